"""How much one function, one file and one statement may say. Lines are not counted anywhere."""

from __future__ import annotations

import ast

import pytest

from tests.policy.house import files, functions_of, tree_of

FUNCTION_STATEMENTS = 40
FILE_STATEMENTS = 350

LONG_FUNCTIONS = {
    "tests/distributed/test_lora_sync.py:measure": "what a rank does and measures, in its order",
}
LONG_FILES = {
    "tests/unit/test_every_size_limit.py": "one table of limits, with a test for each",
}
"""What is longer, and why."""

CONDITIONAL_EXPRESSIONS = 20
COMPREHENSIONS = 35
"""At most so many in 1,000 statements of the package; projects of the field have 7 to 20, and 13 to
30."""

EVERYWHERE = files("spmdflow", "algos", "scripts", "tests")
_COMPREHENSIONS = (ast.ListComp, ast.DictComp, ast.SetComp, ast.GeneratorExp)


def num_statements(tree: ast.AST) -> int:
    """Statements of a tree, nested ones included."""
    return sum(isinstance(node, ast.stmt) for node in ast.walk(tree))


def is_tuple_assignment(node: ast.AST) -> bool:
    """Whether a node is `a, b = x, y`. A swap and the parts of one call's result are not."""
    if not isinstance(node, ast.Assign):
        return False
    target = node.targets[0]
    if not isinstance(target, ast.Tuple) or not isinstance(node.value, ast.Tuple):
        return False
    names = {ast.unparse(item) for item in target.elts}
    values = {ast.unparse(item) for item in node.value.elts}
    return names != values


def _per_thousand(kinds: type | tuple[type, ...]) -> float:
    number = 0
    statements = 0
    for file in files("spmdflow"):
        for node in ast.walk(tree_of(file)):
            number += isinstance(node, kinds)
            statements += isinstance(node, ast.stmt)
    return 1000.0 * number / statements


def test_function_has_at_most_40_statements() -> None:
    long = {}
    for file in EVERYWHERE:
        for function in functions_of(tree_of(file)):
            size = num_statements(function) - 1
            if size > FUNCTION_STATEMENTS:
                long[f"{file}:{function.name}"] = size

    assert long.keys() == LONG_FUNCTIONS.keys(), long


def test_file_has_at_most_350_statements() -> None:
    long = {}
    for file in EVERYWHERE:
        size = num_statements(tree_of(file))
        if size > FILE_STATEMENTS:
            long[file] = size

    assert long.keys() == LONG_FILES.keys(), long


@pytest.mark.parametrize(
    ("text", "is_counted"),
    [
        ("a, b = 1, 2", True),
        ("self.x, y = 1, x", True),
        ("a, b = b, a", False),
        ("a, b = pair()", False),
        ("a, b = pair", False),
    ],
)
def test_several_assignments_in_one_are_told_from_one_result_and_a_swap(
    text: str, is_counted: bool
) -> None:
    (statement,) = ast.parse(text).body

    assert is_tuple_assignment(statement) == is_counted


def test_no_statement_makes_several_assignments() -> None:
    places = []
    for file in EVERYWHERE:
        for node in ast.walk(tree_of(file)):
            if is_tuple_assignment(node):
                places.append(f"{file}:{getattr(node, 'lineno', 0)}")

    assert places == []


def test_package_has_few_conditional_expressions() -> None:
    assert _per_thousand(ast.IfExp) <= CONDITIONAL_EXPRESSIONS


def test_package_has_few_comprehensions() -> None:
    assert _per_thousand(_COMPREHENSIONS) <= COMPREHENSIONS
