"""Which lines of a script look at values, and which of them a loop inside of the step encloses."""

from __future__ import annotations

import ast
import pathlib
from collections.abc import Iterable, Sequence
from types import ModuleType

from spmdflow.plan.record import Read

Path = tuple[int, ...]
"""Lines of the script that were running, the innermost first: a helper's, then its caller's."""

_LOOPS = (ast.While, ast.For, ast.AsyncFor)


def reads_of(
    script: ModuleType, waits: Sequence[tuple[Path, str]], orders: Iterable[Path]
) -> list[Read]:
    """Every line that waited, once, with what it waited for; then loops that made calls.

    orders: the lines that led to each order of a step.
    """
    inner = _inner_loops(pathlib.Path(str(script.__file__)).read_text(encoding="utf-8"))
    found: dict[int, list[str]] = {}
    looping = {path[0] for path, _ in waits if any(_encloses(loop, path) for loop in inner)}
    for (line, *_), what in waits:
        if what not in found.setdefault(line, []):
            found[line].append(what)
    reads = [Read(line, ", ".join(what), line in looping) for line, what in sorted(found.items())]
    calls = set(orders)
    for loop in inner:
        if loop.start not in found and any(_encloses(loop, path) for path in calls):
            waiting = any(_encloses(loop, path) for path, _ in waits)
            what = f"loop over lines {loop.start}-{loop.stop - 1}"
            reads.append(Read(loop.start, what, True, waits=waiting))
    return reads


def _encloses(loop: range, path: Path) -> bool:
    return any(line in loop for line in path)


def _inner_loops(text: str) -> list[range]:
    """Lines of all loops but those over the run's steps, and those that such a loop is in."""
    loops = [node for node in ast.walk(ast.parse(text)) if isinstance(node, _LOOPS)]
    return [
        range(loop.lineno, (loop.end_lineno or loop.lineno) + 1)
        for loop in loops
        if not any(_is_over_steps(node) for node in ast.walk(loop))
    ]


def _is_over_steps(node: ast.AST) -> bool:
    """`for step in flow.steps(...)`, also inside of enumerate and the like."""
    return isinstance(node, ast.For | ast.AsyncFor) and any(
        isinstance(part, ast.Call)
        and isinstance(part.func, ast.Attribute)
        and part.func.attr == "steps"
        for part in ast.walk(node.iter)
    )
