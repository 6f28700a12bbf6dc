"""What makes a call impossible, found in the script's thread before anything is sent.

These are the only errors that a script may catch: a later one ends the run.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from spmdflow.controller.batch import Batch
from spmdflow.errors import ColumnError, MessageError, ProtocolError
from spmdflow.runtime.message import encode
from spmdflow.transfer.register import MapSpec, MethodSpec, method_spec


def columns_read(spec: MethodSpec | MapSpec, batch: Batch, label: str) -> list[str]:
    """Columns that travel to the call; ColumnError if the batch lacks one."""
    missing = [name for name in spec.reads if name not in batch.columns]
    if missing:
        raise ColumnError(
            f"{label}: the batch has {sorted(batch.columns)}, expected {missing} too; "
            f"call the method that writes {missing[0]!r} first"
        )
    return [*spec.reads, *(name for name in spec.optional if name in batch.columns)]


def check_method(
    group: str,
    worker_class: type,
    method: str,
    before: Sequence[Any],
    arguments: Mapping[str, Any],
) -> MethodSpec:
    """The method's spec; refuses methods that are not registered, and arguments of other ones."""
    spec = method_spec(worker_class, method)
    check_arguments(f"{group}.{method}", getattr(worker_class, method), before, arguments)
    return spec


def check_extends(spec: MethodSpec, batch: Batch, label: str) -> None:
    """Refuse to replace a column that the answer would carry along."""
    clash = [name for name in spec.writes if name in batch.columns] if spec.extends else []
    if clash:
        raise ColumnError(
            f"{label}: the batch has {clash[0]!r} already, expected a batch without it, as the "
            f"answer carries the batch's columns along; drop it first"
        )


def check_arguments(
    label: str,
    function: Callable[..., Any],
    before: Sequence[Any],
    arguments: Mapping[str, Any],
) -> None:
    """Refuse arguments that the function does not take, or that cannot be sent to a rank.

    before: what comes first at the call, besides them. ProtocolError or MessageError.
    """
    signature = _signature(function)
    try:
        signature.bind(*before, **arguments)
    except TypeError as err:
        raise ProtocolError(
            f"{label}: {err}; got {sorted(arguments)}, expected "
            f"{label.rpartition('.')[2]}{signature}; pass the batch first and the rest by name"
        ) from err
    try:
        encode(dict(arguments))
    except MessageError as err:
        raise MessageError(f"{label}: {err}") from err
    _check_plain_types(label, signature, arguments)


_PLAIN: dict[str, tuple[type, ...]] = {"bool": (bool,), "int": (int,), "float": (int, float)}
"""Annotation -> classes of values; texts, as modules put off the evaluation of annotations."""


def _check_plain_types(
    label: str, signature: inspect.Signature, arguments: Mapping[str, Any]
) -> None:
    """Refuse values that are no bool or number where the function says so. ProtocolError."""
    for name, value in arguments.items():
        annotation = signature.parameters[name].annotation if name in signature.parameters else ""
        kind = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")
        if kind in _PLAIN and not isinstance(value, _PLAIN[kind]):
            raise ProtocolError(
                f"{label}: got {name}={value!r} ({type(value).__name__}), expected a {kind}; "
                f"correct the value"
            )


def too_many(label: str, function: Callable[..., Any], given: Sequence[Any]) -> ProtocolError:
    """The error of a call with more than the batch by position."""
    names = list(_signature(function).parameters)[2:]
    call = label.rpartition(".")[2]
    named = [f"{name}={value!r}" for name, value in zip(names, given[1:])]
    return ProtocolError(
        f"{label}: got {len(given)} arguments by position, expected the batch alone; write "
        f"{call}({', '.join(['batch', *named])})"
    )


def check_takes_list(label: str, spec: MethodSpec, items: Sequence[Any]) -> None:
    """Refuse a list for a method of rows. ProtocolError."""
    if spec.reads or spec.writes:
        raise ProtocolError(
            f"{label}: got a list of {len(items)}, expected a Batch with the columns "
            f"{list(spec.reads)}; take rows from flow.prompts, or from the call that made them"
        )


def check_every(what: str, every: object) -> None:
    """Refuse a number of steps that is none. ProtocolError."""
    if isinstance(every, bool) or not isinstance(every, int) or every < 0:
        raise ProtocolError(
            f"flow.{what}: got every={every!r}, expected a number of steps (0: never); write "
            f"flow.{what}(..., every=cfg.{'eval' if what == 'evaluate' else what}_every)"
        )


@lru_cache(maxsize=256)
def _signature(function: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(function)
