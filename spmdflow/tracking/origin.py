"""Where the numbers of a run come from: versions of packages and the state of the script's git."""

from __future__ import annotations

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_PACKAGES = ("spmdflow", "torch", "numpy", "tensordict", "transformers", "safetensors")
_GIT = ("git", "--no-optional-locks", "status", "--porcelain=v2", "--branch")
_SECONDS = 10.0
"""Limit for git, whose files may be on a slow disk."""


def versions() -> dict[str, str]:
    """Of Python, and of the packages that make a run's numbers, as far as they are installed."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def git_state(folder: Path) -> dict[str, str | bool]:
    """commit, and dirty: whether a tracked file differs from it; {} outside of a repository,
    without git or if git takes too long."""
    command = [*_GIT, "--untracked-files=no"]
    try:
        told = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return {}
    lines = told.stdout.splitlines()
    commits = []
    for line in lines:
        if line.startswith("# branch.oid "):
            commits.append(line.split()[-1])
    dirty = any(not line.startswith("#") for line in lines)
    if commits:
        return {"commit": commits[0], "dirty": dirty}
    return {}
