"""Trained models pushed to a repository of the Hugging Face hub, or of another HF_ENDPOINT.

Token, endpoint and HF_HUB_OFFLINE are huggingface_hub's own. Knows only files.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from spmdflow.checkpoint.run_dir import EXPORT
from spmdflow.errors import ConfigError

_SHOWN = 300  # characters of an error of the hub


def open_repository(repository: str) -> None:
    """Make owner/name, private, if it is not there: asked before a run, not after days.

    ConfigError if the hub refuses.
    """
    _ask(repository, lambda api: api.create_repo(repository, private=True, exist_ok=True))


def push(run_dir: Path, repository: str) -> str:
    """Upload the models of RUN_DIR/export; returns the address of the last commit.

    A single one goes to the top of the repository, several into folders named as they are.
    ConfigError if there is none, or if the hub refuses.
    """
    if (run_dir / EXPORT).is_dir():
        models = sorted((run_dir / EXPORT).iterdir())
    else:
        models = []
    address = ""
    for model in models:
        folder = model.resolve()
        step = model.resolve().parents[1].name
        place = None if len(models) == 1 else model.name
        message = f"{model.name} after {step}"
        upload = partial(_upload, repository, folder, place, message)
        address = _ask(repository, upload).commit_url
    if not models:
        got = f"{run_dir} without an exported model"
        do = "set run.save_last=true, then use spmdflow.export"
        raise ConfigError.of("run.push_to_hub", got, "one in its export folder", do)
    return address


def _upload(repository: str, folder: Path, place: str | None, message: str, api: Any) -> Any:
    return api.upload_folder(
        repo_id=repository, folder_path=folder, path_in_repo=place, commit_message=message
    )


def _ask(repository: str, request: Callable[[Any], Any]) -> Any:
    """What the hub's client returns; ConfigError if it raises."""
    import huggingface_hub
    import huggingface_hub.errors

    try:
        return request(huggingface_hub.HfApi())
    except (OSError, ValueError, RuntimeError, huggingface_hub.errors.HTTPError) as err:
        text = " ".join(f"{type(err).__name__}: {err}".split())[:_SHOWN]
        expected = "a repository that HF_TOKEN may write to"
        do = (
            "see `hf auth login`, HF_ENDPOINT and HF_HUB_OFFLINE, or upload RUN_DIR/export yourself"
        )
        raise ConfigError.of("run.push_to_hub", f"{repository} ({text})", expected, do) from err
