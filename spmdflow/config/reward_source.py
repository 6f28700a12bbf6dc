"""Is `file.py:name` or `module:name` a reward function? Reads the source, imports nothing of it."""

from __future__ import annotations

import ast
import difflib
import importlib.util
from pathlib import Path

from spmdflow.errors import ConfigError

_PARAMETERS = ("prompt", "response", "row")


def check_reward_function(key: str, reference: str) -> None:
    """The file exists, parses, defines the name at top level and takes three arguments."""
    source, colon, name = reference.rpartition(":")
    if not colon or not source or not name.isidentifier():
        raise ConfigError(
            f"{key}: got {reference!r}, expected file.py:name or module:name; "
            f"write for example my_reward.py:score"
        )
    file = Path(source) if source.endswith(".py") else _module_file(key, source)
    if not file.is_file():
        raise ConfigError(
            f"{key}: no file {file} in {Path.cwd()}, expected a Python file; correct the path"
        )
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError) as err:
        raise ConfigError(f"{key}: got {err} in {file}, expected Python; mend the file") from err
    found = _top_level_names(tree)
    if name not in found:
        near = difflib.get_close_matches(name, found, 1)
        hint = f"did you mean {near[0]}?" if near else "define it there"
        raise ConfigError(f"{key}: no {name} in {file}, expected a function at top level; {hint}")
    _check_parameters(key, file, found[name])


def _module_file(key: str, module: str) -> Path:
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        spec = None
    if spec is None or spec.origin is None:
        raise ConfigError(
            f"{key}: no module {module}, expected one that Python can import; "
            f"install it or write file.py:name"
        )
    return Path(spec.origin)


def _top_level_names(tree: ast.Module) -> dict[str, ast.stmt]:
    """Name -> statement that binds it: functions, classes, imports and assignments."""
    found: dict[str, ast.stmt] = {}
    for statement in tree.body:
        match statement:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                found[name] = statement
            case ast.ClassDef(name=name):
                found[name] = statement
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                found |= {alias.asname or alias.name: statement for alias in names}
            case ast.Assign(targets=targets):
                found |= {node.id: statement for node in targets if isinstance(node, ast.Name)}
    return found


def _check_parameters(key: str, file: Path, statement: ast.stmt) -> None:
    """Only of a plain function; what is imported or assigned shows itself when it is called."""
    if not isinstance(statement, ast.FunctionDef):
        return
    arguments = statement.args
    positional = [argument.arg for argument in arguments.posonlyargs + arguments.args]
    needed = len(positional) - len(arguments.defaults)
    enough = len(positional) >= len(_PARAMETERS) or arguments.vararg is not None
    if not enough or needed > len(_PARAMETERS):
        raise ConfigError(
            f"{key}: got {statement.name}({', '.join(positional)}) in {file}, expected "
            f"{statement.name}({', '.join(_PARAMETERS)}); change its parameters"
        )
