"""Requests per second of the episodes' endpoint, next to another commit's in the same run.

Each round, 256 episodes of three short turns run at the same time, over a connection each. Endpoint
and recorder are the real ones, in a process of their own; a scripted generator answers at once. The
rounds alternate between the source trees, so that a machine whose load changes is fair to both.
`--against FOLDER` is a work tree of the other commit (git worktree add).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SERVER = Path(__file__).parent / "_endpoint_server.py"
TURNS = 3
SAID = "guess"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command line."""
    parser.add_argument("--against", type=Path, metavar="FOLDER", help="tree of another commit")
    parser.add_argument("--episodes", type=int, default=256, help="at the same time")
    parser.add_argument("--rounds", type=int, default=15, help="of each tree, after one to warm up")


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each tree: median requests per second, and the ratio to the other tree's."""
    trees = [ROOT]
    if arguments.against:
        trees.append(arguments.against.resolve())
    servers = [_start(tree) for tree in trees]
    rates: list[list[float]] = [[] for _ in trees]
    for number in range(arguments.rounds + 1):
        order = list(range(len(trees)))
        if number % 2:
            order.reverse()
        for place in order:
            rate = _round(servers[place], arguments.episodes)
            if number:
                rates[place].append(rate)
    for server in servers:
        server.communicate()
    medians = [statistics.median(each) for each in rates]
    rows = []
    for tree, each, median in zip(trees, rates, medians, strict=True):
        rows.append(
            {
                "tree": tree.name,
                "episodes": arguments.episodes,
                "rounds": len(each),
                "requests/s": median,
                "lowest": min(each),
                "highest": max(each),
                "to the last": median / medians[-1],
            }
        )
    return rows


def _start(tree: Path) -> subprocess.Popen[str]:
    """The server's process with the code of a source tree."""
    return subprocess.Popen(
        [sys.executable, str(SERVER), str(tree)],
        env=os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _round(server: subprocess.Popen[str], num_episodes: int) -> float:
    """Requests per second of one round."""
    assert server.stdin is not None and server.stdout is not None
    server.stdin.write(f"{num_episodes}\n")
    server.stdin.flush()
    episodes = json.loads(server.stdout.readline())
    return asyncio.run(_play(episodes))


async def _play(episodes: list[tuple[int, str, str]]) -> float:
    begin = time.perf_counter()
    await asyncio.gather(*(_episode(n, *episode) for n, episode in enumerate(episodes)))
    return TURNS * len(episodes) / (time.perf_counter() - begin)


async def _episode(number: int, port: int, path: str, key: str) -> None:
    """Three turns over one connection. Each episode begins with another text."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    messages = [{"role": "user", "content": f"guess {number}"}]
    for _ in range(TURNS):
        body = json.dumps({"model": "policy", "messages": messages, "max_tokens": 4}).encode()
        head = (
            f"POST {path}/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\n"
            f"accept: application/json\r\ncontent-type: application/json\r\n"
            f"user-agent: bench\r\nauthorization: Bearer {key}\r\ncontent-length: {len(body)}\r\n"
        )
        writer.write(f"{head}\r\n".encode() + body)
        answer = (await reader.readuntil(b"\r\n\r\n")).lower()
        assert answer.startswith(b"http/1.1 200"), answer
        size = int(answer.partition(b"content-length: ")[2].split(b"\r")[0])
        message = json.loads(await reader.readexactly(size))["choices"][0]["message"]
        assert message["content"].strip() == SAID, message
        messages += [message, {"role": "user", "content": "higher"}]
    writer.close()
