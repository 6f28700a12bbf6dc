"""Calls of methods with `extends=True`: which columns of their input the result keeps.

If a method optionally reads all columns that it writes, it continues from them, as
`generate_sequences` continues a response. Columns that were computed from the shorter response
would not match the longer one, so the result omits them.
"""

from __future__ import annotations

from spmdflow.controller.batch import Batch
from spmdflow.controller.result import Ref, SourceRows
from spmdflow.errors import ColumnError
from spmdflow.worker_api.register import MethodSpec


def check_extended(label: str, spec: MethodSpec, batch: Batch) -> None:
    """Raise ColumnError if a method with extends=True cannot be called on this batch.

    The batch may have none of the columns that the method replaces. If it has some, the method must
    be one that continues from them (it reads all columns that it writes as `optional`), and the
    batch must have all columns that it writes.
    """
    consumed = []
    for name in batch.columns:
        if name in _consumed_columns(spec):
            consumed.append(name)
    missing = []
    for name in spec.writes:
        if name not in batch.columns:
            missing.append(name)
    if consumed and not _continues(spec):
        raise ColumnError(
            f"{label}: the batch already has {consumed[0]!r}, expected a batch without it, because "
            f"the result keeps the batch's columns; drop it first"
        )
    if consumed and missing:
        raise ColumnError(
            f"{label}: the batch has {consumed}, expected {missing} too, to continue from; keep "
            f"these columns together, or drop({consumed[0]!r}) to start again"
        )


def carried_columns(spec: MethodSpec, batch: Batch) -> dict[str, Ref]:
    """Return the columns of the batch that the result keeps, by name.

    Omits columns that the method replaces or uses up. Also omits columns that were computed from
    the old version of a written column (by lineage), unless the method reads them.
    """
    old = set()
    for name in spec.writes:
        if name in batch.columns:
            old.add(batch.column(name).result.number)

    def is_valid(name: str) -> bool:
        result = batch.column(name).result
        is_older = isinstance(result, SourceRows) or not old & result.lineage
        return name not in _consumed_columns(spec) and (is_older or name in spec.reads)

    result = {}
    for name in batch.columns:
        if is_valid(name):
            result[name] = batch.column(name)
    return result


def _continues(spec: MethodSpec) -> bool:
    """Whether the method continues from the columns that it writes."""
    return set(spec.writes) <= set(spec.optional)


def _consumed_columns(spec: MethodSpec) -> set[str]:
    """Columns that the method replaces or removes."""
    return {*spec.writes, *(spec.optional if _continues(spec) else ())}
