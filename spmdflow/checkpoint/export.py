"""Exports a saved model as a Hugging Face folder, from the boxes that ranks wrote to a checkpoint.

Values are those that `forward` computes with, or rounded to another precision. Only some rows of
one tensor are in memory at a time. Several processes can each write some of the files, as the ranks
of a training run do. Knows no engine.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spmdflow.blocks.box import Box
from spmdflow.checkpoint.state import StateFiles
from spmdflow.errors import CheckpointError
from spmdflow.weights.adapter import adapter_names, adapter_scale
from spmdflow.weights.architecture import Architecture
from spmdflow.weights.file import TensorInfo, write_file
from spmdflow.weights.folder import (
    HuggingFaceFolder,
    file_names,
    folder_form,
    write_other_files,
)
from spmdflow.weights.peft_settings import PEFT_CONFIG, PEFT_PREFIX, PEFT_WEIGHTS
from spmdflow.weights.table import EMBEDDING, LocalTensor

_LEAST_FILE_BYTES = 64 << 20
_MOST_FILE_BYTES = 4 << 30
_SLAB_ELEMENTS = 1 << 24
_TIED_HEAD = "lm_head.weight"
"""What peft calls the embedding a second time, in a model whose head it is."""


def plan_files(
    facts: Iterable[TensorInfo],
    count: int,
    *,
    least_bytes: int = _LEAST_FILE_BYTES,
    most_bytes: int = _MOST_FILE_BYTES,
) -> list[list[TensorInfo]]:
    """Divide tensors into `count` files of similar size, or fewer or more to respect the limits.

    The number of files is max(1, min(count, total // least_bytes), ceil(total / most_bytes)), or
    less for few tensors, because a tensor is never split. Returns the tensors of each file, none
    empty: wider dtypes first, otherwise in the given order.
    """
    ordered = sorted(facts, key=lambda each: -each.dtype.itemsize)
    total = sum(each.num_bytes for each in ordered)
    number = max(1, min(count, total // least_bytes), -(-total // most_bytes))
    files: dict[int, list[TensorInfo]] = {}
    done = 0
    for each in ordered:  # into the file that contains the tensor's middle
        files.setdefault((2 * done + each.num_bytes) * number // (2 * total + 1), []).append(each)
        done += each.num_bytes
    return list(files.values())


class ModelExport:
    """Writes the model of a role whose state was saved by `EngineWorker.save_state`."""

    def __init__(
        self,
        plain: dict[str, Any],
        dtype: torch.dtype | None = None,
        *,
        index: int = 0,
        count: int = 1,
    ) -> None:
        """Plan the files, and select those of this process.

        plain: JSON data saved with the boxes. dtype: instead of the one of forward. index, count:
        of this process among those that write. Adapters become a peft folder with one float32 file.
        """
        self._model = plain["model"]
        self._is_first = index == 0
        self._lora = self._model.get("lora")
        own = "float32" if self._lora else self._model["dtype"]
        self._dtype = dtype or getattr(torch, own)
        dtype_by_name = {
            "score.weight": torch.float32
        }  # a scalar head, for any dtype of the others
        for n in self._model.get("float32", ()):
            dtype_by_name[n] = torch.float32
        shapes = plain["shapes"]
        self._form = _folder_form(self._model["config"], shapes)
        prefix = PEFT_PREFIX if self._lora else ""
        facts = []
        for n, x in {**_unchanged_tensors(shapes, self._form), **_shapes_of(self._form)}.items():
            facts.append(TensorInfo(prefix + n, dtype_by_name.get(n, self._dtype), x))
        if self._lora and _is_tied(self._model) and EMBEDDING in shapes:
            facts.append(TensorInfo(prefix + _TIED_HEAD, self._dtype, shapes[EMBEDDING]))
        files = [facts] if self._lora else plan_files(facts, count)
        names = [PEFT_WEIGHTS] if self._lora else file_names(len(files))
        self._files = dict(zip(names, files, strict=True))
        shares = zip(self._files.items(), range(0, len(files) * count, count), strict=True)
        self.mine = dict(file for file, number in shares if number // len(files) == index)
        """File name -> tensors, of the files that this process writes."""

    def write(
        self, state: StateFiles | MergedState, folder: Path, *, files_from: Path | None = None
    ) -> None:
        """Write this process's share of the model's safetensors files into folder.

        Creates the folder. The process with index 0 also writes config.json and, for several files,
        the index, and copies other files, such as the tokenizer, from `files_from` or the model's
        source. For adapters it writes adapter_config.json instead of config.json. Only some rows of
        one tensor are in memory at a time.
        """
        folder.mkdir(parents=True, exist_ok=True)
        for name, tensors in self.mine.items():
            parts = _read_by_rows(state, tensors, self._form)
            write_file(folder / name, tensors, parts, {"format": "pt"})
        if self._is_first:
            weights = {}
            for n, facts in self._files.items():
                weights[n] = {x.name: x.num_bytes for x in facts}
            config = {**self._model["config"], "dtype": str(self._dtype).removeprefix("torch.")}
            source = files_from or Path(self._model["source"])
            write_other_files(folder, weights, config=config, source=source)
            if self._lora:
                config = _peft_config(self._lora, self._model)
                (folder / "config.json").unlink()
                (folder / PEFT_CONFIG).write_text(json.dumps(config, indent=2))


class MergedState:
    """A model's weights with a checkpoint's adapters merged into them, read by boxes."""

    def __init__(self, adapters: StateFiles, source: Path) -> None:
        """source: folder of the base model.

        ConfigError if it cannot be read, CheckpointError if it has another model.
        """
        self._adapters = adapters
        self._base = HuggingFaceFolder(source, {})
        self._lora = adapters.plain["model"]["lora"]
        shapes = self._base.shapes()
        trained = adapters.plain["shapes"]
        self._adapted = {n for n in shapes if adapter_names(n)[0] in trained}
        self._saved = {n for n in shapes if n in trained}
        if 2 * len(self._adapted) + len(self._saved) != len(trained):
            got = f"{source} without some of the weights that have adapters"
            expected = "the model that was trained"
            do = "give the folder that the run had"
            raise CheckpointError.of("export", got, expected, do)
        model = {}
        for key, x in adapters.plain["model"].items():
            if key != "lora":
                model[key] = x
        self.plain = {**adapters.plain, "model": model, "shapes": shapes}
        """JSON data as in a checkpoint of the full model."""

    def slabs(self, name: str, shape: Sequence[int]) -> list[Box]:
        """Return boxes of consecutive rows, in order, that cover a tensor of this shape.

        Each has at most 2**24 elements, or is one row. A tensor of shape () or without rows is one
        box.
        """
        full_box = Box.of_shape(shape)
        if shape:
            rows = max(1, _SLAB_ELEMENTS * shape[0] // max(1, full_box.size))
        else:
            rows = 1
        starts = range(0, shape[0], rows) if shape else ()
        inner = full_box.bounds[1:]
        return [Box(((n, min(n + rows, shape[0])), *inner)) for n in starts] or [full_box]

    def read(self, name: str, box: Box) -> Tensor:
        """Return a box of values, on the host: W + scale B A if W has an adapter, else W.

        W is the trained one of a module to save. The sum is float32; without an adapter the dtype
        is that of the file.
        """
        if name in self._saved:
            return self._adapters.read(name, box)
        values = self._base.read(name, box)
        if name not in self._adapted:
            return values
        rank = self._lora["rank"]
        a, b = adapter_names(name)
        wide = self._adapters.read(a, Box(((0, rank), box.bounds[1])))
        tall = self._adapters.read(b, Box((box.bounds[0], (0, rank))))
        rslora = self._lora.get("rslora", False)
        scale = adapter_scale(rank, self._lora["alpha"], rslora=rslora)
        return torch.add(values.float(), tall @ wide, alpha=scale)


def _folder_form(
    config: Mapping[str, Any], shapes: Mapping[str, Sequence[int]]
) -> Mapping[str, LocalTensor]:
    """Return the tensors of the export that are not tensors of the checkpoint (`folder_form`).

    Empty for dense families with a table, for adapters, and if the checkpoint already has them.
    """
    if Architecture.sizes_from_config(config).is_dense_with_table:
        return {}
    form = folder_form(json.dumps(config, sort_keys=True))
    used = {piece.name for table in form.values() for piece in table.pieces}
    return form if used <= shapes.keys() else {}


def _unchanged_tensors(
    shapes: Mapping[str, Sequence[int]], form: Mapping[str, LocalTensor]
) -> dict[str, Sequence[int]]:
    """The tensors of the checkpoint that no tensor of `form` has a part of."""
    used = {piece.name for table in form.values() for piece in table.pieces}
    return {name: shape for name, shape in shapes.items() if name not in used}


def _shapes_of(form: Mapping[str, LocalTensor]) -> dict[str, Sequence[int]]:
    return {name: table.shape for name, table in form.items()}


def _read_by_rows(
    state: StateFiles | MergedState, tensors: Sequence[TensorInfo], form: Mapping[str, LocalTensor]
) -> Iterator[Tensor]:
    """Yield each tensor's values in its export dtype, as parts of consecutive rows, in order.

    A tensor of `form` is one part.
    """
    for name, dtype, shape in tensors:
        if name in form:
            values = torch.empty(*shape, dtype=dtype)
            for piece in form[name].pieces:
                piece.view(values).copy_(state.read(piece.name, piece.box))
            yield values
            continue
        saved = name.removeprefix(PEFT_PREFIX)
        if name != saved and saved not in state.plain["shapes"]:
            saved = EMBEDDING  # peft wants both
        for box in state.slabs(saved, shape):
            yield state.read(saved, box).to(dtype)


def _is_tied(model: Mapping[str, Any]) -> bool:
    """Whether the head is the embedding. model: JSON data of the model."""
    return bool(model["config"].get("tie_word_embeddings"))


def _peft_config(lora: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
    """Return adapter_config.json. model: JSON data of the model, with its config and source.

    A checkpoint of an earlier version lacks some settings of lora, which it did not have.
    """
    modules = lora.get("modules_to_save") or None
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model["source"],
        "r": lora["rank"],
        "lora_alpha": lora["alpha"],
        "target_modules": lora["targets"],
        "lora_dropout": lora.get("dropout", 0.0),
        "use_rslora": lora.get("rslora", False),
        "modules_to_save": modules,
        "ensure_weight_tying": bool(modules) and _is_tied(model),
        "bias": "none",
        "inference_mode": True,
    }
