"""Every module, public class and public function has a docstring; every signature has types."""

from __future__ import annotations

import ast

from tests.policy.house import files, public_functions, tree_of

CODE = files("spmdflow", "algos")


def test_modules_have_a_docstring() -> None:
    assert [file for file in CODE if not ast.get_docstring(tree_of(file))] == []


def test_public_classes_have_a_docstring() -> None:
    bare = [
        f"{file}:{node.lineno} {node.name}"
        for file in CODE
        for node in tree_of(file).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
        if not ast.get_docstring(node)
    ]

    assert bare == []


def test_public_functions_have_a_docstring_or_override_one_that_has() -> None:
    documented = {
        function.name
        for file in CODE
        for owner, function in public_functions(tree_of(file))
        if owner is not None and ast.get_docstring(function)
    }
    bare = [
        f"{file}:{function.lineno} {function.name}"
        for file in CODE
        for owner, function in public_functions(tree_of(file))
        if not ast.get_docstring(function) and not _is_setter(function)
        if not (owner is not None and owner.bases and function.name in documented)
    ]

    assert bare == []


def test_public_functions_have_types() -> None:
    untyped = [
        f"{file}:{function.lineno} {function.name}"
        for file in CODE
        for owner, function in public_functions(tree_of(file))
        if function.returns is None or any(a.annotation is None for a in _arguments(function))
    ]

    assert untyped == []


def _is_setter(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether it belongs to a property, which is documented at its getter."""
    return any(getattr(node, "attr", "") == "setter" for node in function.decorator_list)


def _arguments(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.arg]:
    """All arguments but self and cls."""
    spec = function.args
    named = spec.posonlyargs + spec.args + spec.kwonlyargs + [spec.vararg, spec.kwarg]
    return [argument for argument in named if argument and argument.arg not in ("self", "cls")]
