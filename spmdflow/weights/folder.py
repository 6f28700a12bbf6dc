"""Hugging Face folders: reads boxes directly from safetensors files or torch's distributed
checkpoint, also for a transformers module without weights; writes the files next to the weights.

Files are memory-mapped: a rank reads only the bytes of its own boxes. This module knows no engine.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from functools import cached_property, lru_cache, partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from spmdflow.blocks.box import Box
from spmdflow.errors import ConfigError
from spmdflow.weights.architecture import Architecture
from spmdflow.weights.converted import locate_fused, locate_stored
from spmdflow.weights.dcp import METADATA, TorchCheckpoint
from spmdflow.weights.index import INDEX, read_index
from spmdflow.weights.table import LocalTensor, Piece, shapes_by_name

logger = logging.getLogger(__name__)

_SINGLE = "model.safetensors"
_NOT_COPIED = (
    *(".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".index.json"),
    *(METADATA, ".distcp"),
)


class HuggingFaceFolder:
    """Reads the tensors of a folder box by box. All ranks may read at the same time."""

    bytes_read = 0
    """Bytes of the boxes that were read, in the precision of the files."""

    def __init__(
        self,
        path: str | Path,
        wanted: Architecture | Mapping[str, Sequence[int]],
        *,
        new_head: bool = False,
        stored: Mapping[str, str] | None = None,
        fused: Mapping[str, LocalTensor] | None = None,
        kind: str = "model",
    ) -> None:
        """Raises ConfigError unless the folder has each tensor in its shape.

        wanted: the architecture, or shapes by name. new_head: a scalar head that the folder lacks
        reads as zeros (a new critic). stored: names in the files, for tensors with another name.
        fused: tensors that consist of several of the files, and of which (`converted`); they are
        not among `wanted`. kind: kind of the model, for errors.
        """
        self._path = Path(path)
        self._files = dict[Path, Any]()
        self._stored = stored or {}
        self._fused = fused or {}
        self._zeros = {"score.weight"} - self.names if new_head else set[str]()
        if isinstance(wanted, Architecture):
            kind = f"{wanted.family} model with a {wanted.head} head"
            wanted = shapes_by_name(wanted)
        self._check_shapes(wanted, kind)

    def read(self, name: str, box: Box) -> Tensor:
        """Return the values of a box on the host, in the precision of the file.

        Adds their bytes to bytes_read. A new head that the folder lacks is zeros. ConfigError with
        tensor and file if a value is nan or infinite.
        """
        if name in self._zeros:
            return self._slice(min(self.names))[:1].new_zeros(box.shape)
        if name in self._fused:
            return self._read_fused(self._fused[name], box)
        values: Tensor = self._slice(name)[box.slices()]
        self.bytes_read += values.nbytes
        check_finite(values, stored := self._stored.get(name, name), self._file_of[stored])
        return values

    def _read_fused(self, fused: LocalTensor, box: Box) -> Tensor:
        """Return a box of a tensor that consists of several of the files.

        Of each, only the elements in the box are read.
        """
        result: Tensor | None = None
        for piece in fused.pieces:
            common = piece.local.intersect(box)
            if common is None:
                continue
            values = self.read(piece.name, piece.box_at(common))
            if result is None:
                result = values.new_empty(box.shape)
            place = Piece(
                piece.name, Box.of_shape(values.shape), Box.of_shape(common.shape), piece.axes
            )
            place.view(result[common.slices(box)]).copy_(values)
        assert result is not None, box
        return result

    @property
    def names(self) -> Set[str]:
        """Names of all tensors in the files."""
        return self._file_of.keys()

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor in the files."""
        result = {}
        for name in self.names:
            result[name] = tuple(self._slice(name).get_shape())
        return result

    def _slice(self, name: str) -> Any:
        """Return the slice object of a tensor, from its file, which is opened at first use.

        name: the reader's; the file may have another one (`stored`). ConfigError if the file lacks
        it.
        """
        name = self._stored.get(name, name)
        path = self._file_of[name]
        if path not in self._files:
            self._files[path] = _open(path)
        try:
            return self._files[path].get_slice(name)
        except SafetensorError as err:
            got = f"{path} without {name}"
            do = "download the folder again"
            raise ConfigError.of("model", got, f"that tensor, by {INDEX}", do) from err

    def _check_shapes(self, wanted: Mapping[str, Sequence[int]], kind: str) -> None:
        """Raise ConfigError unless the folder has each tensor of `wanted` in its shape.

        The error has the number of missing tensors and the first three names or, if none is
        missing, the first tensor with another shape. A new head that reads as zeros is not checked.
        kind: kind of the model, for the error.
        """
        wanted = {name: shape for name, shape in wanted.items() if name not in self._zeros}
        missing = []
        for name in wanted:
            if self._stored.get(name, name) not in self.names:
                missing.append(name)
        if missing:
            count = "1 tensor" if len(missing) == 1 else f"{len(missing)} tensors"
            got = f"{self._path} without {count} ({', '.join(missing[:3])})"
            do = "choose the folder of a complete model"
            raise ConfigError.of("model", got, f"every tensor of a {kind}", do)
        for name, expected in wanted.items():
            shape = tuple(self._slice(name).get_shape())
            if shape != tuple(expected):
                got = f"{name} of shape {shape} in {self._path}"
                do = "the two belong to different models: download the folder again"
                raise ConfigError.of("model", got, f"{tuple(expected)} by config.json", do)

    @cached_property
    def _file_of(self) -> Mapping[str, Path]:
        """Return tensor name -> file, by the index, model.safetensors or torch's .metadata.

        The first of these that exists is used; ConfigError if there is none. Read once.
        """
        indexed = read_index(Path(self._path))
        if indexed is not None:
            return indexed
        single = self._path / _SINGLE
        if (self._path / METADATA).is_file() and not single.is_file():
            single = self._path / METADATA
        if not single.is_file():
            got = f"{self._path} with neither {_SINGLE} nor {INDEX}"
            do = "save with safetensors"
            raise ConfigError.of("model", got, "a Hugging Face folder", do)
        return dict.fromkeys(_open(single).keys(), single)


def check_finite(values: Tensor, name: str, path: str | Path) -> None:
    """Raise ConfigError with the tensor and its file if a value is nan or infinite.

    Without this check, the first gradient would be blamed. Integers, types of one byte and empty
    tensors pass.
    """
    if not values.is_floating_point() or values.itemsize == 1 or not values.numel():
        return
    if not torch.stack(values.aminmax()).isfinite().all():
        wrong = int((~values.isfinite()).sum())
        got = f"{wrong} of {values.numel()} numbers nan or infinite in {name} of {path}"
        do = "download the file again, or save it again"
        raise ConfigError.of("model", got, "numbers", do)


def folder_tensors(path: str | Path) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, complete tensor) of all files of a folder, one at a time, on the host.

    Reads all *.safetensors, by name of the file, or torch's checkpoint if there are none. Yields
    nothing if there is neither. ConfigError for a file that cannot be read.
    """
    files = sorted(Path(path).glob("*.safetensors"))
    for file in files or sorted(Path(path).glob(METADATA)):
        opened = _open(file)
        for name in opened.keys():
            yield name, opened.get_tensor(name)


def empty_module(auto: Any, path: str | Path, dtype: torch.dtype, **settings: Any) -> Any:
    """The transformers module of a folder, in eval mode, with its parameters on the meta device.

    Parameters take no memory. Buffers that the module computes (rotary frequencies) have values.
    auto: transformers.AutoModelFor...; settings: overrides of the configuration.
    """
    import transformers

    config = transformers.AutoConfig.from_pretrained(
        path, local_files_only=True, trust_remote_code=False, **settings
    )
    with torch.device("meta"):
        module = auto.from_config(
            config, dtype=dtype, trust_remote_code=False, **attention_of(config)
        )
    for part in module.modules():
        part._is_hf_initialized = False
        for name, buffer in part.named_buffers(recurse=False):
            part._buffers[name] = torch.empty_like(buffer, device="cpu")
    module.initialize_weights()  # computes buffers; parameters have no values yet
    return module.eval()


def attention_of(config: Any) -> dict[str, str]:
    """The attention implementation that a model needs, as an argument for transformers' loaders.

    "eager" if the scores are capped (Gemma 2, attn_logit_softcapping), because their default "sdpa"
    silently ignores the cap. Otherwise {}, for their default.
    """
    capping = getattr(config.get_text_config(), "attn_logit_softcapping", None)
    if capping is None:
        return {}
    return {"attn_implementation": "eager"}


def folder_of(module: Any, path: str | Path, *, new_head: bool = False) -> HuggingFaceFolder | None:
    """A reader of the parameters of an `empty_module` by their names; also fills its buffers.

    A tied parameter has its first name. Returns None and logs a warning with the reason if
    transformers does more than copy the files' tensors. Raises ConfigError if a tensor is missing
    or has another shape. new_head: like in `HuggingFaceFolder`.
    """
    buffers = dict(module.named_buffers()).keys() & module.state_dict().keys()
    tensors = {**dict(module.named_parameters()), **{n: module.get_buffer(n) for n in buffers}}
    shapes = {}
    for name, tensor in tensors.items():
        shapes[name] = tensor.shape
    try:
        stored, fused_names = _stored_names(module, path)
        fused = _locate_fused(module, path, {name: shapes[name] for name in fused_names})
    except _NeedsTransformers as why:
        logger.warning("model.path %s is loaded whole on every rank: %s", path, why)
        return None
    copied = {name: shape for name, shape in shapes.items() if name not in fused}
    kind = type(module).__name__
    folder = HuggingFaceFolder(
        path, copied, new_head=new_head, stored=stored, fused=fused, kind=kind
    )
    for name in buffers:
        tensors[name].copy_(folder.read(name, Box.of_shape(shapes[name])))
    return folder


class _NeedsTransformers(Exception):
    """Only transformers can load the model; the message is the reason."""


def _locate_fused(
    module: Any, path: str | Path, shapes: Mapping[str, Sequence[int]]
) -> dict[str, LocalTensor]:
    """Return where the files' tensors are in each tensor that transformers fuses; shapes: of these.

    _NeedsTransformers if it does more to one of them.
    """
    if not shapes:
        return {}

    def cut(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        try:
            return in_folder_form(module, tensors)
        except (
            RuntimeError,
            ValueError,
            IndexError,
            KeyError,
        ) as err:  # small tensors: `converted`
            raise _NeedsTransformers(f"transformers converts {next(iter(shapes))}: {err}") from err

    fused = locate_fused(shapes, HuggingFaceFolder(path, {}).shapes(), cut)
    others = sorted(shapes.keys() - fused.keys())
    if others:
        raise _NeedsTransformers(
            f"transformers computes {others[0]} from several tensors of the files"
        )
    return fused


def _stored_names(module: Any, path: str | Path) -> tuple[dict[str, str], set[str]]:
    """Return name in the module -> name in the files, and the names of tensors that are fused.

    The first are copied unchanged; transformers makes each of the others of several of the files.
    Of tied parameters, only the first name is in it. _NeedsTransformers if weights are quantized,
    or if tied parameters are two tensors in the files. ConfigError if the folder has no safetensors
    files and no torch checkpoint.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, rename_source_key

    if getattr(module.config, "quantization_config", None):
        raise _NeedsTransformers("its weights are quantized")
    is_torch = (Path(path) / METADATA).is_file()
    if not is_torch and not any(Path(path).glob("*.safetensors")):
        got = f"{path} without safetensors files"
        do = "save the model with safetensors"
        raise ConfigError.of("model", got, "weights that are no pickle", do)
    state = module.state_dict()
    changes = get_model_conversion_mapping(module)
    converters = []
    for change in changes:
        if isinstance(change, WeightConverter):
            converters.append(change)
    renamings = []
    for change in changes:
        if not isinstance(change, WeightConverter):
            renamings.append(change)
    file_name_of: dict[str, str] = {}
    fused = set[str]()
    for key in HuggingFaceFolder(path, {}).names:
        name, converted = rename_source_key(
            key, renamings, converters, module.base_model_prefix, state
        )
        if converted is not None and name in state:
            fused.add(name)
            continue
        file_name_of[name if name in state else key] = key
    aliases: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(parameter), []).append(name)
    for names in aliases.values():
        present = [name for name in names if name in file_name_of]
        if len(present) > 1 and not is_torch:  # torch saves a tied tensor under each name
            raise _NeedsTransformers(
                f"{' and '.join(present)} are tied, but two tensors in the files"
            )
        if present:
            file_name_of[names[0]] = file_name_of[present[0]]
    return file_name_of, fused


def file_names(num_files: int) -> list[str]:
    """Return the names of a model's weight files, in order, as from_pretrained expects them.

    One file is model.safetensors; several are model-00001-of-00003.safetensors, and so on.
    """
    if num_files == 1:
        return [_SINGLE]
    result = []
    for number in range(num_files):
        result.append(f"model-{number + 1:05}-of-{num_files:05}.safetensors")
    return result


def write_other_files(
    folder: Path,
    weights: Mapping[str, Mapping[str, int]],
    *,
    config: Mapping[str, Any],
    source: Path,
) -> None:
    """Write the other files of a model folder: config.json, an index, and copies from `source`.

    config: content of config.json. weights: file -> tensor -> bytes. The index is written if there
    are several files. Files of `source` other than weights and config.json (tokenizer, ...) are
    copied if that folder exists; subfolders are not.
    """
    for path in source.iterdir() if source.is_dir() else ():
        if path.is_file() and path.name != "config.json" and not path.name.endswith(_NOT_COPIED):
            shutil.copyfile(path, folder / path.name)
    (folder / "config.json").write_text(json.dumps(dict(config), indent=2, sort_keys=True) + "\n")
    if len(weights) > 1:
        total = sum(num_bytes for tensors in weights.values() for num_bytes in tensors.values())
        weight_map = {}
        for file, tensors in weights.items():
            for name in tensors:
                weight_map[name] = file
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2))


def _open(path: Path) -> Any:
    """Open a safetensors file or torch's checkpoint; ConfigError if it cannot be read."""
    if path.name == METADATA:
        return TorchCheckpoint(path.parent)
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as err:
        got = f"{path}, which does not read as safetensors ({err})"
        raise ConfigError.of("model", got, "weights", "download the file again") from err


def causal_lm_on_meta(path: str | Path) -> Any:
    """The causal LM of a folder as an `empty_module`: names and shapes, no weights."""
    import transformers

    return empty_module(transformers.AutoModelForCausalLM, path, torch.float32)


def trained_tensors_reader(path: str | Path) -> Callable[[str, Box], Tensor]:
    """Return `read(name, box)` for the tensors that a policy of this folder's model sends.

    Names are those of a weight sync: the table's, or for models without one those of transformers'
    module. If transformers converts tensors while it loads them, the model is loaded whole.
    """
    if Architecture.sizes_from_folder(path).is_dense_with_table:
        return HuggingFaceFolder(path, Architecture.from_folder(path)).read
    folder = folder_of(causal_lm_on_meta(path), path)
    if folder is not None:
        return folder.read
    import transformers

    config = transformers.AutoConfig.from_pretrained(path, local_files_only=True)
    module = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, local_files_only=True, **attention_of(config)
    )
    tensors = dict(module.named_parameters())

    def read(name: str, box: Box) -> Tensor:
        return tensors[name].detach()[box.slices()]

    return read


def with_tensors(architecture: Architecture, path: str | Path) -> Architecture:
    """Return the architecture of a model without a table with the tensors of its causal LM.

    They have the names of transformers' module; tied tensors occur once.
    """
    tensors = []
    for name, parameter in causal_lm_on_meta(path).named_parameters():
        tensors.append((name, tuple(parameter.shape)))
    return replace(architecture, tensors=tuple(tensors))


@lru_cache(maxsize=4)
def folder_form(config: str) -> Mapping[str, LocalTensor]:
    """Return the tensors of a folder that are not tensors of transformers' module, by name.

    Each is the pieces of the module's tensors that it has: an expert of those that transformers
    fuses, or a tensor with another name. config: a config.json. Empty if the two have the same
    tensors, or if transformers computes some of them, which it logs. Builds the module without its
    weights, once for each config.
    """
    module = _module_of(json.loads(config))
    if module is None:
        return {}
    tensors = {name: tensor.to("meta") for name, tensor in module.state_dict().items()}
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    stored = {}
    for name, tensor in in_folder_form(module, tensors).items():
        stored[name] = tuple(tensor.shape)
    changed = {name: shape for name, shape in shapes.items() if stored.get(name) != shape}
    if not changed:
        return {}
    try:
        form = locate_stored(changed, stored, partial(in_folder_form, module))
    except (RuntimeError, ValueError, IndexError, KeyError) as err:
        logger.warning("export has the tensors of transformers' module: %s", err)
        return {}
    num_elements = sum(map(prod, changed.values()))
    has_padding = any(table.padding for table in form.values())
    if has_padding or sum(table.size for table in form.values()) != num_elements:
        logger.warning("export has the tensors of transformers' module: not all are copies")
        return {}
    return form


def _module_of(config: Mapping[str, Any]) -> Any:
    """The transformers module of a config.json on the meta device. None: an unknown model_type."""
    import transformers

    if config.get("model_type") not in transformers.CONFIG_MAPPING:
        return None

    names = config.get("architectures") or [""]
    auto: Any = transformers.AutoModelForCausalLM
    if names[0].endswith("ForSequenceClassification"):
        auto = transformers.AutoModelForSequenceClassification
    settings = transformers.CONFIG_MAPPING[config["model_type"]].from_dict(dict(config))
    with torch.device("meta"):
        return auto.from_config(settings, trust_remote_code=False, **attention_of(settings))


def in_folder_form(module: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors of a transformers module by the names and in the shapes of its files.

    transformers fuses some tensors when it loads them (experts), and cuts them when it saves. The
    tensors need not be all of the module; those that are fused together come together.
    """
    from transformers.core_model_loading import revert_weight_conversion

    return dict(revert_weight_conversion(module, dict(tensors)))
