"""Is `file.py:name` or `module:name` a reward function? Reads the source, imports nothing of it."""

from __future__ import annotations

import ast
import difflib
import importlib.util
from collections.abc import Collection
from pathlib import Path

from spmdflow.config.reward_terms import RewardTerm
from spmdflow.errors import ConfigError

_PARAMETERS = ("prompt", "response", "row")
_LISTS = {f"{name}s" for name in (*_PARAMETERS, "completion", "sample", "answer", "data_source")}
_LISTS |= {"solution_strs", "solutions", "ground_truths", "extra_infos", "batch"}
"""Names that say that a function wants all samples at once, as those of other libraries do."""
_NEEDS = {"spmdflow.rewards.math": ("math_verify", "math")}
"""Module -> the library it needs, and the extra that brings it."""


def check_rewards(key: str, terms: tuple[RewardTerm, ...], *, has_model: bool) -> None:
    """Each function can be called; the model's score is a term exactly if there is both."""
    if not terms and not has_model:
        raise ConfigError(
            f"{key}: got neither model nor function, expected one of them or both; set "
            f"{key}.model.path=FOLDER or {key}.function=file.py:name"
        )
    of_model = [term for term in terms if term.is_model]
    if len(of_model) > 1 or (of_model and not has_model):
        got = "more than one term model" if has_model else "the term model without a reward model"
        raise ConfigError(
            f"{key}.function: got {got}, expected one for {key}.model; set {key}.model.path=FOLDER "
            f"or take a term away"
        )
    if terms and has_model and not of_model:
        raise ConfigError(
            f"{key}: got a model beside functions without a weight for its score, expected the "
            f"term model; write {key}.function={{judge: 1.0 * model, rule: file.py:name}} or set "
            f"one of the two to null"
        )
    for term in terms:
        if not term.is_model:
            check_reward_function(f"{key}.function" + (term.name and f".{term.name}"), term)


def check_reward_function(key: str, term: RewardTerm) -> None:
    """The file exists, parses, defines the name at top level and takes these arguments."""
    reference = term.function
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
    _check_parameters(key, file, found[name], [name for name, _ in term.arguments])
    _check_library(key, source)


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


def _check_parameters(key: str, file: Path, statement: ast.stmt, given: Collection[str]) -> None:
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
    many = [name for name in positional[: len(_PARAMETERS)] if name in _LISTS]
    if many:
        raise ConfigError(
            f"{key}: got {statement.name}({', '.join(positional)}) in {file}, whose {many[0]} says "
            f"that it takes lists, expected {statement.name}({', '.join(_PARAMETERS)}), called for "
            f"one sample at a time; score one sample and name it so"
        )
    defaults = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    required = [argument.arg for argument, default in defaults if default is None]
    known = positional[len(_PARAMETERS) :] + [argument.arg for argument in arguments.kwonlyargs]
    unknown = [] if arguments.kwarg else [name for name in given if name not in known]
    missing = [name for name in required if name not in given]
    if unknown or missing:
        takes = f"one or more of {', '.join(known)}" if known else "no arguments"
        takes += f" ({', '.join(required)} always)" if required else ""
        raise ConfigError(
            f"{key}: got the arguments ({', '.join(given)}), but {statement.name} in {file} takes "
            f"{takes}, expected these; write {statement.name}"
            + (f"({known[0]}=...)" if known else "")
        )


def _check_library(key: str, source: str) -> None:
    library, extra = _NEEDS.get(source, ("", ""))
    if library and importlib.util.find_spec(library) is None:
        raise ConfigError(
            f"{key}: got {source}, but {library} is not installed, expected it; "
            f"pip install 'spmdflow[{extra}]' or choose another function"
        )
