"""Cost tables of a dataflow: what each set of models costs on a pool of each size (Algorithm 2).

Models of a pool choose their strategies together, as memory couples them: residents add, what calls
need is the maximum, and the KV cache has what is left, which decides the waves of generation. So a
set offers a front of vectors, one second for each stage, none of them better than another.

Two kinds of options: `ideal` ones, for all pool sizes at once, in which every model chooses each
stage's best strategy by itself and the others take the least memory (a bound from below); and the
exact front of one set and size, computed when it is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from spmdflow.mapping.dataflow import Call, Dataflow, Model
from spmdflow.mapping.estimate import offload_parts
from spmdflow.mapping.generation import generation_parts, transition_seconds
from spmdflow.mapping.machine import Hardware
from spmdflow.mapping.memory import call_bytes, least_cache_bytes, resident_bytes, total
from spmdflow.mapping.search import Block, Options, pareto
from spmdflow.mapping.strategy import Array, Cut, strategy_rows
from spmdflow.mapping.training import inference_parts, training_parts


@dataclass(frozen=True)
class Entries:
    """All strategies of one model on all pool sizes, sorted by size."""

    model: Model
    sizes: Array
    """Pool size of each entry."""
    cut: Cut
    costs: Array
    """(entries, stages) seconds of all calls but generation; transitions are in them."""
    resident: Array
    needed: Array
    """Most bytes that a call but generation needs beside the residents."""
    generation_bytes: Array
    """What generation needs without its cache; 0 for models that do not generate."""
    least_cache: Array
    starts: dict[int, slice]
    """Entries of each pool size."""

    def take(self, size: int) -> slice:
        """Entries of a pool size; an empty slice if there are none."""
        return self.starts.get(size, slice(0, 0))


@dataclass(frozen=True)
class Front:
    """The vectors that one set offers on one pool size, and the strategies behind each."""

    costs: Array
    """(V, stages)."""
    entries: Array
    """(V, models of the set): numbers in each model's `Entries`."""


class CostTable:
    """Options of every set of models of a dataflow on pools of the given sizes."""

    def __init__(self, dataflow: Dataflow, hardware: Hardware, pool_sizes: Sequence[int]) -> None:
        self.dataflow, self.hardware = dataflow, hardware
        self.sizes = np.asarray(sorted(pool_sizes), dtype=np.int64)
        self.entries = [self._entries_of(model) for model in dataflow.models]
        self._fronts: dict[tuple[Block, int], Front] = {}
        self._least = [self._least_resident(entries) for entries in self.entries]

    def ideal(self, block: Block) -> Options:
        """A bound from below for a set on every pool size on which it might fit."""
        if not self.may_share(block):
            return Options(np.empty(0, dtype=np.int64), np.empty((0, len(self.dataflow.stages))))
        costs = np.zeros((len(self.sizes), len(self.dataflow.stages)))
        for number in block:
            others = sum(
                (self._least[other] for other in block if other != number), 0.0 * self.sizes
            )
            costs += self._least_costs(self.entries[number], others)
        fits = np.isfinite(costs).all(axis=1)
        return Options(self.sizes[fits], costs[fits])

    def front(self, block: Block, size: int) -> Front:
        """All vectors that a set can have on one pool size."""
        key = block, size
        if key not in self._fronts:
            self._fronts[key] = self._front_of(block, size)
        return self._fronts[key]

    def may_share(self, block: Block) -> bool:
        """Whether no two models of the set have to be apart."""
        names = {self.dataflow.models[number].name for number in block}
        return not any(set(pair) <= names for pair in self.dataflow.apart)

    def cache_bytes(self, entries: Entries, index: Array, resident: Array) -> Array:
        """What is left for a generator's KV cache beside residents of so many bytes."""
        return self.hardware.usable_bytes - resident - entries.generation_bytes[index]

    def _entries_of(self, model: Model) -> Entries:
        sizes, rows = strategy_rows(model, self.sizes.tolist(), self.hardware)
        cut, calls = Cut.of_rows(rows), self.dataflow.calls_of(model.name)
        costs = np.zeros((len(cut), len(self.dataflow.stages)))
        needed, generation, cache = (np.zeros(len(cut)) for _ in range(3))
        for call in (call for _, call in calls):
            stage = self.dataflow.stages.index(call.stage)
            costs[:, stage] += total(offload_parts(model, cut, self.hardware))
            beside = total(call_bytes(model, call.kind, call.workload, cut))
            if call.kind == "generate":
                generation = np.maximum(generation, beside)
                cache = np.maximum(cache, least_cache_bytes(model, call.workload, cut))
                continue
            simulate = training_parts if call.kind == "train" else inference_parts
            costs[:, stage] += total(simulate(model, call.workload, cut, self.hardware))
            needed = np.maximum(needed, beside)
        first = next((call for _, call in calls if call.kind == "generate"), None)
        if first is not None:
            stage = self.dataflow.stages.index(first.stage)
            costs[:, stage] += transition_seconds(model, cut, self.hardware)
        resident = total(resident_bytes(model, cut))
        kept = np.flatnonzero(
            resident + np.maximum(needed, generation + cache) <= self.hardware.usable_bytes
        )
        return Entries(
            model,
            sizes[kept],
            cut.take(kept),
            costs[kept],
            resident[kept],
            needed[kept],
            generation[kept],
            cache[kept],
            _slices(sizes[kept]),
        )

    def _least_resident(self, entries: Entries) -> Array:
        least = np.full(len(self.sizes), np.inf)
        np.minimum.at(least, np.searchsorted(self.sizes, entries.sizes), entries.resident)
        return least

    def _least_costs(self, entries: Entries, others: Array) -> Array:
        """(sizes, stages): each stage's least over strategies that fit beside `others` bytes."""
        place = np.searchsorted(self.sizes, entries.sizes)
        resident = entries.resident + others[place]
        beside = np.maximum(entries.needed, entries.generation_bytes + entries.least_cache)
        index = np.flatnonzero(resident + beside <= self.hardware.usable_bytes)
        costs = entries.costs[index] + self._generation_costs(entries, index, resident[index])
        least = np.full((len(self.sizes), len(self.dataflow.stages)), np.inf)
        np.minimum.at(least, place[index], costs)
        return least

    def _generation_costs(self, entries: Entries, index: Array, resident: Array) -> Array:
        """(len(index), stages): generation of some entries beside residents of so many bytes."""
        costs = np.zeros((len(index), len(self.dataflow.stages)))
        for call in self._generations(entries.model):
            stage = self.dataflow.stages.index(call.stage)
            cut, cache = entries.cut.take(index), self.cache_bytes(entries, index, resident)
            parts = generation_parts(
                entries.model, call.workload, cut, self.hardware, kv_bytes=cache
            )
            costs[:, stage] += total(parts)
        return costs

    def _generations(self, model: Model) -> list[Call]:
        calls = [call for _, call in self.dataflow.calls_of(model.name)]
        return [call for call in calls if call.kind == "generate"]

    def _front_of(self, block: Block, size: int) -> Front:
        quiet = [n for n in block if not self._generations(self.entries[n].model)]
        loud = [n for n in block if n not in quiet]
        budget = self.hardware.usable_bytes
        mixed = _Mix.empty(len(self.dataflow.stages))
        for number in (*quiet, *loud):
            entries = self.entries[number]
            index = np.arange(len(entries.sizes))[entries.take(size)]
            beside = (
                entries.needed
                if number in quiet
                else np.maximum(entries.needed, entries.generation_bytes + entries.least_cache)
            )
            mixed = mixed.with_model(index, entries.resident, beside, entries.costs, budget)
            if number in quiet:
                mixed = mixed.pruned()
        order = [(*quiet, *loud).index(number) for number in block]
        picks = mixed.picks[:, order]
        costs = mixed.costs
        for number in loud:
            index = picks[:, block.index(number)]
            costs = costs + self._generation_costs(self.entries[number], index, mixed.resident)
        kept = pareto(costs)
        return Front(costs[kept], picks[kept])


@dataclass(frozen=True)
class _Mix:
    """Combinations of strategies of several models on one pool."""

    resident: Array
    needed: Array
    costs: Array
    picks: Array

    @classmethod
    def empty(cls, stages: int) -> _Mix:
        zero = np.zeros(1)
        return cls(zero, zero, np.zeros((1, stages)), np.empty((1, 0), dtype=np.int64))

    def with_model(
        self, index: Array, resident: Array, needed: Array, costs: Array, budget: float
    ) -> _Mix:
        """Every combination with a model's entries `index` that fits into the budget."""
        mine, theirs = np.divmod(np.arange(len(self.resident) * len(index)), max(len(index), 1))
        theirs = index[theirs] if len(index) else theirs
        added = self.resident[mine] + resident[theirs]
        most = np.maximum(self.needed[mine], needed[theirs])
        fits = np.flatnonzero(added + most <= budget)
        mine, theirs = mine[fits], theirs[fits]
        return _Mix(
            added[fits],
            most[fits],
            self.costs[mine] + costs[theirs],
            np.column_stack([self.picks[mine], theirs]),
        )

    def pruned(self) -> _Mix:
        """Without combinations that another beats in memory and every stage."""
        kept = pareto(np.column_stack([self.resident, self.needed, self.costs]))
        return _Mix(self.resident[kept], self.needed[kept], self.costs[kept], self.picks[kept])


def _slices(sizes: Array) -> dict[int, slice]:
    values, starts = np.unique(sizes, return_index=True)
    stops = [*starts[1:].tolist(), len(sizes)]
    return {
        int(value): slice(int(start), int(stop))
        for value, start, stop in zip(values, starts.tolist(), stops)
    }
