"""Data sets by name: `openai/gsm8k:main/train[@revision]` -> a folder of the hub's cache.

The README.md of a data set names its configs and their files; only those of the config that is
asked for are downloaded. Reads names and that one file; knows no rows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from spmdflow.config.hub import HubName, Wanted, hub_folder
from spmdflow.errors import ConfigError

_DATA = "|".join(f"*.{ending}" for ending in ("parquet", "json*", "csv", "tsv", "txt", "arrow"))
_README = Wanted((), ("README.md",))
_FRONT = re.compile(r"---\n(.*?)\n---", re.DOTALL)


def data_set_folder(
    key: str, name: HubName, config: str, *, download: bool, wait_seconds: float
) -> Path:
    """The folder with the files of a config ("": the default one); ConfigError as `hub_folder`."""
    limits: dict[str, Any] = {"download": download, "wait_seconds": wait_seconds}
    folder = hub_folder(key, name, _README, **limits)
    files = _files_of(key, name, config, folder / _README.more[0])
    name = replace(name, revision=folder.name)  # both parts of one commit
    return hub_folder(key, name, Wanted(files, _README.more), **limits)


def _files_of(key: str, name: HubName, config: str, readme: Path) -> tuple[str, ...]:
    """Patterns of the files of a config; of any data file if the README names none."""
    entries = _configs(readme)
    if not entries:
        return (_DATA,)
    wanted = config or next((n for n, entry in entries.items() if entry.get("default")), "default")
    entry = entries.get(wanted) or (None if config else next(iter(entries.values())))
    if entry is None:
        raise ConfigError(
            f"{key}: got the config {config!r} of {name.repo}, expected one of "
            f"{', '.join(entries)}; write {name.repo}:{next(iter(entries))}/train"
        )
    patterns = _paths(entry.get("data_files", ()))
    return patterns or (f"{entry['data_dir']}/*" if entry.get("data_dir") else _DATA,)


def _configs(readme: Path) -> Mapping[str, Mapping[str, Any]]:
    """The README's configs by name."""
    front = _FRONT.match(readme.read_text(encoding="utf-8")) if readme.is_file() else None
    try:
        facts = yaml.safe_load(front[1]) if front else None
    except yaml.YAMLError:
        facts = None  # the library that reads the rows says what is wrong
    entries = facts.get("configs", ()) if isinstance(facts, dict) else ()
    return {str(entry.get("config_name", "default")): entry for entry in entries}


def _paths(files: Any) -> tuple[str, ...]:
    """Paths in any of the forms of data_files: text, lists, {split, path}, {split: path}."""
    if isinstance(files, str):
        return (files,)
    if isinstance(files, dict):
        return _paths(files["path"] if "path" in files else list(files.values()))
    return tuple(dict.fromkeys(path for part in files for path in _paths(part)))
