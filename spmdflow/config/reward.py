"""What `reward.function` says, and whether such functions can be called.

    function: my_reward.py:score                     one function: its result is the score
    function:                                        a map: the score is the weighted sum
      correct: spmdflow.rewards.gsm8k:score
      format: 0.2 * spmdflow.rewards.format:think_answer
      length: 0.1 * spmdflow.rewards.length:linear(free_tokens=200, max_tokens=400)
      judge: 0.5 * model                             the score of reward.model
      correct:                                       a table: a function for each data source
        gsm8k: spmdflow.rewards.gsm8k:score
        sums: 2 * my_reward.py:exact

The name of a term is the name of its metric. A term of weight 0 is only reported; null removes a
term. Functions are looked up in the source file, which is parsed but not imported.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
import json
import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from spmdflow.config.data_source import texts_of, weight_of
from spmdflow.errors import ConfigError
from spmdflow.requirement import install_command

MODEL = "model"
RESERVED = ("answer", "dropped", "dropped_share", "errors", "mean", "overlong", "score")
"""Names that terms may not have, as other metrics of a reward have them."""

_TERM = re.compile(r"(?:([^*]*?)\s*\*\s*)?(model|.+?:[\w.]+)\s*(\(.*\))?", re.DOTALL)
_FORMS = (
    "expected file.py:name, module:name or model, with a weight in front and name=value behind "
    "where wanted; write for example 0.2 * my_reward.py:score(limit=100)"
)


@dataclass(frozen=True)
class RewardTerm:
    """One summand of the score: weight * function(prompt, response, row, **arguments)."""

    name: str
    """Name of its metric; "" for a function that stands alone."""
    function: str
    """file.py:name or module:name; "model" for the score of reward.model."""
    weight: float = 1.0
    arguments: tuple[tuple[str, Any], ...] = ()
    """Keyword arguments: numbers, texts, booleans, None and lists of them."""
    source: str | None = None
    """The data source whose rows it scores, if it is an entry of a table; None: every row."""

    @property
    def key(self) -> str:
        """Its key below `function`: "", NAME or NAME.SOURCE."""
        if self.source is None:
            return self.name
        return f"{self.name}.{self.source}"

    def scores_rows_of(self, source: object) -> bool:
        """Whether it scores the rows of a data source."""
        return self.source is None or self.source == source

    @property
    def is_model(self) -> bool:
        """Whether it is the score of reward.model."""
        return self.function == MODEL


def reward_terms(key: str, setting: object) -> tuple[RewardTerm, ...]:
    """Return the terms of a `function` setting, in its order; () if it is None.

    The setting is one text, whose term has the name "", or a map name -> text. Instead of a text a
    map may have a table data source -> text, which gives a term for each source. ConfigError for an
    unreadable text or a name that is no identifier or one of RESERVED.
    """
    expected = "one function or a map name -> function"
    do = "write file.py:name or {correct: file.py:name, ...}"
    written = texts_of(key, setting, expected=expected, do=do)
    for name in written:
        if isinstance(setting, dict) and (not str(name).isidentifier() or name in RESERVED):
            raise ConfigError(
                f"{key}: got the term {name!r}, expected a name of letters, digits and _ that is "
                f"none of {', '.join(RESERVED)}; rename it"
            )
    terms: list[RewardTerm] = []
    for name, text in written.items():
        if isinstance(text, dict):
            terms.extend(_table_terms(key, name, text))
        else:
            terms.append(_term(f"{key}.{name}" if name else key, name, text))
    return tuple(terms)


def knows_right(reward: Any) -> bool:
    """Whether reward settings have a function, which can say that a response is right."""
    return any(not term.is_model for term in reward_terms("reward.function", reward.function))


def with_located_files(setting: object, locate: Callable[[str], str]) -> object:
    """Return a `function` setting with the path of every file.py:name replaced by locate(path).

    Weights and arguments stay. Terms without such a path, and what cannot be read, are unchanged.
    """
    if isinstance(setting, dict):
        return {name: with_located_files(text, locate) for name, text in setting.items()}
    match = _TERM.fullmatch(setting.strip()) if isinstance(setting, str) else None
    if match is None or ".py:" not in match[2]:
        return setting
    text = match.string
    file, _, name = match[2].rpartition(":")
    return f"{text[: match.start(2)]}{locate(file)}:{name}{text[match.end(2) :]}"


def _table_terms(key: str, name: str, table: dict[str, object]) -> list[RewardTerm]:
    """Return a term for each data source in a table source -> text; entries that are null are none.

    ConfigError for an empty table, or for the model, which scores the rows of every source.
    """
    terms = []
    for source, text in table.items():
        if text is not None:
            terms.append(replace(_term(f"{key}.{name}.{source}", name, text), source=str(source)))
    if not terms:
        do = "write for example {gsm8k: spmdflow.rewards.gsm8k:score}"
        raise ConfigError.of(f"{key}.{name}", "an empty table", "data source -> function", do)
    for term in terms:
        if term.is_model:
            raise ConfigError(
                f"{key}.{term.key}: got the model in a table, but it scores the rows of every "
                f"source; give it a term of its own, such as {key}.judge=0.5*model"
            )
    return terms


def _term(key: str, name: str, text: object) -> RewardTerm:
    """Return the term that a text such as "0.2 * file.py:name(limit=100)" describes.

    ConfigError for any other form, a weight that is not finite, or arguments of "model".
    name: the term's name in the map, "" for a text alone.
    """
    match = _TERM.fullmatch(text.strip()) if isinstance(text, str) else None
    if match is None:
        raise ConfigError(f"{key}: got {text!r}, {_FORMS}")
    weight, function, call = match.groups()
    if function == MODEL and call:
        raise ConfigError(
            f"{key}: got {text!r}, but a model takes no arguments; expected model alone; "
            f"write {key}=model"
        )
    number = weight_of(
        key,
        weight,
        above=-math.inf,
        expected="a finite number",
        advice="write 0.5 * file.py:name",
    )
    return RewardTerm(name, function, number, _arguments(key, call))


def _arguments(key: str, call: str | None) -> tuple[tuple[str, Any], ...]:
    """Return the keyword arguments of "(name=value, ...)" as pairs; () for None.

    ConfigError unless all are name=value and the values are Python literals that survive JSON
    unchanged: numbers, texts, booleans, None and lists of them.
    """
    try:
        tree = ast.parse(f"f{call or '()'}", mode="eval").body
        if not isinstance(tree, ast.Call):
            raise ValueError("no call")
        values = {}
        for item in tree.keywords:
            values[str(item.arg)] = ast.literal_eval(item.value)
        fits = not tree.args and None not in [item.arg for item in tree.keywords]
        fits = fits and json.loads(json.dumps(values, allow_nan=False)) == values
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        fits = False
    if not fits:
        expected = "name=value with numbers, texts in quotes, True, False or None"
        do = "write for example (limit=100, kind='soft')"
        raise ConfigError.of(key, f"the arguments {call}", expected, do)
    return tuple(values.items())


_PARAMETERS = ("prompt", "response", "row")
_BATCHED = ("prompts", "responses", "rows")
_LISTS = {f"{name}s" for name in (*_PARAMETERS, "completion", "sample", "answer", "data_source")}
_LISTS |= {"solution_strs", "solutions", "ground_truths", "extra_infos", "batch"}
"""Parameter names of functions that take lists of samples, as in other libraries."""
_NEEDS = {"spmdflow.rewards.math": ("math_verify", "math")}
"""Module -> the library it needs, and the extra that brings it."""


def check_rewards(key: str, reward: Any) -> None:
    """Raise ConfigError if a reward section cannot score.

    It needs a model, functions or both. If it has both, exactly one term must be `model`, to weight
    the model's score. per_token needs a model. Every function must exist, take its arguments and
    have the library that it needs installed.
    reward: the section (Any: the user's class).
    """
    terms = reward_terms(f"{key}.function", reward.function)
    has_model = reward.model is not None
    if not terms and not has_model:
        expected = "one of them or both"
        do = f"set {key}.model.path=FOLDER or {key}.function=file.py:name"
        raise ConfigError.of(key, "neither model nor function", expected, do)
    if reward.per_token and not has_model:
        do = f"set {key}.model.path=FOLDER or {key}.per_token=false"
        raise ConfigError.of(f"{key}.per_token", "true without a model", "a model", do)
    of_model = []
    for term in terms:
        if term.is_model:
            of_model.append(term)
    if len(of_model) > 1 or (of_model and not has_model):
        if has_model:
            got = "more than one term model"
        else:
            got = "the term model without a reward model"
        do = f"set {key}.model.path=FOLDER or take a term away"
        raise ConfigError.of(f"{key}.function", got, f"one for {key}.model", do)
    if terms and has_model and not of_model:
        raise ConfigError(
            f"{key}: got a model and functions without a weight for its score, expected the "
            f"term model; write {key}.function={{judge: 1.0 * model, rule: file.py:name}} or set "
            f"one of the two to null"
        )
    for term in terms:
        if not term.is_model:
            _check_function(f"{key}.function" + (term.key and f".{term.key}"), term)


def check_tables(
    key: str, reward: Any, mixtures: Mapping[str, Collection[str]], *, all_known: bool
) -> None:
    """Raise ConfigError if the tables of a reward do not fit the sources of the run's data.

    Some term must score the rows of each source. If all sources are known, each entry of a table
    must be one of them.
    reward: the section (Any: the user's class). mixtures: data setting -> names of its sources.
    all_known: whether all rows of the run are rows of these mixtures.
    """
    terms = reward_terms(f"{key}.function", reward.function)
    sources = {source for names in mixtures.values() for source in names}
    for term in terms:
        if all_known and term.source is not None and term.source not in sources:
            near = difflib.get_close_matches(term.source, sources, 1)
            hint = f"did you mean {near[0]}?" if near else "correct the name"
            raise ConfigError(
                f"{key}.function.{term.key}: no source {term.source!r} in {', '.join(mixtures)}, "
                f"expected one of {', '.join(sorted(sources))}; {hint}"
            )
    for setting, names in mixtures.items():
        for source in names:
            if terms and not any(term.scores_rows_of(source) for term in terms):
                raise ConfigError(
                    f"{key}.function: no term scores the rows of {source!r} in {setting}, expected "
                    f"an entry for it; write {key}.function.{terms[0].name}.{source}=file.py:name"
                )


def _check_function(key: str, term: RewardTerm) -> None:
    """Raise ConfigError if a term's function is not found or does not take its arguments.

    Also if a library that it needs is not installed.
    """
    file, statement = locate_function(key, term.function)
    _check_parameters(key, file, statement, [name for name, _ in term.arguments])
    source = term.function.rpartition(":")[0]
    library, extra = _NEEDS.get(source, ("", ""))
    if library and importlib.util.find_spec(library) is None:
        do = f"{install_command(extra)}, or choose another function"
        raise ConfigError.of(key, f"{source}, but {library} is not installed", "it", do)


def locate_function(key: str, reference: str) -> tuple[Path, ast.stmt]:
    """Return the file of "file.py:name" or "module:name" and the statement that binds the name.

    The file is parsed, not run. ConfigError unless it exists, parses and binds the name at top
    level.
    """
    source, colon, name = reference.rpartition(":")
    if not colon or not source or not name.isidentifier():
        do = "write for example my_reward.py:score"
        raise ConfigError.of(key, repr(reference), "file.py:name or module:name", do)
    file = Path(source) if source.endswith(".py") else _module_file(key, source)
    if not file.is_file():
        raise ConfigError(
            f"{key}: no file {file} in {Path.cwd()}, expected a Python file; correct the path"
        )
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError) as err:
        raise ConfigError.of(key, f"{err} in {file}", "Python", "fix the file") from err
    statements = _top_level_names(tree)
    if name not in statements:
        near = difflib.get_close_matches(name, statements, 1)
        hint = f"did you mean {near[0]}?" if near else "define it there"
        raise ConfigError(f"{key}: no {name} in {file}, expected a function at top level; {hint}")
    return file, statements[name]


def _module_file(key: str, module: str) -> Path:
    """Return the source file of a module without importing it; ConfigError if not found.

    Parent packages are imported, as Python does it to find a module.
    """
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
    """Return name -> the statement that binds it at the top level of a module.

    Counts functions, classes, imports and plain assignments; the last statement wins.
    """
    statements: dict[str, ast.stmt] = {}
    for statement in tree.body:
        match statement:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                statements[name] = statement
            case ast.ClassDef(name=name):
                statements[name] = statement
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                statements |= {alias.asname or alias.name: statement for alias in names}
            case ast.Assign(targets=targets):
                statements |= {node.id: statement for node in targets if isinstance(node, ast.Name)}
    return statements


def _check_parameters(key: str, file: Path, statement: ast.stmt, names: Collection[str]) -> None:
    """Raise ConfigError unless a function can be called as f(prompt, response, row, **names).

    It must take three positional arguments and require no more. If one has a name that means a
    list, they must be prompts, responses and rows: it is called for many samples at once. Every
    further argument must be known and every required one given. Only `def` and `async def` are
    checked; other statements, such as imports, pass.
    names: of the keyword arguments.
    """
    if not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
        return
    arguments = statement.args
    positional = []
    for argument in arguments.posonlyargs + arguments.args:
        positional.append(argument.arg)
    needed = len(positional) - len(arguments.defaults)
    enough = len(positional) >= len(_PARAMETERS) or arguments.vararg is not None
    if not enough or needed > len(_PARAMETERS):
        got = f"{statement.name}({', '.join(positional)}) in {file}"
        expected = f"{statement.name}({', '.join(_PARAMETERS)})"
        raise ConfigError.of(key, got, expected, "change its parameters")
    many = []
    for name in positional[: len(_PARAMETERS)]:
        if name in _LISTS:
            many.append(name)
    if many and tuple(positional[: len(_PARAMETERS)]) != _BATCHED:
        raise ConfigError(
            f"{key}: got {statement.name}({', '.join(positional)}) in {file}, whose {many[0]} says "
            f"that it takes lists, expected {statement.name}({', '.join(_PARAMETERS)}) for one "
            f"sample at a time, or {statement.name}({', '.join(_BATCHED)}) for many at once; give "
            f"them these names"
        )
    defaults = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    required = []
    for argument, default in defaults:
        if default is None:
            required.append(argument.arg)
    known = positional[len(_PARAMETERS) :] + [argument.arg for argument in arguments.kwonlyargs]
    unknown: list[str] = []
    if not arguments.kwarg:
        for name in names:
            if name not in known:
                unknown.append(name)
    missing = []
    for name in required:
        if name not in names:
            missing.append(name)
    if unknown or missing:
        takes = f"one or more of {', '.join(known)}" if known else "no arguments"
        takes += f" ({', '.join(required)} always)" if required else ""
        raise ConfigError(
            f"{key}: got the arguments ({', '.join(names)}), but {statement.name} in {file} takes "
            f"{takes}, expected these; write {statement.name}"
            + (f"({known[0]}=...)" if known else "")
        )
