"""Tables that are read off a loader: loaders that copy in many ways, and some that compute."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from spmdflow.blocks.box import Box
from spmdflow.errors import WeightSyncError
from spmdflow.weights.move import Blocks, blocks, fill
from spmdflow.weights.numbered import derive_table
from spmdflow.weights.table import Piece, ShardTable

TYPES = (torch.float32, torch.bfloat16, torch.float16)


def pieces_of(table: ShardTable, name: str) -> list[tuple[str, tuple, tuple]]:
    """Name, box and local box of each piece."""
    return [(p.name, p.box.bounds, p.local.bounds) for p in table[name].pieces]


@pytest.mark.parametrize("dtype", TYPES)
def test_fused_rows_padding_and_a_gap_are_found(dtype: torch.dtype) -> None:
    local = {
        "qkv": torch.empty(12, 300, dtype=dtype),
        "words": torch.empty(64, 8, dtype=dtype),
    }

    def load(tensors: Mapping[str, Tensor]) -> None:
        first = {"q": 0, "k": 8, "v": 10}
        for name, values in tensors.items():
            if name == "words":
                local["words"][:50] = values
            else:
                local["qkv"][first[name] : first[name] + len(values)] = values

    shapes = {"q": (8, 300), "k": (2, 300), "v": (2, 300)}
    table = derive_table(local, shapes | {"words": (50, 8)}, load)

    assert pieces_of(table, "qkv") == [
        ("q", ((0, 8), (0, 300)), ((0, 8), (0, 300))),
        ("k", ((0, 2), (0, 300)), ((8, 10), (0, 300))),
        ("v", ((0, 2), (0, 300)), ((10, 12), (0, 300))),
    ]
    assert pieces_of(table, "words") == [("words", ((0, 50), (0, 8)), ((0, 50), (0, 8)))]
    assert table["words"].padding == 14 * 8
    assert not local["qkv"].any() and not local["words"].any()


def test_experts_are_found_stacked_transposed_and_without_an_axis() -> None:
    local = {
        "up": torch.empty(3, 10, 8),
        "down": torch.empty(3, 8, 5),
        "convolution": torch.empty(6, 4),
    }

    def load(tensors: Mapping[str, Tensor]) -> None:
        local["up"][:, :5] = tensors["gate"].view(3, 5, 8)
        local["up"][:, 5:] = tensors["up"].view(3, 5, 8)
        local["down"].copy_(tensors["down"].transpose(1, 2))
        local["convolution"].copy_(tensors["convolution"].squeeze(1))

    shapes = {"gate": (15, 8), "up": (15, 8), "down": (3, 5, 8), "convolution": (6, 1, 4)}
    table = derive_table(local, shapes, load)

    assert len(table["up"].pieces) == 6
    (down,) = table["down"].pieces
    assert down == Piece("down", Box.of_shape((3, 5, 8)), Box.of_shape((3, 8, 5)), (0, 2, 1))
    (convolution,) = table["convolution"].pieces
    assert convolution.axes == (0, None, 1)


Way = Callable[[Tensor, Tensor], None]
"""(local tensor, values of the model's) -> None."""


def _double(local: Tensor, values: Tensor) -> None:
    local.copy_(2 * values)


def _add_one(local: Tensor, values: Tensor) -> None:
    local.copy_(values + 1)


def _mean(local: Tensor, values: Tensor) -> None:
    local.copy_(values.float().mean(0, keepdim=True).expand(local.shape))


def _sum_of_rows(local: Tensor, values: Tensor) -> None:
    local.copy_(values + values.flip(0))


def _largest_first(local: Tensor, values: Tensor) -> None:
    local.copy_(values.sort(0, descending=True).values)


@pytest.mark.parametrize("way", [_double, _add_one, _mean, _sum_of_rows, _largest_first])
@pytest.mark.parametrize("dtype", TYPES)
def test_a_loader_that_computes_is_refused(way: Way, dtype: torch.dtype) -> None:
    local = {"w": torch.empty(40, 30, dtype=dtype)}

    def load(tensors: Mapping[str, Tensor]) -> None:
        way(local["w"], tensors["w"])

    with pytest.raises(WeightSyncError, match="weights of w: got a loader that computes it"):
        derive_table(local, {"w": (40, 30)}, load)


@dataclass(frozen=True)
class Rows:
    """Some rows of one of the model's tensors, in one of the engine's, perhaps transposed."""

    name: str
    shape: tuple[int, int]
    origin: int
    height: int
    where: str
    start: int
    is_turned: bool

    def copy(self, local: Mapping[str, Tensor], values: Tensor) -> None:
        """As the engine's loader does it."""
        part = values[self.origin : self.origin + self.height]
        target = local[self.where]
        if self.is_turned:
            target = target.T
        target[self.start : self.start + self.height] = part


@st.composite
def loaders(draw: st.DrawFn) -> tuple[dict[str, Tensor], list[Rows]]:
    """Tensors of an engine, each of rows of some of the model's, with gaps; and what is copied."""
    dtype = draw(st.sampled_from(TYPES))
    columns = draw(st.integers(1, 40))
    local = {}
    copies = []
    for number in range(draw(st.integers(1, 3))):
        where = f"local.{number}"
        is_turned = draw(st.booleans())
        row = draw(st.integers(0, 3))
        for height in draw(st.lists(st.integers(1, 30), min_size=1, max_size=4)):
            origin = draw(st.integers(0, 20))
            total = origin + height + draw(st.integers(0, 20))
            name = f"model.{len(copies)}"
            copies.append(Rows(name, (total, columns), origin, height, where, row, is_turned))
            row += height + draw(st.integers(0, 2))
        size = (columns, row) if is_turned else (row, columns)
        local[where] = torch.empty(size, dtype=dtype)
    return local, copies


@settings(max_examples=60, deadline=None)
@given(loaders())
def test_filling_by_the_table_gives_what_the_loader_gives(
    case: tuple[dict[str, Tensor], list[Rows]],
) -> None:
    local, copies = case
    shapes = {each.name: each.shape for each in copies}

    def load(tensors: Mapping[str, Tensor]) -> None:
        for each in copies:
            if each.name in tensors:
                each.copy(local, tensors[each.name])

    table = derive_table(local, shapes, load)

    weights = {}
    for name, shape in shapes.items():
        weights[name] = torch.randn(shape)
    load(weights)
    expected = {name: tensor.clone() for name, tensor in local.items()}
    whole = Blocks((name, x, Box.of_shape(x.shape)) for name, x in weights.items())
    for tensor in local.values():
        tensor.fill_(7)
    fill(local, table, whole.read)
    for name, tensor in local.items():
        assert torch.equal(tensor, expected[name])
    for name, view, box in blocks(local, table):
        assert torch.equal(view, weights[name][box.slices()].to(view.dtype))


LAYER_SHAPES = {"up": (6, 5), "gate": (6, 5), "down": (5, 6)}
NUM_LAYERS = 4


def engine_of_layers() -> dict[str, Tensor]:
    """Fused up and gate, and down, of each layer; a table of words."""
    local = {"model.words": torch.empty(9, 5, dtype=torch.bfloat16)}
    for layer in range(NUM_LAYERS):
        local[f"model.layers.{layer}.fused"] = torch.empty(12, 5, dtype=torch.bfloat16)
        local[f"model.layers.{layer}.down"] = torch.empty(5, 6, dtype=torch.bfloat16)
    return local


def shapes_of_layers() -> dict[str, tuple[int, int]]:
    shapes = {"model.words": (9, 5)}
    for layer in range(NUM_LAYERS):
        for name, shape in LAYER_SHAPES.items():
            shapes[f"model.layers.{layer}.{name}"] = shape
    return shapes


def store(local: Mapping[str, Tensor], name: str, values: Tensor) -> None:
    """As most loaders do it."""
    prefix, _, kind = name.rpartition(".")
    if kind in ("up", "gate"):
        start = 6 if kind == "up" else 0
        local[f"{prefix}.fused"][start : start + 6] = values
    else:
        local[name].copy_(values)


def test_of_layers_with_the_same_tensors_one_is_numbered() -> None:
    local = engine_of_layers()
    loads: list[list[str]] = []

    def load(tensors: Mapping[str, Tensor]) -> None:
        loads.append(list(tensors))
        for name, values in tensors.items():
            store(local, name, values)

    table = derive_table(local, shapes_of_layers(), load)

    for layer in range(NUM_LAYERS):
        prefix = f"model.layers.{layer}"
        assert pieces_of(table, f"{prefix}.fused") == [
            (f"{prefix}.gate", ((0, 6), (0, 5)), ((0, 6), (0, 5))),
            (f"{prefix}.up", ((0, 6), (0, 5)), ((6, 12), (0, 5))),
        ]
        loads_of_layer = [names for names in loads if f"{prefix}.up" in names]
        if layer == 0:
            assert len(loads_of_layer) > 2
        else:
            assert len(loads_of_layer) == 2  # the codes
    assert not any(bool(tensor.any()) for tensor in local.values())


@pytest.mark.parametrize("layer", range(NUM_LAYERS))
def test_a_layer_that_is_stored_in_another_way_is_numbered_too(layer: int) -> None:
    local = engine_of_layers()
    other = f"model.layers.{layer}.down"

    def load(tensors: Mapping[str, Tensor]) -> None:
        for name, values in tensors.items():
            if name == other:  # two elements are exchanged
                values = values.clone()
                values[1, 2] = tensors[name][3, 4]
                values[3, 4] = tensors[name][1, 2]
            store(local, name, values)

    table = derive_table(local, shapes_of_layers(), load)

    weights = {name: torch.randn(shape).bfloat16() for name, shape in shapes_of_layers().items()}
    load(weights)
    expected = {name: tensor.clone() for name, tensor in local.items()}
    whole = Blocks((name, x, Box.of_shape(x.shape)) for name, x in weights.items())
    fill(local, table, whole.read)
    for name, tensor in local.items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("layer", range(NUM_LAYERS))
def test_a_loader_that_computes_in_one_layer_is_refused(layer: int) -> None:
    local = engine_of_layers()
    other = f"model.layers.{layer}.down"

    def load(tensors: Mapping[str, Tensor]) -> None:
        for name, values in tensors.items():
            store(local, name, values)
            if name == other:
                local[name][2, 3] *= 2

    with pytest.raises(WeightSyncError, match=f"weights of {other}: got a loader that computes it"):
        derive_table(local, shapes_of_layers(), load)
