"""`Connection`: what a trainer and the workers of another program's vLLM agree on.

The trainer says it once, as plain data, through vLLM's own interface (vllm_server); from it each
side derives the same plan. Both sides share one numbering: the trainer's ranks keep theirs, the
workers follow. The data goes over sockets between them, not over the job's process groups.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from spmdflow.blocks.hash import MODULUS, to_signed
from spmdflow.errors import ConfigError, WeightSyncError
from spmdflow.hybrid_engine.bucket import Message
from spmdflow.hybrid_engine.reshard import boxes_of, training_tables
from spmdflow.hybrid_engine.stream import WholeTensors
from spmdflow.parallel.layout import Layout
from spmdflow.weights.architecture import Architecture, RopeScaling
from spmdflow.weights.table import parameters

BACKEND = "spmdflow"
"""Name under which vLLM knows the receiving side (`--weight-transfer-config`)."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""What weights may travel as: the precision in which vLLM holds them."""
_HOST = torch.device("cpu")
_ADDRESS_BYTES = 64
_PAUSE_SECONDS = 0.01
"""Between two checks whether the workers have come."""
_WAIT_SECONDS = 1e-3
"""Between two checks of a transfer that `meanwhile` may end."""


@dataclass(frozen=True)
class Connection:
    """Facts of one trainer and one server; both build the rest from them."""

    host: str
    """Where the trainer's first rank listens, as the workers reach it."""
    port: int
    num_workers: int
    kind: str
    """engine.kind of the trainer."""
    layout: Mapping[str, Any]
    """Of the trainer, as a dict."""
    architecture: Mapping[str, Any]
    """Of the model, as a dict."""
    seconds: float
    """Limit of every wait."""

    @property
    def training(self) -> Layout:
        """The trainer's layout."""
        return Layout(**{**self.layout, "ranks": tuple(self.layout["ranks"])})

    @property
    def model(self) -> Architecture:
        """The model's architecture."""
        facts = dict(self.architecture)
        scaling = facts.pop("rope_scaling")
        return Architecture(**facts, rope_scaling=RopeScaling(**scaling) if scaling else None)

    @property
    def workers(self) -> tuple[int, ...]:
        """Numbers of the workers, after the trainer's."""
        first = max(self.training.ranks) + 1
        return tuple(range(first, first + self.num_workers))

    @property
    def names(self) -> list[str]:
        """Every tensor, in the order of a header's hashes."""
        result = []
        for parameter in parameters(self.model):
            result.append(parameter.name)
        return result

    def join(
        self,
        rank: int,
        store: dist.Store | None = None,
        *,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> SocketWire:
        """Connect to the other ranks. store: the one that the trainer's first rank listens with.

        meanwhile: called repeatedly until the workers have come; what it raises ends the wait.
        WeightSyncError if a rank does not connect in time.
        """
        limit = timedelta(seconds=self.seconds)
        store = store or dist.TCPStore(self.host, self.port, timeout=limit)
        everyone = [*self.training.ranks, *self.workers]
        address = address_towards(self.host, self.port)
        if rank in self.workers:
            store.set(f"here/{rank}", "")
        self._await_workers(store, meanwhile)
        return SocketWire(store, everyone, rank=rank, address=address, seconds=self.seconds)

    def _await_workers(self, store: dist.Store, meanwhile: Callable[[], None]) -> None:
        """Wait for the workers. One that failed never comes: only `meanwhile` can raise why."""
        end = time.monotonic() + self.seconds
        while missing := [each for each in self.workers if not store.check([f"here/{each}"])]:
            meanwhile()
            if time.monotonic() > end:
                got = f"no workers {missing} of the vLLM server within {self.seconds:g}"
                got += f" s at {self.host}:{self.port}"
                do = "look at the server's log, and whether it reaches that address"
                raise WeightSyncError.of("weight transfer", got, self.workers, do)
            time.sleep(_PAUSE_SECONDS)

    def tensors(self, rank: int, wire: SocketWire, dtype: torch.dtype) -> WholeTensors:
        """This rank's part in bringing every whole tensor to every worker."""
        have = boxes_of(training_tables(self.model, self.training, kind=self.kind))
        return WholeTensors(
            have,
            dict.fromkeys(self.workers, parameters(self.model)),
            lambda plan: wire,
            rank=rank,
            dtype=dtype,
            device=_HOST,
            seconds=self.seconds,
        )

    def to_facts(self) -> dict[str, Any]:
        """Plain data; `Connection(**facts)` is the same connection."""
        return asdict(self)


def check_model(connection: Connection, served: Architecture) -> None:
    """ConfigError that names what differs between the trainer's model and the server's."""
    mine = dict(connection.architecture)
    theirs = asdict(served)
    wrong = [name for name in theirs if theirs[name] != mine.get(name)]
    if wrong:
        name = wrong[0]
        raise ConfigError(
            f"weight transfer: got a vLLM whose model has {name} {theirs[name]!r}, expected the "
            f"trainer's {mine.get(name)!r} ({len(wrong)} facts differ: {wrong}); serve the folder "
            f"that is actor.model.path"
        )


def header_of(connection: Connection) -> Tensor:
    """(2 + tensors,) int64 zeros, for: the weights' version, whether hashes follow, every hash."""
    return torch.zeros(2 + len(connection.names), dtype=torch.int64)


def verdict_of(connection: Connection) -> Tensor:
    """(1 + tensors,) int64 zeros, for: whether the weights were loaded, every tensor's hash."""
    return torch.zeros(1 + len(connection.names), dtype=torch.int64)


def packed_hashes(connection: Connection, hashes: Mapping[str, int]) -> Tensor:
    """Hashes as int64, in the order of names."""
    return torch.tensor([to_signed(hashes[name]) for name in connection.names], dtype=torch.int64)


def unpacked_hashes(connection: Connection, values: Tensor) -> dict[str, int]:
    """Hashes by name: the inverse of `packed_hashes`."""
    found = [value % MODULUS for value in values.tolist()]
    return dict(zip(connection.names, found, strict=True))


class SocketWire:
    """A gloo group over ranks of two programs; tensors are in host memory."""

    def __init__(
        self, store: dist.Store, ranks: Sequence[int], *, rank: int, address: str, seconds: float
    ) -> None:
        """Connect to the others, who pass the same ranks; address: this host's, as they reach it.

        seconds: limit of every wait. WeightSyncError if they have not come by then.
        """
        self._ranks = list(ranks)
        self._rank = rank
        gloo: Any = dist.ProcessGroupGloo  # its methods are in no stub
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=address)]
        options._timeout = timedelta(seconds=seconds)
        try:
            self._group = gloo(store, self._ranks.index(rank), len(self._ranks), options)
        except RuntimeError as err:
            raise self._apart(f"no connection within {seconds:g} s at {address}") from err

    def start(self, transfers: Sequence[tuple[Message, Tensor]]) -> list[dist.Work]:
        """See stream.Wire: point to point."""
        place = self._ranks.index
        works = []
        for message, values in transfers:
            if message.source != self._rank:
                works.append(self._group.recv([values], place(message.source), 0))
                continue
            works += [self._group.send([values], place(to), 0) for to in message.destinations]
        return works

    def share(
        self, values: Tensor, source: int, *, meanwhile: Callable[[], None] | None = None
    ) -> None:
        """The source's values on every rank, in place; collective.

        meanwhile: called repeatedly until it is done; what it raises ends the wait.
        WeightSyncError if the other side is gone.
        """
        options = dist.BroadcastOptions()
        options.rootRank = self._ranks.index(source)
        work = self._group.broadcast([values], options)
        while meanwhile is not None and not work.is_completed():
            meanwhile()
            time.sleep(_WAIT_SECONDS)
        try:
            work.wait()
        except RuntimeError as err:
            raise self._apart(f"nothing from rank {source}") from err

    def _apart(self, what: str) -> WeightSyncError:
        got = f"{what} on rank {self._rank} of {self._ranks}"
        expected = "all of them"
        do = "look at the log of the other program, restart it and this run"
        return WeightSyncError.of("weights between two programs", got, expected, do)


def address_towards(host: str, port: int) -> str:
    """This host's address on its route to another; nothing is sent. OSError if there is none."""
    family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def agreed_address(
    found: tuple[str, int, int], group: dist.ProcessGroup, source: int, device: torch.device
) -> tuple[str, int, int]:
    """(host, port, number of workers) of the source on every rank; collective."""
    host, *numbers = found
    assert len(host) <= _ADDRESS_BYTES, host
    facts = [*numbers, *host.encode().ljust(_ADDRESS_BYTES, b"\0")]
    values = torch.tensor(facts, dtype=torch.int64, device=device)
    dist.broadcast(values, src=source, group=group)
    port, num_workers, *letters = values.tolist()
    return bytes(letters).rstrip(b"\0").decode(), port, num_workers
