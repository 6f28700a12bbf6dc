"""The table that an evaluation prints."""

from __future__ import annotations

from collections.abc import Mapping

from spmdflow.tracking.estimate import COVERAGE, Estimate


def evaluation_table(title: str, found: Mapping[str, Estimate], facts: Mapping[str, float]) -> str:
    """Text of a title, a row for each estimate with its interval, and a row for each fact."""
    width = max(map(len, [*found, *facts]))
    lines = [title, f"{'':{width}}   value   {COVERAGE:.0%} interval"]
    for name, (value, low, high) in found.items():
        lines.append(f"{name:{width}} {value:7.4f}   {low:.4f} to {high:.4f}")
    lines += [f"{name:{width}} {value:7.4g}" for name, value in facts.items()]
    return "\n".join(lines) + "\n"
