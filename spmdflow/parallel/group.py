"""Process groups by (ranks, lane, backend), created once by a command that every rank runs.

Only this module calls `new_group`. All ranks of the default world must call `make` with the same
specs in the same order, whether they are members or not: a `new_group` call that some ranks skip
breaks all later ones.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from functools import _lru_cache_wrapper
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import debug

from spmdflow.errors import ProtocolError
from spmdflow.message import decode, encode
from spmdflow.parallel.device import backend_of, own_device

LANES = ("compute", "transfer")


@dataclass(frozen=True, order=True)
class GroupSpec:
    """Key of a process group. Models on the same ranks share it."""

    ranks: tuple[int, ...]
    """Global ranks, ascending."""
    lane: str
    """compute or transfer: the thread that uses the group."""
    backend: str
    """gloo, nccl, or another backend of torch."""

    def __post_init__(self) -> None:
        """Raises ProtocolError unless ranks ascend and lane and backend exist."""
        object.__setattr__(self, "ranks", tuple(self.ranks))
        if not self.ranks or list(self.ranks) != sorted(set(self.ranks)):
            expected = "at least one rank, ascending, each once"
            do = f"list them as {tuple(sorted(set(self.ranks)))}"
            raise ProtocolError.of("group", f"ranks {self.ranks}", expected, do)
        backends = tuple(dist.Backend.backend_list)
        if self.lane not in LANES or self.backend not in backends:
            got = f"lane {self.lane!r} and backend {self.backend!r}"
            expected = f"one of {LANES} and one of {backends}"
            raise ProtocolError.of(f"group {self.ranks}", got, expected, "choose one of each")


_PIECE_BYTES = 32 << 20
"""Size of the pieces that `broadcast_plain` sends."""
COLLECTIVE_SECONDS = 7 * 86400.0
"""The timeout of process groups. It must never end a call: a rank may wait in a collective for a
rank that waits for rows. The controller ends calls (failure/limit.py), then all processes."""


class GroupTable:
    """The process groups of one rank."""

    def __init__(self, rank: int, timeout_seconds: float = COLLECTIVE_SECONDS) -> None:
        """rank: this process's global rank. Creates no group yet."""
        self._rank = rank
        self.timeout_seconds = timeout_seconds
        self._timeout = timedelta(seconds=timeout_seconds)
        self._groups: dict[GroupSpec, dist.ProcessGroup | None] = {}

    def make(self, specs: Iterable[GroupSpec], device: torch.device | None = None) -> None:
        """Create the process groups that do not exist yet, and connect those of devices.

        All ranks of the default world call it together with the same specs in the same order,
        members or not. Groups of one rank are skipped: `get` creates them at first use.
        device: of this rank, for groups with another backend than gloo; None: the current one.
        """
        for spec in specs:
            if spec in self._groups or len(spec.ranks) == 1:
                continue
            group = dist.new_group(list(spec.ranks), timeout=self._timeout, backend=spec.backend)
            self._groups[spec] = group if self._rank in spec.ranks else None
            if self._rank in spec.ranks and spec.backend != "gloo":
                _connect(group, own_device() if device is None else device)

    def destroy(self) -> None:
        """Destroy all groups and forget them. No operation may be running in them.

        Also clears torch's caches of meshes that refer to the groups.
        """
        for group in self._groups.values():
            if group is not None:
                dist.destroy_process_group(group)
        self._groups.clear()
        _forget_meshes()

    def specs(self) -> list[GroupSpec]:
        """Every group that was created, in order, including those without this rank."""
        return list(self._groups)

    def get(
        self, ranks: Iterable[int], lane: str = "compute", backend: str | None = None
    ) -> dist.ProcessGroup:
        """Return the group over ranks.

        backend None: the group that was created first, with the device's backend; ranks in the
        worker's host_groups also have a gloo group. A group of only this rank is created here if it
        does not exist, without other ranks. ProtocolError if another group does not exist, or if
        this rank is not in it.
        """
        ranks = tuple(ranks)
        if ranks == (self._rank,):
            return self._single_rank_group(lane, backend or backend_of(own_device()))
        if self._rank not in ranks:
            expected = f"a group that rank {self._rank} is in"
            do = "use this rank's own group, e.g. layout.axis_group(rank, 'dp')"
            raise ProtocolError.of("group", f"ranks {ranks} on rank {self._rank}", expected, do)
        group = self.get_or_none(ranks, lane, backend)
        if group is None:
            known = sorted(spec.ranks for spec in self._groups if spec.lane == lane)
            raise ProtocolError(
                f"group {ranks}, lane {lane}, backend {backend or 'any'}: not made; expected one "
                f"of {known}; add {ranks} to the worker's needed_groups, for gloo its host_groups"
            )
        return group

    def get_or_none(
        self, ranks: Iterable[int], lane: str = "compute", backend: str | None = None
    ) -> dist.ProcessGroup | None:
        """Return the first group that was created over these ranks in this lane.

        backend None: with any backend. None if there is no such group or this rank is not in it.
        Never creates a group.
        """
        key = tuple(ranks), lane
        for spec, group in self._groups.items():
            if (spec.ranks, spec.lane) == key and backend in (None, spec.backend):
                return group
        return None

    def _single_rank_group(self, lane: str, backend: str) -> dist.ProcessGroup:
        """Return the group of only this rank, and create it at first use, without other ranks."""
        spec = GroupSpec((self._rank,), lane, backend)
        group = self._groups.get(spec)
        if group is None:
            group = self._groups[spec] = dist.new_group(
                [self._rank],
                timeout=self._timeout,
                backend=backend,
                use_local_synchronization=True,
            )
        return group

    def reducer(self, ranks: Iterable[int]) -> Callable[[Tensor], Tensor]:
        """Return a function that sums a tensor over the gloo compute group of ranks, in float64.

        Every rank of the group must call the function equally often. Each gets the same bits, on
        its tensor's device, and the argument is not changed. A single rank needs no group: its sum
        is its own tensor. ProtocolError if the group does not exist.
        """
        ranks = tuple(ranks)
        if len(ranks) == 1:
            return lambda tensor: tensor.detach().to(torch.float64)
        group = self.get(ranks, backend="gloo")

        def reduce(tensor: Tensor) -> Tensor:
            total = tensor.detach().to("cpu", torch.float64, copy=True)
            dist.all_reduce(total, group=group)
            return total.to(tensor.device)

        return reduce


def _connect(group: dist.ProcessGroup, device: torch.device) -> None:
    """Run one small collective, with which all ranks of a group connect to each other.

    NCCL connects the ranks in their first operation on a group and blocks until all of them have
    called one. A group whose first operation is a message between some of its ranks would never
    begin (torch's documentation of `batch_isend_irecv`). Connecting here has the same order on all
    ranks.
    """
    dist.all_reduce(torch.zeros(1, device=device), group=group)


class _Payload(NamedTuple):
    """Envelope of a value that a rank sends. In the fields of a record, tuples stay tuples."""

    value: Any


def all_gather_plain(mine: Any, group: dist.ProcessGroup) -> list[Any]:
    """Return the values that the ranks of the group pass, in the group's order.

    Values are plain data, encoded without pickle, and may differ in size. All ranks of the group
    call it together.
    """
    if dist.get_backend(group) == "gloo":
        device = torch.device("cpu")
    else:
        device = own_device()
    data = torch.frombuffer(bytearray(encode(_Payload(mine), max_bytes=None)), dtype=torch.uint8)
    sizes = []
    for _ in range(group.size()):
        sizes.append(torch.zeros(1, dtype=torch.int64, device=device))
    dist.all_gather(sizes, torch.tensor([len(data)], device=device), group=group)
    padded = torch.zeros(int(max(sizes)), dtype=torch.uint8, device=device)
    padded[: len(data)] = data
    gathered = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(gathered, padded, group=group)
    payloads = (each[: int(size)].cpu().numpy().data for each, size in zip(gathered, sizes))
    return [decode(data, max_bytes=None).value for data in payloads]


def broadcast_plain(mine: Any, group: dist.ProcessGroup) -> Any:
    """Return the value that the group's first rank passes, on every rank of the group.

    It is plain data of any size, sent in pieces of 32 MiB. The other ranks pass None. All ranks of
    the group, which must be a gloo group, call it together.
    """
    first = dist.get_global_rank(group, 0)
    is_first = group.rank() == 0
    size = torch.zeros(1, dtype=torch.int64)
    data = torch.zeros(0, dtype=torch.uint8)
    if is_first:
        data = torch.frombuffer(
            bytearray(encode(_Payload(mine), max_bytes=None)), dtype=torch.uint8
        )
        size[0] = len(data)
    dist.broadcast(size, first, group=group)
    if not is_first:
        data = torch.empty(int(size), dtype=torch.uint8)
    for piece in data.split(_PIECE_BYTES):
        dist.broadcast(piece, first, group=group)
    if is_first:
        return mine
    return decode(data.numpy().data, max_bytes=None).value


def _forget_meshes() -> None:
    """Clear torch's caches of DTensor operations, which refer to meshes and so to their groups.

    There is no public call for it. The caches compare by value, so an equal mesh of a later launch
    would get the cached one, whose groups are destroyed.
    """
    debug._clear_sharding_prop_cache()
    for name, module in list(sys.modules.items()):
        if not name.startswith("torch.distributed.tensor."):
            continue
        for value in list(vars(module).values()):
            if isinstance(value, _lru_cache_wrapper):
                value.cache_clear()
        clear_planners = getattr(module, "clear_redistribute_planner_cache", None)
        if clear_planners is not None:
            clear_planners()
