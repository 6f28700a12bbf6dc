"""A reward function: found by "path/file.py:name" or "module:name", its result read as numbers.

Loading runs the user's module; a worker process does it, a rank need not.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
import sys
from collections.abc import Callable, Mapping
from functools import partial
from numbers import Real
from pathlib import Path
from types import ModuleType
from typing import Any

from spmdflow.errors import ConfigError

RewardFunction = Callable[[str, str, dict[str, Any]], Any]
_FORM = '"path/file.py:name" or "module:name"'


def load_function(name: str, arguments: Mapping[str, Any] | None = None) -> RewardFunction:
    """The function of that name, with its keyword arguments bound.

    ConfigError if it is missing or cannot be called with three and these. What the user's module
    itself raises while it is imported passes through.
    """
    source, colon, attribute = name.rpartition(":")
    if not (source and colon and attribute):
        raise ConfigError(
            f"reward.function: got {name!r}, expected {_FORM}; "
            f"name the file or module and, after a colon, the function"
        )
    module = _from_file(name, Path(source)) if source.endswith(".py") else _module(name, source)
    function = _attribute(name, module, attribute)
    _check_call(name, function, arguments or {})
    return partial(function, **arguments) if arguments else function


def place_of(function: RewardFunction) -> str:
    """file:line where a function is defined; "" for what Python did not compile."""
    while isinstance(function, partial):
        function = function.func
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else ""


def _from_file(name: str, path: Path) -> ModuleType:
    if not path.is_file():
        raise ConfigError(
            f"reward.function: got {name!r}, but there is no file {path} in {Path.cwd()}; "
            f"expected {_FORM}; correct the path"
        )
    module_name = f"spmdflow_reward_{path.stem}"
    known = sys.modules.get(module_name)
    if known is not None and known.__file__ == str(path.resolve()):
        return known  # another function of the same file
    spec = importlib.util.spec_from_file_location(module_name, path.resolve())
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses and pickle look the module up there
    spec.loader.exec_module(module)
    return module


def _module(name: str, source: str) -> ModuleType:
    try:
        return importlib.import_module(source)
    except ModuleNotFoundError as err:
        if err.name is None or not (source + ".").startswith(err.name + "."):
            raise  # the module is there, but lacks something of its own
        raise ConfigError(
            f"reward.function: got {name!r}, but there is no module {err.name!r}; "
            f"expected {_FORM}; correct the name, or name the file instead"
        ) from err


def _attribute(name: str, module: ModuleType, attribute: str) -> Any:
    function: Any = module
    for part in attribute.split("."):
        function = getattr(function, part, None)
    if callable(function):
        return function
    found = sorted(
        key
        for key, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__
    )
    got = "nothing of that name" if function is None else type(function).__name__
    raise ConfigError(
        f"reward.function: got {name!r}, but {attribute!r} is {got}; expected a function; "
        f"choose one of the module's: {', '.join(found) or 'it has none'}"
    )


def _check_call(name: str, function: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    expected = "expected fn(prompt, response, row) -> float | dict"
    if inspect.iscoroutinefunction(function):
        raise ConfigError(
            f"reward.function: got {name!r}, an async function; {expected}; "
            f"make it an ordinary one (asyncio.run inside it, if it must)"
        )
    try:
        signature = inspect.signature(function)
    except ValueError:  # a builtin without a signature: its first call will tell
        return
    try:
        signature.bind("", "", {}, **arguments)
    except TypeError as err:
        raise ConfigError(
            f"reward.function: got {name!r} with the parameters {signature}; {expected}; "
            f"give it these{' and its arguments' if arguments else ' three'} ({err})"
        ) from err


class BadAnswer(ValueError):
    """A result that is no score; the message is the rest of "the function ..."."""


def scores_of(value: object) -> dict[str, Any]:
    """{"score": float, ...} of a float or a dict; BadAnswer if there is no finite score.

    Further entries of a dict are kept if they are numbers, and must then be finite. "answer", what
    the response answers in a form in which equal answers are equal, is kept as text (None: there
    is none); evaluations vote on it.
    """
    if not isinstance(value, dict):
        return {"score": _number("", value)}
    if "score" not in value:
        keys = ", ".join(map(repr, value)) or "no keys"
        raise BadAnswer(f'returned a dict without "score" (it has {keys})')
    numbers: dict[str, Any] = {"score": _number("score=", value["score"])}
    for key, entry in value.items():
        if key == "answer":
            numbers[key] = None if entry is None else str(entry)
        elif key != "score" and isinstance(key, str) and isinstance(entry, Real):
            numbers[key] = _number(f"{key}=", entry)
    return numbers


def _number(label: str, value: object) -> float:
    if not isinstance(value, Real):
        raise BadAnswer(f"returned {label}{_shorten(repr(value))} ({type(value).__name__})")
    try:
        number = float(value)
    except OverflowError as err:
        raise BadAnswer(f"returned {label}a number beyond float") from err
    if not math.isfinite(number):
        raise BadAnswer(f"returned {label}{number}")
    return number


def _shorten(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 60 else text[:57] + "..."
