"""Seconds in which an update of weights reaches a server's worker: NIXL against messages of gloo.

Two processes of this host, without a server: the rank's end sends the same updates over every
transport by turns. Rows are medians over rounds, from the first byte until the worker has all of
them; `times_gloo`: gloo's seconds / this transport's. Checksums are compared after every update.
UCX_TLS=tcp in the environment shows NIXL without the shared memory of the host.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import threading
import time
from collections import defaultdict
from multiprocessing.connection import Connection
from typing import Any

import torch

from spmdflow.blocks.hash import positional_hash
from spmdflow.serving.transport import TRANSPORTS, UpdateSender, open_receiver, open_sender
from spmdflow.serving.update import PackedMessage

DTYPE = torch.bfloat16
SECONDS = 60.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Sizes of the updates, and rounds."""
    parser.add_argument("--elements", type=int, default=17_000_000, help="of a whole update")
    parser.add_argument("--positions", type=int, default=1_000_000, help="of a delta")
    parser.add_argument("--rounds", type=int, default=10)


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each update and transport."""
    torch.manual_seed(0)
    whole = PackedMessage(
        positions=torch.zeros(0, dtype=torch.int32),
        values=torch.randn(arguments.elements).to(DTYPE),
    )
    delta = PackedMessage(
        positions=torch.randperm(arguments.elements)[: arguments.positions].sort().values.int(),
        values=torch.randn(arguments.positions).to(DTYPE),
    )
    updates = {"whole": whole, "delta": delta}
    workers = {name: _Worker(name, max(whole.num_bytes, delta.num_bytes)) for name in TRANSPORTS}
    seconds: dict[tuple[str, str], list[float]] = defaultdict(list)
    for number in range(1, arguments.rounds + 2):
        for name, message in updates.items():
            for transport, worker in workers.items():
                taken = worker.bring(message, 2 * number + (name == "delta"))
                if number > 1:  # the first round connects
                    seconds[name, transport].append(taken)
    for worker in workers.values():
        worker.close()
    rows = []
    for name, message in updates.items():
        gloo = statistics.median(seconds[name, "gloo"])
        for transport in TRANSPORTS:
            median = statistics.median(seconds[name, transport])
            row = {
                "update": name,
                "transport": transport,
                "megabytes": message.num_bytes / 1e6,
                "milliseconds": median * 1e3,
                "gigabytes_per_s": message.num_bytes / 1e9 / median,
                "times_gloo": gloo / median,
            }
            rows.append(row)
    return rows


class _Worker:
    """The process that receives, and the rank's end of the connection to it."""

    def __init__(self, transport: str, num_bytes: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=_receive, args=(transport, num_bytes, other))
        self._process.start()
        self._sender: UpdateSender = open_sender(
            transport, host="127.0.0.1", port=1, seconds=SECONDS
        )
        self._pipe.send(self._sender.facts)
        self._sender.connect(self._pipe.recv())

    def bring(self, message: PackedMessage, number: int) -> float:
        """Send an update; return the seconds until it has arrived."""
        self._pipe.send((number, (len(message.positions), len(message.values))))
        self._pipe.recv()
        begun = time.perf_counter()
        self._sender.send([message], update=number)
        self._pipe.recv()
        seconds = time.perf_counter() - begun
        assert self._pipe.recv() == _hashes_of(message), "the worker has other bytes"
        return seconds

    def close(self) -> None:
        """End the process."""
        self._pipe.send(None)
        self._process.join()
        self._sender.close()


def _receive(transport: str, num_bytes: int, pipe: Connection) -> None:
    """The process that receives: tells that it waits, that an update is there, and its hashes."""
    torch.set_num_threads(1)
    receiver = open_receiver(transport, pipe.recv(), num_bytes=num_bytes, seconds=SECONDS)
    connecting = threading.Thread(target=lambda: list(receiver.receive([], DTYPE, update=0)))
    connecting.start()
    pipe.send(receiver.reply)
    connecting.join()
    while (command := pipe.recv()) is not None:
        number, size = command
        pipe.send("waits")
        (message,) = receiver.receive([size], DTYPE, update=number)
        pipe.send("arrived")
        pipe.send(_hashes_of(message))
    receiver.close()


def _hashes_of(message: PackedMessage) -> tuple[int, int]:
    """Hashes of both tensors."""
    return positional_hash(message.positions), positional_hash(message.values)
