"""Finds classes and functions by "module:qualname" on every rank; no code is shipped."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

from spmdflow.errors import ProtocolError


def name_of(thing: Callable[..., Any]) -> str:
    """The name under which every rank finds a module-level class or function."""
    name = f"{thing.__module__}:{thing.__qualname__}"
    if "<" in name:
        raise ProtocolError(
            f"{name}: defined inside a function, expected module level; move it to the top of "
            f"the script, so that every rank finds it by name"
        )
    return name


def find(name: str) -> Any:
    """The inverse of `name_of`; the module is imported if it is not yet."""
    module_name, _, path = name.partition(":")
    thing: Any = sys.modules.get(module_name) or importlib.import_module(module_name)
    for part in path.split("."):
        thing = getattr(thing, part)
    return thing
