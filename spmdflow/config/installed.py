"""What was installed: the bundled scripts with their settings and data, found by name.

In a wheel they lie in spmdflow/algos, in a checkout in algos/ beside the package. A path that
exists in the current directory always wins over a bundled one.
"""

from __future__ import annotations

import traceback
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
_FOLDER_NAME = "algos"


def bundled_folder() -> Path:
    """The folder of the bundled scripts."""
    inside = PACKAGE / _FOLDER_NAME
    return inside if inside.is_dir() else PACKAGE.parent / _FOLDER_NAME


def bundled_scripts() -> list[str]:
    """Short names of the bundled scripts, such as ppo."""
    return sorted(path.stem for path in bundled_folder().glob("*.py"))


def find_bundled(name: str | Path, suffix: str = "") -> Path | None:
    """The bundled file or folder that `name` means, if there is one.

    With the suffix .py, `ppo`, `ppo.py` and `algos/ppo.py` all mean the script of that name.
    """
    path = Path(name)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        return None
    parts = path.parts[1:] if path.parts[0] == _FOLDER_NAME else path.parts
    found = bundled_folder().joinpath(*parts)
    if suffix and not found.suffix:
        found = found.with_suffix(suffix)
    return found if parts and found.exists() else None


def find_file(name: str | Path, suffix: str) -> Path:
    """The file of that name in the current directory, else the bundled one, else the name."""
    path = Path(name)
    return path if path.is_file() else find_bundled(path, suffix) or path


def broken_installation(err: ImportError, script: Path) -> str | None:
    """What to say if an import failed below one of spmdflow's own; None if the script's did."""
    files = [Path(frame.filename).resolve() for frame in traceback.extract_tb(err.__traceback__)]
    script = script.resolve()
    below = files[files.index(script) + 1 :] if script in files else []
    ours = [file for file in below if PACKAGE in file.parents]
    if not ours:
        return None
    missing = err.name or "it"
    if missing.split(".")[0] == PACKAGE.name:
        return (
            f"installation: {PACKAGE} is incomplete ({err}), expected every module of spmdflow; "
            f"install spmdflow again"
        )
    return (
        f"installation: {ours[-1]} cannot import what it needs ({err}), expected {missing} beside "
        f"spmdflow; install it (`spmdflow doctor` lists what is missing)"
    )
