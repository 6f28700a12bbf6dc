"""Trained models pushed to a repository of the Hugging Face hub (or of HF_ENDPOINT).

Tokens, endpoint and HF_HUB_OFFLINE are huggingface_hub's own. Knows only files.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from spmdflow.checkpoint.run_dir import EXPORT
from spmdflow.errors import ConfigError

_SHOWN = 300  # characters of an error of the hub


def open_repository(repository: str) -> None:
    """Make owner/name, private, if it is not there: before a run, so that it can be pushed to.

    ConfigError if the hub refuses.
    """
    with _hub_errors(f"the hub's refusal to open {repository}"):
        from huggingface_hub import HfApi

        HfApi().create_repo(repository, private=True, exist_ok=True)


def push(run_dir: Path, repository: str, *, step: int) -> str:
    """Upload the models that a run exports; returns the address of the commit.

    A single one goes to the top of the repository, several into folders named as their roles.
    ConfigError if the hub refuses.
    """
    roles = sorted((run_dir / EXPORT).iterdir())
    for role in roles:
        with _hub_errors(f"{role}, which the hub does not take as {repository}"):
            from huggingface_hub import HfApi

            made = HfApi().upload_folder(
                repo_id=repository,
                folder_path=role.resolve(),
                path_in_repo=None if len(roles) == 1 else role.name,
                commit_message=f"{role.name} after step {step}",
            )
    return made.commit_url


@contextmanager
def _hub_errors(got: str) -> Iterator[None]:
    """Turn what the hub's client raises into a ConfigError."""
    try:
        yield
    except Exception as err:  # of the client's HTTP library, whichever it is
        text = " ".join(str(err).split())[:_SHOWN]
        expected = "a repository that HF_TOKEN may write to"
        do = "see hf auth login, HF_ENDPOINT and HF_HUB_OFFLINE, or upload RUN_DIR/export by hand"
        raise ConfigError.of("run.push_to_hub", f"{got} ({text})", expected, do) from err
