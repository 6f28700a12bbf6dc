"""`DeferredName`: a public name of the package that is not imported before something uses it.

`spmdflow run` checks a script before it starts ranks. Nearly every script imports workers, whose
modules need torch, and torch alone takes seconds. Within `deferring()`, `from spmdflow import
ActorWorker` therefore gives a `DeferredName`. A script that uses the name at import, as a base
class or decorator, gets the real object at that moment.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import import_module
from typing import Any

_IS_DEFERRING: ContextVar[bool] = ContextVar("is_deferring", default=False)
_WITHOUT_TORCH = ("spmdflow.config.", "spmdflow.errors", "spmdflow.kind.")
"""Modules that are imported at once, because they do not import torch."""


@contextmanager
def deferring() -> Iterator[None]:
    """Within this block, public names of modules that need torch are not imported."""
    token = _IS_DEFERRING.set(True)
    try:
        yield
    finally:
        _IS_DEFERRING.reset(token)


def find_name(module: str, name: str) -> Any:
    """Return a name of a module, or a `DeferredName` for it within `deferring()`."""
    is_cheap = module.startswith(_WITHOUT_TORCH) or sys.modules.get("torch") is not None
    if _IS_DEFERRING.get() and not is_cheap:
        return DeferredName(module, name)
    return getattr(import_module(module), name)


class DeferredName:
    """Stands for `module.name`, which is imported when it is called, subclassed or looked into."""

    def __init__(self, module: str, name: str) -> None:
        self._module = module
        self._name = name

    def _import(self) -> Any:
        return getattr(import_module(self._module), self._name)

    def __getattr__(self, name: str) -> Any:
        """An attribute of the real object; AttributeError for what typing asks of annotations."""
        if name == "__origin__":
            raise AttributeError(name)
        return getattr(self._import(), name)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Call the real object, such as a decorator."""
        return self._import()(*arguments, **options)

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[Any, ...]:
        """The real class as a base class."""
        return (self._import(),)

    def __or__(self, other: Any) -> Any:
        """The annotation `Name | other`."""
        return self._import() | other

    def __repr__(self) -> str:
        return f"{self._module}.{self._name}"
