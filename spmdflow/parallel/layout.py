"""`Layout`: which rank of a pool is where in a model's grid. Integers only, no processes.

All groups are slices of one grid of ranks; there is no other rank arithmetic. Paper section 5.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

import numpy as np

from spmdflow.errors import ConfigError

_AXES = {
    "dp": (0,),
    "pp": (1, 2),
    "cp": (3,),
    "tp": (4, 5),
    "tp_cp": (3, 4, 5),
    "replica": (1, 2, 3, 4, 5),
    "gen_pp": (1,),
    "gen_tp": (4,),
    "micro_dp": (2, 3, 5),
    "gen_parts": (2, 5),
    "gen_replica": (1, 4),
}
"""Axis -> dimensions of the grid (see `Layout._grid`)."""

_WEIGHT_AXES = {
    "weights": (0, 1, 2),
    "replicate": (0,),
    "shard": (1, 2),
    "ep": (2,),
    "expert_dp": (0, 1),
    "tp_ep": (2, 4),
    "copy": (2, 3, 4),
    "model": (3, 4),
}
"""Axis -> dimensions of the grid of weights (see `Layout._weight_grid`)."""

_GENERATION_AXES = {"gen_pp": (1,), "gen_tp": (2,), "gen_replica": (1, 2), "micro_dp": (0, 1, 2)}
"""Axis -> dimensions of the grid (generation replica, gen_pp, gen_tp), if sizes do not nest."""


class Coordinate(NamedTuple):
    """Coordinates of a rank in the training grid."""

    pp: int
    dp: int
    tp: int
    cp: int


class GenerationCoordinate(NamedTuple):
    """Coordinates of a rank in its training replica's generation grid."""

    pp: int
    micro_dp: int
    tp: int


@dataclass(frozen=True)
class Layout:
    """Grid of a model's ranks: p*d*c*t of them, tp fastest, then cp, then pp, then dp.

    The c*t*p ranks with the same dp have the same rows. Weights are divided over dp and cp.
    Generation sizes that divide the training sizes *nest*: each training replica is split.
    Otherwise the pool is divided independently of training, tp fastest, then pp, and weights move
    between training replicas. Raises ConfigError if the sizes do not multiply to the number of
    ranks, a rank repeats or is out of order, a shard does not divide dp, the expert size does not
    divide a shard, or generation replicas do not fill the pool.
    """

    ranks: tuple[int, ...]
    """Global ranks, ascending."""
    pp_size: int = 1
    dp_size: int = 1
    tp_size: int = 1
    cp_size: int = 1
    """Ranks that divide the tokens of each row (context parallelism)."""
    shard_size: int = 0
    """Number of neighbouring ranks of a stage, over dp and cp, that shard one copy of the model; 0
    becomes dp_size * cp_size."""
    expert_size: int = 1
    """Number of neighbours among them that divide the experts of a mixture."""
    virtual_size: int = 1
    """Model chunks of each pipeline stage, p chunks apart (Megatron's interleaved schedule)."""
    gen_tp_size: int = 0
    """Tensor-parallel size while generating; 0 becomes tp_size."""
    gen_pp_size: int = 0
    """Pipeline size while generating; 0 becomes pp_size."""
    gen_expert_size: int = 1
    """Tensor-parallel ranks that divide whole experts while generating: 1 (all have a slice of each
    expert) or gen_tp_size."""

    def __post_init__(self) -> None:
        """Fill in default sizes and check all of them."""
        object.__setattr__(self, "ranks", tuple(self.ranks))
        object.__setattr__(self, "shard_size", self.shard_size or self.weight_size)
        object.__setattr__(self, "gen_tp_size", self.gen_tp_size or self.tp_size)
        object.__setattr__(self, "gen_pp_size", self.gen_pp_size or self.pp_size)
        _check_sizes(self)

    @classmethod
    def data_parallel(cls, ranks: tuple[int, ...], *, shard_size: int = 0) -> Layout:
        """Layout of plain data parallelism: every rank is a separate dp rank."""
        return cls(tuple(ranks), dp_size=len(ranks), shard_size=shard_size)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def weight_size(self) -> int:
        """Number of ranks, over dp and cp, that have the weights of one stage and tp rank."""
        return self.dp_size * self.cp_size

    def weight_rank(self, rank: int) -> int:
        """Position of a global rank among them: dp * c + cp."""
        coordinate = self.coordinate(rank)
        return coordinate.dp * self.cp_size + coordinate.cp

    @property
    def nests(self) -> bool:
        """Whether every generation replica is inside one training replica."""
        return self.tp_size % self.gen_tp_size == 0 and self.pp_size % self.gen_pp_size == 0

    @property
    def num_generation_replicas(self) -> int:
        """d_g: number of generation replicas inside one training replica, if they nest."""
        assert self.nests, f"layout {self}: generation replicas lie across training replicas"
        ranks = self.pp_size * self.cp_size * self.tp_size
        return ranks // (self.gen_pp_size * self.gen_tp_size)

    @property
    def generation_dp_size(self) -> int:
        """Number of generation replicas in the pool: d * d_g if they nest."""
        return self.size // (self.gen_pp_size * self.gen_tp_size)

    def generation_replica(self, rank: int) -> int:
        """Return the index of a global rank's generation replica in the pool.

        dp * d_g + micro_dp if replicas nest, otherwise the rank's position in the pool divided by
        the size of a generation replica. ConfigError for a rank outside the pool.
        """
        if not self.nests:
            return self.group_rank(rank) // (self.gen_pp_size * self.gen_tp_size)
        return self.coordinate(rank).dp * self.num_generation_replicas + self.micro_dp(rank)

    def group_rank(self, rank: int) -> int:
        """Return the position of a global rank in the pool; ConfigError if it is not there."""
        position = self._positions.get(rank)
        if position is None:
            expected = f"one of {_format_ranks(self.ranks)}"
            do = "pass a rank of the pool"
            raise ConfigError.of("layout", f"rank {rank}", expected, do)
        return position

    def coordinate(self, rank: int) -> Coordinate:
        """Return the training coordinate of a global rank: tp fastest, then cp, then pp, then dp.

        ConfigError for a rank outside the pool.
        """
        above, tp = divmod(self.group_rank(rank), self.tp_size)
        above, cp = divmod(above, self.cp_size)
        dp, pp = divmod(above, self.pp_size)
        return Coordinate(pp, dp, tp, cp)

    def generation_coordinate(self, rank: int) -> GenerationCoordinate:
        """Return the generation coordinate of a global rank.

        If replicas nest, with t, p the training and t_g, p_g the generation sizes: tp_g = tp // (t
        / t_g), pp_g = pp // (p / p_g), micro_dp = ((pp % (p / p_g)) * c + cp) * (t / t_g) + tp % (t
        / t_g). Otherwise the pool is divided with tp fastest, then pp, and micro_dp is the index of
        the replica in the pool.
        """
        if not self.nests:
            replica, inside = divmod(self.group_rank(rank), self.gen_pp_size * self.gen_tp_size)
            return GenerationCoordinate(
                inside // self.gen_tp_size, replica, inside % self.gen_tp_size
            )
        pp, _, tp, cp = self.coordinate(rank)
        tp_ratio = self.tp_size // self.gen_tp_size
        pp_ratio = self.pp_size // self.gen_pp_size
        micro_dp = ((pp % pp_ratio) * self.cp_size + cp) * tp_ratio + tp % tp_ratio
        return GenerationCoordinate(pp // pp_ratio, micro_dp, tp // tp_ratio)

    def micro_dp(self, rank: int) -> int:
        """Index of a global rank's generation replica in its training replica."""
        return self.generation_coordinate(rank).micro_dp

    def axis_groups(self, axis: str) -> list[tuple[int, ...]]:
        """Return the groups of an axis as tuples of global ranks, each ascending.

        They partition the ranks. Axes: tp, cp, pp, dp; tp_cp (tp and cp together: the ranks of a
        stage with the same rows); replica (tp, cp and pp together: all ranks with the same rows);
        weights (dp and cp together), and inside them shard and replicate; ep (inside a shard: the
        ranks that divide the experts), expert_dp (those with the same experts), tp_ep (tp and ep
        together), copy (tp, pp and ep together: one copy of all weights) and model (tp and pp
        together, of one cp); gen_tp, gen_pp, gen_replica (both together) and micro_dp (inside a
        replica; the complete pool if generation does not nest); gen_parts (those of micro_dp with
        the same cp, whose training weights together are what each of them generates with). Only
        `embedding` omits ranks: its groups are the first and last rank of each pp group. Groups are
        ordered by the other axes, dp slowest, gen_replica's by dp * d_g + micro_dp. ConfigError for
        any other axis.
        """
        if axis == "embedding":
            result = []
            for group in self.axis_groups("pp"):
                result.append(tuple(sorted({group[0], group[-1]})))
            return result
        grid = self._grid
        dims = _AXES.get(axis)
        if axis in _WEIGHT_AXES:
            grid = self._weight_grid
            dims = _WEIGHT_AXES[axis]
        if not self.nests and axis in _GENERATION_AXES:
            grid = self._generation_grid
            dims = _GENERATION_AXES[axis]
        if dims is None:
            expected = f"one of {', '.join(sorted(_AXES | _WEIGHT_AXES))}"
            raise ConfigError.of("layout", f"axis {axis!r}", expected, "choose one of these")
        others = []
        for dim in range(grid.ndim):
            if dim not in dims:
                others.append(dim)
        size = prod(grid.shape[dim] for dim in dims)
        rows = grid.transpose(*others, *dims).reshape(-1, size)
        return [tuple(row) for row in rows.tolist()]

    def axis_group(self, rank: int, axis: str) -> tuple[int, ...]:
        """The group of an axis that a global rank is in."""
        self.group_rank(rank)
        return next(group for group in self.axis_groups(axis) if rank in group)

    @cached_property
    def _grid(self) -> np.ndarray:
        """(dp, gen_pp, micro pp, cp, gen_tp, micro tp) int64: global ranks.

        If generation does not nest, gen_pp and gen_tp have the training sizes.
        """
        pp_size = self.pp_size
        tp_size = self.tp_size
        gen_pp, gen_tp = (self.gen_pp_size, self.gen_tp_size) if self.nests else (pp_size, tp_size)
        stages = gen_pp, pp_size // gen_pp
        shape = self.dp_size, *stages, self.cp_size, gen_tp, tp_size // gen_tp
        return np.array(self.ranks, dtype=np.int64).reshape(shape)

    @cached_property
    def _weight_grid(self) -> np.ndarray:
        """(replicate, shard / expert, expert, pp, tp) int64: global ranks.

        The first three divide the ranks of dp and cp, cp fastest.
        """
        ranks = np.array(self.ranks, dtype=np.int64)
        by_axis = ranks.reshape(self.dp_size, self.pp_size, self.cp_size, self.tp_size)
        experts = self.expert_size
        sharers = self.weight_size // self.shard_size, self.shard_size // experts, experts
        shape = *sharers, self.pp_size, self.tp_size
        return by_axis.transpose(0, 2, 1, 3).reshape(shape)

    @cached_property
    def _generation_grid(self) -> np.ndarray:
        """(generation replica, gen_pp, gen_tp) int64: global ranks, if generation does not nest."""
        return np.array(self.ranks, dtype=np.int64).reshape(-1, self.gen_pp_size, self.gen_tp_size)

    @cached_property
    def _positions(self) -> dict[int, int]:
        """Position of each global rank in the pool."""
        positions = {}
        for position, rank in enumerate(self.ranks):
            positions[rank] = position
        return positions

    def __str__(self) -> str:
        """Short name, such as t2p1d4.

        c: ranks that divide rows, if several; v: model chunks of a stage, if several; s: shard
        size, if less than d * c; e: expert size, if
        more than 1; -g(t1p1x8): generation's t_g, p_g and number of replicas, if they differ; -ge2:
        generation's expert size.
        """
        virtual = f"v{self.virtual_size}" if self.virtual_size > 1 else ""
        name = f"t{self.tp_size}p{self.pp_size}{virtual}d{self.dp_size}"
        name += f"c{self.cp_size}" if self.cp_size > 1 else ""
        name += f"s{self.shard_size}" if self.shard_size < self.weight_size else ""
        name += f"e{self.expert_size}" if self.expert_size > 1 else ""
        if (self.gen_tp_size, self.gen_pp_size) != (self.tp_size, self.pp_size):
            name += f"-g(t{self.gen_tp_size}p{self.gen_pp_size}x{self.generation_dp_size})"
        if self.gen_expert_size > 1:
            name += f"-ge{self.gen_expert_size}"
        return name


def divisors(number: int) -> list[int]:
    """Return the divisors of a positive number, ascending."""
    result = []
    for small in range(1, number + 1):
        if number % small == 0:
            result.append(small)
    return result


def _check_sizes(layout: Layout) -> None:
    """Raise ConfigError if the ranks or sizes of a layout are invalid.

    Ranks must ascend, be distinct and not negative; all sizes at least 1; pp * dp * cp * tp the
    number of ranks; shard_size a divisor of dp_size * cp_size; expert_size a divisor of shard_size;
    gen_tp * gen_pp a divisor of the number of ranks; gen_expert_size 1 or gen_tp.
    """
    ranks = layout.ranks
    pp_size = layout.pp_size
    dp_size = layout.dp_size
    tp_size = layout.tp_size
    usable = tuple(sorted({rank for rank in ranks if rank >= 0}))
    if not ranks or ranks != usable:
        expected = "at least one, none negative, ascending, each once"
        do = f"list them as {_format_ranks(usable or (0,))}"
        raise ConfigError.of("layout", f"ranks {_format_ranks(ranks)}", expected, do)
    cp_size = layout.cp_size
    product = pp_size * dp_size * tp_size * cp_size
    if min(pp_size, dp_size, tp_size, cp_size) < 1 or product != layout.size:
        context = f" * cp_size {cp_size}" if cp_size != 1 else ""
        got = f"pp_size {pp_size} * dp_size {dp_size}{context} * tp_size {tp_size} = {product}"
        expected = f"{layout.size}, the number of ranks {_format_ranks(ranks)}"
        do = "change a size or the pool, each size at least 1"
        raise ConfigError.of("layout", got, expected, do)
    if layout.shard_size < 1 or layout.weight_size % layout.shard_size:
        got = f"shard_size {layout.shard_size}"
        expected = f"a divisor of dp_size * cp_size = {layout.weight_size}"
        do = f"choose one of {divisors(layout.weight_size)}"
        raise ConfigError.of("layout", got, expected, do)
    if layout.expert_size < 1 or layout.shard_size % layout.expert_size:
        got = f"expert_size {layout.expert_size}"
        expected = f"a divisor of the {layout.shard_size} data-parallel ranks of a shard"
        do = f"choose one of {divisors(layout.shard_size)}"
        raise ConfigError.of("layout", got, expected, do)
    gen_tp_size = layout.gen_tp_size
    gen_pp_size = layout.gen_pp_size
    if min(gen_tp_size, gen_pp_size) < 1 or layout.size % (gen_tp_size * gen_pp_size):
        got = f"gen_tp_size {gen_tp_size} * gen_pp_size {gen_pp_size}"
        expected = f"a divisor of the {layout.size} ranks {_format_ranks(ranks)}"
        do = f"choose a product among {divisors(layout.size)}"
        raise ConfigError.of("layout", got, expected, do)
    if layout.gen_expert_size not in (1, gen_tp_size):
        got = f"gen_expert_size {layout.gen_expert_size}"
        raise ConfigError.of("layout", got, f"1 or gen_tp_size {gen_tp_size}", "choose one of them")


def _format_ranks(ranks: tuple[int, ...]) -> str:
    """Return the ranks as text. More than 8 become "(0, 1, 2, ... 15; 16 ranks)"."""
    if len(ranks) <= 8:
        return str(tuple(ranks))
    head = ranks[:3]
    tail = ranks[-1]
    return f"({', '.join(map(str, head))}, ... {tail}; {len(ranks)} ranks)"
