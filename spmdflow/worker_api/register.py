"""The marks that make a user's code callable: `@register` for worker methods (paper Fig. 5b), and
`@map_function` for functions that `batch.map` may run where the rows live.

A mark only stores facts on the function; nothing wraps it. The controller reads them to know which
columns travel, which rows go where and who answers. The executor calls a map function as
`fn(batch, **arguments)`, with those of these that the function names: `reduce` sums a tensor over
the pool's ranks (float64; ranks without rows take part with zeros), `report` takes metrics. Every
rank must call `reduce` equally often. The function returns its columns by name, in a dict or
TensorDict: tensors, jagged tensors, or lists of str. Map functions are found by name on every rank,
so they are module-level.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from inspect import signature
from typing import Any, TypeVar

from spmdflow.errors import ProtocolError
from spmdflow.message import find

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
    """Whether the answer also carries the columns of the batch that was given. If all that the
    method writes is among `optional`, it goes on from a batch that has these columns; then what it
    used up (`optional`) and what was made from the old ones is left out of the answer."""
    draws: bool = False
    """Whether the method draws random numbers for its rows."""
    check: Check | None = None
    """Raises for invalid arguments of a call, before anything is sent."""
    early: str | None = None
    """Method that runs before the call's turn, in a thread, as soon as its rows are here."""
    instead: Mapping[str, str] = field(default_factory=dict)
    """Column -> substitute, for old_log_probs and the generator's rollout_log_probs
    (controller/old_log_probs.py). Of a method that writes: a written column and what may replace
    it, so that the call need not be made. Of an update: a column of `reads` that it can do
    without, and the column that it gets in its place if the batch has it."""
    followed_by: Callable[[Any], tuple[Callable[..., Any], Mapping[str, Any]] | None] | None = None
    """From the model's settings: a map function and its arguments. It is run on the rows and the
    answer, and what it writes joins the answer. None: no such function."""


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
    early: str | None = None,
    instead: Mapping[str, str] | None = None,
    followed_by: Callable[[Any], tuple[Callable[..., Any], Mapping[str, Any]] | None] | None = None,
) -> Callable[[F], F]:
    """Mark a worker method for the controller (paper section 4.1, Table 3 for the modes).

    What the method is given must stay as it is: writing into it ends the run, under every placement
    alike (work on a clone). What it returns is copied, so it may be a buffer of its own, a
    parameter or what it was given. Writes that torch's version counter misses (NumPy, `.data`) are
    detected by a checksum of the column. Clone columns that you keep beyond the call, too.

    optional: columns that it gets if the batch has them: `batch.get("valid")`. draws:
    `self.call.generation` then says how often rows were drawn for before in the step, so that a
    second call on the same rows takes other random numbers. A call with greedy=True draws none and
    is not counted. check: raises in the script, before anything is sent, for invalid arguments.
    early: the name of a method `early(batch, call)` that needs neither the device nor other ranks;
    it runs beside other calls as soon as the rows are here, and the method finds what it returned
    in `self.begun`. Several calls may be under way at once, so it returns all that it found out and
    leaves nothing in an attribute. instead: column -> substitute, for custom forms of
    `compute_log_prob` and `update_actor`: a written column that another may replace, so that the
    call need not be made (actor.update.old_log_probs); of an update, a column of `reads` that it
    can do without. followed_by: from the model's settings, a map function and its arguments, whose
    columns join the answer.
    """
    columns = (tuple(reads), tuple(optional), tuple(writes))
    marks = (minibatches, extends, draws)
    spec = MethodSpec(
        transfer_mode, *columns, *marks, check, early, dict(instead or {}), followed_by
    )

    def mark(method: F) -> F:
        setattr(method, _ATTRIBUTE, spec)
        return method

    return mark


def method_spec(cls: type, name: str) -> MethodSpec:
    """Facts of cls.name; ProtocolError if it is not marked, saying what to add."""
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
    methods = {}
    for name in dir(cls):
        spec = getattr(getattr(cls, name, None), _ATTRIBUTE, None)
        if spec is not None:
            methods[name] = spec
    return methods


_MAP_ATTRIBUTE = "_spmdflow_map_function"


@dataclass(frozen=True)
class MapSpec:
    """Facts of one map function."""

    reads: tuple[str, ...]
    """Columns that must be there."""
    optional: tuple[str, ...]
    """Columns that are passed if the batch has them."""
    writes: tuple[str, ...]
    """Columns of the answer, one entry per row received, in order."""
    groups: bool = False
    """Whether the function is given the groups of its rows."""
    given: tuple[str, ...] = ()
    """Arguments that the ranks give: those of reduce, report and groups that it takes."""
    reads_for: Callable[[Mapping[str, Any]], Iterable[str]] | None = None
    """Further columns that must be there, from the arguments of a call."""

    def reads_with(self, arguments: Mapping[str, Any]) -> tuple[str, ...]:
        """Columns that a call with these arguments needs."""
        more = self.reads_for(arguments) if self.reads_for else ()
        return tuple(dict.fromkeys([*self.reads, *more]))


def map_function(
    *,
    reads: Iterable[str],
    optional: Iterable[str] = (),
    writes: Iterable[str],
    groups: bool = False,
    reads_for: Callable[[Mapping[str, Any]], Iterable[str]] | None = None,
) -> Callable[[F], F]:
    """Mark a module-level function for `batch.map`; ProtocolError for a lambda or local one.

    optional: columns that it gets if the batch has them: `batch.get("valid")`. groups: it also
    takes `groups`, a `RowGroups`: sums and means over the samples of a prompt, also
    of those on other ranks. The others take a call's arguments by name. reads_for: further
    columns that it needs.
    """

    def mark(fn: F) -> F:
        _require_module_level(fn)
        columns = (tuple(reads), tuple(optional), tuple(writes))
        if not columns[2]:
            raise ProtocolError(
                f"map: {_name(fn)} writes no column; expected writes=(...) with at least one, as "
                f"batch.map returns columns; name what it returns, or report metrics from a "
                f"function that also writes one"
            )
        known = ("reduce", "report", "groups") if groups else ("reduce", "report")
        arguments = tuple(name for name in known if name in signature(fn).parameters)
        setattr(fn, _MAP_ATTRIBUTE, MapSpec(*columns, groups, arguments, reads_for))
        return fn

    return mark


def map_spec(fn: Callable[..., Any]) -> MapSpec:
    """Facts of fn; ProtocolError if it is not marked, saying what to add."""
    spec = getattr(fn, _MAP_ATTRIBUTE, None)
    if spec is not None:
        return spec
    _require_module_level(fn)
    raise ProtocolError(
        f"map: {_name(fn)} declares no columns; expected a function marked with "
        f"@map_function(reads=(...), writes=(...)); add the mark above its definition"
    )


def find_map_function(name: str) -> Callable[..., Any]:
    """The map function of that name in a command; ProtocolError if it is none."""

    def is_marked(thing: object) -> bool:
        return callable(thing) and _MAP_ATTRIBUTE in getattr(thing, "__dict__", {})

    function: Callable[..., Any] = find(name, is_marked, "a function marked with @map_function")
    return function


def _require_module_level(fn: Callable[..., Any]) -> None:
    """Other ranks import fn by name, which a lambda or a nested function does not have."""
    if "<" in _name(fn):
        raise ProtocolError(
            f"map: got {_name(fn)}; expected a function that every rank can import by name; "
            f"move it to the top level of its module"
        )


def _name(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__qualname__", repr(fn))
