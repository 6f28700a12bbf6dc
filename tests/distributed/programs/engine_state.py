"""States of engines: copied, loaded again, and put together from what the ranks save."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from spmdflow.blocks.box import Box
from spmdflow.checkpoint.export import ModelExport, plan_files
from spmdflow.checkpoint.state import StateFiles
from spmdflow.checkpoint.tensors import write_state
from spmdflow.weights.folder import folder_tensors
from spmdflow.weights.move import Block, Blocks
from spmdflow.workers.engine import TrainEngine

State = dict[tuple[str, Box], Tensor]


def state_of(engine: TrainEngine) -> State:
    """A copy of what this rank holds."""
    return {(name, box): view.clone() for name, view, box in engine.state_blocks()}


def load_state(engine: TrainEngine, state: State, *, steps_done: int) -> None:
    """Load a copy that `state_of` an engine of this layout gave after so many steps."""
    saved = Blocks((name, values, box) for (name, box), values in state.items())

    def load(blocks: Iterable[Block]) -> None:
        for name, view, box in blocks:
            view.copy_(saved.read(name, box))

    engine.load_blocks(load, steps_done)


def full_tensors(engine: TrainEngine) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, full float32 tensor) on every rank, in the order of shapes.

    Of bfloat16 weights these are the rounded values, as the forward pass uses them.
    """
    mine: dict[str, list[tuple[Tensor, Box]]] = {}
    for name, view, box in engine.own_blocks():
        mine.setdefault(name, []).append((view, box))
    for name, shape in engine.shapes.items():
        whole = torch.zeros(shape, device=engine.device)
        for view, box in mine.get(name, ()):
            whole[box.slices()] = view.float()
        if engine.weight_group is not None:
            # one rank has each element's bits, the others zeros: the sum of bits is exact
            dist.all_reduce(whole.view(torch.int32), group=engine.weight_group)
        yield name, whole


def write_folder(engine: TrainEngine, folder: Path) -> None:
    """The engine's model as a folder; tiny models, too, are written by all ranks."""
    layout = engine.layout
    place = layout.group_rank(engine.rank)
    group = engine.groups.get(layout.ranks)
    saved = folder.with_name(f"{folder.name}-state")
    names = [f"rank-{place}.safetensors" for place in range(layout.size)]
    dtype = str(engine.dtype).removeprefix("torch.")
    model = {"config": dict(engine.model.config), "dtype": dtype, "source": engine.model.source}
    plain = {"shapes": {name: list(x) for name, x in engine.shapes.items()}, "model": model}
    write_state(saved / names[place], engine.own_state_blocks(), {})
    dist.barrier(group)
    state = StateFiles(saved, index=place, count=layout.size, unsealed=names)
    with mock.patch.dict(plan_files.__kwdefaults__, least_bytes=1):
        export = ModelExport(plain, index=place, count=layout.size)
    export.write(state, folder)


def exported(engine: TrainEngine, folder: Path) -> dict[str, Tensor]:
    """The tensors of an export as they lie in its files, on every rank."""
    write_folder(engine, folder)
    dist.barrier(engine.groups.get(engine.layout.ranks))
    config = json.loads((folder / "config.json").read_text())
    assert config["dtype"] == str(engine.dtype).removeprefix("torch."), config["dtype"]
    return dict(folder_tensors(folder))


def rounded(name: str, values: Tensor) -> Tensor:
    """As a bfloat16 engine computes with it: a scalar head is float32."""
    return values if name == "score.weight" else values.bfloat16()


def whole_state(engine: TrainEngine) -> dict[str, Tensor]:
    """What the ranks save put together on the pool's first rank, by pickling; each element once."""
    group = engine.groups.get(engine.layout.ranks)
    first = engine.layout.ranks[0]
    pieces: list[Any] | None = [None] * engine.layout.size if engine.rank == first else None
    mine = [(name, view.to("cpu", copy=True), box) for name, view, box in engine.own_state_blocks()]
    dist.gather_object(mine, pieces, dst=first, group=group)
    if pieces is None:
        return {}
    found: dict[str, Tensor] = {}
    shapes = {**engine.shapes, **engine.trained_shapes}
    for name, values, box in (block for piece in pieces for block in piece):
        shape = shapes[name if name in shapes else name.rsplit(".", 1)[0]]
        whole = found.setdefault(name, torch.full(shape, torch.nan, dtype=values.dtype))
        assert bool(whole[box.slices()].isnan().all()), f"{name}{box.bounds} is saved twice"
        whole[box.slices()] = values
    buffers = engine.trained_shapes.keys() - engine.shapes.keys()  # without moments
    num_tensors = 3 * len(engine.shapes) + len(buffers)
    if engine.model.lora is not None:
        num_tensors = 3 * len(engine.trained_shapes)
    assert len(found) == num_tensors, "a tensor, or a moment of it, that nobody saved"
    assert not any(bool(x.isnan().any()) for x in found.values()), "elements that nobody saved"
    return dict(sorted(found.items()))
