"""The transport `nixl`: a rank writes updates into a worker's memory with NIXL, one-sided.

    worker   registers staging memory once; its reply has the metadata of its agent and the address
    rank     registers a message, writes it there, and notifies the worker: "update/message"
    worker   waits for that notification, and gives views of its staging memory

UCX moves the bytes: over RDMA, the shared memory of a host, or TCP. It knows no models. Neither end
has a thread for it (NIXL's own takes a third of a core while nothing happens): each moves bytes
only while it sends or receives.

What native code parses: the metadata (NIXL's and UCX's addresses and keys) on the rank; on both
ends the notifications, and UCX's own messages. Nothing is unpickled: only native methods are
called, and the one function that unpickles, `deserialize_descs`, is in NIXL's Python layer. NIXL
does not survive all damage to metadata, so the reply has their SHA-256, and no others are parsed.

UCX does not ask who connects: whoever reaches its ports can write into the process, so they belong
on a trusted network, as gloo's do. On one host it writes by process_vm_writev, which a worker
cannot revoke: a rank that another one replaces while it writes may still write to the old address.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import math
import secrets
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from spmdflow.errors import WeightSyncError
from spmdflow.requirement import install_command
from spmdflow.serving.transport import Sizes, transport_error
from spmdflow.serving.update import POSITION_BYTES, PackedMessage

PACKAGES = ("nixl_cu12", "nixl_cu13")
"""One for each CUDA version. Host memory needs none, so either will do."""
_ALIGNMENT = 64
_PAUSE_SECONDS = 2e-4
"""Between two looks whether a message has arrived."""
_MOST_METADATA_BYTES = 1 << 20


@dataclass(frozen=True)
class Place:
    """Where a message lies in the staging memory, in bytes from its start."""

    positions: int
    values: int


def places_of(sizes: Sequence[tuple[int, int]], element_bytes: int) -> tuple[list[Place], int]:
    """Return the place of each message of an update, and the bytes that the update takes.

    sizes: numbers of positions and of values. All positions come first, so everything is aligned.
    """
    position = 0
    num_positions = sum(count for count, _ in sizes)
    value = math.ceil(num_positions * POSITION_BYTES / _ALIGNMENT) * _ALIGNMENT
    places = []
    for position_count, value_count in sizes:
        places.append(Place(positions=position, values=value))
        position += position_count * POSITION_BYTES
        value += value_count * element_bytes
    return places, value


@dataclass(frozen=True)
class _Area:
    """Memory to be written elsewhere: two addresses, and the size."""

    source: int
    target: int
    num_bytes: int


@dataclass(frozen=True)
class _Transfer:
    """A write that was begun."""

    handle: int
    registered: object


class _Agent:
    """NIXL's agent: its native methods, for one thread at a time.

    An end may be closed while another thread uses it. Handles are numbers and only this object
    refers to the agent, so that `close` ends it at once, whatever a traceback keeps alive.
    """

    def __init__(self) -> None:
        """Create it; nothing connects yet."""
        self._nixl: Any = import_module(f"{_installed_package()}._bindings")
        self.name = f"spmdflow-{secrets.token_hex(16)}"
        """Nobody can guess it: a notification in this name comes from this agent."""
        self._errors = _errors_of(self._nixl)
        self._lock = threading.Lock()
        config = self._nixl.nixlAgentConfig()
        config.useProgThread = False
        self._agent: Any = None
        try:
            self._agent = self._nixl.nixlAgent(self.name, config)
        except self._errors as err:
            raise _native_error("an agent of NIXL", err) from err
        self.call("NIXL's backend UCX", "createBackend", "UCX", {})

    def call(self, what: str, method: str, *arguments: object) -> Any:
        """Call a method of the agent. WeightSyncError, which says for what, if it fails."""
        with self._lock:
            if self._agent is None:
                raise transport_error(f"{what}, on a connection that was closed")
            try:
                return getattr(self._agent, method)(*arguments)
            except self._errors as err:
                raise _native_error(what, err) from err

    def write(
        self, what: str, areas: Sequence[_Area], worker: str, notification: bytes
    ) -> _Transfer:
        """Begin to write areas of this process into another one, which is notified then."""
        host = self._nixl.DRAM_SEG
        registered = self.register(what, [(area.source, area.num_bytes) for area in areas])
        sources = [(area.source, area.num_bytes, 0) for area in areas]
        targets = [(area.target, area.num_bytes, 0) for area in areas]
        handle = self.call(
            what,
            "createXferReq",
            self._nixl.NIXL_WRITE,
            self._nixl.nixlXferDList(host, sources),
            self._nixl.nixlXferDList(host, targets),
            worker,
            notification,
        )
        self.call(what, "postXferReq", handle)
        return _Transfer(handle=handle, registered=registered)

    def is_written(self, what: str, transfer: _Transfer) -> bool:
        """Whether a transfer has ended; moves bytes. WeightSyncError if it failed."""
        status = self.call(what, "getXferStatus", transfer.handle)
        if status == self._nixl.NIXL_SUCCESS:
            return True
        if status == self._nixl.NIXL_IN_PROG:
            return False
        raise transport_error(f"{what}, which ended with: {status}")

    def release(self, what: str, transfer: _Transfer) -> None:
        """Forget a transfer that has ended, and the memory that it read."""
        self.call(what, "releaseXferReq", transfer.handle)
        self.call(what, "deregisterMem", transfer.registered)

    def register(self, what: str, areas: Sequence[tuple[int, int]]) -> object:
        """Register memory: (address, bytes)."""
        registered = self._nixl.nixlRegDList(
            self._nixl.DRAM_SEG, [(address, num_bytes, 0, "") for address, num_bytes in areas]
        )
        self.call(what, "registerMem", registered)
        return registered

    def close(self) -> None:
        """End it and its connections. Nothing reads or writes memory through it afterwards."""
        with self._lock:
            self._agent = None


class NixlSender:
    """A rank's end. It is closed after an error."""

    def __init__(self, *, seconds: float) -> None:
        """seconds: limit of the wait for each message."""
        self._seconds = seconds
        self._agent = _Agent()
        self._worker = ""
        self._address = 0
        self._num_bytes = 0

    @property
    def facts(self) -> dict[str, Any]:
        """See UpdateSender.facts."""
        return {"agent": self._agent.name}

    def connect(self, reply: Mapping[str, Any]) -> None:
        """See UpdateSender.connect. UCX connects with the first message."""
        metadata = _read_metadata(reply)
        self._address = _read_number(reply, "address")
        self._num_bytes = _read_number(reply, "num_bytes")
        name: bytes = self._agent.call("the metadata of a worker", "loadRemoteMD", metadata)
        self._worker = name.decode("ascii", errors="replace")

    def send(self, messages: Sequence[PackedMessage], *, update: int) -> None:
        """See UpdateSender.send. Nothing is sent for an update without messages."""
        if not messages:
            return
        sizes = [(len(message.positions), len(message.values)) for message in messages]
        places, num_bytes = places_of(sizes, messages[0].values.element_size())
        if num_bytes > self._num_bytes:
            raise _size_error(num_bytes, self._num_bytes)
        for index, (message, place) in enumerate(zip(messages, places, strict=True)):
            try:
                self._write(message, place, _notification(update, index))
            except WeightSyncError:
                self.close()
                raise

    def _write(self, message: PackedMessage, place: Place, notification: bytes) -> None:
        """Write a message into the worker's memory. Waits until it is there."""
        what = f"message {notification.decode()} of an update"
        deadline = time.monotonic() + self._seconds
        areas = []
        for tensor, offset in (
            (message.positions, place.positions),
            (message.values, place.values),
        ):
            if len(tensor):
                areas.append(_Area(tensor.data_ptr(), self._address + offset, tensor.nbytes))
        if not areas:
            self._agent.call(what, "genNotif", self._worker, notification)
            return
        transfer = self._agent.write(what, areas, self._worker, notification)
        while not self._agent.is_written(what, transfer):
            if time.monotonic() > deadline:
                raise transport_error(f"{what}, which was not written within {self._seconds:g} s")
            time.sleep(_PAUSE_SECONDS)
        self._agent.release(what, transfer)

    def close(self) -> None:
        """See UpdateSender.close."""
        self._agent.close()


class NixlReceiver:
    """A worker's end, with memory for one update.

    The next update overwrites it. The rank announces that one after the worker has put this one
    into use, or has given it up (link.ServerLink, worker.WeightTaker).
    """

    def __init__(self, facts: Mapping[str, Any], *, num_bytes: int, seconds: float) -> None:
        """num_bytes: of all boxes. A delta has fewer (update.FULL_ABOVE), at 2 bytes or more."""
        self._seconds = seconds
        self._rank = str(facts["agent"])
        self._arrived: set[bytes] = set()
        self._staging = torch.empty(num_bytes + _ALIGNMENT, dtype=torch.uint8)
        self._agent = _Agent()
        what = "staging memory"
        self._agent.register(what, [(self._staging.data_ptr(), self._staging.nbytes)])
        self._metadata: bytes = self._agent.call(what, "getLocalMD")

    @property
    def reply(self) -> dict[str, Any]:
        """See UpdateReceiver.reply."""
        return {
            "metadata": base64.b64encode(self._metadata).decode(),
            "sha256": hashlib.sha256(self._metadata).hexdigest(),
            "address": self._staging.data_ptr(),
            "num_bytes": self._staging.nbytes,
        }

    def receive(self, sizes: Sizes, dtype: torch.dtype, *, update: int) -> Iterator[PackedMessage]:
        """See UpdateReceiver.receive. The messages are views of the staging memory."""
        places, num_bytes = places_of(sizes, dtype.itemsize)
        if num_bytes > self._staging.nbytes:
            raise _size_error(num_bytes, self._staging.nbytes)
        self._arrived.clear()
        for index, (size, place) in enumerate(zip(sizes, places, strict=True)):
            self._wait(_notification(update, index))
            num_positions, num_values = size
            yield PackedMessage(
                positions=_view(self._staging, place.positions, num_positions, torch.int32),
                values=_view(self._staging, place.values, num_values, dtype),
            )

    def _wait(self, notification: bytes) -> None:
        """Wait for a notification of the rank. Those of updates that were given up are dropped."""
        what = f"message {notification.decode()} of an update"
        deadline = time.monotonic() + self._seconds
        while notification not in self._arrived:
            if time.monotonic() > deadline:
                raise transport_error(f"{what}, which has not arrived within {self._seconds:g} s")
            time.sleep(_PAUSE_SECONDS)
            arrived = self._agent.call(what, "getNotifs", {})
            self._arrived.update(arrived.get(self._rank, []))
        self._arrived.remove(notification)

    def close(self) -> None:
        """See UpdateReceiver.close."""
        self._agent.close()


def _view(staging: Tensor, offset: int, size: int, dtype: torch.dtype) -> Tensor:
    return staging[offset : offset + size * dtype.itemsize].view(dtype)


def _notification(update: int, message: int) -> bytes:
    return f"{update}/{message}".encode("ascii")


def _installed_package() -> str:
    """The first package that is installed. WeightSyncError if none is."""
    for name in PACKAGES:
        if find_spec(name) is not None:
            return name
    raise WeightSyncError.of(
        "weights of a generation server",
        "actor.rollout.server.transport=nixl without the package nixl",
        "NIXL on the node of the server and on the trainer's",
        f"{install_command('nixl')}, or set actor.rollout.server.transport=gloo",
    )


def _native_error(what: str, err: Exception) -> WeightSyncError:
    reason = str(err).strip() or type(err).__name__
    return transport_error(f"{what}, which ended with: {reason[:200]}")


def _errors_of(bindings: Any) -> tuple[type[Exception], ...]:
    """What NIXL raises: classes without a common one, and those of its bindings."""
    result: list[type[Exception]] = [RuntimeError, ValueError, TypeError]
    for name, value in vars(bindings).items():
        if name.endswith("Error"):
            result.append(value)
    return tuple(result)


def _read_metadata(reply: Mapping[str, Any]) -> bytes:
    """The metadata in a worker's reply. WeightSyncError if it is not what the worker sent."""
    text = reply.get("metadata")
    if not isinstance(text, str) or len(text) > 2 * _MOST_METADATA_BYTES:
        raise _reply_error(f"metadata of type {type(text).__name__}, or too long")
    try:
        metadata = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as err:
        raise _reply_error(f"metadata that is no base64: {text[:40]!r}") from err
    if hashlib.sha256(metadata).hexdigest() != reply.get("sha256"):
        raise _reply_error(f"{len(metadata)} bytes of metadata with another SHA-256")
    return metadata


def _read_number(reply: Mapping[str, Any], name: str) -> int:
    """A number of a worker's reply. WeightSyncError if it is none."""
    value = reply.get(name)
    if type(value) is not int or not 0 < value < 1 << 63:
        raise _reply_error(f"{name} {str(value)[:40]!r}")
    return value


def _reply_error(got: str) -> WeightSyncError:
    return WeightSyncError.of(
        "weights of a generation server",
        got,
        "a worker's reply for transport nixl",
        "use this package's version on the server",
    )


def _size_error(num_bytes: int, available: int) -> WeightSyncError:
    return WeightSyncError.of(
        "weights of a generation server",
        f"an update of {num_bytes} bytes",
        f"at most {available}, the staging memory of the worker",
        "serve the folder that is actor.model.path, with this package's version",
    )
