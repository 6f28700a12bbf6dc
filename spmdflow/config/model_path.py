"""What the paths of models and tokenizers mean: folders, checkpoints and names on the hub.

    a folder that is there                  itself
    a RUN_DIR or one of its checkpoints     the model in it (exported.py)
    owner/name[@revision]                   a folder of the hub's cache (hub.py)

After `resolve_models` every path is a folder. A run that resumes takes the revision that it began
with: its config.yaml names it, as `to_yaml` writes folders of the cache as owner/name@commit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from spmdflow.config.exported import exported_folder
from spmdflow.config.hub import (
    MODEL,
    SIZES,
    TOKENIZER,
    HubName,
    Wanted,
    hub_folder,
    hub_name_of,
    hub_name_of_folder,
)
from spmdflow.config.leaf import parts_of
from spmdflow.config.schema import DataConfig, ModelConfig, RunConfig


def resolve_models(cfg: Any, *, download: bool) -> None:
    """Make every model path and tokenizer path of a settings object a folder.

    download: whether a name that the hub's cache lacks may be downloaded (HF_HUB_OFFLINE
    forbids it); if not, a model's config.json is enough. ConfigError for a name or a checkpoint
    that cannot be had; a path that is no folder is left to the checks.
    """
    files = MODEL if download else SIZES
    models = [(f"{key}.path", part, "path", files) for key, part in parts_of(cfg, ModelConfig)]
    data = parts_of(cfg, DataConfig)
    tokenizers = [
        (f"{key}.tokenizer_path", part, "tokenizer_path", TOKENIZER) for key, part in data
    ]
    run = next((part for _, part in parts_of(cfg, RunConfig)), RunConfig())
    for key, part, field, wanted in [*models, *tokenizers]:  # a model's folder has its tokenizer
        path = exported_folder(key, getattr(part, field))
        name = hub_name_of(path)
        if name is not None:
            path = _folder(key, name, wanted, run, download=download)
        setattr(part, field, path)


def run_dir_of(run: RunConfig) -> Path:
    """RUN_DIR: run.dir, else runs/<run.name>."""
    return Path(run.dir or Path("runs") / run.name)


def named(value: Any) -> Any:
    """Settings as plain data with folders of the hub's cache as names with their commit."""
    if isinstance(value, dict):
        return {key: named(part) for key, part in value.items()}
    name = hub_name_of_folder(value) if isinstance(value, str) else None
    return value if name is None else str(name)


def _folder(key: str, name: HubName, wanted: Wanted, run: RunConfig, *, download: bool) -> str:
    name = _of_earlier_run(key, name, run) or name
    limit = run.start_seconds
    return str(hub_folder(key, name, wanted, download=download, wait_seconds=limit))


def _of_earlier_run(key: str, name: HubName, run: RunConfig) -> HubName | None:
    """The revision with which the run that is resumed began; none if another one is asked for."""
    file = run_dir_of(run) / "config.yaml"
    if name.revision is not None or not file.is_file():
        return None
    tree: Any = yaml.safe_load(file.read_text(encoding="utf-8"))
    for part in key.split("."):
        tree = tree.get(part) if isinstance(tree, dict) else None
    earlier = hub_name_of(tree) if isinstance(tree, str) else None
    return earlier if earlier is not None and earlier.repo == name.repo else None
