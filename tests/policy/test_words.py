"""Names that say one thing: no class name twice, no function named by a participle alone."""

from __future__ import annotations

import ast
from collections import defaultdict

import pytest

from tests.policy.house import FUNCTIONS, files, tree_of

IRREGULAR = set("told held made found kept said heard begun shown given taken thrown sent".split())
"""Participles that do not end in -ed."""
NO_PARTICIPLES = set("seed need feed shed speed embed".split())
PARTICIPLES = {
    "spmdflow/data/ragged.py:ragged": "the kind of tensor that it makes",
    "spmdflow/rewards/arithmetic.py:shuffled": "users write it as a value of reward.function",
    "spmdflow/worker_api/worker.py:begun": "the old name of early_result, until 0.3.0",
    "spmdflow/rewards/format.py:boxed": "users write it as a value of reward.function",
}
"""Public functions that are named by a participle alone, and why."""


def is_participle(name: str) -> bool:
    """Whether a name is a participle and nothing else."""
    word = name.strip("_")
    ends_in_ed = word.endswith("ed") and word not in NO_PARTICIPLES
    return "_" not in word and (ends_in_ed or word in IRREGULAR)


def is_property(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a function is read as an attribute."""
    return any("property" in ast.unparse(decorator) for decorator in function.decorator_list)


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        ("merged", True),
        ("_held", True),
        ("merged_blocks", False),
        ("seed", False),
        ("merge", False),
    ],
)
def test_participles_are_told_from_other_names(name: str, is_one: bool) -> None:
    assert is_participle(name) == is_one


def test_public_class_name_has_one_meaning_in_the_package() -> None:
    places = defaultdict(list)
    for file in files("spmdflow"):
        for node in ast.walk(tree_of(file)):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(f"{file}:{node.lineno}")

    assert {name: where for name, where in places.items() if len(where) > 1} == {}


def test_public_function_is_not_named_by_a_participle_alone() -> None:
    participles = set()
    for file in files("spmdflow"):
        for node in ast.walk(tree_of(file)):
            is_public = isinstance(node, FUNCTIONS) and not node.name.startswith("_")
            if is_public and is_participle(node.name) and not is_property(node):
                participles.add(f"{file}:{node.name}")

    assert participles == PARTICIPLES.keys()
