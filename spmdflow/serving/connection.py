"""`Connection`: the facts that a trainer shares with the workers of another program's vLLM.

The trainer sends them once, as plain data, through vLLM's own interface (`server`). Each side then
derives the same plan from them. Both sides use one numbering: the trainer's ranks keep their
numbers, and the workers' numbers follow. The data goes over sockets between the two programs, not
over the job's process groups.
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
"""Name of our backend in vLLM (`--weight-transfer-config`)."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Precisions in which weights can be sent: the one in which vLLM holds them."""
_HOST = torch.device("cpu")
_ADDRESS_BYTES = 64
_PAUSE_SECONDS = 0.01
"""Between two checks whether all workers have connected."""
_WAIT_SECONDS = 1e-3
"""Between two checks whether a transfer has ended, and two calls of `meanwhile`."""


@dataclass(frozen=True)
class Connection:
    """Facts of one trainer and one server, from which both derive everything else."""

    host: str
    """Address of the trainer's first rank, as the workers reach it."""
    port: int
    num_workers: int
    kind: str
    """engine.kind of the trainer."""
    layout: Mapping[str, Any]
    """The trainer's layout as a dict."""
    architecture: Mapping[str, Any]
    """The model's architecture as a dict."""
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
        del facts["tensors"]  # of models without a table, which are not served
        scaling = facts.pop("rope_scaling")
        return Architecture(**facts, rope_scaling=RopeScaling(**scaling) if scaling else None)

    @property
    def workers(self) -> tuple[int, ...]:
        """Numbers of the workers, which follow the trainer's ranks."""
        first = max(self.training.ranks) + 1
        return tuple(range(first, first + self.num_workers))

    @property
    def names(self) -> list[str]:
        """Names of all tensors, in the order of a header's hashes."""
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
        """Connect to all other ranks and workers; return the open connection.

        All of them call it together. First waits for all workers of the server. store: the server
        store of the trainer's first rank; None on all others, which connect to it. meanwhile:
        called repeatedly until the workers have connected; an exception of it ends the wait.
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
        """Wait until all workers have set their key in the store; calls `meanwhile` every 10 ms.

        WeightSyncError with the missing workers after `seconds`. A worker that failed never
        connects; only `meanwhile` knows why.
        """
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
        """This rank's part in sending every whole tensor to every worker."""
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
        """The facts as plain data; `Connection(**facts)` gives the same connection."""
        return asdict(self)


def check_model(connection: Connection, served: Architecture) -> None:
    """ConfigError if a fact of the server's architecture differs from the trainer's.

    The error has the first fact that differs, with both values, and the names of all of them.
    """
    mine = dict(connection.architecture)
    theirs = asdict(served)
    del theirs["tensors"]
    wrong = [name for name in theirs if theirs[name] != mine.get(name)]
    if wrong:
        name = wrong[0]
        raise ConfigError(
            f"weight transfer: got a vLLM whose model has {name} {theirs[name]!r}, expected the "
            f"trainer's {mine.get(name)!r} ({len(wrong)} facts differ: {wrong}); serve the folder "
            f"that is actor.model.path"
        )


def empty_header(connection: Connection) -> Tensor:
    """(2 + tensors,) int64 zeros, for the weights' version, whether hashes follow, and each
    hash."""
    return torch.zeros(2 + len(connection.names), dtype=torch.int64)


def empty_verdict(connection: Connection) -> Tensor:
    """(1 + tensors,) int64 zeros, for whether the weights were loaded, and each tensor's hash."""
    return torch.zeros(1 + len(connection.names), dtype=torch.int64)


def pack_hashes(connection: Connection, hashes: Mapping[str, int]) -> Tensor:
    """The hashes as int64, in the order of `Connection.names`."""
    return torch.tensor([to_signed(hashes[name]) for name in connection.names], dtype=torch.int64)


def unpack_hashes(connection: Connection, values: Tensor) -> dict[str, int]:
    """The hashes by name: the inverse of `pack_hashes`."""
    hashes = [value % MODULUS for value in values.tolist()]
    return dict(zip(connection.names, hashes, strict=True))


class SocketWire:
    """A gloo group over the ranks of two programs, for tensors in host memory."""

    def __init__(
        self, store: dist.Store, ranks: Sequence[int], *, rank: int, address: str, seconds: float
    ) -> None:
        """Connect to the other ranks, which pass the same list of ranks.

        address: this host's, as the others reach it. seconds: limit of every wait. WeightSyncError
        if a rank has not connected by then.
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
            raise self._connection_error(
                f"no connection within {seconds:g} s at {address}"
            ) from err

    def start(self, transfers: Sequence[tuple[Message, Tensor]]) -> list[dist.Work]:
        """Start the transfers of this rank as point-to-point messages, and return the works.

        A source sends its values to each destination; any other rank receives (see stream.Wire).
        """
        group_rank_of = self._ranks.index
        works = []
        for message, values in transfers:
            if message.source != self._rank:
                works.append(self._group.recv([values], group_rank_of(message.source), 0))
                continue
            works += [
                self._group.send([values], group_rank_of(to), 0) for to in message.destinations
            ]
        return works

    def share(
        self, values: Tensor, source: int, *, meanwhile: Callable[[], None] | None = None
    ) -> None:
        """Broadcast the source's values to every rank, in place; collective.

        meanwhile: called repeatedly until the broadcast ends; an exception of it ends the wait.
        WeightSyncError if the connection is lost.
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
            raise self._connection_error(f"nothing from rank {source}") from err

    def _connection_error(self, what: str) -> WeightSyncError:
        """Return the error for a connection that is missing or lost. what: its description."""
        got = f"{what} on rank {self._rank} of {self._ranks}"
        expected = "all of them"
        do = "look at the log of the other program, restart it and this run"
        return WeightSyncError.of("weights between two programs", got, expected, do)


def address_towards(host: str, port: int) -> str:
    """This host's address on its route to another host; OSError without a route. Sends nothing."""
    family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def share_address(
    address: tuple[str, int, int], group: dist.ProcessGroup, source: int, device: torch.device
) -> tuple[str, int, int]:
    """Broadcast (host, port, number of workers) from the rank `source`; return it on all ranks.

    All ranks of the group call it together; the others' address is ignored. AssertionError for a
    host of more than 64 characters.
    """
    host, *numbers = address
    assert len(host) <= _ADDRESS_BYTES, host
    facts = [*numbers, *host.encode().ljust(_ADDRESS_BYTES, b"\0")]
    values = torch.tensor(facts, dtype=torch.int64, device=device)
    dist.broadcast(values, src=source, group=group)
    port, num_workers, *letters = values.tolist()
    return bytes(letters).rstrip(b"\0").decode(), port, num_workers
