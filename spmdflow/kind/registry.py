"""`Registry`: objects that a setting selects by name.

A script adds an object with a decorator, an installed package with an entry point.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeVar

from spmdflow.errors import ConfigError

T = TypeVar("T")
Reference = Any
"""An object, or the "module:name" of an object whose module is imported on first use."""


class Registry(dict[str, T]):
    """Name -> entry, in the order of registration. `find` and `add` explain their errors."""

    def __init__(self, noun: str, key: str, *, decorator: str = "", group: str = "") -> None:
        """noun, key and decorator appear in error messages.

        noun: what an entry is. key: the setting. decorator: how to register an entry, with {name!r}
        in it. group: of entry points, which are searched for names that are not registered.
        """
        super().__init__()
        self._noun = noun
        self._key = key
        self._decorator = decorator
        self._group = group
        self.modules: dict[str, str] = {}
        """Name of an entry -> name of the module that registered it."""

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator that registers a function or class under a name; see `add`."""
        return lambda function: self.add(name, function, function)

    def add(self, name: str, entry: T, implementation: Reference) -> T:
        """Store an entry under a name and return it. A module may replace an entry of its own.

        implementation: the object behind the entry, or its "module:name". ConfigError if another
        module than the implementation's has registered the name.
        """
        module = home_of(implementation)
        owner = self.modules.setdefault(name, module)
        if owner != module:
            where = f"{self._noun} {name!r}"
            got = f"a definition in {module}"
            expected = f"a name that is not taken by {owner}"
            raise ConfigError.of(where, got, expected, "choose another")
        self[name] = entry
        return entry

    def find(self, name: str, *, key: str = "") -> T:
        """Return the entry of that name; ConfigError with the choices if there is none.

        An unknown name is looked up among the installed entry points of the group, and added if
        found.
        key: the setting to report in the error, instead of the registry's own.
        """
        if self._group and name not in self:
            installed = _entry_points(self._group)
        else:
            installed = ()
        for point in installed:
            if point.name == name:
                self.add(name, point.value, point.value)  # type: ignore[arg-type]
        if name not in self:
            own = f" or add yours with @{self._decorator.format(name=name)}"
            expected = f"one of {', '.join(sorted({*self, *(point.name for point in installed)}))}"
            do = f"choose one{own if self._decorator else ''}"
            raise ConfigError.of(key or self._key, repr(name), expected, do)
        return self[name]


TRACKERS: Registry[Reference] = Registry(
    "tracker",
    "run.trackers",
    decorator="register_tracker({name!r})",
    group="spmdflow.trackers",
)
"""Subclasses of `tracking.tracker.Sink`. A built-in one is named after the extra that it needs."""
register_tracker = TRACKERS.register
"""Decorator that registers a subclass of `Sink` for run.trackers."""


def resolve(reference: Reference) -> Any:
    """Return the object itself, or the one that "module:name" names; imports that module."""
    if not isinstance(reference, str):
        return reference
    module, _, name = reference.partition(":")
    return getattr(import_module(module), name)


def _entry_points(group: str) -> Any:
    """Entry points of this group in all installed packages: objects with name and value."""
    metadata = import_module("importlib.metadata")  # imported late: it takes 22 ms
    return metadata.entry_points(group=group)


def home_of(reference: Reference) -> str:
    """Name of the module of an object, or of a "module:name"."""
    if isinstance(reference, str):
        return reference.partition(":")[0]
    return str(reference.__module__)
