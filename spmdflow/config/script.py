"""The user's script: imports it by path or name, and finds the settings class of its `main`."""

from __future__ import annotations

import difflib
import sys
from dataclasses import is_dataclass
from inspect import iscoroutinefunction, signature
from pathlib import Path
from types import ModuleType
from typing import Any, get_type_hints

from spmdflow.config.schema import PPOConfig
from spmdflow.config.source import broken_installation, bundled_scripts, find_file
from spmdflow.errors import ConfigError
from spmdflow.source_file import import_file

SCRIPT_MODULE = "spmdflow_script"
"""Name under which every rank imports the script: its functions are `spmdflow_script:name`."""


def load_script(path: str | Path) -> ModuleType:
    """Import the script as the module `spmdflow_script` and return it.

    Its folder is appended to sys.path. A name without a file means a bundled script. ConfigError if
    there is no such file, it cannot be imported, or it does not define a plain main(flow, cfg).
    """
    path = find_file(path, ".py")
    if not path.is_file():
        bundled = bundled_scripts()
        known = [*map(str, path.parent.glob("*.py")), *bundled]
        near = difflib.get_close_matches(str(path), known, 1)
        hint = f"; nearest is {near[0]}" if near else ""
        raise ConfigError(
            f"script: no file {path} in {Path.cwd()}, expected a Python file with main(flow, cfg) "
            f"or a bundled script ({', '.join(bundled)}){hint}; give its path or that name"
        )
    if str(path.parent.resolve()) not in sys.path:
        sys.path.append(str(path.parent.resolve()))
    module = _execute(path)
    if not callable(getattr(module, "main", None)):
        raise ConfigError(f"script: {path} has no main, expected main(flow, cfg); define it")
    if iscoroutinefunction(module.main):
        raise ConfigError(
            f"script: main in {path} is an async function, expected a plain one: calls of workers "
            f"return at once without await; write def main(flow, cfg)"
        )
    return module


def schema_of(script: ModuleType) -> type:
    """Return the settings class of a script: the type annotation of main's second parameter.

    Without an annotation it is PPOConfig. ConfigError if the annotation is no dataclass or cannot
    be read, or if there is none but the script has a class Config.
    """
    try:
        hints = get_type_hints(script.main)
        names = list(signature(script.main).parameters)
    except (NameError, TypeError, ValueError) as err:
        raise ConfigError.of(
            "script", f"{err} in the annotations of main", "classes", "import them in the script"
        ) from err
    schema = hints.get(names[1], Any) if len(names) > 1 else Any
    if schema is Any and not hasattr(script, "Config"):
        return PPOConfig
    if not (isinstance(schema, type) and is_dataclass(schema)):
        if schema is Any:
            got = "main(flow, cfg) and a class Config"
        else:
            got = f"cfg: {schema!r}"
        do = "write main(flow: Flow, cfg: PPOConfig)"
        raise ConfigError.of("script", got, "a dataclass of settings", do)
    return schema


def _execute(path: Path) -> ModuleType:
    """Execute the file as the module `spmdflow_script`, register it in sys.modules, return it.

    ConfigError for an ImportError or SyntaxError; other exceptions pass through. The message says
    if spmdflow or a package that it needs is not installed.
    """
    try:
        return import_file(SCRIPT_MODULE, path)
    except (ImportError, SyntaxError) as err:
        del sys.modules[SCRIPT_MODULE]
        if isinstance(err, ImportError):
            ours = broken_installation(err, path)
        else:
            ours = None
        raise ConfigError(
            ours
            or f"script: {path} cannot be imported: {type(err).__name__}: {err}; "
            f"expected a Python file that imports; fix it or install what it needs"
        ) from err
