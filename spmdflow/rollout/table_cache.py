"""A cache on disk of the tables of weights that a loader gave.

To derive one, all weights are numbered and loaded, and the folder is loaded again (`vllm_derived`).
A cached table is used only for the same config.json, sizes, rank, precision, versions and
parameters of the engine, which are in its name. The checksums of the first weight sync confirm it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spmdflow.blocks.box import Box
from spmdflow.weights.table import LocalTensor, Piece, ShardTable

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CachedTable:
    """What a loader does with the trainer's tensors on one rank."""

    own: ShardTable
    """The engine's parameters that are trained."""
    constants: frozenset[str]
    """Those that are not."""


def table_path(facts: Mapping[str, Any]) -> Path:
    """Return the file of a table, in the folder tables of $SPMDFLOW_CACHE.

    Without that variable it is spmdflow in $XDG_CACHE_HOME, or in ~/.cache. facts: everything that
    a table depends on, as JSON data.
    """
    cache = os.environ.get("SPMDFLOW_CACHE")
    if not cache:
        cache = str(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "spmdflow")
    name = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    return Path(cache) / "tables" / f"{name}.json"


def read_table(path: Path) -> CachedTable | None:
    """Return a cached table; None if there is none, or if the file is damaged."""
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        own = {name: from_lists(*parts) for name, parts in saved["own"].items()}
        return CachedTable(own, frozenset(saved["constants"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AssertionError) as err:
        logger.warning("%s cannot be used (%s): the weights are numbered again", path, err)
        return None


def write_table(path: Path, table: CachedTable) -> None:
    """Write a table, atomically. If that fails, the next start derives it again; logs why."""
    own = {name: as_lists(local) for name, local in table.own.items()}
    text = json.dumps({"own": own, "constants": sorted(table.constants)})
    unfinished = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(path)
    except OSError as err:
        logger.info("the table of weights is not cached: %s", err)


def as_lists(local: LocalTensor) -> list[Any]:
    """A local tensor in a form that JSON has."""
    pieces = [(p.name, p.box.bounds, p.local.bounds, p.axes) for p in local.pieces]
    return [local.shape, pieces]


def from_lists(shape: list[int], pieces: list[Any]) -> LocalTensor:
    """The inverse of `as_lists`."""
    result = []
    for name, box, local, axes in pieces:
        result.append(Piece(name, _box(box), _box(local), tuple(axes)))
    return LocalTensor(tuple(shape), tuple(result))


def _box(bounds: list[list[int]]) -> Box:
    return Box(tuple((start, stop) for start, stop in bounds))
