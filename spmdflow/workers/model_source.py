"""`ModelSource`: a model folder that ranks read box by box, and that can be written again.

For engines that build their own modules: no transformers, and no rank reads more than its share.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spmdflow.config.schema import ModelConfig
from spmdflow.weights.architecture import Architecture, Head, read_config
from spmdflow.weights.folder import HuggingFaceFolder, write_folder
from spmdflow.weights.move import Read

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class ModelSource:
    """What an engine needs of a model: its architecture, and a reader of its weights."""

    architecture: Architecture
    dtype: torch.dtype
    """Compute precision."""
    read: Read
    config: Mapping[str, Any]
    """config.json of an export."""
    source: Path
    """The folder it came from; its tokenizer files go along with an export."""

    def export(self, folder: Path, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Write a folder that from_pretrained can load."""
        write_folder(folder, tensors, config=self.config, source=self.source)


def open_model(cfg: ModelConfig, *, head: str) -> ModelSource:
    """The folder cfg.path; ConfigError if it is incomplete or no engine here can compute it.

    head: causal_lm, scalar (a trained one-label head) or critic (a zero head if there is none).
    """
    path = Path(cfg.path)
    kind: Head = "causal_lm" if head == "causal_lm" else "scalar"
    config = read_config(path)
    architecture = Architecture.from_config(config, head=kind)
    folder = HuggingFaceFolder(path, architecture, new_head=head == "critic")
    return ModelSource(architecture, DTYPES[cfg.dtype], folder.read, _exported(config, kind), path)


def _exported(config: dict[str, Any], head: Head) -> dict[str, Any]:
    """config.json of a folder with float32 weights and this head."""
    config = {key: value for key, value in config.items() if key != "torch_dtype"}
    config["dtype"] = "float32"
    if head == "scalar":
        names = config.get("architectures") or [""]
        config["architectures"] = [
            name.replace("ForCausalLM", "ForSequenceClassification") for name in names
        ]
        config |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    return config
