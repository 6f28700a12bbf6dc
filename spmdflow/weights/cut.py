"""`Cut`: the ways in which one tensor-parallel rank gets its part of Hugging Face tensors.

Each way takes Hugging Face names and gives the local tensor they fill. The engines' files say
which way each of their tensors is made; a tensor is there if the architecture has its names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from spmdflow.blocks.box import Box
from spmdflow.errors import ConfigError
from spmdflow.parallel.layout import divisors
from spmdflow.weights.architecture import Architecture
from spmdflow.weights.piece import LocalTensor, columns_of, rows_of, stack
from spmdflow.weights.table import parameters_by_name

Way = Callable[["Cut", Sequence[str]], LocalTensor]
LayerRow = tuple[str, Way, tuple[str, ...]]
"""(engine's name below its layer, way, Hugging Face names below the layer)."""


@dataclass(frozen=True)
class Cut:
    """One rank's share of an architecture; `engine` is named in errors."""

    engine: str
    arch: Architecture
    size: int
    """Tensor-parallel size."""
    rank: int
    vocab_multiple: int

    def layer(self, rows: Sequence[LayerRow], layer: int) -> Iterator[tuple[str, LocalTensor]]:
        """(engine's name below its layer, tensor) of the rows that the architecture has."""
        known = parameters_by_name(self.arch)
        for local, way, suffixes in rows:
            names = [f"model.layers.{layer}.{suffix}" for suffix in suffixes]
            if names[0] in known:
                yield local, way(self, names)

    def whole(self, names: Sequence[str]) -> LocalTensor:
        """The tensor as it is, on every rank."""
        (name,) = names
        return stack([(name, Box.of_shape(self._shape(name)))])

    def rows(self, names: Sequence[str]) -> LocalTensor:
        """An equal part of the rows of each tensor, one tensor beneath another."""
        parts = []
        for name in names:
            start, stop = self._chunk(f"rows of {name}", self._shape(name)[0])
            parts.append((name, rows_of(self._shape(name), start, stop)))
        return stack(parts)

    def columns(self, names: Sequence[str]) -> LocalTensor:
        """An equal part of the columns."""
        (name,) = names
        start, stop = self._chunk(f"columns of {name}", self._shape(name)[1])
        return stack([(name, columns_of(self._shape(name), start, stop))])

    def vocabulary(self, names: Sequence[str]) -> LocalTensor:
        """An equal part of the rows padded to vocab_multiple; padding belongs to no piece."""
        (name,) = names
        multiple = self.vocab_multiple
        padded = -(-self.arch.vocab_size // multiple) * multiple
        start, stop = self._chunk("padded vocabulary", padded)
        return stack([(name, rows_of(self._shape(name), start, stop))], num_rows=stop - start)

    def heads(self, names: Sequence[str]) -> LocalTensor:
        """q over k over v, each an equal part of its heads; a kv head is shared by neighbours
        if there are fewer of them than ranks."""
        groups, head_dim = self.arch.num_kv_heads, self.arch.head_dim
        query = self._chunk("attention heads", self.arch.num_heads)
        first = self.rank * groups // self.size
        group = (first, first + max(1, groups // self.size))
        return stack(
            (name, rows_of(self._shape(name), low * head_dim, high * head_dim))
            for name, (low, high) in zip(names, (query, group, group), strict=True)
        )

    def groups(self, names: Sequence[str]) -> LocalTensor:
        """An equal part of the rows of q, k and v laid out group by group: a group's query heads,
        its key head, its value head. A part may begin or end inside a head."""
        groups, head_dim = self.arch.num_kv_heads, self.arch.head_dim
        per_group = self.arch.num_heads // groups
        heights = (per_group * head_dim, head_dim, head_dim)
        start, stop = self._chunk("rows of q, k and v", groups * sum(heights))
        parts, row = [], 0
        for group in range(groups):
            for name, height in zip(names, heights, strict=True):
                low, high = max(start - row, 0), min(stop - row, height)
                if low < high:
                    origin = group * height
                    parts.append((name, rows_of(self._shape(name), origin + low, origin + high)))
                row += height
        return stack(parts)

    def _shape(self, name: str) -> tuple[int, ...]:
        return parameters_by_name(self.arch)[name].shape

    def _chunk(self, what: str, size: int) -> tuple[int, int]:
        """(start, stop) of this rank's equal part."""
        if size % self.size:
            raise ConfigError(
                f"{self.engine}: got {size} {what} over tensor-parallel size {self.size}, expected "
                f"a multiple of it; choose a size among {divisors(size)[:12]}"
            )
        each = size // self.size
        return self.rank * each, (self.rank + 1) * each


def check_sizes(engine: str, arch: Architecture, *, tp_size: int, pp_size: int) -> None:
    """ConfigError unless heads divide over tp_size and every stage gets a layer."""
    heads, groups = arch.num_heads, arch.num_kv_heads
    if heads % tp_size or (groups % tp_size and tp_size % groups):
        raise ConfigError(
            f"{engine}: got tensor-parallel size {tp_size} for {heads} attention and {groups} "
            f"key-value heads, expected a divisor of the first that divides the second or is a "
            f"multiple of it; choose another size"
        )
    if not 1 <= pp_size <= arch.num_layers:
        raise ConfigError(
            f"{engine}: got {pp_size} pipeline stages for {arch.num_layers} layers, expected at "
            f"most one stage a layer; choose {arch.num_layers} or fewer"
        )
