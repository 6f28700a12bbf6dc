"""Seconds of collectives between the devices of a cluster.

Collectives are rings over NVLink and the network. A group has `per_node` of its members on each
node that it touches. The devices of a node share its network: while a group of `per_node` members
sends, the node's other gpus_per_node / per_node - 1 groups of the same axis send too.

Every function takes sizes and groups as numbers and returns a number, or arrays of both.
"""

from __future__ import annotations

import numpy as np

from spmdflow.mapping.dataflow import Array
from spmdflow.mapping.hardware import Hardware


def all_reduce(size: Array, group: Array, per_node: Array, hardware: Hardware) -> Array:
    """Seconds for `size` bytes in a ring of n = `group` members; each sends 2 (n-1)/n of them."""
    return _ring_seconds(2 * size * (group - 1) / group, 2 * (group - 1), group, per_node, hardware)


def all_to_all(size: Array, group: Array, per_node: Array, hardware: Hardware) -> Array:
    """Seconds in which each of n = `group` members sends (n-1)/n of its `size` bytes to others."""
    return _ring_seconds(size * (group - 1) / group, group - 1, group, per_node, hardware)


def all_gather(size: Array, group: Array, per_node: Array, hardware: Hardware) -> Array:
    """Seconds to gather (or reduce-scatter) `size` bytes in a ring; each sends (n-1)/n of them."""
    return _ring_seconds(size * (group - 1) / group, group - 1, group, per_node, hardware)


def point_to_point(size: Array, crosses_nodes: Array, hardware: Hardware) -> Array:
    """Seconds of one message of `size` bytes; across nodes it uses the network alone."""
    local = size / hardware.link_rate + hardware.collective_base_seconds
    remote = size / hardware.network_rate + hardware.network_hop_seconds
    return np.where(crosses_nodes, remote, local)


def _ring_seconds(
    traffic: Array, steps: Array, group: Array, per_node: Array, hw: Hardware
) -> Array:
    """Return the seconds of a ring: each member sends `traffic` bytes in all, in `steps` steps.

    The slower of link and network counts, as the groups of a node share its network. Each step adds
    a hop inside a node or between nodes. 0 for a group of one.
    per_node: members of the group on each node.
    """
    nodes = np.ceil(group / per_node)
    local = traffic / hw.link_rate
    remote = traffic * (hw.gpus_per_node / per_node) / hw.network_rate
    busy = np.where(nodes > 1, np.maximum(local, remote), local)
    far_steps = steps * (nodes - 1) / np.maximum(group - 1, 1)
    waiting = (steps - far_steps) * hw.link_hop_seconds + far_steps * hw.network_hop_seconds
    return np.where(group > 1, busy + waiting + hw.collective_base_seconds, 0.0)
