"""How updates of weights travel from a rank to one worker of a server: two transports.

    gloo   messages of torch.distributed over TCP, in a group of the rank and the worker
    nixl   one-sided writes (NIXL) into the worker's staging memory; its notification says that an
           update has arrived. Needs the extra `nixl`; serving.nixl

The facts of an update (sizes, boxes) go over HTTP before it. A lost or stopped end is an error of
the other one within the limit. Host memory only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from importlib import import_module
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from spmdflow.errors import WeightSyncError
from spmdflow.serving.connection import address_towards
from spmdflow.serving.update import PackedMessage

TRANSPORTS = ("gloo", "nixl")
Sizes = Sequence[tuple[int, int]]
"""Numbers of positions and of values of each message of an update."""


class UpdateSender(Protocol):
    """A rank's end of the connection to one worker."""

    @property
    def facts(self) -> dict[str, Any]:
        """Plain data from which the worker opens its end."""

    def connect(self, reply: Mapping[str, Any]) -> None:
        """Finish connecting; the worker has opened its end and replied with this plain data."""

    def send(self, messages: Sequence[PackedMessage], *, update: int) -> None:
        """Send the messages of an update, whose number is `update`.

        WeightSyncError if the worker does not take them within the limit.
        """

    def close(self) -> None:
        """Close the connection."""


class UpdateReceiver(Protocol):
    """A worker's end of the connection to a rank."""

    @property
    def reply(self) -> dict[str, Any]:
        """Plain data for `UpdateSender.connect`."""

    def receive(self, sizes: Sizes, dtype: torch.dtype, *, update: int) -> Iterator[PackedMessage]:
        """Yield the messages of an update of these sizes, as they arrive.

        WeightSyncError if one does not arrive within the limit.
        """

    def close(self) -> None:
        """Close the connection."""


def open_sender(transport: str, *, host: str, port: int, seconds: float) -> UpdateSender:
    """Open a rank's end. host, port: the server's address. seconds: limit of each wait."""
    if transport == "gloo":
        return GlooSender(address_towards(host, port), seconds=seconds)
    sender: UpdateSender = import_module("spmdflow.serving.nixl").NixlSender(seconds=seconds)
    return sender


def open_receiver(
    transport: str, facts: Mapping[str, Any], *, num_bytes: int, seconds: float
) -> UpdateReceiver:
    """Open a worker's end. facts: of the rank's end. num_bytes: of the largest update."""
    if transport == "gloo":
        return GlooReceiver(str(facts["host"]), int(facts["port"]), seconds=seconds)
    module = import_module("spmdflow.serving.nixl")
    receiver: UpdateReceiver = module.NixlReceiver(facts, num_bytes=num_bytes, seconds=seconds)
    return receiver


class GlooSender:
    """A rank's end: it has the store through which the worker finds it."""

    def __init__(self, address: str, *, seconds: float) -> None:
        """address: this host's, as the worker reaches it."""
        self._seconds = seconds
        self._address = address
        limit = timedelta(seconds=seconds)
        self._store = dist.TCPStore(address, 0, None, True, limit, wait_for_workers=False)
        self._group: Any = None

    @property
    def facts(self) -> dict[str, Any]:
        """See UpdateSender.facts."""
        return {"host": self._address, "port": self._store.port}

    def connect(self, reply: Mapping[str, Any]) -> None:
        """See UpdateSender.connect. The worker connects at the same time, in a thread."""
        self._group = _open_group(self._store, 0, self._address, self._seconds)

    def send(self, messages: Sequence[PackedMessage], *, update: int) -> None:
        """See UpdateSender.send."""
        for message in messages:
            for tensor in (message.positions, message.values):
                if len(tensor):
                    work = self._group.send([tensor], 1, 0)
                    _wait(work, f"update {update}", self._seconds)

    def close(self) -> None:
        """See UpdateSender.close."""
        self._group = None
        del self._store


class GlooReceiver:
    """A worker's end."""

    def __init__(self, host: str, port: int, *, seconds: float) -> None:
        """host, port: of the rank's store."""
        self._seconds = seconds
        limit = timedelta(seconds=seconds)
        self._address = address_towards(host, port)
        self._store = dist.TCPStore(host, port, None, False, limit)
        self._group: Any = None

    @property
    def reply(self) -> dict[str, Any]:
        """See UpdateReceiver.reply."""
        return {}

    def receive(self, sizes: Sizes, dtype: torch.dtype, *, update: int) -> Iterator[PackedMessage]:
        """See UpdateReceiver.receive. The first one also connects."""
        if self._group is None:
            self._group = _open_group(self._store, 1, self._address, self._seconds)
        for num_positions, num_values in sizes:
            positions = torch.empty(num_positions, dtype=torch.int32)
            values = torch.empty(num_values, dtype=dtype)
            for tensor in (positions, values):
                if len(tensor):
                    work = self._group.recv([tensor], 0, 0)
                    _wait(work, f"update {update}", self._seconds)
            yield PackedMessage(positions, values)

    def close(self) -> None:
        """See UpdateReceiver.close."""
        self._group = None
        del self._store


def _open_group(store: dist.Store, rank: int, address: str, seconds: float) -> Any:
    """Return a gloo group of two: a rank (0) and a worker (1). Both call it together.

    WeightSyncError if the other end does not connect within the limit.
    """
    gloo: Any = dist.ProcessGroupGloo  # its methods are in no stub
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=address)]
    options._timeout = timedelta(seconds=seconds)
    try:
        return gloo(store, rank, 2, options)
    except RuntimeError as err:
        raise transport_error(f"no connection within {seconds:g} s") from err


def _wait(work: dist.Work, what: str, seconds: float) -> None:
    """Wait for a message. WeightSyncError if it does not end within the limit."""
    try:
        work.wait(timedelta(seconds=seconds))
    except RuntimeError as err:
        text = str(err).strip() or "no reason given"
        raise transport_error(f"{what}, which ended with: {text[:200]}") from err


def transport_error(what: str) -> WeightSyncError:
    """Return the error of a connection. what: happened, after "got"."""
    got = what
    expected = "both ends of the connection alive and on time"
    do = "look at the server's log, or raise actor.rollout.server.transfer_seconds"
    return WeightSyncError.of("weights of a generation server", got, expected, do)


def flat_bytes(tensor: Tensor) -> Tensor:
    """The bytes (n,) uint8 of a contiguous tensor, without a copy."""
    return tensor.view(torch.uint8)
