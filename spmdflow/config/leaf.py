"""The keys of a settings tree as a flat list. Knows dataclasses; no files, no omegaconf."""

from __future__ import annotations

import types
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from spmdflow.config.schema import REQUIRED, Bounds

T = TypeVar("T")


@dataclass(frozen=True)
class Leaf:
    """One setting of a tree: where it is, what it may be, what it is."""

    key: str
    """Dotted, such as "actor.optimizer.lr"."""
    hint: Any  # a type expression
    value: Any  # of that type
    doc: str
    bounds: Bounds


def leaves(tree: Any, prefix: str = "") -> Iterator[Leaf]:
    """Every setting of a dataclass object, depth first; an absent part is one leaf, None."""
    hints = get_type_hints(type(tree))
    for field in fields(tree):
        key, value = prefix + field.name, getattr(tree, field.name)
        if is_dataclass(value):
            yield from leaves(value, key + ".")
            continue
        doc = field.metadata.get("doc", "")
        bounds = field.metadata.get("bounds", Bounds())
        yield Leaf(key, hints[field.name], value, doc, bounds)


def defaults(cls: type) -> Any:
    """An object of a settings class: defaults, `REQUIRED` where there is none, all parts there."""
    required = {
        field.name: REQUIRED
        for field in fields(cls)
        if field.default is MISSING and field.default_factory is MISSING
    }
    return _complete(cls(**required))


def _complete(tree: Any) -> Any:
    """The same object with its absent parts filled in, at every depth."""
    changes = {}
    for name, part in parts(type(tree)).items():
        value = getattr(tree, name)
        changes[name] = _complete(value) if is_dataclass(value) else defaults(part)
    return replace(tree, **changes)


def parts(cls: type) -> dict[str, type]:
    """Field name -> dataclass of the fields that are groups of settings, optional ones too."""
    hints = get_type_hints(cls)
    found: dict[str, type] = {}
    for field in fields(cls):
        for choice in (hints[field.name], *get_args(hints[field.name])):
            if isinstance(choice, type) and is_dataclass(choice):
                found[field.name] = choice
    return found


def parts_of(tree: Any, cls: type[T], prefix: str = "") -> Iterator[tuple[str, T]]:
    """(dotted key, part) of every part of a settings object that is a `cls`."""
    for field in fields(tree):
        value = getattr(tree, field.name)
        if isinstance(value, cls):
            yield prefix + field.name, value
        if is_dataclass(value):
            yield from parts_of(value, cls, f"{prefix}{field.name}.")


def type_name(hint: Any) -> str:
    """A type in words: "float", "int or none", "list of str"."""
    if get_origin(hint) in (types.UnionType, Union):
        return " or ".join(type_name(choice) for choice in get_args(hint))
    if get_origin(hint) is list:
        return f"list of {type_name(get_args(hint)[0])}"
    if hint is type(None):
        return "none"
    if is_dataclass(hint):
        return "a group of settings"
    return getattr(hint, "__name__", str(hint)).lower()


def is_required(leaf: Leaf) -> bool:
    """Whether a setting has neither a default nor a value."""
    return bool(leaf.value == REQUIRED)
