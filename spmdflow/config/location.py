"""What paths of models, tokenizers and data mean: files, folders, checkpoints, names on the hub.

    a file or folder that is there          itself
    a RUN_DIR or one of its checkpoints     the model in it (exported.py)
    owner/name[@revision]                   a folder of the hub's cache (hub.py)
    owner/name:config/split[@revision]      the same of a data set (hub_data.py)

After `resolve_paths` no name is left. A run that resumes takes the revisions that it began with:
its config.yaml names them, as `to_yaml` writes folders of the cache as names with their commit.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from spmdflow.config.data_source import split_place, with_places
from spmdflow.config.exported import exported_folder
from spmdflow.config.hub import (
    MODEL,
    SIZES,
    TOKENIZER,
    HubName,
    hub_folder,
    hub_name_of,
    hub_name_of_folder,
)
from spmdflow.config.hub_data import data_set_folder
from spmdflow.config.leaf import parts_of
from spmdflow.config.schema import DataConfig, ModelConfig, RunConfig
from spmdflow.errors import ConfigError


def resolve_paths(cfg: Any, *, download: bool) -> None:
    """Make every model, tokenizer and data set of a settings object a folder.

    download: whether a name that the hub's cache lacks may be downloaded (HF_HUB_OFFLINE
    forbids it); if not, a model's config.json is enough and data may be missing. ConfigError
    for a name or a checkpoint that cannot be had; a path that is not there is left to the checks.
    """
    files = MODEL if download else SIZES
    models = [(f"{key}.path", part, "path", files) for key, part in parts_of(cfg, ModelConfig)]
    data = list(parts_of(cfg, DataConfig))
    tokenizers = [
        (f"{key}.tokenizer_path", part, "tokenizer_path", TOKENIZER) for key, part in data
    ]
    run = next((part for _, part in parts_of(cfg, RunConfig)), RunConfig())
    for key, part, field, wanted in [*models, *tokenizers]:  # a model's folder has its tokenizer
        path = exported_folder(key, getattr(part, field))
        name = hub_name_of(path)
        if name is not None:
            name = _as_before(key, name, run)
            limit = run.start_seconds
            path = str(hub_folder(key, name, wanted, download=download, wait_seconds=limit))
        setattr(part, field, path)
    for key, part in data:
        for field in ("train_path", "eval_path"):
            if getattr(part, field) is not None:
                found = _located_data(f"{key}.{field}", getattr(part, field), run, download)
                setattr(part, field, found)


def run_dir_of(run: RunConfig) -> Path:
    """RUN_DIR: run.dir, else runs/<run.name>."""
    return Path(run.dir or Path("runs") / run.name)


def named(value: Any) -> Any:
    """Settings as plain data with folders of the hub's cache as names with their commit."""
    if isinstance(value, dict):
        return {key: named(part) for key, part in value.items()}
    return (
        with_places(value, _named) if isinstance(value, str) and "/snapshots/" in value else value
    )


def _named(place: str) -> str:
    path, split = split_place(place)
    name = hub_name_of_folder(path)
    return place if name is None else f"{name.repo}{split}@{name.revision}"


def _located_data(key: str, setting: Any, run: RunConfig, download: bool) -> Any:
    def change(place: str) -> str:
        path, split = split_place(place)
        split, _, revision = split.partition("@")
        name = hub_name_of(f"{path}@{revision}" if revision else path, "dataset")
        if name is None or not split:
            return place
        config = split[1:].rpartition("/")[0]
        limits: dict[str, Any] = {"download": download, "wait_seconds": run.start_seconds}
        try:
            folder = data_set_folder(key, _as_before(key, name, run), config, **limits)
        except ConfigError:
            if download:
                raise
            return place  # a plan says what it takes instead
        return f"{folder}{split}"

    return with_places(setting, change)


def _as_before(key: str, name: HubName, run: RunConfig) -> HubName:
    """The revision with which the run that is resumed began, unless another one is asked for."""
    file = run_dir_of(run) / "config.yaml"
    if name.revision is not None or not file.is_file():
        return name
    tree: Any = yaml.safe_load(file.read_text(encoding="utf-8"))
    for part in key.split("."):
        tree = tree.get(part) if isinstance(tree, dict) else None
    said = re.search(rf"\b{re.escape(name.repo)}(?::[^@()]*)?@([0-9a-f]{{40}})", str(tree))
    return HubName(name.repo, said[1], name.kind) if said else name
