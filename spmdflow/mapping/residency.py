"""`choose_residency`: which parts of a pool's models are in host memory between calls.

Parameters and optimizer of each model that leaves it open stay on the device or are offloaded;
gradients are freed, not copied, together with any of them or alone. Combinations are tried in the
order of the seconds that their copies take, until no later one can be better. The best one fits
into every phase and has the least time for copies over the host's link plus generation, with the KV
cache that it leaves room for.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations

import numpy as np

from spmdflow.mapping.dataflow import Call, Dataflow, Model, Strategy
from spmdflow.mapping.hardware import Hardware
from spmdflow.mapping.memory import (
    least_cache_bytes,
    offload_seconds,
    pool_memory,
    state_bytes,
)
from spmdflow.mapping.seconds import Parts, generation_parts, sequence_bytes, total

Members = Sequence[tuple[Model, Strategy]]
Moved = tuple[tuple[str, str], ...]
"""(model, part) of all that is offloaded."""
MOST_PARTS = 10
"""Parts of a pool that are considered, the largest; smaller ones stay on the device."""
BLOCK_TOKENS = 16
"""A sequence's KV cache is allocated in blocks of this size."""
LEAST_BYTES = float(64 << 20)
"""Least size of a KV cache that is limited by its rows."""


@dataclass(frozen=True)
class Share:
    """A KV cache that is not set in bytes: the fraction `of_free` of the free memory."""

    of_free: float
    most_rows: int | None = None
    """Most sequences that it has room for; None: no limit."""


@dataclass(frozen=True)
class Residency:
    """What is offloaded, and what a rank then holds."""

    moved: Moved
    caches: Mapping[str, tuple[float, float]]
    """(bytes, bytes that are free for it) by generating model without a cache of a set size."""
    fits: bool
    peak_bytes: float
    """Most in any phase."""
    copy_seconds: float
    """Of a step, between device and host."""
    seconds: float
    """Copies and, if it fits, generation."""

    def parts_of(self, model: str) -> tuple[str, ...]:
        """What moves of a model."""
        return tuple(part for name, part in self.moved if name == model)


def choose_residency(
    members: Members,
    dataflow: Dataflow,
    hardware: Hardware,
    *,
    open_models: Collection[str],
    shares: Mapping[str, Share],
) -> Residency:
    """The best combination of one pool; if none fits, the one that needs least.

    open_models: whose parts may move; those of the others do as their engine says. shares: of
    generating models without a cache of a set size.
    """
    by_name = {}
    for model, cut in members:
        by_name[model.name] = (model, cut)
    pool = _Pool(by_name, dataflow, hardware, open_models, shares)
    floor = pool.generation_seconds(dict.fromkeys(shares, 1e18))
    best: Residency | None = None
    for copy_seconds, moved in sorted(pool.combinations()):
        if best is not None and best.fits and copy_seconds + floor >= best.seconds:
            break
        found = pool.tried(moved, copy_seconds)
        if best is None or _rank(found) < _rank(best):
            best = found
    assert best is not None
    return best


def _rank(found: Residency) -> tuple[float, float]:
    return (0.0 if found.fits else found.peak_bytes), found.seconds


def residencies(model: Model, cut: Strategy) -> list[Model]:
    """The model with each choice of what it offloads; `choose_residency` has the same."""
    if not model.engine.may_move:
        return [model]
    parts = []
    for part in _movable_bytes(model, cut):
        if part != "gradients":
            parts.append(part)
    freed = ("gradients",) * ("gradients" in _movable_bytes(model, cut))
    chosen = chain.from_iterable(combinations(parts, n) for n in range(len(parts) + 1))
    result = []
    for some in chosen:
        result.append(replace(model, engine=replace(model.engine, moved=(*some, *freed))))
    return result


def _movable_bytes(model: Model, cut: Strategy) -> Parts:
    stays = model.rollout is not None and model.rollout.weights != "copy"
    return {
        part: size
        for part, size in state_bytes(model, cut).items()
        if np.any(size > 0) and not (stays and part == "parameters")  # generation reads them
    }


def choose_weights(ways: Mapping[str, Residency]) -> str:
    """Which rollout.weights gives the fastest step; the first of equal ones."""
    return min(ways, key=lambda way: _rank(ways[way]))


@dataclass(frozen=True)
class _Pool:
    """One pool with its open parts."""

    members: Mapping[str, tuple[Model, Strategy]]
    dataflow: Dataflow
    hardware: Hardware
    open: Collection[str]
    shares: Mapping[str, Share]

    def combinations(self) -> Iterator[tuple[float, Moved]]:
        """(seconds of copies in a step, what moves)."""
        parts = []
        gradients = []
        for name in self.open:
            model, cut = self.members[name]
            for part, size in _movable_bytes(model, cut).items():
                if part == "gradients":
                    gradients.append((name, part))
                else:
                    parts.append((float(size), name, part))
        largest = []
        for _, name, part in sorted(parts, reverse=True)[:MOST_PARTS]:
            largest.append((name, part))
        chosen = chain.from_iterable(combinations(largest, n) for n in range(len(largest) + 1))
        for moved in chosen:
            if not moved:
                yield 0.0, ()
            if moved or gradients:
                yield self._copy_seconds(moved), (*moved, *gradients)

    def tried(self, moved: Moved, copy_seconds: float) -> Residency:
        """The residency of one combination."""
        members = []
        for name in self.members:
            members.append(self._with(name, moved))
        phases = pool_memory(members, self.dataflow, self.hardware)
        limit = self.hardware.usable_bytes
        caches: dict[str, tuple[float, float]] = {}
        fits = True
        for call in (call for call in self._generations() if call.model in self.shares):
            held = phases[call.title]
            share = self.shares[call.model]
            free = limit - (sum(held.values()) - held["kv_cache"])
            size = min(share.of_free * free, self._most(call, share))
            model, cut = self.members[call.model]
            fits &= size >= min(
                least_cache_bytes(model, call.workload, cut), self._most(call, share)
            )
            held["kv_cache"] = max(size, 0.0)
            caches[call.model] = held["kv_cache"], max(free, 0.0)
        peak = max((sum(held.values()) for held in phases.values()), default=0.0)
        sizes = {name: size for name, (size, _) in caches.items()}
        fits = fits and peak <= limit
        seconds = copy_seconds + (self.generation_seconds(sizes) if fits else 0.0)
        return Residency(moved, caches, fits, peak, copy_seconds, seconds)

    def generation_seconds(self, caches: Mapping[str, float]) -> float:
        """Of all generations of a step; caches: the sizes of those that are open."""
        seconds = 0.0
        for call in self._generations():
            model, cut = self.members[call.model]
            assert model.rollout is not None, model.name
            size = caches.get(call.model, model.rollout.kv_cache_bytes)
            if size is None:  # neither set nor open: nothing to compare
                continue
            parts = generation_parts(model, call.workload, cut, self.hardware, kv_bytes=size)
            seconds += float(total(parts))
        return seconds

    def _generations(self) -> Iterator[Call]:
        return (call for call in self._calls() if call.kind == "generate")

    def _calls(self) -> Iterator[Call]:
        return (call for call in self.dataflow.calls if call.model in self.members)

    def _most(self, call: Call, share: Share) -> float:
        """Bytes of a cache with room for the most rows."""
        if share.most_rows is None:
            return float("inf")
        model, cut = self.members[call.model]
        blocks = 1 + BLOCK_TOKENS / call.workload.tokens
        rows = share.most_rows * blocks * sequence_bytes(model, call.workload, cut)
        return max(float(rows), LEAST_BYTES)

    def _copy_seconds(self, moved: Moved) -> float:
        seconds = 0.0
        for call in self._calls():
            if call.model in {name for name, _ in moved}:
                model, cut = self._with(call.model, moved)
                seconds += float(offload_seconds(model, call.kind, cut, self.hardware))
        return seconds

    def _with(self, name: str, moved: Moved) -> tuple[Model, Strategy]:
        """A member with the parts that move."""
        model, cut = self.members[name]
        if name not in self.open:
            return model, cut
        parts = tuple(part for n, part in moved if n == name)
        return replace(model, engine=replace(model.engine, moved=parts)), cut
