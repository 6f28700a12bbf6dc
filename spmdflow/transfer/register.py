"""`@register`: the mark that makes a worker method callable from the script (paper Fig. 5b).

The mark only stores facts on the function; nothing wraps it. The controller reads them to
know which columns travel, which rows go where and who answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from spmdflow.errors import ProtocolError

F = TypeVar("F", bound=Callable)
_ATTRIBUTE = "_spmdflow_method"
Check = Callable[[str, Any, Mapping[str, Any]], None]
"""check(name of the call, settings of the model, arguments by name)"""


@dataclass(frozen=True)
class MethodSpec:
    """Facts of one registered method."""

    transfer_mode: str
    """Name of the transfer protocol."""
    reads: tuple[str, ...]
    """Columns that must be there and travel."""
    optional: tuple[str, ...]
    """Columns that travel if the batch has them."""
    writes: tuple[str, ...]
    """Columns of the answer; empty: the method answers with metrics or a plain value."""
    minibatches: bool
    """Whether the controller cuts the rows into mini-batches (update methods)."""
    extends: bool
    """Whether the answer also carries the columns of the batch that was given."""
    draws: bool = False
    """Whether the method draws random numbers for its rows."""
    check: Check | None = None
    """Refuses arguments of a call before anything is sent."""


def register(
    *,
    transfer_mode: str,
    reads: Iterable[str] = (),
    optional: Iterable[str] = (),
    writes: Iterable[str] = (),
    minibatches: bool = False,
    extends: bool = False,
    draws: bool = False,
    check: Check | None = None,
) -> Callable[[F], F]:
    """Mark a worker method for the controller (paper section 4.1, Table 3 for the modes).

    What the method is given must stay as it is: writing into it ends the run, under every placement
    alike (work on a clone). What it returns is copied, so it may be a buffer of its own, a
    parameter or what it was given. Writes that torch does not count (NumPy, `.data`) are noticed by
    the sum of the column's words. Columns that are kept beyond the call are to be cloned, too.

    draws: `self.call.generation` then says how often rows were drawn for before in the step, so
    that a second call on the same rows takes other random numbers. A call with greedy=True draws
    none and is not counted. check: raises in the script, before anything is sent, for arguments
    that cannot be.
    """
    spec = MethodSpec(
        transfer_mode,
        tuple(reads),
        tuple(optional),
        tuple(writes),
        minibatches,
        extends,
        draws,
        check,
    )

    def mark(method: F) -> F:
        setattr(method, _ATTRIBUTE, spec)
        return method

    return mark


def method_spec(cls: type, name: str) -> MethodSpec:
    """Facts of cls.name; an unmarked method is an error that says what to add."""
    method = getattr(cls, name, None)
    spec = getattr(method, _ATTRIBUTE, None)
    if spec is not None:
        return spec
    known = ", ".join(sorted(registered_methods(cls))) or "none"
    problem = "has no such method" if method is None else "is not registered"
    raise ProtocolError(
        f"{cls.__name__}.{name}: {problem}; registered methods are {known}; "
        f"define it and mark it with @register(transfer_mode=...)"
    )


def registered_methods(cls: type) -> dict[str, MethodSpec]:
    """Every marked method of a worker class, by name."""
    found = {name: getattr(getattr(cls, name, None), _ATTRIBUTE, None) for name in dir(cls)}
    return {name: spec for name, spec in found.items() if spec is not None}
