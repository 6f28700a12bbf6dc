"""What a rank holds of each Hugging Face tensor, and the ways in which a rank gets its part.

`Piece`: a box of a Hugging Face tensor and the equal box of a local tensor. `Cut`: the ways to
cut; each takes Hugging Face names and gives the local tensor they fill. The engines' files say
which way each of their tensors is made; a tensor is there if the architecture has its names.
Integers only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from spmdflow.blocks.box import Box, merged, subtract_all
from spmdflow.errors import ConfigError
from spmdflow.parallel.layout import divisors
from spmdflow.weights.architecture import Architecture
from spmdflow.weights.table import parameters_by_name


@dataclass(frozen=True)
class Piece:
    """The elements `box` of the tensor `name` lie at `local` in the local tensor."""

    name: str
    """Hugging Face name."""
    box: Box
    local: Box
    """Of the same shape as box."""

    def __post_init__(self) -> None:
        assert self.box.shape == self.local.shape, self

    def part(self, box: Box) -> Piece:
        """The piece of those elements; box lies in this piece's."""
        assert self.box.contains(box), (self, box)
        moved = [
            (low + start - origin, low + stop - origin)
            for (low, _), (origin, _), (start, stop) in zip(
                self.local.bounds, self.box.bounds, box.bounds, strict=True
            )
        ]
        return Piece(self.name, box, Box(tuple(moved)))

    def box_at(self, local: Box) -> Box:
        """The box of the tensor whose elements lie there; local lies in this piece's."""
        return Piece(self.name, self.local, self.box).part(local).local


@dataclass(frozen=True)
class LocalTensor:
    """A tensor that an engine holds; elements outside its pieces are padding, kept at zero."""

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def size(self) -> int:
        """Number of elements, padding included."""
        return prod(self.shape)

    @property
    def padding(self) -> int:
        """Elements that belong to no Hugging Face tensor."""
        return self.size - sum(piece.local.size for piece in self.pieces)


ShardTable = Mapping[str, LocalTensor]
"""Local tensors by the engine's own parameter names, in the order of the model."""


def stack(parts: Iterable[tuple[str, Box]], *, num_rows: int = 0) -> LocalTensor:
    """Boxes laid beneath one another, in order; num_rows pads the end. Empty boxes vanish.

    All boxes have the same shape but for dimension 0.
    """
    pieces: list[Piece] = []
    inner: tuple[int, ...] = ()
    row = 0
    for name, box in parts:
        height, *rest = box.shape
        inner = tuple(rest)
        local = Box(((row, row + height), *((0, size) for size in inner)))
        if box.size:
            pieces.append(Piece(name, box, local))
        row += height
    return LocalTensor((max(row, num_rows), *inner), tuple(pieces))


def rows_of(shape: Sequence[int], start: int, stop: int) -> Box:
    """Rows start .. stop - 1 of a tensor of that shape, cut to the rows that there are."""
    start, stop = min(start, shape[0]), min(stop, shape[0])
    return Box(((start, stop), *((0, size) for size in shape[1:])))


def columns_of(shape: Sequence[int], start: int, stop: int) -> Box:
    """Columns start .. stop - 1 of a matrix of that shape."""
    return Box(((0, shape[0]), (start, stop)))


def pieces_by_name(table: ShardTable) -> dict[str, list[Box]]:
    """Boxes by Hugging Face name of what a rank holds; a tied copy makes one appear twice."""
    found: dict[str, list[Box]] = {}
    for tensor in table.values():
        for piece in tensor.pieces:
            found.setdefault(piece.name, []).append(piece.box)
    return found


def owned(tables: Sequence[ShardTable]) -> list[ShardTable]:
    """The tables with only the pieces that each rank owns: every element once over all of them.

    The first holder in the order of tables owns what several hold (norms, replicated kv heads, a
    tied copy). So hashes add up, and files hold each element once.
    """
    taken: dict[str, list[Box]] = {}
    result: list[ShardTable] = []
    for table in tables:
        mine: dict[str, LocalTensor] = {}
        for name, tensor in table.items():
            pieces = tuple(part for piece in tensor.pieces for part in _untaken(piece, taken))
            mine[name] = replace(tensor, pieces=pieces)
        result.append(mine)
    return result


def _untaken(piece: Piece, taken: dict[str, list[Box]]) -> list[Piece]:
    """The parts of a piece that nobody owns yet; they are taken now."""
    boxes = taken.setdefault(piece.name, [])
    rest = subtract_all([piece.box], boxes)
    boxes[:] = merged([*boxes, *rest])
    return [piece.part(box) for box in rest]


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
