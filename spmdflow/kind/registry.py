"""What a setting chooses by name, to which a script may add its own with a decorator, and an
installed package with an entry point."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeVar

from spmdflow.errors import ConfigError

T = TypeVar("T")
Reference = Any
"""An object, or "module:name" of one that is imported when it is needed."""


class Registry(dict[str, T]):
    """Name -> entry, in the order of registration; `find` and `add` say what is wrong."""

    def __init__(self, noun: str, key: str, *, decorator: str = "", group: str = "") -> None:
        """For errors. noun: what an entry is; key: the setting; decorator: how to add one, with
        {name!r} in it. group: of entry points, which are read if a name is not known without."""
        super().__init__()
        self._noun = noun
        self._key = key
        self._decorator = decorator
        self._group = group
        self._modules: dict[str, str] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator that makes a function known under a name; see `add`."""
        return lambda function: self.add(name, function, function)

    def add(self, name: str, entry: T, implementation: Reference) -> T:
        """Make an entry known that this object implements; a module may add its own again.

        ConfigError if the name belongs to another module.
        """
        module = home_of(implementation)
        owner = self._modules.setdefault(name, module)
        if owner != module:
            where = f"{self._noun} {name!r}"
            got = f"a definition in {module}"
            expected = f"a name that is not taken by {owner}"
            raise ConfigError.of(where, got, expected, "choose another")
        self[name] = entry
        return entry

    def find(self, name: str, *, key: str = "") -> T:
        """The entry of that name; ConfigError naming the choices. key: of another setting."""
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
"""Subclasses of `tracking.tracker.Sink`; built-in ones have the name of the extra that they
need."""
register_tracker = TRACKERS.register
"""Decorator of a subclass of `Sink`, which run.trackers may then name."""


def resolve(reference: Reference) -> Any:
    """The object; its module is imported if it was named."""
    if not isinstance(reference, str):
        return reference
    module, _, name = reference.partition(":")
    return getattr(import_module(module), name)


def _entry_points(group: str) -> Any:
    """Of the installed packages: objects with name and value."""
    metadata = import_module("importlib.metadata")  # 22 ms, for the few who ask
    return metadata.entry_points(group=group)


def home_of(reference: Reference) -> str:
    """Name of the module of an object, or of a "module:name"."""
    if isinstance(reference, str):
        return reference.partition(":")[0]
    return str(reference.__module__)
