"""A kind of engine or generator is named where it is registered, and nowhere else."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from fnmatch import fnmatch

import pytest

from spmdflow.kind.engine import EngineKind, engine_kind, engine_names
from spmdflow.kind.generator import GeneratorKind, generator_kind, generator_names
from spmdflow.kind.registry import resolve
from tests.policy.house import files, tree_of

KINDS = [*map(engine_kind, engine_names()), *map(generator_kind, generator_names())]
LIBRARIES = {
    "spmdflow/config/foreign_names.py": "settings of other libraries, with the values of ours",
    "spmdflow/config/episode.py": "the library whose tool parsers are used",
    "spmdflow/doctor/packages.py": "extras of the distribution, by their names",
    "spmdflow/tracking/origin.py": "distributions whose versions a run records, by their names",
    "spmdflow/log.py": "loggers of the libraries, by their names",
}
"""Files that name a library of the same name as a kind, and why."""


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_kind_is_named_only_in_the_files_of_its_registration(
    kind: EngineKind | GeneratorKind,
) -> None:
    allowed = [*_homes(kind), *kind.files, *LIBRARIES]

    found = [
        f"{file}:{line}"
        for file in files("spmdflow")
        if not any(fnmatch(file, pattern) for pattern in allowed)
        for line in _lines_with(kind.name, tree_of(file))
    ]

    assert found == [], "read the fact from spmdflow.kind, or name the file in the registration"


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_kind_names_files_that_are_there(kind: EngineKind | GeneratorKind) -> None:
    every = files("spmdflow")

    assert [name for name in kind.files if not any(fnmatch(file, name) for file in every)] == []
    assert callable(resolve(kind.weight_table))
    assert set(_homes(kind)) <= set(every)


@pytest.mark.parametrize("file", LIBRARIES)
def test_exception_is_needed(file: str) -> None:
    names = {kind.name for kind in KINDS}

    assert any(text in names for _, text in _strings(tree_of(file)))


def test_a_name_in_a_comparison_or_a_message_is_found_and_a_module_path_is_not() -> None:
    planted = """
'''What zero1 does.'''
if kind == "zero1":
    raise ValueError(f"{kind}: set engine.kind=zero1")
load("zero1.engine:Engine")
"""

    assert _lines_with("zero1", ast.parse(planted)) == [3, 4]


def _lines_with(name: str, tree: ast.Module) -> list[int]:
    """Lines of strings that have the name as a word of its own."""
    word = re.compile(rf"(?<![\w./:-]){name}(?!\w|[-./:]\w)")
    return [line for line, text in _strings(tree) if word.search(text)]


def _homes(kind: EngineKind | GeneratorKind) -> Iterator[str]:
    """The files of a kind's facts, class and weight table."""
    for reference in (kind.implementation, kind.weight_table):
        yield reference.partition(":")[0].replace(".", "/") + ".py"
    for file in files("spmdflow/kind"):
        calls = [node for node in ast.walk(tree_of(file)) if isinstance(node, ast.Call)]
        named = {call.args[0].value for call in calls if _registers(call)}  # type: ignore[attr-defined]
        if kind.name in named:
            yield file


def _registers(call: ast.Call) -> bool:
    names = ("EngineKind", "GeneratorKind")
    return getattr(call.func, "id", "") in names and isinstance(call.args[0], ast.Constant)


def _strings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, text) of every string but docstrings, which explain."""
    explained = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    exported = {
        id(item)
        for node in tree.body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__"
        for item in ast.walk(node.value)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if id(node) not in explained | exported:
                yield node.lineno, node.value
