"""A reader of the weights in a folder of peft's format: adapter_model.safetensors.

peft names a tensor base_model.model.<name here>. Knows no engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from spmdflow.blocks.box import Box
from spmdflow.errors import ConfigError
from spmdflow.weights.folder import check_finite
from spmdflow.weights.peft_settings import PEFT_PREFIX, PEFT_WEIGHTS
from spmdflow.weights.table import EMBEDDING

_HEAD = "lm_head.weight"


class PeftFolder:
    """The tensors of an adapter in peft's format, by the names that they have here."""

    def __init__(self, key: str, folder: str | Path) -> None:
        """key: the setting, for errors. ConfigError if the folder has no safetensors."""
        self._key = key
        self._file = Path(folder) / PEFT_WEIGHTS
        if not self._file.is_file():
            got = f"{folder} without {PEFT_WEIGHTS}"
            do = "save the adapter with safetensors, as peft does by default"
            raise ConfigError.of(key, got, "a peft folder with its weights", do)
        self._open: Any = safe_open(self._file, framework="pt")

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each tensor by its name here."""
        result = {}
        for name in self._open.keys():
            shape = self._open.get_slice(name).get_shape()
            result[name.removeprefix(PEFT_PREFIX)] = tuple(shape)
        return result

    def check(self, wanted: Mapping[str, Sequence[int]], *, is_tied: bool) -> None:
        """Raise ConfigError unless the file has exactly these tensors, in these shapes.

        is_tied: the model's head is its embedding. peft writes both, and they must be equal.
        """
        own = self.shapes()
        if is_tied and EMBEDDING in wanted:
            self._check_tied_head(own)
            del own[_HEAD]
        for name in sorted(own.keys() | wanted.keys()):
            shape = None if name not in wanted else tuple(wanted[name])
            if own.get(name) != shape:
                has = "no tensor" if name not in own else f"shape {own[name]}"
                needs = "no such tensor" if shape is None else f"shape {shape}"
                do = "give the model that the adapter was trained on as model.path"
                raise ConfigError.of(
                    self._key, f"{has} for {name} in {self._file}", f"{needs}, by the model", do
                )

    def _check_tied_head(self, own: Mapping[str, object]) -> None:
        """Raise ConfigError unless the file has a head that equals its embedding."""
        names = [EMBEDDING, _HEAD]
        tensors = [self._open.get_tensor(PEFT_PREFIX + name) for name in names if name in own]
        if len(tensors) < len(names) or not torch.equal(*tensors):
            got = f"{self._file} with an embedding that is not the head's weight"
            do = "train the adapter with ensure_weight_tying=True in peft"
            raise ConfigError.of(self._key, got, "one weight, as in the model", do)

    def read(self, name: str, box: Box) -> Tensor:
        """Return a box of a tensor, on the host, in the precision of the file.

        ConfigError if a value is nan or infinite.
        """
        values: Tensor = self._open.get_slice(PEFT_PREFIX + name)[box.slices()]
        check_finite(values, name, self._file)
        return values
