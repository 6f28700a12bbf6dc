"""Episodes per second of the worker processes, shared and with a process for each episode.

The environment returns at once and asks nobody, so this is the cost of starting and ending
episodes. Rounds alternate between the two.
"""

from __future__ import annotations

import argparse
import socket
import statistics
import time
from pathlib import Path
from typing import Any

from spmdflow.config.episode import EpisodeConfig
from spmdflow.episodes.pool import EnvironmentPool

ENVIRONMENT = Path(__file__).parent / "_idle_env.py"
KINDS = {
    "shared": {"isolation": "shared"},
    "process": {"isolation": "process"},
    "process, memory_mb": {"isolation": "process", "memory_mb": 1024},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command line."""
    parser.add_argument("--episodes", type=int, default=500, help="of each round")
    parser.add_argument("--concurrency", type=int, default=64, help="at the same time")
    parser.add_argument("--rounds", type=int, default=5, help="of each, after one to warm up")


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each isolation: median, lowest and highest episodes per second."""
    pools = {}
    for kind, settings in KINDS.items():
        cfg = EpisodeConfig(
            environment=f"{ENVIRONMENT}:episode", concurrency=arguments.concurrency, **settings
        )
        pools[kind] = EnvironmentPool(cfg)
    rates: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for number in range(arguments.rounds + 1):
        for kind, pool in pools.items():
            rate = _round(pool, arguments.episodes)
            if number:
                rates[kind].append(rate)
    rows = []
    for kind, pool in pools.items():
        pool.close()
        each = rates[kind]
        rows.append(
            {
                "isolation": kind,
                "episodes/s": statistics.median(each),
                "lowest": min(each),
                "highest": max(each),
            }
        )
    return rows


def _round(pool: EnvironmentPool, num_episodes: int) -> float:
    """Episodes per second of one round."""
    waker, wake = socket.socketpair()
    with waker, wake:
        begin = time.perf_counter()
        pool.begin({number: {} for number in range(num_episodes)})
        while pool.num_under_way:
            pool.start_waiting(lambda number: {"base_url": "", "model": "", "api_key": ""})
            pool.advance(10.0, wake=wake.fileno(), faults=dict)
        return num_episodes / (time.perf_counter() - begin)
