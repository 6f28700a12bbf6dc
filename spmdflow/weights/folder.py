"""Hugging Face folders: boxes read straight from safetensors files, and whole folders written.

Reading maps the files: a rank touches only the bytes of its own boxes. Knows no engine.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from spmdflow.blocks.box import Box
from spmdflow.errors import ConfigError
from spmdflow.weights.architecture import Architecture
from spmdflow.weights.table import shapes_by_name

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_MAX_FILE_BYTES = 4 << 30
_NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".index.json")


class HuggingFaceFolder:
    """The tensors of a folder, read box by box. Every rank may read at the same time."""

    bytes_read = 0
    """Of the boxes that were read, in the precision of the files."""

    def __init__(
        self,
        path: str | Path,
        wanted: Architecture | Mapping[str, Sequence[int]],
        *,
        new_head: bool = False,
        stored: Mapping[str, str] | None = None,
        kind: str = "model",
    ) -> None:
        """ConfigError unless the folder has each tensor in its shape.

        wanted: the architecture, or a shape by name. new_head: a scalar head that the folder lacks
        reads as zeros (a fresh critic). stored: the name in the files of what has another there.
        kind: of the model, for errors.
        """
        self._path, self._files, self._stored = Path(path), dict[Path, Any](), stored or {}
        self._zeros = {"score.weight"} - self.names if new_head else set[str]()
        if isinstance(wanted, Architecture):
            kind = f"{wanted.family} model with a {wanted.head} head"
            wanted = shapes_by_name(wanted)
        self._check(wanted, kind)

    def read(self, name: str, box: Box) -> Tensor:
        """The values of a box on the host, in the precision of the file."""
        if name in self._zeros:
            return self._slice(min(self.names))[:1].new_zeros(box.shape)
        values: Tensor = self._slice(name)[box.slices()]
        self.bytes_read += values.nbytes
        return values

    @property
    def names(self) -> Set[str]:
        """Of all tensors in the files."""
        return self._file_of.keys()

    def _slice(self, name: str) -> Any:
        name = self._stored.get(name, name)
        path = self._file_of[name]
        if path not in self._files:
            self._files[path] = _open(path)
        return self._files[path].get_slice(name)

    def _check(self, wanted: Mapping[str, Sequence[int]], kind: str) -> None:
        wanted = {name: shape for name, shape in wanted.items() if name not in self._zeros}
        missing = [name for name in wanted if self._stored.get(name, name) not in self.names]
        if missing:
            got = f"{self._path} without {', '.join(missing[:3])} ({len(missing)} tensors missing)"
            do = "choose the folder of a complete model of this kind"
            raise ConfigError.of("model", got, f"every tensor of a {kind}", do)
        for name, expected in wanted.items():
            shape = tuple(self._slice(name).get_shape())
            if shape != tuple(expected):
                got = f"{name} of shape {shape} in {self._path}"
                do = "the two belong to different models: download the folder again"
                raise ConfigError.of("model", got, f"{tuple(expected)} by config.json", do)

    @cached_property
    def _file_of(self) -> Mapping[str, Path]:
        """Tensor name -> file."""
        index, single = self._path / _INDEX, self._path / _SINGLE
        if index.is_file():
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            return {name: self._path / file for name, file in weight_map.items()}
        if not single.is_file():
            got, do = f"{self._path} with neither {_SINGLE} nor {_INDEX}", "save with safetensors"
            raise ConfigError.of("model", got, "a Hugging Face folder", do)
        return dict.fromkeys(_open(single).keys(), single)


def folder_tensors(path: str | Path) -> Iterator[tuple[str, Tensor]]:
    """(name, whole tensor) of every file of a folder, one at a time, on the host.

    ConfigError for a file that does not read as safetensors.
    """
    for file in sorted(Path(path).glob("*.safetensors")):
        opened = _open(file)
        for name in opened.keys():
            yield name, opened.get_tensor(name)


def write_folder(
    folder: Path,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    config: Mapping[str, Any],
    source: Path,
    max_file_bytes: int = _MAX_FILE_BYTES,
) -> None:
    """Write config.json, weights (one tensor at a time on the host, files of at most
    max_file_bytes) and source's other files (tokenizer, generation settings) to folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        if path.is_file() and path.name != "config.json" and not path.name.endswith(_NOT_COPIED):
            shutil.copyfile(path, folder / path.name)
    (folder / "config.json").write_text(json.dumps(dict(config), indent=2, sort_keys=True) + "\n")
    part: dict[str, Tensor] = {}
    files: list[list[str]] = []
    size = total = 0
    for name, tensor in tensors:
        if part and size + tensor.nbytes > max_file_bytes:
            files.append(_write_part(folder, len(files), part))
            part, size = {}, 0
        part[name] = tensor.detach().cpu().contiguous()
        size, total = size + tensor.nbytes, total + tensor.nbytes
    files.append(_write_part(folder, len(files), part))
    _name_parts(folder, files, total)


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as err:
        got = f"{path}, which does not read as safetensors ({err})"
        raise ConfigError.of("model", got, "weights", "download the file again") from err


def _write_part(folder: Path, number: int, tensors: dict[str, Tensor]) -> list[str]:
    save_file(tensors, folder / f"part-{number}.safetensors", metadata={"format": "pt"})
    return list(tensors)


def _name_parts(folder: Path, files: list[list[str]], total_bytes: int) -> None:
    """Give the parts the names from_pretrained looks for; the count is known only now."""
    if len(files) == 1:
        (folder / "part-0.safetensors").rename(folder / _SINGLE)
        return
    weight_map: dict[str, str] = {}
    for number, names in enumerate(files):
        name = f"model-{number + 1:05}-of-{len(files):05}.safetensors"
        (folder / f"part-{number}.safetensors").rename(folder / name)
        weight_map |= dict.fromkeys(names, name)
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (folder / _INDEX).write_text(json.dumps(index, indent=2))
