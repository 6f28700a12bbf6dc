"""Cost tables of a dataflow: costs of each set of models on a pool of each size (Algorithm 2).

The models of a pool choose their strategies together, because memory couples them. Residents add
up, the needs of calls are a maximum, and the KV cache gets the rest, which determines the waves of
generation. So a set of models has a Pareto front of vectors, the seconds of each stage.

There are two kinds of options. `ideal` ones are lower bounds for all pool sizes at once: for each
stage, every model independently chooses its best strategy, while the others use the least memory.
The exact front of one set and size is computed on demand.

If a set does not fit without offloading, parts that may move are offloaded. A second table has an
entry for each choice of offloaded parts, with the seconds of their copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from spmdflow.mapping.dataflow import Dataflow, Model, ModelCall, Strategy, strategies_on
from spmdflow.mapping.hardware import Hardware
from spmdflow.mapping.memory import (
    KEPT_WHILE_TRAINING,
    call_bytes,
    full_cache_bytes,
    generator_weights,
    least_cache_bytes,
    offload_seconds,
    resident_bytes,
    save_bytes,
    sync_bytes,
    weights_at_start,
)
from spmdflow.mapping.residency import offload_variants
from spmdflow.mapping.search import ModelSet, Options, pareto, select_unbeaten
from spmdflow.mapping.seconds import generation_parts, pass_parts, total, transition_seconds

Array = np.ndarray
_MANY = 1 << 20
"""Larger than any parallel size."""
_MANY_COMBINATIONS = 4096


@dataclass(frozen=True)
class Entries:
    """All strategies of one model on all pool sizes, sorted by size."""

    model: Model
    sizes: Array
    """Pool size of each entry."""
    cut: Strategy
    variants: Sequence[Model]
    """One variant of the model per choice of offloaded parts."""
    variant: Array
    """Index into `variants`, per entry."""
    costs: Array
    """(entries, stages): seconds of all calls except generation, including transitions."""
    resident: Array
    needed: Array
    """Most bytes, in addition to residents, of calls except generation, and of sync and
    checkpoint."""
    exposed: Array
    """The same for calls during which another model's generation weights may be resident."""
    idle_weights: Array
    """Bytes of its generation weights during such calls of other models."""
    generation_bytes: Array
    """Bytes of generation without its cache; 0 for models that do not generate."""
    least_cache: Array
    full_cache: Array
    """Cache for all sequences of a replica at once."""

    @property
    def peak_call_bytes(self) -> Array:
        """Most bytes of any call in addition to residents, with the least cache for generation."""
        return np.maximum(self.needed, self.generation_bytes + self.least_cache)

    def choice(self, entry: int) -> tuple[Model, Strategy]:
        """The variant of the model and the strategy of one entry."""
        return self.variants[self.variant[entry]], self.cut.one(entry)


@dataclass(frozen=True)
class Front:
    """Combinations of the strategies of a set of models on one pool size."""

    costs: Array
    """(V, stages): seconds; (V, 1): their sum, if this is the only pool."""
    entries: Array
    """(V, models of the set): indices into each model's `Entries`."""
    resident: Array
    needed: Array
    """(V,): most bytes of a call in addition to residents."""
    exposed: Array
    """(V,): the same for calls during which other generation weights may be resident."""

    def take(self, index: Array) -> Front:
        """The combinations at these indices."""
        return Front(*(part[index] for part in vars(self).values()))

    def with_model(self, entries: Entries, index: Array, costs: Array, budget: float) -> Front:
        """Return all combinations with entries of one more model that fit.

        The model's entry is the last column of `entries`. A combination fits if its residents plus
        the largest need of a call are at most `budget`.
        index: of the model's entries. costs: of these entries. budget: bytes of a rank.
        """
        count = len(index)
        mine, theirs = np.divmod(np.arange(len(self.resident) * count), max(count, 1))
        resident = self.resident[mine] + entries.resident[index][theirs]
        needed = np.maximum(self.needed[mine], entries.peak_call_bytes[index][theirs])
        needed = np.maximum(needed, self.exposed[mine] + entries.idle_weights[index][theirs])
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

    offloads: whether to have entries for all choices of offloaded parts. Only such a table counts
    generation weights that are resident during other models' calls, as updates need more than that
    if all residents stay.
    """

    def __init__(
        self,
        dataflow: Dataflow,
        hardware: Hardware,
        pool_sizes: Sequence[int],
        *,
        offloads: bool = False,
    ) -> None:
        """Simulate all strategies of all models on these pool sizes."""
        self.dataflow = dataflow
        self.hardware = hardware
        self._offloads = offloads
        modes = set()
        for model in dataflow.models:
            if model.rollout:
                modes.add(model.rollout.weights)
        self._exposed_kinds = ("infer", "train") if modes & KEPT_WHILE_TRAINING else ("infer",)
        self.sizes = np.asarray(sorted(pool_sizes), dtype=np.int64)
        self.entries = [self._entries_of(model) for model in dataflow.models]
        self._fronts: dict[tuple[ModelSet, int, bool], Front] = {}
        self._offloaded: set[tuple[ModelSet, int]] = set()
        """(set, size) pairs that fit only with offloaded parts, if at all."""
        self._useful_entries: dict[tuple[int, int], Array] = {}
        self._lowest = [self._lowest_peaks(entries) for entries in self.entries]
        self._least = [np.full(len(self.sizes), np.inf) for _ in self.entries]
        """Fewest resident bytes of each model by pool size."""
        for least, entries in zip(self._least, self.entries):
            np.minimum.at(least, np.searchsorted(self.sizes, entries.sizes), entries.resident)

    @cached_property
    def _offloading(self) -> CostTable:
        every = tuple(range(len(self.entries)))
        sizes = self.sizes[~self._fits_surely(every)]
        return CostTable(self.dataflow, self.hardware, sizes.tolist(), offloads=True)

    def ideal(self, block: ModelSet) -> Options:
        """Return lower bounds of a set's costs for each pool size on which it might fit.

        No options if the set has a pair that may not share a pool, or lacks a model whose weights
        one of its models uses. Where the set may not fit as it is, the bounds are those with
        offloading, if parts of its models may be offloaded.
        """
        names = set()
        for number in block:
            names.add(self.dataflow.models[number].name)
        lenders = {self.dataflow.models[number].shares for number in block} - {""}
        if lenders - names or any(set(pair) <= names for pair in self.dataflow.apart):
            return Options(np.empty(0, dtype=np.int64), np.empty((0, len(self.dataflow.stages))))
        costs = self._ideal_costs(block)
        unsure = ~self._fits_surely(block)
        if unsure.any() and self._may_offload(block):
            columns = np.searchsorted(self._offloading.sizes, self.sizes[unsure])
            costs[unsure] = self._offloading._ideal_costs(block)[columns]
        fits = np.isfinite(costs).all(axis=1)
        return Options(self.sizes[fits], costs[fits])

    def front(self, block: ModelSet, size: int, *, alone: bool = False) -> Front:
        """Return the exact front of a set on one pool size. It is computed once.

        If the set does not fit and parts may be offloaded, it is the front with offloading, which
        `choices` then uses, too. The front is empty if nothing fits.
        alone: whether it is the only pool; then only the sum over stages counts, and costs have one
        column.
        """
        key = block, size, alone
        if key not in self._fronts:
            front = self._compute_front(block, size, alone)
            if not len(front.costs) and self._may_offload(block):
                self._offloaded.add((block, size))
                front = self._offloading.front(block, size, alone=alone)
            self._fronts[key] = front
        return self._fronts[key]

    def choices(self, block: ModelSet, size: int, entries: Array) -> list[tuple[Model, Strategy]]:
        """Return the variant and the strategy of each model, for one row of a front's entries.

        block, size: as given to `front`, which must have been called before.
        """
        table = self._offloading if (block, size) in self._offloaded else self
        result = []
        for n, entry in zip(block, entries.tolist()):
            result.append(table.entries[n].choice(entry))
        return result

    def cache_bytes(self, entries: Entries, index: Array, resident: Array) -> Array:
        """Bytes left for a generator's KV cache if residents have `resident` bytes."""
        return self.hardware.usable_bytes - resident - entries.generation_bytes[index]

    def _ideal_costs(self, block: ModelSet) -> Array:
        """Return (sizes, stages): lower bounds of a set's seconds, infinite where it cannot fit.

        Every model is at its best in each stage, while the others use their fewest resident bytes.
        """
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

    def _fits_surely(self, block: ModelSet) -> Array:
        """(sizes,): whether the models fit together with their strategies of the lowest peak."""
        resident, call_bytes_of_models = zip(*(self._lowest[number] for number in block))
        return sum(resident) + np.max(call_bytes_of_models, axis=0) <= self.hardware.usable_bytes

    def _lowest_peaks(self, entries: Entries) -> Array:
        """Return (2, sizes): resident and peak call bytes of the strategy with the lowest sum.

        inf for a pool size without any strategy.
        """
        order = np.lexsort((entries.resident + entries.peak_call_bytes, entries.sizes))
        sizes, first = np.unique(entries.sizes[order], return_index=True)
        columns = np.searchsorted(self.sizes, sizes)
        index = order[first]
        lowest = np.full((2, len(self.sizes)), np.inf)
        lowest[:, columns] = entries.resident[index], entries.peak_call_bytes[index]
        return lowest

    def _entries_of(self, model: Model) -> Entries:
        """Return the entries of all strategies that fit if the model is alone in its pool, by size.

        A table that offloads has an entry for each variant of offloaded parts.
        """
        sizes, cut = strategies_on(model, self.sizes.tolist(), self.hardware)
        variants = offload_variants(model, cut) if self._offloads else [model]
        simulated = zip(*(self._simulate_strategies(variant, cut) for variant in variants))
        costs, *memory = (np.concatenate(parts) for parts in simulated)
        resident, needed, _, _, generation, cache, _ = memory
        peaks = resident + np.maximum(needed, generation + cache)
        fitting = np.flatnonzero(peaks <= self.hardware.usable_bytes)
        rows = fitting % len(sizes)
        order = np.argsort(rows, kind="stable")
        fitting = fitting[order]
        rows = rows[order]
        arrays = (each[fitting] for each in (costs, *memory))
        variant = fitting // len(sizes)
        return Entries(model, sizes[rows], cut.take(rows), variants, variant, *arrays)

    def _simulate_strategies(self, model: Model, cut: Strategy) -> tuple[Array, ...]:
        """Return the costs and bytes of all strategies, in the order of the fields of `Entries`.

        costs (strategies, stages) are without generation, but with copies of offloaded parts and
        the weight transition, which counts in the stage of the first generation. Bytes are
        (strategies,).
        """
        calls = self.dataflow.calls_of(model.name)
        costs = np.zeros((len(cut.dp), len(self.dataflow.stages)))
        needed, exposed, generation, cache, full = (np.zeros(len(cut.dp)) for _ in range(5))
        for call in calls:
            stage = self.dataflow.stages.index(call.stage)
            if call.fixed_seconds is not None:
                costs[:, stage] += call.fixed_seconds
                continue
            costs[:, stage] += offload_seconds(model, call.kind, cut, self.hardware)
            on_cpu = self.hardware.is_cpu
            extra_bytes = total(call_bytes(model, call.kind, call.workload, cut, on_cpu=on_cpu))
            if call.kind != "generate":
                extra_bytes = extra_bytes + generator_weights(model, cut, call.kind)
            if call.kind == "generate":
                needed = np.maximum(needed, total(sync_bytes(model, call.workload, cut)))
                generation = np.maximum(generation, extra_bytes)
                if model.rollout is not None and model.rollout.kv_cache_bytes is not None:
                    generation = np.maximum(generation, weights_at_start(model, cut))
                cache = np.maximum(cache, least_cache_bytes(model, call.workload, cut))
                full = np.maximum(full, full_cache_bytes(model, call.workload, cut))
                continue
            trains = call.kind == "train"
            parts = pass_parts(model, call.workload, cut, self.hardware, trains=trains)
            costs[:, stage] += total(parts)
            needed = np.maximum(needed, extra_bytes)
            if call.kind in self._exposed_kinds:
                exposed = np.maximum(exposed, extra_bytes)
        if model.trained:
            needed = np.maximum(needed, total(save_bytes(model, cut)))
        first = next((call for call in calls if call.kind == "generate"), None)
        if first is not None:
            stage = self.dataflow.stages.index(first.stage)
            costs[:, stage] += transition_seconds(model, cut, self.hardware)
        resident = total(resident_bytes(model, cut))
        idle_weights = generator_weights(model, cut, "infer") * self._offloads
        return costs, resident, needed, exposed, idle_weights, generation, cache, full

    def _least_costs(self, entries: Entries, others: Array) -> Array:
        """Return (sizes, stages): the least seconds over the strategies that fit; inf if none fits.

        Each stage on its own, with generation. others: (sizes,) resident bytes of the other models.
        """
        columns = np.searchsorted(self.sizes, entries.sizes)
        resident = entries.resident + others[columns]
        index = np.flatnonzero(resident + entries.peak_call_bytes <= self.hardware.usable_bytes)
        costs = entries.costs[index] + self._generation_costs(entries, index, resident[index])
        least = np.full((len(self.sizes), len(self.dataflow.stages)), np.inf)
        np.minimum.at(least, columns[index], costs)
        return least

    def _generation_costs(self, entries: Entries, index: Array, resident: Array) -> Array:
        """Return (len(index), stages): seconds of a model's generations with some of its entries.

        The KV cache gets the usable memory that `resident`, the bytes of all residents, and the
        generation itself leave.
        """
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

    def _generations(self, model: Model) -> list[ModelCall]:
        """Return the generation calls of a model whose seconds are simulated, not fixed."""
        calls = self.dataflow.calls_of(model.name)
        generations = []
        for c in calls:
            if c.kind == "generate" and c.fixed_seconds is None:
                generations.append(c)
        return generations

    def _compute_front(self, block: ModelSet, size: int, alone: bool) -> Front:
        """Return the exact front of a set: adds one model after another, generating ones last.

        Dominated partial combinations are dropped. Memory counts in that comparison only if it
        couples the models (`_is_coupled`); otherwise generation is added to each model's costs at
        once.
        alone: costs have one column, the sum over stages.
        """
        generating = []
        for n in block:
            if self._generations(self.entries[n].model):
                generating.append(n)
        order = [*(n for n in block if n not in generating), *generating]
        index = {}
        for number in block:
            index[number] = self._select_entries(number, size)
        coupled = self._is_coupled(order, generating, index)
        stages = 1 if alone else len(self.dataflow.stages)
        zero = np.zeros(1)
        mixed = Front(np.zeros((1, stages)), np.empty((1, 0), dtype=np.int64), zero, zero, zero)
        for number in order:
            entries = self.entries[number]
            some = index[number]
            costs = entries.costs[some]
            if number in generating and not coupled:
                costs = costs + self._generation_costs(entries, some, entries.resident[some])
            costs = costs.sum(axis=1, keepdims=True) if alone else costs
            mixed = mixed.with_model(entries, some, costs, self.hardware.usable_bytes)
            if number != order[-1]:  # drop dominated ones; memory counts only if it couples models
                memory = [mixed.resident, mixed.needed] if coupled else []
                memory += [mixed.exposed] * (coupled and self._offloads)
                mixed = mixed.take(pareto(np.column_stack([*memory, mixed.costs])))
        picks = mixed.entries[:, [order.index(number) for number in block]]
        own = {}
        for number in generating:
            if coupled:
                own[number] = picks[:, block.index(number)]
        costs, remaining = self._with_generation(mixed, own)
        return replace(mixed.take(remaining), costs=costs[remaining], entries=picks[remaining])

    def _with_generation(self, mixed: Front, own: dict[int, Array]) -> tuple[Array, Array]:
        """Return (costs with generation, indices of the front) of combinations of strategies.

        Of more than 4096 combinations, the 1024 most promising are simulated first. The others are
        simulated only if they would not be dominated with the largest possible cache for each
        generator. Costs of the remaining ones are without generation.
        own: generating model -> its entries.
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
                bound += best[np.searchsorted(values, index)]
            first = np.argpartition(bound.sum(axis=1), _MANY_COMBINATIONS // 4)
            first = first[: _MANY_COMBINATIONS // 4]
            known = self._add_generation(mixed, own, first)
            alive = select_unbeaten(bound, known[pareto(known)])
        costs[alive] = self._add_generation(mixed, own, alive)
        return costs, alive[pareto(costs[alive])]

    def _add_generation(self, mixed: Front, own: dict[int, Array], some: Array) -> Array:
        """Return the costs of the combinations `some`, with the seconds of generation added.

        Stages are summed first if costs have one column. own: generating model -> its entries.
        """
        costs = mixed.costs[some]
        for number, index in own.items():
            entries = self.entries[number]
            resident = mixed.resident[some]
            added = self._generation_costs(entries, index[some], resident)
            costs = costs + (added.sum(axis=1, keepdims=True) if costs.shape[1] == 1 else added)
        return costs

    def _select_entries(self, number: int, size: int) -> Array:
        """Return the entries of a model on a pool size that no other entry beats.

        Another one beats an entry if it dominates it in memory and the seconds of all stages. Only
        entries with the same generation sizes are compared. The result is computed once.
        """
        key = number, size
        if key not in self._useful_entries:
            entries = self.entries[number]
            index = np.arange(*np.searchsorted(entries.sizes, [size, size + 1]))
            memory = [entries.resident, entries.needed, entries.generation_bytes]
            memory += [entries.exposed, entries.idle_weights] * self._offloads
            points = np.column_stack([*(part[index] for part in memory), entries.costs[index]])
            groups = entries.cut.gen_tp[index] * _MANY + entries.cut.gen_pp[index]
            fronts = [index[:0]]
            for group in np.unique(groups):
                members = np.flatnonzero(groups == group)
                fronts.append(index[members[pareto(points[members])]])
            self._useful_entries[key] = np.concatenate(fronts)
        return self._useful_entries[key]

    def _is_coupled(
        self, order: Sequence[int], generating: Sequence[int], index: dict[int, Array]
    ) -> bool:
        """Return whether memory couples the models of a set, so that they must choose together.

        It does if some combination does not fit, if it leaves a generator less cache than it could
        use, or if a model has no entries.
        order: all models. generating: those that generate. index: entries of each model.
        """
        if not all(len(own) for own in index.values()):
            return True
        residents = sum(self.entries[n].resident[index[n]].max() for n in order)
        needed = max(self.entries[n].needed[index[n]].max() for n in order)
        exposed = max(self.entries[n].exposed[index[n]].max() for n in order)
        idle_weights = sum(self.entries[n].idle_weights[index[n]].max() for n in generating)
        if residents + max(needed, exposed + idle_weights) > self.hardware.usable_bytes:
            return True
        for number in generating:
            entries = self.entries[number]
            own = index[number]
            cache = self.cache_bytes(entries, own, np.asarray(residents))
            if (cache < np.maximum(entries.full_cache, entries.least_cache)[own]).any():
                return True
        return False
