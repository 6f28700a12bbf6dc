"""The tensors of an architecture by Hugging Face name, and a rank's shards of them.

`parameters` lists them in the order of the state dict. The families share names and order. The
architecture's flags determine which rows exist (biases, norms of q and k, the head). A tied lm_head
is the embedding and is omitted.

`Piece`: a box of a Hugging Face tensor and the equal box of a local tensor. `Cut`: the ways to cut;
each takes Hugging Face names and returns the local tensor that they fill. The engines' tables
(`ranks`) have the way for each of their tensors. A tensor exists if the architecture has its names.
Integers only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import NamedTuple

from torch import Tensor

from spmdflow.blocks.box import Box
from spmdflow.errors import ConfigError
from spmdflow.parallel.layout import divisors
from spmdflow.weights.architecture import Architecture

EMBEDDING = "model.embed_tokens.weight"
"""The tensor that a tied head shares."""


class Parameter(NamedTuple):
    """One tensor of the model."""

    name: str
    """Hugging Face name."""
    shape: tuple[int, ...]


_LAYER = (
    ("self_attn.q_proj.weight", ("q", "hidden"), ""),
    ("self_attn.q_proj.bias", ("q",), "qkv_bias"),
    ("self_attn.k_proj.weight", ("kv", "hidden"), ""),
    ("self_attn.k_proj.bias", ("kv",), "qkv_bias"),
    ("self_attn.v_proj.weight", ("kv", "hidden"), ""),
    ("self_attn.v_proj.bias", ("kv",), "qkv_bias"),
    ("self_attn.o_proj.weight", ("hidden", "q"), ""),
    ("self_attn.o_proj.bias", ("hidden",), "o_bias"),
    ("self_attn.q_norm.weight", ("head",), "qk_norm"),
    ("self_attn.k_norm.weight", ("head",), "qk_norm"),
    ("mlp.experts.gate_up_proj", ("experts", "gate_up", "hidden"), "mixture"),
    ("mlp.experts.down_proj", ("experts", "hidden", "expert"), "mixture"),
    ("mlp.gate.weight", ("experts", "hidden"), "mixture"),
    ("mlp.gate_proj.weight", ("ffn", "hidden"), "is_dense"),
    ("mlp.gate_proj.bias", ("ffn",), "mlp_bias"),
    ("mlp.up_proj.weight", ("ffn", "hidden"), "is_dense"),
    ("mlp.up_proj.bias", ("ffn",), "mlp_bias"),
    ("mlp.down_proj.weight", ("hidden", "ffn"), "is_dense"),
    ("mlp.down_proj.bias", ("hidden",), "mlp_bias"),
    ("input_layernorm.weight", ("hidden",), ""),
    ("post_attention_layernorm.weight", ("hidden",), ""),
)
"""Names below a layer, extent of each dimension, and the attribute of architectures that have it.

Experts have the names and the shapes of transformers' module, which fuses them: gate and up are one
tensor, the rows of gate before those of up. Files may have other tensors (`folder`)."""


@lru_cache(maxsize=64)
def parameters(arch: Architecture) -> tuple[Parameter, ...]:
    """Return name and shape of every tensor of the model, in the order of the state dict.

    The embedding comes first, then the layers, the last norm, and `score` or, unless tied, lm_head;
    then the adapters, if the architecture has any. Of a model without a table: its `tensors`, which
    must have been read; AssertionError otherwise.
    """
    if arch.obstacle:
        assert arch.tensors, arch.obstacle
        return tuple(Parameter(name, shape) for name, shape in arch.tensors)
    hidden = arch.hidden_size
    sizes = {"hidden": hidden, "ffn": arch.ffn_size, "head": arch.head_dim}
    sizes |= {"q": arch.q_size, "kv": arch.kv_size}
    if arch.mixture is not None:
        expert = arch.mixture.expert_size
        sizes |= {"experts": arch.num_experts, "expert": expert, "gate_up": 2 * expert}
    layer = []
    for name, dimensions, flag in _LAYER:
        if not flag or getattr(arch, flag):
            layer.append((name, tuple(sizes[dimension] for dimension in dimensions)))
    tensors = [Parameter(EMBEDDING, (arch.vocab_size, hidden))]
    for number in range(arch.num_layers):
        tensors += [Parameter(f"model.layers.{number}.{name}", shape) for name, shape in layer]
    tensors.append(Parameter("model.norm.weight", (hidden,)))
    if arch.head == "scalar":
        tensors.append(Parameter("score.weight", (1, hidden)))
    elif not arch.tied:
        tensors.append(Parameter("lm_head.weight", (arch.vocab_size, hidden)))
    if arch.adapters is not None:
        tensors += [Parameter(*each) for each in arch.adapters.shapes(dict(tensors)).items()]
    return tuple(tensors)


@lru_cache(maxsize=64)
def shapes_by_name(arch: Architecture) -> Mapping[str, tuple[int, ...]]:
    """`parameters` by name. Do not write to it."""
    return dict(parameters(arch))


def stage_layers(num_layers: int, *, pp_size: int, pp_rank: int) -> range:
    """Layers of a pipeline stage. If they do not divide evenly, the first stages have one more.

    Stage boundaries are ceil(stage * num_layers / pp_size), so each stage is inside one stage of
    every divisor of pp_size. vLLM is configured to divide layers in the same way
    (`rollout.vllm_engine`).
    """
    assert 0 <= pp_rank < pp_size, (pp_rank, pp_size)
    start, stop = (-(-stage * num_layers // pp_size) for stage in (pp_rank, pp_rank + 1))
    return range(start, stop)


@dataclass(frozen=True)
class Piece:
    """The elements `box` of the tensor `name` are at `local` in the local tensor."""

    name: str
    """Hugging Face name."""
    box: Box
    local: Box
    """It has the same shape as box, unless there are `axes`."""
    axes: tuple[int | None, ...] = ()
    """For each axis of the box, the axis of `local` along which it runs; None: of one element. ():
    both have the same axes."""

    def __post_init__(self) -> None:
        if self.axes and self._has_axes_of_local():
            object.__setattr__(self, "axes", ())
        assert self.box.size == self.local.size, self
        assert self.axes or self.box.shape == self.local.shape, self

    def _has_axes_of_local(self) -> bool:
        """Whether box and `local` have the same axes; one of a single element fits any."""
        if self.box.shape != self.local.shape:
            return False
        return all(
            axis == own or (axis is None and self.box.shape[own] == 1)
            for own, axis in enumerate(self.axes)
        )

    def view(self, local: Tensor) -> Tensor:
        """The piece's elements of the local tensor, a view with the shape of `box`."""
        part = local[self.local.slices()]
        if not self.axes:
            return part
        named = [axis for axis in self.axes if axis is not None]
        others = [axis for axis in range(part.ndim) if axis not in named]
        part = part.permute(*others, *named)[(0,) * len(others)]
        for position, axis in enumerate(self.axes):
            if axis is None:
                part = part.unsqueeze(position)
        return part

    def part(self, box: Box) -> Piece:
        """The piece with only the elements `box`, which must be inside this piece's box.

        Both have the same axes.
        """
        assert self.box.contains(box) and not self.axes, (self, box)
        moved = []
        for (low, _), (origin, _), (start, stop) in zip(
            self.local.bounds, self.box.bounds, box.bounds, strict=True
        ):
            moved.append((low + start - origin, low + stop - origin))
        return Piece(self.name, box, Box(tuple(moved)))

    def box_at(self, local: Box) -> Box:
        """The tensor's box whose elements are at `local`, which must be inside this piece's."""
        assert self.local.contains(local), (self, local)
        axes = self.axes or tuple(range(len(self.box.bounds)))
        bounds = []
        for (start, stop), axis in zip(self.box.bounds, axes, strict=True):
            if axis is not None:
                origin = start - self.local.bounds[axis][0]
                low, high = local.bounds[axis]
                start = origin + low
                stop = origin + high
            bounds.append((start, stop))
        return Box(tuple(bounds))


@dataclass(frozen=True)
class LocalTensor:
    """A tensor of an engine. Elements outside its pieces are padding, which stays zero."""

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def size(self) -> int:
        """Number of elements, including padding."""
        return prod(self.shape)

    @property
    def padding(self) -> int:
        """Number of elements that belong to no Hugging Face tensor."""
        return self.size - sum(piece.local.size for piece in self.pieces)

    def has_elements_of(self, other: LocalTensor) -> bool:
        """Whether both have the same elements in the same positions."""
        return self.shape == other.shape and set(self.pieces) == set(other.pieces)


ShardTable = Mapping[str, LocalTensor]
"""Local tensors by the engine's own parameter names, in the order of the model."""


def stack(parts: Iterable[tuple[str, Box]], *, num_rows: int = 0) -> LocalTensor:
    """Stack boxes along dimension 0, in order, and return the local tensor; num_rows pads its end.

    All boxes have the same shape except for dimension 0. Empty boxes give no piece. A stack of more
    than num_rows rows is not padded.
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


def chunk_box(shape: Sequence[int], first: int, num_rows: int, chunk: int, num_chunks: int) -> Box:
    """Return a chunk of torch.chunk over num_rows rows of a tensor, from row `first` on.

    Chunks have ceil(num_rows / num_chunks) rows, so the last ones may have fewer, or none.
    """
    rows = -(-num_rows // num_chunks)
    start = min(chunk * rows, num_rows)
    stop = min(start + rows, num_rows)
    return row_box(shape, first + start, first + stop)


def row_box(shape: Sequence[int], start: int, stop: int) -> Box:
    """Rows start .. stop - 1 of a tensor of that shape, clipped to the rows that exist."""
    start = min(start, shape[0])
    stop = min(stop, shape[0])
    return Box(((start, stop), *((0, size) for size in shape[1:])))


Way = Callable[["Cut", Sequence[str]], LocalTensor]
ExpertWay = Callable[["Cut", str, int], LocalTensor]
"""(cut, fused tensor of all experts, number of an expert) -> the local tensor."""
LayerRow = tuple[str, Way, tuple[str, ...]]
"""(engine's name below its layer, way, Hugging Face names below the layer)."""


class _Run(NamedTuple):
    """Elements start .. stop - 1 along an axis of a tensor."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True)
class Cut:
    """One rank's share of an architecture. `engine` is for errors."""

    engine: str
    arch: Architecture
    size: int
    """Tensor-parallel size."""
    rank: int
    vocab_multiple: int
    shapes: Mapping[str, tuple[int, ...]] | None = None
    """Of the tensors, if they are not to be cut in the shapes of the architecture."""

    def layer(self, rows: Sequence[LayerRow], layer: int) -> Iterator[tuple[str, LocalTensor]]:
        """Yield (engine's name below its layer, tensor) of each row that the architecture has.

        rows: the engine's table for one layer. layer: number of the layer in the model.
        """
        known = shapes_by_name(self.arch)
        for local, cut, suffixes in rows:
            names = []
            for suffix in suffixes:
                names.append(f"model.layers.{layer}.{suffix}")
            if names[0] in known:
                yield local, cut(self, names)

    def full_tensor(self, names: Sequence[str]) -> LocalTensor:
        """The complete tensor, on every rank."""
        (name,) = names
        return stack([(name, Box.of_shape(self._shape(name)))])

    def first_rank_only(self, names: Sequence[str]) -> LocalTensor:
        """The complete tensor on the first rank, padding of its size on the others.

        A bias that is added once, as the results of all ranks are summed.
        """
        local = self.full_tensor(names)
        return local if self.rank == 0 else LocalTensor(local.shape, ())

    def rows(self, names: Sequence[str]) -> LocalTensor:
        """Return an equal part of the rows of each tensor, the tensors stacked in order.

        ConfigError if the tensor-parallel size does not divide the rows.
        """
        return self.divide(names, axis=0)

    def columns(self, names: Sequence[str]) -> LocalTensor:
        """An equal part of the columns."""
        return self.divide(names, axis=1)

    def divide(self, names: Sequence[str], *, axis: int, num_parts: int = 1) -> LocalTensor:
        """Return an equal part of an axis of each tensor, stacked along that axis in order.

        num_parts: the axis has so many parts of equal size, such as gate and up, and the rank has
        an equal part of each. ConfigError if the tensor-parallel size does not divide a part.
        """
        runs = []
        for name in names:
            size = self._shape(name)[axis] // num_parts
            start, stop = self._chunk(f"{_elements_along(axis)} of {name}", size)
            for part in range(num_parts):
                runs.append(_Run(name, part * size + start, part * size + stop))
        return self._stack(runs, axis)

    def vocabulary(self, names: Sequence[str]) -> LocalTensor:
        """Return an equal part of the vocabulary's rows, padded to a multiple of vocab_multiple.

        Rows beyond the vocabulary belong to no piece: they are padding.
        """
        (name,) = names
        multiple = self.vocab_multiple
        padded = -(-self._shape(name)[0] // multiple) * multiple
        start, stop = self._chunk("padded vocabulary", padded)
        return stack([(name, row_box(self._shape(name), start, stop))], num_rows=stop - start)

    def expert_rows(self, name: str, expert: int) -> LocalTensor:
        """Return an equal part of the rows of gate, then of up, of one expert.

        name: of the fused tensor (experts, gate and up, hidden).
        """
        _, both, width = self._shape(name)
        start, stop = self._chunk(f"rows of gate in {name}", both // 2)
        pieces = []
        for number, origin in enumerate((0, both // 2)):
            box = Box(((expert, expert + 1), (origin + start, origin + stop), (0, width)))
            rows = stop - start
            local = Box(((number * rows, (number + 1) * rows), (0, width)))
            pieces.append(Piece(name, box, local, (None, 0, 1)))
        return LocalTensor((2 * (stop - start), width), tuple(pieces))

    def expert_columns(self, name: str, expert: int) -> LocalTensor:
        """Return an equal part of the columns of one expert.

        name: of the fused tensor (experts, hidden, columns).
        """
        _, height, width = self._shape(name)
        start, stop = self._chunk(f"columns of {name}", width)
        box = Box(((expert, expert + 1), (0, height), (start, stop)))
        local = Box(((0, height), (0, stop - start)))
        piece = Piece(name, box, local, (None, 0, 1))
        return LocalTensor(local.shape, (piece,))

    def heads(self, names: Sequence[str]) -> LocalTensor:
        """Return an equal part of the heads of q, k and v, stacked in this order.

        names: of the three tensors, or of one that has their rows one after another. Neighbouring
        ranks share a kv head if there are fewer kv heads than ranks. ConfigError if the
        tensor-parallel size does not divide the attention heads, or if the tensors have another
        number of heads than config.json.
        """
        groups = self.arch.num_kv_heads
        num_heads = self.arch.num_heads
        rows = self._rows_of_head(names)
        query = self._chunk("attention heads", num_heads)
        first = self.rank * groups // self.size
        group = (first, first + max(1, groups // self.size))
        origins = (0, 0, 0)
        if len(names) == 1:
            names = [*names] * 3
            origins = (0, num_heads, num_heads + groups)
        runs = []
        for name, origin, (low, high) in zip(names, origins, (query, group, group), strict=True):
            runs.append(_Run(name, (origin + low) * rows, (origin + high) * rows))
        return self._stack(runs, axis=0)

    def groups(self, names: Sequence[str]) -> LocalTensor:
        """Return an equal part of the rows of q, k and v, arranged group by group.

        A group has its query heads, its key head and its value head. A part may start or end inside
        a head. ConfigError if the tensor-parallel size does not divide all rows together.
        """
        groups = self.arch.num_kv_heads
        head_dim = self.arch.head_dim
        per_group = self.arch.num_heads // groups
        heights = (per_group * head_dim, head_dim, head_dim)
        start, stop = self._chunk("rows of q, k and v", groups * sum(heights))
        parts = []
        row = 0
        for group in range(groups):
            for name, height in zip(names, heights, strict=True):
                low = max(start - row, 0)
                high = min(stop - row, height)
                if low < high:
                    origin = group * height
                    parts.append((name, row_box(self._shape(name), origin + low, origin + high)))
                row += height
        return stack(parts)

    def _shape(self, name: str) -> tuple[int, ...]:
        return (self.shapes or shapes_by_name(self.arch))[name]

    def _rows_of_head(self, names: Sequence[str]) -> int:
        """Rows of one head in tensors with all of q, k and v; ConfigError if heads do not fit."""
        heads = [self.arch.num_heads, self.arch.num_kv_heads, self.arch.num_kv_heads]
        if len(names) == 1:
            heads = [sum(heads)]
        rows = [self._shape(name)[0] for name in names]
        each = rows[0] // max(heads[0], 1)
        if rows != [count * each for count in heads]:
            got = f"{rows} rows of q, k and v in {', '.join(names)}"
            expected = f"equally many for each of {heads} heads"
            raise ConfigError.of(self.engine, got, expected, "state the heads in config.json")
        return each

    def _stack(self, runs: Sequence[_Run], axis: int) -> LocalTensor:
        """Stack runs of an axis in order; neighbours of one tensor become one piece."""
        shape = list(self._shape(runs[0].name))
        pieces = []
        position = 0
        for run in _join_neighbours(runs):
            end = position + run.stop - run.start
            box = [(0, size) for size in self._shape(run.name)]
            local = list(box)
            box[axis] = (run.start, run.stop)
            local[axis] = (position, end)
            if run.start < run.stop:
                pieces.append(Piece(run.name, Box(tuple(box)), Box(tuple(local))))
            position = end
        shape[axis] = position
        return LocalTensor(tuple(shape), tuple(pieces))

    def _chunk(self, what: str, size: int) -> tuple[int, int]:
        """Return (start, stop) of this rank's equal part of `size` elements.

        ConfigError unless the tensor-parallel size divides them. what: the elements, for the error.
        """
        if size % self.size:
            got = f"{size} {what} over tensor-parallel size {self.size}"
            do = f"choose a size among {divisors(size)[:12]}"
            raise ConfigError.of(self.engine, got, "a multiple of it", do)
        each = size // self.size
        return self.rank * each, (self.rank + 1) * each


def _elements_along(axis: int) -> str:
    """What one index of an axis selects, for errors."""
    names = ("rows", "columns")
    return names[axis] if axis < len(names) else f"elements along axis {axis}"


def _join_neighbours(runs: Sequence[_Run]) -> list[_Run]:
    """The same runs, in which one that begins where the run before it ends continues it."""
    joined: list[_Run] = []
    for run in runs:
        if joined and joined[-1].name == run.name and joined[-1].stop == run.start:
            run = _Run(run.name, joined.pop().start, run.stop)
        joined.append(run)
    return joined


def check_cut(engine: str, arch: Architecture, *, tp_size: int, pp_size: int) -> None:
    """Raise ConfigError unless heads and layers can be divided over tp_size and pp_size ranks.

    tp_size must divide the attention heads, and divide the key-value heads or be a multiple of
    them. Every stage must get a layer.
    """
    heads = arch.num_heads
    groups = arch.num_kv_heads
    if heads % tp_size or (groups % tp_size and tp_size % groups):
        got = f"tensor-parallel size {tp_size} for {heads} attention and {groups} key-value heads"
        expected = "a divisor of the first that divides the second or is a multiple of it"
        raise ConfigError.of(engine, got, expected, "choose another size")
    if not 1 <= pp_size <= arch.num_layers:
        got = f"{pp_size} pipeline stages for {arch.num_layers} layers"
        do = f"choose {arch.num_layers} or fewer"
        raise ConfigError.of(engine, got, "at most one stage a layer", do)
