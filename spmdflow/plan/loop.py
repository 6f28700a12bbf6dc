"""Which lines of a script look at values, and which of them a loop inside of the step encloses."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType

from spmdflow.plan.record import Read, TracedOrder

_LOOPS = (ast.While, ast.For, ast.AsyncFor)


def reads_of(
    script: ModuleType, waits: Sequence[tuple[int, str]], orders: Iterable[TracedOrder]
) -> list[Read]:
    """Every line that waited, once, with what it waited for."""
    inner = _inner_loops(Path(str(script.__file__)).read_text(encoding="utf-8"))
    found: dict[int, list[str]] = {}
    for line, what in waits:
        if what not in found.setdefault(line, []):
            found[line].append(what)
    reads = [
        Read(line, ", ".join(what), any(line in loop for loop in inner))
        for line, what in sorted(found.items())
    ]
    for loop in inner:
        if loop.start not in found and any(order.line in loop for order in orders if order.line):
            reads.append(Read(loop.start, f"loop over lines {loop.start}-{loop.stop - 1}", True))
    return reads


def _inner_loops(text: str) -> list[range]:
    """Lines of the loops that stand inside of another one."""
    outer = [node for node in ast.walk(ast.parse(text)) if isinstance(node, _LOOPS)]
    return [
        range(node.lineno, (node.end_lineno or node.lineno) + 1)
        for loop in outer
        for node in ast.walk(loop)
        if isinstance(node, _LOOPS) and node is not loop
    ]
