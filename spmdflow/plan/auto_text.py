"""A search for a placement as text and as data: the ten best, and why they lose."""

from __future__ import annotations

from typing import Any

from spmdflow.mapping.explain import explain, reason
from spmdflow.plan.auto import Automatic
from spmdflow.plan.table import wrapped

COUNT = 10


def auto_text(found: Automatic) -> str:
    """The explanation, and the settings that give the same without a search."""
    lines = ["placement=auto", ""]
    for line in explain(found.mapping, count=COUNT).splitlines():
        lines += wrapped("  " + line, "", colon="") if line.strip() else [""]
    lines += ["", "  the first as settings:"]
    for key, value in found.changed.items():
        shown = value if isinstance(value, str) else _shown(value)
        lines += wrapped(f"    {key}={shown}", "", colon="")
    return "\n".join(lines) + "\n\n"


def placed_text(found: Automatic) -> str:
    """A line for the start of a run."""
    best = found.mapping.best[0]
    layouts = ", ".join(f"{k}={v}" for k, v in found.changed.items() if k != "placement")
    return f"auto   {best.title}: {best.seconds:.4g} s a step predicted; {layouts or 'no layouts'}"


def auto_plain(found: Automatic) -> dict[str, Any]:
    """The same as data."""
    mapping, best = found.mapping, found.mapping.best[0]
    return {
        "partitions": mapping.num_partitions,
        "is_tie": mapping.is_tie,
        "seconds_searched": mapping.seconds_searched,
        "settings": dict(found.changed),
        "best": [
            {
                "seconds": placed.seconds,
                "ratio": placed.seconds / best.seconds,
                "pools": placed.to_config(),
                "layouts": placed.engine_overrides(),
                "stage_seconds": dict(placed.stage_seconds),
                "limit": list(placed.limit),
                "why": "" if placed is best else reason(placed, best),
            }
            for placed in mapping.best[:COUNT]
        ],
    }


def _shown(value: Any) -> str:
    """YAML's flow style; ranks as they are written in a file would fill pages."""
    if isinstance(value, dict):
        pools = (
            f"{name}: {{roles: [{', '.join(pool['roles'])}], ranks: [{pool['ranks'][0]}, ..., "
            f"{pool['ranks'][-1]}]}}"
            for name, pool in value.items()
        )
        return "{" + ", ".join(pools) + "}"
    return f"[{', '.join(map(str, value))}]"
