"""A table of runs: their state, the settings that differ and their last metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from spmdflow.tracking.reading import RunFiles, RunState

SUMMARY_METRICS = (
    "eval/accuracy",
    "eval/mean",
    "eval/loss",
    "reward/mean",
    "actor/reference_kl",
    "actor/loss",
    "actor/entropy",
    "rollout/response_length",
)
"""The first of these that some run has are in the table, the most important first."""
NUM_METRICS = 4
MOST_SETTINGS = 12
_NAMES_OF_A_RUN = ("run.dir", "run.name")
STATE_NAMES = {
    RunState.LIVE: "live",
    RunState.FAILED: "failed",
    RunState.KILLED: "killed",
    RunState.FINISHED: "finished",
    RunState.STOPPED: "stopped",
    RunState.NONE: "not started",
}


def differing_settings(runs: Sequence[RunFiles]) -> list[str]:
    """Return the keys whose values differ between the runs, but for their names and folders.

    Runs without settings (not started yet) are not compared. [] if more than MOST_SETTINGS differ,
    as between runs of different scripts: such a table could not be read.
    """
    known = [each.settings for each in runs if each.settings]
    keys = dict.fromkeys(key for settings in known for key in settings)
    differing = [
        key
        for key in keys
        if key not in _NAMES_OF_A_RUN and any(each.get(key) != known[0].get(key) for each in known)
    ]
    return differing if len(differing) <= MOST_SETTINGS else []


def last_value(run: RunFiles, name: str) -> Any:
    """Return the last value of a metric that is not null; None if there is none."""
    for record in reversed(run.metrics):
        if record.get(name) is not None:
            return record[name]
    return None


def summary_metrics(runs: Sequence[RunFiles]) -> list[str]:
    """Return the metrics of the table: the first NUM_METRICS of SUMMARY_METRICS that a run has."""
    names = [
        name for name in SUMMARY_METRICS if any(last_value(run, name) is not None for run in runs)
    ]
    return names[:NUM_METRICS]


def summary_rows(runs: Sequence[RunFiles]) -> tuple[list[str], list[list[str]]]:
    """Return (heads, one row of texts for each run) of the table."""
    keys = differing_settings(runs)
    names = summary_metrics(runs)
    heads = ["run", "state", "steps", *(key.rpartition(".")[2] for key in keys), *names]
    rows = []
    for run in runs:
        steps = run.metrics[-1]["step"] if run.metrics else 0
        row = [run.name, STATE_NAMES[run.run_state], str(steps)]
        row += [_text(run.settings.get(key)) for key in keys]
        row += [_text(last_value(run, name)) for name in names]
        rows.append(row)
    return heads, rows


def summary_table(runs: Sequence[RunFiles]) -> str:
    """Return the table as text, one line for each run, columns aligned."""
    heads, rows = summary_rows(runs)
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    lines = []
    for row in (heads, *rows):
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines) + "\n"


def _text(value: Any) -> str:
    """Return a setting or metric as a cell; "-" for None."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping | list):
        return str(value).replace(" ", "")
    return str(value)
