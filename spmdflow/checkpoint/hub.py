"""Pushes trained models to a repository of the Hugging Face hub, or of another HF_ENDPOINT.

huggingface_hub reads the token, the endpoint and HF_HUB_OFFLINE. Knows only files.
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
    """Create owner/name as a private repository if it does not exist.

    Called before the run, so that a mistake does not show only after days of training. ConfigError
    if the hub rejects the request.
    """
    _request(repository, lambda api: api.create_repo(repository, private=True, exist_ok=True))


def push(run_dir: Path, repository: str) -> str:
    """Upload the models of RUN_DIR/export; return the address of the last commit.

    A single model goes to the top of the repository, several go into folders of their names, one
    commit each. ConfigError if there is no model, or if the hub rejects an upload; commits before
    it stay.
    """
    if (run_dir / EXPORT).is_dir():
        models = sorted((run_dir / EXPORT).iterdir())
    else:
        models = []
    address = ""
    for model in models:
        folder = model.resolve()
        step = model.resolve().parents[1].name
        path_in_repo = None if len(models) == 1 else model.name
        message = f"{model.name} after {step}"
        upload = partial(_upload, repository, folder, path_in_repo, message)
        address = _request(repository, upload).commit_url
    if not models:
        got = f"{run_dir} without an exported model"
        do = "set run.save_last=true, then use spmdflow.export"
        raise ConfigError.of("run.push_to_hub", got, "one in its export folder", do)
    return address


def _upload(repository: str, folder: Path, path_in_repo: str | None, message: str, api: Any) -> Any:
    """The hub's description of the commit that uploads a folder."""
    return api.upload_folder(
        repo_id=repository, folder_path=folder, path_in_repo=path_in_repo, commit_message=message
    )


def _request(repository: str, request: Callable[[Any], Any]) -> Any:
    """Return request(api), where api is huggingface_hub's client.

    ConfigError for any error of the hub, the network or the disk, with the first 300 characters of
    its text.
    """
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
