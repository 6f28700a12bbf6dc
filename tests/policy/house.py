"""What the policy tests look at: the repository's Python files, their trees and imports."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def files(*roots: str) -> list[str]:
    """Python files below the given folders, relative to the repository."""
    found = (path for root in roots for path in (REPOSITORY / root).rglob("*.py"))
    return sorted(str(path.relative_to(REPOSITORY)) for path in found)


def text_of(file: str) -> str:
    """The text of a file that is named relative to the repository."""
    return (REPOSITORY / file).read_text(encoding="utf-8")


@cache
def tree_of(file: str) -> ast.Module:
    """The syntax tree of a file that is named relative to the repository."""
    return ast.parse(text_of(file), file)


def functions_of(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Every function, methods and nested ones included."""
    return (node for node in ast.walk(tree) if isinstance(node, FUNCTIONS))


def public_functions(
    tree: ast.Module,
) -> Iterator[tuple[ast.ClassDef | None, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """(class or None, function) of what a reader may call: no leading underscore anywhere."""
    for node in tree.body:
        if isinstance(node, FUNCTIONS) and not node.name.startswith("_"):
            yield None, node
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            for member in node.body:
                if isinstance(member, FUNCTIONS) and not member.name.startswith("_"):
                    yield node, member


def imported_names(tree: ast.AST) -> Iterator[tuple[int, str, str | None]]:
    """(line, module, name) of every import, late ones too; name is None for `import module`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, None) for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, node.module or "", alias.name) for alias in node.names)


def type_lines(tree: ast.AST) -> set[int]:
    """Lines below `if TYPE_CHECKING:`, which never run."""
    blocks = (
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
    )
    return {line for node in blocks for line in range(node.lineno, (node.end_lineno or 0) + 1)}


def module_of(file: str) -> str:
    """The dotted name of a file: spmdflow/data/__init__.py -> spmdflow.data."""
    return ".".join(Path(file).with_suffix("").parts).removesuffix(".__init__")


def room_of(module: str) -> str:
    """The room of one of our modules: spmdflow.data.ragged -> data, spmdflow -> __init__."""
    return (module.split(".") + ["__init__"])[1]


@cache
def import_graph(*, with_types: bool) -> dict[str, dict[str, str]]:
    """Module -> imported module of ours -> "file:line"; with or without imports for types only."""
    modules = {module_of(file): file for file in files("spmdflow")}
    graph: dict[str, dict[str, str]] = {module: {} for module in modules}
    for module, file in modules.items():
        skipped = set() if with_types else type_lines(tree_of(file))
        for line, source, name in imported_names(tree_of(file)):
            if source.split(".")[0] != "spmdflow" or line in skipped:
                continue
            inner = f"{source}.{name}"
            graph[module].setdefault(inner if inner in modules else source, f"{file}:{line}")
    return graph
