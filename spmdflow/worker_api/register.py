"""The marks that make a user's code callable: `@register` for methods of workers (paper Fig. 5b),
and `@map_function` for functions that `batch.map` runs on the ranks that hold the rows.

A mark only stores facts on the function; nothing wraps it. The controller reads the facts: which
columns travel, which rows each rank gets, and which ranks answer.

The executor calls a map function as `fn(batch, **arguments)`. The function may also have these
parameters:

- `reduce`: sums a tensor over the ranks of the pool, in float64. Every rank must call it equally
  often; ranks without rows take part with zeros.
- `report`: takes metrics.

It returns columns by name, in a dict or TensorDict: tensors, jagged tensors, or lists of str. Every
rank finds it by its name, so it must be at module level.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
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
    """Columns that the batch must have. They travel to the ranks that run the method."""
    optional: tuple[str, ...]
    """Columns that travel if the batch has them."""
    writes: tuple[str, ...]
    """Columns of the answer. Empty: the method answers with metrics or a plain value."""
    minibatches: bool
    """Whether the controller cuts the rows into mini-batches (update methods)."""
    extends: bool
    """Whether the answer also has the columns of the batch that the method was called with. If all
    that the method writes is among `optional`, it continues a batch that has these columns. The
    answer then omits the columns that it used up (`optional`) and those derived from the old
    ones."""
    draws: bool = False
    """Whether the method draws random numbers for its rows."""
    finishes: bool = False
    """Whether the method returns rows that an earlier one, which draws, began on the same ranks."""
    check: Check | None = None
    """Raises for invalid arguments of a call before anything is sent."""
    early: str | None = None
    """Method that runs ahead of the call, in a thread, as soon as the rank has the rows."""
    instead: Mapping[str, str] = field(default_factory=dict)
    """Column -> substitute, for old_log_probs and the generator's rollout_log_probs
    (controller/old_log_probs.py). For a method that writes: a written column and the column that
    may replace it, which makes the call unnecessary. For an update: a column of `reads` that it
    does not need, and the column that it gets instead if the batch has it."""
    followed_by: Callable[[Any], tuple[Callable[..., Any], Mapping[str, Any]] | None] | None = None
    """Returns a map function and its arguments, from the model's settings. That function runs on
    the rows and the answer, and the columns that it writes join the answer. None: there is no such
    function."""
    parents: bool = False
    """Whether the method gets the group of each row."""
    on_demand: bool = False
    """Whether a call waits until something reads its columns, unless the settings say that
    something will (controller/on_demand.py). The model may not have been built before that."""
    also_writes: Callable[[Any], tuple[str, ...]] | None = None
    """Returns further columns of the answer, from the model's settings. None: there are none."""

    def with_settings(self, settings: Any) -> MethodSpec:
        """Return the facts for a model with these settings: `writes` with all that it writes."""
        if self.also_writes is None:
            return self
        return replace(self, writes=(*self.writes, *self.also_writes(settings)), also_writes=None)


def register(
    *,
    transfer_mode: str,
    reads: Iterable[str] = (),
    optional: Iterable[str] = (),
    writes: Iterable[str] = (),
    minibatches: bool = False,
    extends: bool = False,
    draws: bool = False,
    finishes: bool = False,
    check: Check | None = None,
    early: str | None = None,
    instead: Mapping[str, str] | None = None,
    followed_by: Callable[[Any], tuple[Callable[..., Any], Mapping[str, Any]] | None] | None = None,
    on_demand: bool = False,
    also_writes: Callable[[Any], tuple[str, ...]] | None = None,
    parents: bool = False,
) -> Callable[[F], F]:
    """Return a decorator that marks a worker method for the controller (paper 4.1, Table 3).

    It stores a `MethodSpec` on the method, and returns the method itself.
    The method must not write into the columns that it gets. Writing ends the run under every
    placement, also if torch's version counter misses it (NumPy, `.data`), because columns have a
    checksum. Clone a column in order to change it, or to keep it beyond the call. What the method
    returns is copied, so it may be a buffer of its own, a parameter, or a column that it got.

    transfer_mode: name of the protocol, which says which rows each rank gets and which ranks
    answer.
    reads, writes: columns that the batch must have, and that the method returns. Without `writes`
    it returns metrics or a plain value.
    optional: columns that it gets if the batch has them: `batch.get("valid")`.
    minibatches: the controller cuts the rows into mini-batches, one for each optimizer step.
    extends: the answer also has the columns of the batch that the method was called with.
    draws: the method draws random numbers. `self.call.generation` is then the number of earlier
    calls in the step that drew for the same rows, so that a second call gets other random numbers.
    A call with greedy=True draws none and is not counted. Rows go to ranks by what it costs to
    generate their responses.
    finishes: the method returns rows that an earlier one with draws=True began. They go to the same
    ranks.
    check: raises in the script for invalid arguments, before anything is sent.
    early: the name of a method `early(batch, call)` that needs neither the device nor other ranks.
    It runs alongside other calls as soon as the rank has the rows, and the method finds its result
    in `self.early_result`. Several calls may be in progress at once, so it returns everything and
    leaves nothing in an attribute.
    instead: column -> substitute, for custom forms of `compute_log_prob` and `update_actor`
    (actor.update.old_log_probs). For a method that writes: the column that may replace a written
    one, which makes the call unnecessary. For an update: a column of `reads` that it does not need,
    and what it gets instead.
    followed_by: returns a map function and its arguments from the model's settings. Its columns
    join the answer.
    on_demand: nothing is computed until something reads the columns, for a frozen model whose
    answer often nobody needs, such as `compute_ref_log_prob`.
    also_writes: returns further columns that the method writes, from the model's settings.
    parents: `self.call.parents` has the group of each row.
    """
    spec = MethodSpec(
        transfer_mode=transfer_mode,
        reads=tuple(reads),
        optional=tuple(optional),
        writes=tuple(writes),
        minibatches=minibatches,
        extends=extends,
        draws=draws,
        finishes=finishes,
        check=check,
        early=early,
        instead=dict(instead or {}),
        followed_by=followed_by,
        on_demand=on_demand,
        also_writes=also_writes,
        parents=parents,
    )

    def mark(method: F) -> F:
        """Store the facts on the method and return it unchanged."""
        setattr(method, _ATTRIBUTE, spec)
        return method

    return mark


def method_spec(cls: type, name: str) -> MethodSpec:
    """Return the facts that @register stored on the method cls.name.

    ProtocolError, with the registered methods, if there is no such method or it is not registered.
    """
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
    """Return the facts of every registered or inherited method of a worker class, by name."""
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
    """Columns that the batch must have."""
    optional: tuple[str, ...]
    """Columns that are passed if the batch has them."""
    writes: tuple[str, ...]
    """Columns of the answer, with one entry per row received, in order."""
    groups: bool = False
    """Whether the function gets the groups of its rows."""
    rank_arguments: tuple[str, ...] = ()
    """Parameters that the ranks pass, and not the script: those of reduce, report and groups that
    the function has."""
    reads_for: Callable[[Mapping[str, Any]], Iterable[str]] | None = None
    """Returns further columns that the batch must have, from the arguments of a call."""

    def reads_with(self, arguments: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the columns that a call with these arguments needs: `reads`, then `reads_for`."""
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
    """Return a decorator that marks a function at module level for `batch.map`.

    The decorator stores a `MapSpec` on the function and returns it. ProtocolError for a lambda or a
    local function, and if `writes` is empty.
    reads, writes: columns that the batch must have, and that the function returns.
    optional: columns that it gets if the batch has them: `batch.get("valid")`.
    groups: it also has the parameter `groups`, a `RowGroups`, for sums and means over the samples
    of a prompt, including those on other ranks.
    reads_for: returns further columns that it needs, from the arguments of a call.
    """

    def mark(fn: F) -> F:
        """Store a `MapSpec` on the function, and return it.

        ProtocolError if it is a lambda or a nested function, or if `writes` is empty.
        """
        _require_module_level(fn)
        columns_written = tuple(writes)
        if not columns_written:
            raise ProtocolError(
                f"map: {_name(fn)} writes no column; expected writes=(...) with at least one, as "
                f"batch.map returns columns; name what it returns, or report metrics from a "
                f"function that also writes one"
            )
        spec = MapSpec(
            reads=tuple(reads),
            optional=tuple(optional),
            writes=columns_written,
            groups=groups,
            rank_arguments=_rank_arguments(fn, groups=groups),
            reads_for=reads_for,
        )
        setattr(fn, _MAP_ATTRIBUTE, spec)
        return fn

    return mark


def map_spec(fn: Callable[..., Any]) -> MapSpec:
    """Return the facts that @map_function stored on a function.

    ProtocolError if it is not marked: define it at module level, or add the mark.
    """
    spec = getattr(fn, _MAP_ATTRIBUTE, None)
    if spec is not None:
        return spec
    _require_module_level(fn)
    raise ProtocolError(
        f"map: {_name(fn)} declares no columns; expected a function marked with "
        f"@map_function(reads=(...), writes=(...)); add the mark above its definition"
    )


def find_map_function(name: str) -> Callable[..., Any]:
    """Return the map function with the name that a command has, "module:function".

    ProtocolError if this rank has not imported its module, or if it is not marked.
    """

    def is_marked(thing: object) -> bool:
        return callable(thing) and _MAP_ATTRIBUTE in getattr(thing, "__dict__", {})

    function: Callable[..., Any] = find(name, is_marked, "a function marked with @map_function")
    return function


def _rank_arguments(fn: Callable[..., Any], *, groups: bool) -> tuple[str, ...]:
    """Return which of reduce, report and (if `groups`) groups are parameters of fn, in this order.

    The ranks pass them, and the script does not.
    """
    names = ["reduce", "report"]
    if groups:
        names.append("groups")
    parameters = signature(fn).parameters
    return tuple(name for name in names if name in parameters)


def _require_module_level(fn: Callable[..., Any]) -> None:
    """ProtocolError for a lambda or a nested function, which other ranks cannot import by name."""
    if "<" in _name(fn):
        raise ProtocolError(
            f"map: got {_name(fn)}; expected a function that every rank can import by name; "
            f"move it to the top level of its module"
        )


def _name(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__qualname__", repr(fn))
