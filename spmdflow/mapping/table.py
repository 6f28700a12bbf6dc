"""Cost tables of a dataflow: what each set of models costs on a pool of each size (Algorithm 2).

Models of a pool choose their strategies together, as memory couples them: residents add, what calls
need is the maximum, and the KV cache has what is left, which decides the waves of generation. So a
set of models has a Pareto front of vectors: the seconds of each stage.

Two kinds of options: `ideal` ones, for all pool sizes at once, in which every model chooses each
stage's best strategy by itself and the others take the least memory (a lower bound); and the
exact front of one set and size, computed when it is asked for.

Where a set does not fit with every part where its engine keeps it, the parts that may move are
offloaded: a second table has an entry for each choice of parts too, with the seconds of its copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from spmdflow.mapping.dataflow import Call, Dataflow, Model, Strategy, strategies_on
from spmdflow.mapping.hardware import Hardware
from spmdflow.mapping.memory import (
    KEPT_WHILE_TRAINING,
    call_bytes,
    full_cache_bytes,
    held_weights,
    least_cache_bytes,
    offload_seconds,
    resident_bytes,
    save_bytes,
    sync_bytes,
)
from spmdflow.mapping.residency import residencies
from spmdflow.mapping.search import ModelSet, Options, pareto, unbeaten
from spmdflow.mapping.seconds import generation_parts, pass_parts, total, transition_seconds

Array = np.ndarray
_MANY = 1 << 20
"""More than any size."""
_MANY_COMBINATIONS = 4096


@dataclass(frozen=True)
class Entries:
    """All strategies of one model on all pool sizes, sorted by size."""

    model: Model
    sizes: Array
    """Pool size of each entry."""
    cut: Strategy
    variants: Sequence[Model]
    """The model by what is offloaded."""
    variant: Array
    """Which of them each entry is of."""
    costs: Array
    """(entries, stages) seconds of all calls but generation; transitions are in them."""
    resident: Array
    needed: Array
    """Most bytes beside the residents of any call but generation, and of sync and checkpoint."""
    exposed: Array
    """The same of calls during which another model's own generation weights may be held."""
    held: Array
    """Own generation weights during such calls of other models."""
    generation_bytes: Array
    """What generation needs without its cache; 0 for models that do not generate."""
    least_cache: Array
    full_cache: Array
    """With so much cache all sequences of a replica are held at once."""

    @property
    def most_beside(self) -> Array:
        """Most that any call needs beside the residents, generation with its least cache."""
        return np.maximum(self.needed, self.generation_bytes + self.least_cache)

    def choice(self, entry: int) -> tuple[Model, Strategy]:
        """The model as one entry offloads it, and its strategy."""
        return self.variants[self.variant[entry]], self.cut.one(entry)


@dataclass(frozen=True)
class Front:
    """What a set of models offers on one pool size: combinations of their strategies."""

    costs: Array
    """(V, stages) seconds; (V, 1), their sum, for the only pool."""
    entries: Array
    """(V, models of the set): numbers in each model's `Entries`."""
    resident: Array
    needed: Array
    """(V,): most that a call needs beside the residents."""
    exposed: Array
    """(V,): the same of calls during which generation weights may be held."""

    def take(self, index: Array) -> Front:
        """Some of them."""
        return Front(*(part[index] for part in vars(self).values()))

    def with_model(self, entries: Entries, index: Array, costs: Array, budget: float) -> Front:
        """Every combination with a model's entries `index`, at these costs, that fits."""
        count = len(index)
        mine, theirs = np.divmod(np.arange(len(self.resident) * count), max(count, 1))
        resident = self.resident[mine] + entries.resident[index][theirs]
        needed = np.maximum(self.needed[mine], entries.most_beside[index][theirs])
        needed = np.maximum(needed, self.exposed[mine] + entries.held[index][theirs])
        exposed = np.maximum(self.exposed[mine], entries.exposed[index][theirs])
        fits = np.flatnonzero(resident + needed <= budget)
        mine = mine[fits]
        theirs = theirs[fits]
        return Front(
            self.costs[mine] + costs[theirs],
            np.column_stack([self.entries[mine], index[theirs]]),
            resident[fits],
            needed[fits],
            exposed[fits],
        )


class CostTable:
    """Options of every set of models of a dataflow on pools of the given sizes.

    offloads: with entries for all that may be offloaded. Only then generation weights that are held
    during other models' calls are counted: beside residents that stay, updates need more.
    """

    def __init__(
        self,
        dataflow: Dataflow,
        hardware: Hardware,
        pool_sizes: Sequence[int],
        *,
        offloads: bool = False,
    ) -> None:
        self.dataflow = dataflow
        self.hardware = hardware
        self._offloads = offloads
        ways = set()
        for model in dataflow.models:
            if model.rollout:
                ways.add(model.rollout.weights)
        self._exposed_kinds = ("infer", "train") if ways & KEPT_WHILE_TRAINING else ("infer",)
        self.sizes = np.asarray(sorted(pool_sizes), dtype=np.int64)
        self.entries = [self._entries_of(model) for model in dataflow.models]
        self._fronts: dict[tuple[ModelSet, int, bool], Front] = {}
        self._offloaded: set[tuple[ModelSet, int]] = set()
        """Sets and sizes that fit only with offloaded parts, if at all."""
        self._useful_entries: dict[tuple[int, int], Array] = {}
        self._lowest = [self._lowest_of(entries) for entries in self.entries]
        self._least = [np.full(len(self.sizes), np.inf) for _ in self.entries]
        """Fewest resident bytes of each model by size."""
        for least, entries in zip(self._least, self.entries):
            np.minimum.at(least, np.searchsorted(self.sizes, entries.sizes), entries.resident)

    @cached_property
    def _offloading(self) -> CostTable:
        every = tuple(range(len(self.entries)))
        sizes = self.sizes[~self._surely_fits(every)]
        return CostTable(self.dataflow, self.hardware, sizes.tolist(), offloads=True)

    def ideal(self, block: ModelSet) -> Options:
        """Lower bounds for a set on every pool size on which it might fit."""
        names = set()
        for number in block:
            names.add(self.dataflow.models[number].name)
        lenders = {self.dataflow.models[number].shares for number in block} - {""}
        if lenders - names or any(set(pair) <= names for pair in self.dataflow.apart):
            return Options(np.empty(0, dtype=np.int64), np.empty((0, len(self.dataflow.stages))))
        costs = self._ideal_costs(block)
        unsure = ~self._surely_fits(block)
        if unsure.any() and self._may_offload(block):
            place = np.searchsorted(self._offloading.sizes, self.sizes[unsure])
            costs[unsure] = self._offloading._ideal_costs(block)[place]
        fits = np.isfinite(costs).all(axis=1)
        return Options(self.sizes[fits], costs[fits])

    def front(self, block: ModelSet, size: int, *, alone: bool = False) -> Front:
        """The exact front of a set on one pool size.

        alone: it is the only pool, so only the sum over stages counts: costs have one column.
        """
        key = block, size, alone
        if key not in self._fronts:
            found = self._front_of(block, size, alone)
            if not len(found.costs) and self._may_offload(block):
                self._offloaded.add((block, size))
                found = self._offloading.front(block, size, alone=alone)
            self._fronts[key] = found
        return self._fronts[key]

    def choices(self, block: ModelSet, size: int, entries: Array) -> list[tuple[Model, Strategy]]:
        """Each model as one row of a front's entries offloads it, and its strategy."""
        table = self._offloading if (block, size) in self._offloaded else self
        result = []
        for n, entry in zip(block, entries.tolist()):
            result.append(table.entries[n].choice(entry))
        return result

    def cache_bytes(self, entries: Entries, index: Array, resident: Array) -> Array:
        """What is left for a generator's KV cache beside residents of so many bytes."""
        return self.hardware.usable_bytes - resident - entries.generation_bytes[index]

    def _ideal_costs(self, block: ModelSet) -> Array:
        """(sizes, stages): lower bounds, infinite where the set cannot fit."""
        costs = np.zeros((len(self.sizes), len(self.dataflow.stages)))
        for number in block:
            others = sum(
                (self._least[other] for other in block if other != number), 0.0 * self.sizes
            )
            costs += self._least_costs(self.entries[number], others)
        return costs

    def _may_offload(self, block: ModelSet) -> bool:
        open_models = (self.dataflow.models[number].engine.may_move for number in block)
        return not self._offloads and any(open_models)

    def _surely_fits(self, block: ModelSet) -> Array:
        """(sizes,): whether each model's strategy of the lowest peak fits beside the others'."""
        resident, beside = zip(*(self._lowest[number] for number in block))
        return sum(resident) + np.max(beside, axis=0) <= self.hardware.usable_bytes

    def _lowest_of(self, entries: Entries) -> Array:
        """(2, sizes) bytes of the strategy with the lowest peak: resident, most beside."""
        order = np.lexsort((entries.resident + entries.most_beside, entries.sizes))
        found, first = np.unique(entries.sizes[order], return_index=True)
        place = np.searchsorted(self.sizes, found)
        index = order[first]
        lowest = np.full((2, len(self.sizes)), np.inf)
        lowest[:, place] = entries.resident[index], entries.most_beside[index]
        return lowest

    def _entries_of(self, model: Model) -> Entries:
        """Those that fit where the model is alone."""
        sizes, cut = strategies_on(model, self.sizes.tolist(), self.hardware)
        variants = residencies(model, cut) if self._offloads else [model]
        found = zip(*(self._simulated(variant, cut) for variant in variants))
        costs, *memory = (np.concatenate(parts) for parts in found)
        resident, needed, _, _, generation, cache, _ = memory
        peaks = resident + np.maximum(needed, generation + cache)
        kept = np.flatnonzero(peaks <= self.hardware.usable_bytes)
        rows = kept % len(sizes)
        order = np.argsort(rows, kind="stable")
        kept = kept[order]
        rows = rows[order]
        arrays = (each[kept] for each in (costs, *memory))
        variant = kept // len(sizes)
        return Entries(model, sizes[rows], cut.take(rows), variants, variant, *arrays)

    def _simulated(self, model: Model, cut: Strategy) -> tuple[Array, ...]:
        """Costs and bytes as in `Entries`, of every strategy."""
        calls = self.dataflow.calls_of(model.name)
        costs = np.zeros((len(cut.dp), len(self.dataflow.stages)))
        needed, exposed, generation, cache, full = (np.zeros(len(cut.dp)) for _ in range(5))
        for call in calls:
            stage = self.dataflow.stages.index(call.stage)
            if call.fixed_seconds is not None:
                costs[:, stage] += call.fixed_seconds
                continue
            costs[:, stage] += offload_seconds(model, call.kind, cut, self.hardware)
            beside = total(call_bytes(model, call.kind, call.workload, cut))
            if call.kind != "generate":
                beside = beside + held_weights(model, cut, call.kind)
            if call.kind == "generate":
                needed = np.maximum(needed, total(sync_bytes(model, call.workload, cut)))
                generation = np.maximum(generation, beside)
                cache = np.maximum(cache, least_cache_bytes(model, call.workload, cut))
                full = np.maximum(full, full_cache_bytes(model, call.workload, cut))
                continue
            trains = call.kind == "train"
            parts = pass_parts(model, call.workload, cut, self.hardware, trains=trains)
            costs[:, stage] += total(parts)
            needed = np.maximum(needed, beside)
            if call.kind in self._exposed_kinds:
                exposed = np.maximum(exposed, beside)
        if model.trained:
            needed = np.maximum(needed, total(save_bytes(model, cut)))
        first = next((call for call in calls if call.kind == "generate"), None)
        if first is not None:
            stage = self.dataflow.stages.index(first.stage)
            costs[:, stage] += transition_seconds(model, cut, self.hardware)
        resident = total(resident_bytes(model, cut))
        held = held_weights(model, cut, "infer") * self._offloads
        return costs, resident, needed, exposed, held, generation, cache, full

    def _least_costs(self, entries: Entries, others: Array) -> Array:
        """(sizes, stages): each stage's least over strategies that fit beside `others` bytes."""
        place = np.searchsorted(self.sizes, entries.sizes)
        resident = entries.resident + others[place]
        index = np.flatnonzero(resident + entries.most_beside <= self.hardware.usable_bytes)
        costs = entries.costs[index] + self._generation_costs(entries, index, resident[index])
        least = np.full((len(self.sizes), len(self.dataflow.stages)), np.inf)
        np.minimum.at(least, place[index], costs)
        return least

    def _generation_costs(self, entries: Entries, index: Array, resident: Array) -> Array:
        """(len(index), stages): generation of some entries beside residents of so many bytes."""
        costs = np.zeros((len(index), len(self.dataflow.stages)))
        for call in self._generations(entries.model):
            stage = self.dataflow.stages.index(call.stage)
            cut = entries.cut.take(index)
            cache = self.cache_bytes(entries, index, resident)
            parts = generation_parts(
                entries.model, call.workload, cut, self.hardware, kv_bytes=cache
            )
            costs[:, stage] += total(parts)
        return costs

    def _generations(self, model: Model) -> list[Call]:
        calls = self.dataflow.calls_of(model.name)
        generations = []
        for c in calls:
            if c.kind == "generate" and c.fixed_seconds is None:
                generations.append(c)
        return generations

    def _front_of(self, block: ModelSet, size: int, alone: bool) -> Front:
        loud = []
        for n in block:
            if self._generations(self.entries[n].model):
                loud.append(n)
        order = [*(n for n in block if n not in loud), *loud]
        index = {}
        for number in block:
            index[number] = self._useful(number, size)
        coupled = self._is_coupled(order, loud, index)
        stages = 1 if alone else len(self.dataflow.stages)
        zero = np.zeros(1)
        mixed = Front(np.zeros((1, stages)), np.empty((1, 0), dtype=np.int64), zero, zero, zero)
        for number in order:
            entries = self.entries[number]
            some = index[number]
            costs = entries.costs[some]
            if number in loud and not coupled:
                costs = costs + self._generation_costs(entries, some, entries.resident[some])
            costs = costs.sum(axis=1, keepdims=True) if alone else costs
            mixed = mixed.with_model(entries, some, costs, self.hardware.usable_bytes)
            if number != order[-1]:  # drop dominated ones; memory counts if it couples models
                memory = [mixed.resident, mixed.needed] if coupled else []
                memory += [mixed.exposed] * (coupled and self._offloads)
                mixed = mixed.take(pareto(np.column_stack([*memory, mixed.costs])))
        picks = mixed.entries[:, [order.index(number) for number in block]]
        own = {}
        for number in loud:
            if coupled:
                own[number] = picks[:, block.index(number)]
        costs, kept = self._with_generation(mixed, own)
        return replace(mixed.take(kept), costs=costs[kept], entries=picks[kept])

    def _with_generation(self, mixed: Front, own: dict[int, Array]) -> tuple[Array, Array]:
        """Costs with generation added for the models in `own`, and the indices of the front.

        With many combinations, the most promising are simulated first. Of the others, only those
        are that would not be dominated if each generator had the largest possible cache.
        """
        costs = mixed.costs.copy()
        if not own:
            return costs, pareto(costs)
        alive = np.arange(len(costs))
        if len(costs) > _MANY_COMBINATIONS:
            bound = costs.copy()
            least = mixed.resident.min()
            for number, index in own.items():
                entries = self.entries[number]
                values = np.unique(index)
                best = self._generation_costs(entries, values, np.full(len(values), least))
                if costs.shape[1] == 1:
                    best = best.sum(axis=1, keepdims=True)
                else:
                    best = best
                bound += best[np.searchsorted(values, index)]
            first = np.argpartition(bound.sum(axis=1), _MANY_COMBINATIONS // 4)
            first = first[: _MANY_COMBINATIONS // 4]
            known = self._generation_added(mixed, own, first)
            alive = unbeaten(bound, known[pareto(known)])
        costs[alive] = self._generation_added(mixed, own, alive)
        return costs, alive[pareto(costs[alive])]

    def _generation_added(self, mixed: Front, own: dict[int, Array], some: Array) -> Array:
        costs = mixed.costs[some]
        for number, index in own.items():
            entries = self.entries[number]
            resident = mixed.resident[some]
            added = self._generation_costs(entries, index[some], resident)
            costs = costs + (added.sum(axis=1, keepdims=True) if costs.shape[1] == 1 else added)
        return costs

    def _useful(self, number: int, size: int) -> Array:
        """Entries of a model on a pool size that no other beats in memory and every stage; those
        that generate in different sizes are not compared."""
        key = number, size
        if key not in self._useful_entries:
            entries = self.entries[number]
            index = np.arange(*np.searchsorted(entries.sizes, [size, size + 1]))
            memory = [entries.resident, entries.needed, entries.generation_bytes]
            memory += [entries.exposed, entries.held] * self._offloads
            points = np.column_stack([*(part[index] for part in memory), entries.costs[index]])
            groups = entries.cut.gen_tp[index] * _MANY + entries.cut.gen_pp[index]
            found = [index[:0]]
            for group in np.unique(groups):
                members = np.flatnonzero(groups == group)
                found.append(index[members[pareto(points[members])]])
            self._useful_entries[key] = np.concatenate(found)
        return self._useful_entries[key]

    def _is_coupled(
        self, order: Sequence[int], loud: Sequence[int], index: dict[int, Array]
    ) -> bool:
        """Whether some combination does not fit, or leaves a generator less cache than it uses."""
        if not all(len(own) for own in index.values()):
            return True
        residents = sum(self.entries[n].resident[index[n]].max() for n in order)
        needed = max(self.entries[n].needed[index[n]].max() for n in order)
        exposed = max(self.entries[n].exposed[index[n]].max() for n in order)
        held = sum(self.entries[n].held[index[n]].max() for n in loud)
        if residents + max(needed, exposed + held) > self.hardware.usable_bytes:
            return True
        for number in loud:
            entries = self.entries[number]
            own = index[number]
            cache = self.cache_bytes(entries, own, np.asarray(residents))
            if (cache < np.maximum(entries.full_cache, entries.least_cache)[own]).any():
                return True
        return False
