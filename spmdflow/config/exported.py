"""Models inside checkpoints: a run's folder, a step's or `latest` as a Hugging Face folder.

    RUN_DIR, RUN_DIR/checkpoints, RUN_DIR/checkpoints/latest      the newest sealed step
    RUN_DIR/checkpoints/step-N                                    that step
        -> RUN_DIR/checkpoints/step-N/<role>/hugging_face

Reads names, sizes and one JSON file; knows nothing else of what a checkpoint holds.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from spmdflow.errors import ConfigError

_MANIFEST, _EXPORT, _LATEST = "manifest.json", "hugging_face", "latest"
_STEP = re.compile(r"step-\d+(\.\d+)?")


def exported_folder(key: str, path: str) -> str:
    """The Hugging Face folder that `path` means; any other path as it is.

    key: the setting, such as "actor.model.path", whose role chooses among several models of a
    checkpoint. ConfigError for a checkpoint that is unsealed, damaged or has no such model.
    """
    step = _step_folder(key, Path(path))
    if step is None:
        return path
    sizes = _sizes(key, step)
    roles = sorted({name.split("/")[0] for name in sizes if f"/{_EXPORT}/" in name})
    wanted = [role for role in (key.split(".")[0], "actor") if role in roles]
    if not wanted and len(roles) != 1:
        raise ConfigError(
            f"{key}: got {step} with {'models of ' + ', '.join(roles) if roles else 'no model'}, "
            f"expected one model as a Hugging Face folder; name its folder, such as "
            f"{step / (roles[0] if roles else 'actor') / _EXPORT}"
        )
    role = wanted[0] if wanted else roles[0]
    for name, size in sizes.items():
        if name.startswith(f"{role}/{_EXPORT}/"):
            _check_file(key, step / name, size)
    return str(step / role / _EXPORT)


def _step_folder(key: str, path: Path) -> Path | None:
    """The step's folder; None if the path is not of a checkpoint."""
    if _STEP.fullmatch(path.name) and not (path / "config.json").exists():
        return path
    places = (path, path / _LATEST, path / "checkpoints" / _LATEST)
    latest = next((p for p in places if p.name == _LATEST and p.is_file()), None)
    if latest is None:
        return None
    name = latest.read_text(encoding="utf-8", errors="replace").strip()
    if not _STEP.fullmatch(name) or not (latest.parent / name).is_dir():
        raise ConfigError(
            f"{key}: got {latest}, which names {name!r}, expected a checkpoint beside it; write "
            f"the name of one of {_steps(latest.parent)} into it, or give the step's folder"
        )
    return latest.parent / name


def _sizes(key: str, step: Path) -> dict[str, int]:
    """Bytes of every file of a sealed checkpoint, by name."""
    manifest = step / _MANIFEST
    if not manifest.is_file():
        got = "no such folder" if not step.is_dir() else f"a folder without {_MANIFEST}"
        raise ConfigError(
            f"{key}: got {step}, {got}, expected a sealed checkpoint; choose one of "
            f"{_steps(step.parent)}"
        )
    try:
        files = json.loads(manifest.read_bytes())["files"]
        return {str(name): int(facts["num_bytes"]) for name, facts in files.items()}
    except (ValueError, LookupError, TypeError, AttributeError) as err:
        raise ConfigError(
            f"{key}: got {manifest}, which does not read as a manifest ({type(err).__name__}), "
            f"expected the file as it was sealed; restore it, or choose another of "
            f"{_steps(step.parent)}"
        ) from err


def _check_file(key: str, file: Path, size: int) -> None:
    got = file.stat().st_size if file.is_file() else None
    if got != size:
        what = "which is missing" if got is None else f"which has {got} bytes"
        raise ConfigError(
            f"{key}: got {file}, {what}, expected the {size} bytes that were sealed; restore the "
            f"checkpoint, or choose another step"
        )


def _steps(folder: Path) -> str:
    """Names of the sealed checkpoints of a folder."""
    found = sorted(path.parent.name for path in folder.glob(f"step-*/{_MANIFEST}"))
    return ", ".join(found) or f"none, as {folder} has no sealed checkpoint"
