"""`@row_maths`: the mark of a function that `batch.map` may run where the rows live.

Like `@register` it only stores facts; nothing wraps the function. The executor calls it as
`fn(batch, reduce=..., report=..., **arguments)`: `reduce` sums a tensor over the pool's ranks
(float64; ranks without rows take part with zeros), `report` takes metrics. Every rank must call
`reduce` equally often. Functions are found by name on every rank, so they are module-level. With
`groups=True` the call also has groups=..., a `RowGroups` of rows that share a prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from spmdflow.errors import ProtocolError

F = TypeVar("F", bound=Callable)
_ATTRIBUTE = "_spmdflow_row_maths"


@dataclass(frozen=True)
class RowMathsSpec:
    """Facts of one row-maths function."""

    module: str
    """Module that defines it."""
    name: str
    """Its name in that module (dotted for a static method of a class)."""
    reads: tuple[str, ...]
    """Columns that must be there."""
    optional: tuple[str, ...]
    """Columns that are handed over if the batch has them."""
    writes: tuple[str, ...]
    """Columns of the answer, one entry per row received, in order."""
    groups: bool = False
    """Whether the function is given the groups of its rows."""
    reads_for: Callable[[Mapping[str, Any]], Iterable[str]] | None = None
    """Further columns that must be there, from the arguments of a call."""

    def reads_with(self, arguments: Mapping[str, Any]) -> tuple[str, ...]:
        """Columns that a call with these arguments needs."""
        more = self.reads_for(arguments) if self.reads_for else ()
        return tuple(dict.fromkeys([*self.reads, *more]))


def row_maths(
    *,
    reads: Iterable[str],
    optional: Iterable[str] = (),
    writes: Iterable[str],
    groups: bool = False,
    reads_for: Callable[[Mapping[str, Any]], Iterable[str]] | None = None,
) -> Callable[[F], F]:
    """Mark a module-level function for `batch.map`; ProtocolError for a lambda or local one."""

    def mark(fn: F) -> F:
        _require_module_level(fn)
        spec = RowMathsSpec(
            fn.__module__,
            fn.__qualname__,
            tuple(reads),
            tuple(optional),
            tuple(writes),
            groups,
            reads_for,
        )
        setattr(fn, _ATTRIBUTE, spec)
        return fn

    return mark


def row_maths_spec(fn: Callable[..., Any]) -> RowMathsSpec:
    """Facts of fn; ProtocolError if it is not marked, saying what to add."""
    spec = getattr(fn, _ATTRIBUTE, None)
    if spec is not None:
        return spec
    _require_module_level(fn)
    raise ProtocolError(
        f"map: {_name(fn)} declares no columns; expected a function marked with "
        f"@row_maths(reads=(...), writes=(...)); add the mark above its definition"
    )


def _require_module_level(fn: Callable[..., Any]) -> None:
    """Other ranks import fn by name, which a lambda or a nested function does not have."""
    if "<" in _name(fn):
        raise ProtocolError(
            f"map: got {_name(fn)}; expected a function that every rank can import by name; "
            f"move it to the top level of its module"
        )


def _name(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__qualname__", repr(fn))
