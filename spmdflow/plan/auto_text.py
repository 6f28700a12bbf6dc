"""A search for a placement as text and as data: the ten best, and why they lose."""

from __future__ import annotations

import math
import shlex
import textwrap
from typing import Any

import yaml

from spmdflow.mapping.explain import explain, reason
from spmdflow.plan.auto import Automatic
from spmdflow.plan.table import WIDTH, wrapped

COUNT = 10
_EACH_LINE = "each line: the best sizes and layouts for one way to share the models out into pools"
_CONTINUED = " \\"


def auto_text(found: Automatic) -> str:
    """The explanation, and the settings that give the same without a search."""
    lines = ["placement=auto", "", f"  {_EACH_LINE}"]
    for line in explain(found.mapping, count=COUNT).splitlines():
        lines += wrapped("  " + line, "", colon="") if line.strip() else [""]
    lines += ["", "  the first as settings of a command line:", "", *settings_text(found)]
    return "\n".join(lines) + "\n\n"


def settings_text(found: Automatic) -> list[str]:
    """Lines to paste behind a command: words of a shell, all ranks in full."""
    lines: list[str] = []
    for key, value in found.changed.items():
        lines += textwrap.wrap(
            shlex.quote(f"{key}={value if isinstance(value, str) else _flow_style(value)}"),
            WIDTH - len(_CONTINUED),
            initial_indent="    ",
            subsequent_indent="        ",
            break_long_words=False,
            break_on_hyphens=False,
        )
        lines[-1] += _CONTINUED
    lines[-1] = lines[-1].removesuffix(_CONTINUED)
    return lines


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


def _flow_style(value: Any) -> str:
    """YAML on one line."""
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=math.inf)
    return text.strip()
