"""The index of a model folder: which file has which tensor. Reads JSON only."""

from __future__ import annotations

from pathlib import Path

from spmdflow.errors import ConfigError
from spmdflow.weights.architecture import read_json

INDEX = "model.safetensors.index.json"


def read_index(folder: Path, *, key: str = "model.path") -> dict[str, Path] | None:
    """Return tensor name -> file from model.safetensors.index.json; None if there is no such file.

    ConfigError about the setting `key` if the index is not a JSON object, if its weight_map is
    missing or empty, or if that names a file that is not directly in the folder or does not exist.
    """
    file = folder / INDEX
    if not file.is_file():
        return None
    again = "download the folder again, or save the model again"
    weight_map = read_json(file, key=key).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        expected = "weight_map: the file of each tensor"
        raise ConfigError.of(key, f"{file} without weight_map", expected, again)
    for name in dict.fromkeys(weight_map.values()):
        if not isinstance(name, str) or Path(name).name != name:
            got = f"{file}, which names {name!r} as a file of weights"
            raise ConfigError.of(key, got, "files next to it", again)
        if not (folder / name).is_file():
            got = f"{folder} without {name}, which {INDEX} names"
            raise ConfigError.of(key, got, "every file of the index", again)
    index = {}
    for tensor, name in weight_map.items():
        index[tensor] = folder / name
    return index
