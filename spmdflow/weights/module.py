"""transformers modules without weights, and the folders that they are read from.

The module is built on the meta device: it takes no memory, whatever its size. What it computes
for itself (rotary frequencies) is there; its parameters are read box by box, by names that
transformers gives to the tensors of the files.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

from spmdflow.blocks.box import Box
from spmdflow.weights.folder import HuggingFaceFolder

logger = logging.getLogger(__name__)


def empty_module(auto: Any, path: str | Path, dtype: torch.dtype, **settings: Any) -> Any:
    """The module of a folder, in eval mode, its parameters on the meta device.

    auto: transformers.AutoModelFor...; settings: of the configuration.
    """
    import transformers

    config = transformers.AutoConfig.from_pretrained(path, local_files_only=True, **settings)
    with torch.device("meta"):
        module = auto.from_config(config, dtype=dtype)
    for part in module.modules():
        part._is_hf_initialized = False
        for name, buffer in part.named_buffers(recurse=False):
            part._buffers[name] = torch.empty_like(buffer, device="cpu")
    module.initialize_weights()  # computes buffers; parameters have no values yet
    return module.eval()


def folder_of(module: Any, path: str | Path, *, new_head: bool = False) -> HuggingFaceFolder | None:
    """Reads the parameters of an `empty_module` by their names, a tied one by its first.

    None, and a warning with the reason, if transformers does more than copy the files' tensors.
    ConfigError if one is missing or of another shape. new_head: as `HuggingFaceFolder`.
    """
    buffers = dict(module.named_buffers()).keys() & module.state_dict().keys()
    try:
        stored = _stored_names(module, path)
    except _NotByBoxes as why:
        logger.warning("model.path %s is loaded whole on every rank: %s", path, why)
        return None
    tensors = {**dict(module.named_parameters()), **{n: module.get_buffer(n) for n in buffers}}
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    kind = type(module).__name__
    folder = HuggingFaceFolder(path, shapes, new_head=new_head, stored=stored, kind=kind)
    for name in buffers:
        tensors[name].copy_(folder.read(name, Box.of_shape(shapes[name])))
    return folder


class _NotByBoxes(Exception):
    """Why transformers must load a model by itself."""


def _stored_names(module: Any, path: str | Path) -> dict[str, str]:
    """Name in the module -> name in the files, of what transformers copies from them."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, rename_source_key

    if getattr(module.config, "quantization_config", None):
        raise _NotByBoxes("its weights are quantized")
    if not any(Path(path).glob("*.safetensors")):
        raise _NotByBoxes("it has no safetensors files")
    state, changes = module.state_dict(), get_model_conversion_mapping(module)
    converters = [change for change in changes if isinstance(change, WeightConverter)]
    renamings = [change for change in changes if not isinstance(change, WeightConverter)]
    found: dict[str, str] = {}
    for key in HuggingFaceFolder(path, {}).names:
        name, converted = rename_source_key(
            key, renamings, converters, module.base_model_prefix, state
        )
        if converted is not None and name in state:
            raise _NotByBoxes(f"transformers computes {name} from several tensors of the files")
        found[name if name in state else key] = key
    aliases: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(parameter), []).append(name)
    for names in aliases.values():
        there = [name for name in names if name in found]
        if len(there) > 1:
            raise _NotByBoxes(f"{' and '.join(there)} are tied, but two tensors in the files")
        if there:
            found[names[0]] = found[there[0]]
    return found
