"""What a vLLM model of any family reads: where vLLM's own loader stores each element.

The table is derived (`weights.numbered`), not written: the trainer's tensors are numbered, brought
into the form of a folder as transformers saves them, and loaded by vLLM. So fused, expert and
transposed weights need no code of ours. This file uses the model's `load_weights`, and of vLLM
itself only the version.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spmdflow.blocks.box import Box, subtract_all
from spmdflow.blocks.hash import positional_hash
from spmdflow.errors import ConfigError, WeightSyncError
from spmdflow.kind.generator import generator_names
from spmdflow.rollout.generator import Replica
from spmdflow.rollout.table_cache import (
    CachedTable,
    as_lists,
    from_lists,
    read_table,
    table_path,
    write_table,
)
from spmdflow.weights.architecture import read_config
from spmdflow.weights.folder import causal_lm_on_meta, folder_tensors, in_folder_form
from spmdflow.weights.numbered import derive_table
from spmdflow.weights.table import ShardTable


@dataclass(frozen=True)
class DerivedTables:
    """Which elements of the trainer's tensors the ranks of a replica have."""

    shapes: Mapping[str, torch.Size]
    """Of the trainer's tensors, by the names of transformers' module; tied tensors once."""
    tables: Sequence[ShardTable]
    """Of each rank of the replica, in their order."""
    constants: frozenset[str]
    """This rank's parameters that the trainer does not train, such as a bias of a router. They keep
    the folder's values."""


def derive_tables(model: Any, model_path: str, replica: Replica) -> DerivedTables:
    """Return where vLLM's own loader stores each element of the trainer's tensors.

    model: vLLM's, with the folder's weights, which it has again afterwards. ConfigError if a tensor
    of vLLM gets no values, or others than a sync would bring, or if an element of the trainer is on
    no rank. Tables are cached for the next start (`table_cache`). All ranks of the replica call it
    together.
    """
    module = causal_lm_on_meta(model_path)
    shapes = {name: tensor.shape for name, tensor in module.named_parameters()}
    fixed = {}
    for name in module.state_dict().keys() & dict(module.named_buffers()).keys():
        fixed[name] = module.get_buffer(name).shape
    parameters = dict(model.named_parameters())
    path = table_path(_facts(parameters, model_path, replica))
    cached = read_table(path)
    every = replica.gather(torch.tensor([cached is not None]))
    if cached is None or not all(map(bool, every)):
        cached = _derive(model, module, {**shapes, **fixed}, fixed.keys(), model_path)
        write_table(path, cached)
    tables = _gather_tables(cached.own, replica)
    for name in cached.own:  # a rank may have nothing but padding of a vocabulary
        if not any(name in table and table[name].pieces for table in tables):
            raise _refusal(model_path, f"its tensor {name} gets no trained weight")
    _check_cover(shapes, tables, model_path)
    return DerivedTables(shapes, tables, cached.constants)


def _facts(parameters: Mapping[str, Tensor], model_path: str, replica: Replica) -> dict[str, Any]:
    """Return what a table depends on, as JSON data: model, sizes, versions, vLLM's parameters."""
    import transformers
    import vllm

    described = []
    for name, tensor in parameters.items():
        described.append([name, list(tensor.shape), str(tensor.dtype)])
    return {
        "config": read_config(model_path),
        "sizes": [replica.tp_size, replica.pp_size, replica.replica_rank],
        "versions": [torch.__version__, transformers.__version__, vllm.__version__],
        "parameters": described,
    }


def _derive(
    model: Any,
    module: Any,
    shapes: Mapping[str, Sequence[int]],
    fixed: Collection[str],
    model_path: str,
) -> CachedTable:
    """Return this rank's table, by numbering all of the trainer's tensors.

    model, model_path: as in `derive_tables`. module: transformers', without weights. shapes: of its
    tensors, `fixed` among them, which are not trained.
    """
    parameters = dict(model.named_parameters())

    def load(tensors: Mapping[str, Tensor]) -> None:
        model.load_weights(in_folder_form(module, tensors).items())

    with torch.no_grad():
        before = {name: positional_hash(tensor) for name, tensor in parameters.items()}
        try:
            derived = derive_table(parameters, shapes, load)
        except WeightSyncError as err:
            raise _refusal(model_path, f"not all weights are copies: {err}") from err
        model.load_weights(folder_tensors(model_path))
    for name, tensor in parameters.items():
        if positional_hash(tensor) != before[name]:
            raise _refusal(model_path, f"{name} is rearranged after it was loaded")
    own = {}
    constants = set()
    for name, local in derived.items():
        if local.pieces and all(piece.name in fixed for piece in local.pieces):
            constants.add(name)
        else:
            own[name] = local
    return CachedTable(own, frozenset(constants))


def _gather_tables(own: ShardTable, replica: Replica) -> list[ShardTable]:
    """Return the tables of all ranks of the replica, in their order. They call it together."""
    text = json.dumps({name: as_lists(local) for name, local in own.items()}).encode()
    sizes = [int(size) for size in replica.gather(torch.tensor([len(text)]))]
    padded = torch.zeros(max(sizes), dtype=torch.uint8)
    padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    tables: list[ShardTable] = []
    for size, values in zip(sizes, replica.gather(padded), strict=True):
        lists = json.loads(bytes(values[:size].tolist()))
        tables.append({name: from_lists(*parts) for name, parts in lists.items()})
    return tables


def _check_cover(
    shapes: Mapping[str, torch.Size], tables: Sequence[ShardTable], model_path: str
) -> None:
    """ConfigError unless the ranks together have every element of every tensor."""
    boxes: dict[str, list[Box]] = defaultdict(list)
    for table in tables:
        for local in table.values():
            for piece in local.pieces:
                boxes[piece.name].append(piece.box)
    for name, shape in shapes.items():
        missing = subtract_all([Box.of_shape(shape)], boxes[name])
        if missing:
            raise _refusal(model_path, f"{name} {list(missing[0].bounds)} is nowhere in it")


def _refusal(model_path: str, reason: str) -> ConfigError:
    return ConfigError.of(
        "rollout.engine=vllm",
        f"vLLM's model of {model_path}, in which {reason}",
        "one that takes all trained weights from the folder",
        f"set actor.rollout.engine={generator_names()[0]}",
    )
