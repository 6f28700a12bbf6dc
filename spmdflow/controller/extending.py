"""Calls of methods with `extends=True`: what the answer carries along of the batch that was given.

A method that may be given what it writes (all of it is among `optional`) goes on from there, as
`generate_sequences` does from a response. Columns that were made from the shorter response would
be wrong beside the longer one: they are left out.
"""

from __future__ import annotations

from spmdflow.controller.batch import Batch
from spmdflow.controller.result import ColumnRef, RowResult
from spmdflow.errors import ColumnError
from spmdflow.worker_api.register import MethodSpec


def check_extended(label: str, spec: MethodSpec, batch: Batch) -> None:
    """ColumnError if the batch has columns that the method writes and cannot go on from."""
    found = []
    for name in batch.columns:
        if name in _consumed_columns(spec):
            found.append(name)
    missing = []
    for name in spec.writes:
        if name not in batch.columns:
            missing.append(name)
    if found and not _goes_on(spec):
        raise ColumnError(
            f"{label}: the batch has {found[0]!r} already, expected a batch without it, as the "
            f"answer carries the batch's columns along; drop it first"
        )
    if found and missing:
        raise ColumnError(
            f"{label}: the batch has {found}, expected {missing} too, to go on from; keep these "
            f"columns together, or drop({found[0]!r}) to start anew"
        )


def carried_columns(spec: MethodSpec, batch: Batch) -> dict[str, ColumnRef]:
    """Columns of the batch that stay beside those that the method writes."""
    old = set()
    for name in spec.writes:
        if name in batch.columns:
            old.add(batch.column(name).result.number)

    def stays(name: str) -> bool:
        result = batch.column(name).result
        is_older = not isinstance(result, RowResult) or not old & result.lineage
        return name not in _consumed_columns(spec) and (is_older or name in spec.reads)

    result = {}
    for name in batch.columns:
        if stays(name):
            result[name] = batch.column(name)
    return result


def _goes_on(spec: MethodSpec) -> bool:
    return set(spec.writes) <= set(spec.optional)


def _consumed_columns(spec: MethodSpec) -> set[str]:
    """Columns that the method replaces or uses up."""
    return {*spec.writes, *(spec.optional if _goes_on(spec) else ())}
