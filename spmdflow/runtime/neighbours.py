"""Finds out, once, which ranks of a machine can read each other's memory (transfer/memory.py)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from spmdflow.runtime.order import Order, Replies, Transport

logger = logging.getLogger(__name__)


def readable_memory(
    transport: Transport, ranks: tuple[int, ...], *, seconds: float
) -> dict[int, frozenset[int]]:
    """By rank, the ranks whose memory it can read; every pair of a machine tries it."""
    asked = _ask(transport, {rank: {"operation": "memory"} for rank in ranks}, seconds)
    commands: dict[int, dict[str, Any]] = {}
    for rank in ranks:
        near = [
            other
            for other in ranks
            if other != rank and transport.node_of(other) == transport.node_of(rank)
        ]
        processes = {other: asked[other]["process"] for other in near}
        commands[rank] = {"operation": "neighbours", "processes": processes}
    told = _ask(transport, commands, seconds)
    for rank, command in commands.items():
        refused = sorted(command["processes"].keys() - set(told[rank]["readable"]))
        if refused:
            logger.info("rank %d may not read the memory of %s: rows are sent", rank, refused)
    return {rank: frozenset(reply["readable"]) for rank, reply in told.items()}


def _ask(transport: Transport, commands: Mapping[int, dict[str, Any]], seconds: float) -> Replies:
    return transport.submit(Order(0, "compute", "start", commands, seconds)).result()
