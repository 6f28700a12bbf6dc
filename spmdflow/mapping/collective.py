"""Seconds of ring collectives over NVLink and the network. Pure functions on numbers and arrays.

A group has `per_node` of its members on each node that it touches. The devices of a node share its
network: while a group of `per_node` members sends, the node's other gpus_per_node / per_node - 1
groups of the same axis send too.
"""

from __future__ import annotations

import numpy as np

from spmdflow.mapping.machine import Hardware
from spmdflow.mapping.strategy import Array


def all_reduce(size: Array, group: Array, per_node: Array, hardware: Hardware) -> Array:
    """Of `size` bytes over `group` members: 2 (n-1)/n of them pass each member."""
    return _ring(2 * size * (group - 1) / group, 2 * (group - 1), group, per_node, hardware)


def all_gather(size: Array, group: Array, per_node: Array, hardware: Hardware) -> Array:
    """To `size` bytes on every member, also a reduce-scatter from them: (n-1)/n pass each."""
    return _ring(size * (group - 1) / group, group - 1, group, per_node, hardware)


def point_to_point(size: Array, crosses_nodes: Array, hardware: Hardware) -> Array:
    """One message of `size` bytes; across nodes it has their network for itself."""
    local = size / hardware.link_rate + hardware.collective_base_seconds
    remote = size / hardware.network_rate + hardware.network_hop_seconds
    return np.where(crosses_nodes, remote, local)


def dp_per_node(replica: Array, dp: Array, hardware: Hardware) -> Array:
    """Members of a data-parallel group on one node, for replicas of `replica` ranks."""
    return np.clip(hardware.gpus_per_node // replica, 1, dp)


def _ring(traffic: Array, steps: Array, group: Array, per_node: Array, hw: Hardware) -> Array:
    nodes = np.ceil(group / per_node)
    local = traffic / hw.link_rate
    remote = traffic * (hw.gpus_per_node / per_node) / hw.network_rate
    busy = np.where(nodes > 1, np.maximum(local, remote), local)
    far_steps = steps * (nodes - 1) / np.maximum(group - 1, 1)
    waiting = (steps - far_steps) * hw.link_hop_seconds + far_steps * hw.network_hop_seconds
    return np.where(group > 1, busy + waiting + hw.collective_base_seconds, 0.0)
