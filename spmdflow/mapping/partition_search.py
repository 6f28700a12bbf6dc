"""Device mapping of a dataflow: an exact and fast search by Algorithm 1 over Algorithm 2's tables.

For each partition of the models, the ideal options (see `table`) give a lower bound and a first
allocation. The exact fronts of that allocation give an achievable cost. Exact fronts are then
computed for the pool sizes that could still be part of a cheaper placement, and the search over
these is final. Partitions are visited in the order of their bounds, until a bound is above the
worst result that is kept.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import numpy as np

from spmdflow.errors import ConfigError
from spmdflow.log import PLANNING
from spmdflow.mapping.dataflow import Dataflow
from spmdflow.mapping.hardware import Hardware
from spmdflow.mapping.placed import Ranking, assemble
from spmdflow.mapping.search import (
    SLACK,
    ModelSet,
    Options,
    best_of_partition,
    best_partitions,
    least_cost,
    model_sets,
    partitions,
    possible_sizes,
    select_undominated,
)
from spmdflow.mapping.table import CostTable


def find_mapping(
    dataflow: Dataflow,
    hardware: Hardware,
    num_ranks: int,
    *,
    unit: int | None = None,
    keep: int = 10,
) -> Ranking:
    """Return the fastest placements of a dataflow on num_ranks ranks (paper Algorithm 1).

    At most one placement for each partition of the models into pools. Raises ConfigError if nothing
    fits, with an estimate of the number of ranks that would.
    unit: pool sizes are multiples of it. None: a node, if num_ranks is a larger multiple of it,
    otherwise a single rank.
    keep: most placements to return.
    """
    started = time.perf_counter()
    node = int(hardware.gpus_per_node)
    unit = unit or (node if num_ranks > node and num_ranks % node == 0 else 1)
    pool_sizes = range(unit, num_ranks + 1, unit)
    table = CostTable(dataflow, hardware, pool_sizes)
    best = _PartitionSearch(table, num_ranks // unit, unit).best(keep)
    if not best:
        raise _memory_error(dataflow, hardware, num_ranks, unit)
    placed = tuple(assemble(table, blocks, sizes, rows) for blocks, sizes, rows in best)
    number = sum(1 for _ in partitions(len(dataflow.models)))
    return Ranking(placed, number, num_ranks, unit, time.perf_counter() - started)


planning = logging.getLogger(PLANNING)
_LARGEST_WORLD = 1 << 14

Choice = tuple[tuple[ModelSet, ...], list[int], list[np.ndarray]]
"""Blocks, their pool sizes in ranks, and each model's entry in the table."""


class _PartitionSearch:
    """Search over all partitions of a table's models."""

    def __init__(self, table: CostTable, num_units: int, unit: int) -> None:
        """Compute the ideal options of every set of models, with sizes in units."""
        self.table = table
        self.num_units = num_units
        self.unit = unit
        blocks = model_sets(len(table.dataflow.models))
        ideal = {}
        for number, block in enumerate(blocks, 1):
            planning.debug("%d of %d sets of models that could share ranks", number, len(blocks))
            ideal[block] = table.ideal(block)
        self.ideal = {block: Options(o.sizes // unit, o.costs) for block, o in ideal.items()}

    def best(self, keep: int) -> list[Choice]:
        """Return the best choice of each of the `keep` best partitions, best first.

        Ties are broken by fewer pools, then by the order of the sets of models. [] if nothing fits.
        """
        bounds = []
        for blocks in partitions(len(self.table.dataflow.models)):
            options = [self.ideal[block] for block in blocks]
            if all(len(one) for one in options):
                bound = least_cost(options, self.num_units)
                if np.isfinite(bound):
                    bounds.append((bound, blocks))
        result = []
        for one in best_partitions(bounds, self._search_partition, keep):
            result.append(one[2])
        return result

    def _search_partition(
        self, blocks: tuple[ModelSet, ...], worst: float
    ) -> tuple[float, Choice] | None:
        """Return (seconds, choice) of the best choice of one partition, exactly.

        None if it costs more than `worst`, or nothing fits. First the pool sizes that are best by
        the ideal costs (lower bounds) are computed exactly. Unless they reach the bound, all sizes
        that could still be cheaper follow.
        """
        planning.debug(
            "placement: searching the best pools for %s", " | ".join(map(self._block_title, blocks))
        )
        ideal = [self.ideal[block] for block in blocks]
        relaxed = best_of_partition(ideal, self.num_units, worst=worst)
        if relaxed is None:
            return None
        sizes = []
        for one, pick in zip(ideal, relaxed[1]):
            sizes.append(int(one.sizes[pick]))
        first = self._search_sizes(blocks, [[size] for size in sizes], worst)
        worst = min(worst, first[0]) if first else worst
        if first is not None and first[0] <= relaxed[0] * SLACK:
            return first
        survivors = []
        for number in range(len(blocks)):
            survivors.append(possible_sizes(ideal, number, self.num_units, worst).tolist())
        return self._search_sizes(blocks, survivors, worst) or first

    def _block_title(self, block: ModelSet) -> str:
        return "+".join(self.table.dataflow.models[number].name for number in block)

    def _search_sizes(
        self, blocks: tuple[ModelSet, ...], sizes: Sequence[Sequence[int]], worst: float
    ) -> tuple[float, Choice] | None:
        """Return (seconds, choice) of the best choice from the exact fronts of these pool sizes.

        None if a set of models fits on none of its sizes, or if the best choice costs more than
        `worst`.
        sizes: for each block, in units.
        """
        options = []
        origins = []
        alone = len(blocks) == 1
        for block, wanted in zip(blocks, sizes):
            pools = [(size, size * self.unit) for size in wanted]
            fronts = []
            for n, ranks in pools:
                fronts.append((n, self.table.front(block, ranks, alone=alone)))
            fronts = [(size, front) for size, front in fronts if len(front.costs)]
            if not fronts:
                return None
            counts = np.concatenate([np.full(len(f.costs), size) for size, f in fronts])
            pruned, indices = select_undominated(
                Options(counts, np.concatenate([f.costs for _, f in fronts]))
            )
            options.append(pruned)
            origins.append(
                (counts[indices], np.concatenate([f.entries for _, f in fronts])[indices])
            )
        best = best_of_partition(options, self.num_units, worst=worst)
        if best is None:
            return None
        cost, picks = best
        pool_sizes = []
        for o, pick in zip(origins, picks):
            pool_sizes.append(int(o[0][pick]) * self.unit)
        rows = [o[1][pick] for o, pick in zip(origins, picks)]
        return cost, (blocks, pool_sizes, rows)


def _memory_error(dataflow: Dataflow, hardware: Hardware, num_ranks: int, unit: int) -> ConfigError:
    """Return the error for models that do not fit, with an estimate of the ranks that suffice.

    The number of ranks is doubled until a placement fits, up to 2^14. If none does, the error asks
    for more memory instead.
    """
    world = num_ranks + unit
    while world <= _LARGEST_WORLD:
        table = CostTable(dataflow, hardware, range(unit, world + 1, unit))
        if _PartitionSearch(table, world // unit, unit).best(1):
            break
        world *= 2
    if world <= _LARGEST_WORLD:
        least = f"at least about {world}"
    else:
        least = "more memory a rank"
    models = ", ".join(f"{m.name} ({m.shape.num_parameters:.2g} weights)" for m in dataflow.models)
    return ConfigError(
        f"placement: got {num_ranks} ranks of {hardware.usable_bytes / 1e9:.1f} GB for {models}, "
        f"expected {least}; set engine.options=[recompute], a smaller engine.micro_batch_tokens or "
        f"engine.offload=[optimizer], start more processes or use smaller models"
    )
