"""`choose_residency`: which parts of a pool's models are in host memory between calls.

The parameters and the optimizer of each model with an open residency are kept on the device or
offloaded. Gradients are freed without a copy, together with other parts or alone. Combinations are
simulated in order of the seconds of their copies, until no later one can be better. The best one
fits in every phase, and has the least time for copies over the host's link plus generation with the
KV cache that it leaves room for.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations

import numpy as np

from spmdflow.mapping.dataflow import Dataflow, Model, ModelCall, Strategy
from spmdflow.mapping.hardware import Hardware
from spmdflow.mapping.memory import (
    build_moments,
    least_cache_bytes,
    offload_seconds,
    pool_memory,
    state_bytes,
)
from spmdflow.mapping.seconds import Parts, generation_parts, sequence_bytes, total

Members = Sequence[tuple[Model, Strategy]]
Moved = tuple[tuple[str, str], ...]
"""(model, part) of each offloaded part."""
MOST_PARTS = 10
"""How many of a pool's largest parts are considered; smaller ones stay on the device."""
LEAST_BYTES = float(64 << 20)
"""Least size of a KV cache that is limited by its rows."""


@dataclass(frozen=True)
class Share:
    """Size of a KV cache that is not set in bytes: the fraction `of_free` of the free memory."""

    of_free: float
    most_rows: int | None = None
    """Most sequences that it is sized for; None: no limit."""


@dataclass(frozen=True)
class Residency:
    """The offloaded parts, and the resulting memory and seconds."""

    moved: Moved
    caches: Mapping[str, tuple[float, float]]
    """Generating model without a fixed cache size -> (bytes of its cache, free bytes)."""
    fits: bool
    peak_bytes: float
    """Peak of a rank over all phases."""
    copy_seconds: float
    """Seconds of the copies between device and host in a step."""
    seconds: float
    """Seconds of the copies and, if it fits, of generation."""

    def parts_of(self, model: str) -> tuple[str, ...]:
        """The offloaded parts of a model."""
        return tuple(part for name, part in self.moved if name == model)


def choose_residency(
    members: Members,
    dataflow: Dataflow,
    hardware: Hardware,
    *,
    open_models: Collection[str],
    shares: Mapping[str, Share],
) -> Residency:
    """Return the best residency of one pool; if none fits, the one with the lowest peak.

    The best one fits and has the fewest seconds of copies plus generation. Combinations are
    simulated by rising copy seconds, until the copies alone (with generation at an unlimited cache)
    take as long as the best one.
    open_models: models whose parts may be offloaded; the others keep the residency of their engine.
    shares: cache sizes of generating models without a fixed one.
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
        residency = pool.simulate(moved, copy_seconds)
        if best is None or _sort_key(residency) < _sort_key(best):
            best = residency
    assert best is not None
    return best


def _sort_key(residency: Residency) -> tuple[float, float]:
    return (0.0 if residency.fits else residency.peak_bytes), residency.seconds


def offload_variants(model: Model, cut: Strategy) -> list[Model]:
    """Return variants of a model, one for each set of offloaded parts, the empty set first.

    Parts are the parameters, unless generation reads them, and the optimizer. A gradient buffer is
    freed in every variant. Only the model itself if engine.may_move is False.
    """
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
    """Bytes of each part that can be offloaded."""
    stays = model.rollout is not None and model.rollout.weights != "copy"
    return {
        part: size
        for part, size in state_bytes(model, cut).items()
        if np.any(size > 0) and not (stays and part == "parameters")  # generation reads them
    }


def choose_weights(choices: Mapping[str, Residency]) -> str:
    """The value of rollout.weights with the fastest step, the first if several are equal."""
    return min(choices, key=lambda mode: _sort_key(choices[mode]))


@dataclass(frozen=True)
class _Pool:
    """One pool whose parts may be offloaded."""

    members: Mapping[str, tuple[Model, Strategy]]
    dataflow: Dataflow
    hardware: Hardware
    open: Collection[str]
    shares: Mapping[str, Share]

    def combinations(self) -> Iterator[tuple[float, Moved]]:
        """Yield (seconds of copies in a step, offloaded parts) of each combination.

        Parameters and optimizers of the open models are combined, at most the ten largest. If there
        are gradient buffers, every combination frees them all, too, and offloading nothing at all
        is one more.
        """
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

    def simulate(self, moved: Moved, copy_seconds: float) -> Residency:
        """Return the memory and seconds of one combination of offloaded parts.

        A cache in `shares` gets its share of the memory that is free both while its model generates
        and when its generator is built, at most for its most rows. The combination fits if every
        phase does, and every such cache has room for min_batch_size sequences or, if fewer, for its
        most rows. Generation counts in `seconds` only if it fits.
        copy_seconds: of this combination.
        """
        members = []
        for name in self.members:
            members.append(self._offload_parts(name, moved))
        phases = pool_memory(members, self.dataflow, self.hardware)
        limit = self.hardware.usable_bytes
        caches: dict[str, tuple[float, float]] = {}
        fits = True
        for call in (call for call in self._generations() if call.model in self.shares):
            phase = phases[call.title]
            share = self.shares[call.model]
            position = list(self.members).index(call.model)
            _, at_start = build_moments(members[:position], *members[position])
            used = max(sum(phase.values()) - phase["kv_cache"], float(total(at_start)))
            free = limit - used
            size = min(share.of_free * free, self._max_cache_bytes(call, share))
            model, cut = self.members[call.model]
            fits &= size >= min(
                least_cache_bytes(model, call.workload, cut), self._max_cache_bytes(call, share)
            )
            phase["kv_cache"] = max(size, 0.0)
            caches[call.model] = phase["kv_cache"], max(free, 0.0)
        peak = max((sum(phase.values()) for phase in phases.values()), default=0.0)
        sizes = {name: size for name, (size, _) in caches.items()}
        fits = fits and peak <= limit
        seconds = copy_seconds + (self.generation_seconds(sizes) if fits else 0.0)
        return Residency(moved, caches, fits, peak, copy_seconds, seconds)

    def generation_seconds(self, caches: Mapping[str, float]) -> float:
        """Return the seconds of all generations of a step.

        A cache of a model that is not in `caches` has its fixed size. A generation with neither is
        skipped, as it takes the same time in all combinations.
        caches: bytes by model.
        """
        seconds = 0.0
        for call in self._generations():
            model, cut = self.members[call.model]
            assert model.rollout is not None, model.name
            size = caches.get(call.model, model.rollout.kv_cache_bytes)
            if size is None:  # neither fixed nor open: the same for all combinations
                continue
            parts = generation_parts(model, call.workload, cut, self.hardware, kv_bytes=size)
            seconds += float(total(parts))
        return seconds

    def _generations(self) -> Iterator[ModelCall]:
        return (call for call in self._calls() if call.kind == "generate")

    def _calls(self) -> Iterator[ModelCall]:
        return (call for call in self.dataflow.calls if call.model in self.members)

    def _max_cache_bytes(self, call: ModelCall, share: Share) -> float:
        """Return the bytes of a cache for the most rows that the share allows; inf without a limit.

        At least 64 MiB.
        """
        if share.most_rows is None:
            return float("inf")
        model, cut = self.members[call.model]
        rows = share.most_rows * sequence_bytes(model, call.workload, cut)
        return max(float(rows), LEAST_BYTES)

    def _copy_seconds(self, moved: Moved) -> float:
        """Return the seconds of all copies of these parts between device and host in a step."""
        seconds = 0.0
        for call in self._calls():
            if call.model in {name for name, _ in moved}:
                model, cut = self._offload_parts(call.model, moved)
                seconds += float(offload_seconds(model, call.kind, cut, self.hardware))
        return seconds

    def _offload_parts(self, name: str, moved: Moved) -> tuple[Model, Strategy]:
        """Return a model with exactly these of its parts offloaded, and its strategy.

        A model that is not open keeps its engine's residency. name: of the model. moved: of all
        models.
        """
        model, cut = self.members[name]
        if name not in self.open:
            return model, cut
        parts = tuple(part for n, part in moved if n == name)
        return replace(model, engine=replace(model.engine, moved=parts)), cut
