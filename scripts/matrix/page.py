"""The tables of docs/lab/REAL_MODEL.md, between its marks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from scripts.learn.curves import write_page as write_between_marks

Record = dict[str, Any]
"""Of `start.perform`. Any: JSON values."""
SECONDS_WITHIN = 0.20
MEMORY_WITHIN = 0.05
LEAST_SECONDS = 0.2
"""Stages that take less are host time, and no miss is listed for them."""
GROUPS = ("algorithms", "placements", "checkpoints", "engines")


def write_page(page: Path, records: Sequence[Record]) -> None:
    """Write the tables of all groups, of what was refused, and of all misses into the page."""
    tables = {}
    for group in GROUPS:
        tables[group] = table_of([r for r in records if r["group"] == group])
    tables["processor"] = "\n".join(processors(records))
    tables["refused"] = "\n".join(refusals(records))
    tables["seconds"] = "\n".join(missed_seconds(records))
    tables["memory"] = "\n".join(missed_bytes(records))
    write_between_marks(page, tables)


def table_of(records: Sequence[Record]) -> str:
    """A line for each case that ran: seconds of a step and peak memory by rank, and the plan's."""
    lines = [
        "| case | ranks | step, seconds | predicted | ratio | peak GB by rank | planned | ratio "
        "| generator/trainer mismatch |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for record in records:
        if record["state"] != "ran":
            continue
        predicted, measured = record["seconds"]["step"]
        peaks = peaks_by_rank(record)
        planned = planned_peak(record)
        by_rank = ", ".join(f"{peak / 1e9:.2f}" for peak in peaks)
        drift = record["metrics"].get("rollout/drift")
        cells = [
            record["name"],
            str(record["ranks"]),
            f"{measured:.1f}",
            "-" if predicted is None else f"{predicted:.1f}",
            ratio(predicted, measured),
            by_rank,
            "-" if planned is None else f"{planned / 1e9:.2f}",
            ratio(planned, max(peaks)),
            "-" if drift is None else f"{drift:.1e}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def peaks_by_rank(record: Record) -> list[int]:
    """The largest phase of each rank, in bytes."""
    peaks = [0] * record["ranks"]
    for phase in record["memory"].values():
        for rank, size in enumerate(phase["measured"]):
            peaks[rank] = max(peaks[rank], size or 0)
    return peaks


def planned_peak(record: Record) -> float | None:
    """The largest phase of the plan among those that were measured."""
    sizes = [p["planned"] for p in record["memory"].values() if p["planned"] is not None]
    return max(sizes, default=None)


def ratio(predicted: float | None, measured: float) -> str:
    """predicted / measured with two digits; - if there is no prediction."""
    if predicted is None or not measured:
        return "-"
    return f"{predicted / measured:.2f}"


def refusals(records: Sequence[Record]) -> Iterator[str]:
    """Markdown: which cases were refused, and why. Equal reasons are one line."""
    by_text: dict[str, list[str]] = {}
    for record in records:
        if record["state"] == "refused":
            by_text.setdefault(record["text"], []).append(record["name"])
    yield "| cases | refused, because |"
    yield "|---|---|"
    for text, names in by_text.items():
        reason = text.replace("|", "/")
        yield f"| {', '.join(names)} | {reason} |"


def processors(records: Sequence[Record]) -> Iterator[str]:
    """Markdown: on which processor how many cases ran."""
    yield "| processor | cases |"
    yield "|---|---|"
    names = [r.get("processor", "not noted") for r in records]
    for name in dict.fromkeys(names):
        yield f"| {name} | {names.count(name)} |"


def missed_seconds(records: Sequence[Record]) -> Iterator[str]:
    """Markdown: stages whose predicted seconds are off by more than 20 %."""
    yield "| case | stage | predicted | measured | ratio |"
    yield "|---|---|---|---|---|"
    for record in records:
        for stage, (predicted, measured) in record.get("seconds", {}).items():
            if predicted is None or measured is None or measured < LEAST_SECONDS:
                continue
            if abs(predicted / measured - 1) > SECONDS_WITHIN:
                cells = [record["name"], stage, f"{predicted:.2f}", f"{measured:.2f}"]
                yield f"| {' | '.join(cells)} | {ratio(predicted, measured)} |"


def missed_bytes(records: Sequence[Record]) -> Iterator[str]:
    """Markdown: phases whose planned bytes are off by more than 5 % of the fullest rank's."""
    yield "| case | phase | planned GB | measured GB | ratio | parts of the plan, GB |"
    yield "|---|---|---|---|---|---|"
    for record in records:
        for name, phase in record.get("memory", {}).items():
            planned = phase["planned"]
            if planned is None:
                continue
            measured = max(size or 0 for size in phase["measured"])
            if abs(planned / measured - 1) <= MEMORY_WITHIN:
                continue
            parts = ", ".join(f"{part} {size / 1e9:.2f}" for part, size in phase["parts"].items())
            cells = [record["name"], name, f"{planned / 1e9:.2f}", f"{measured / 1e9:.2f}"]
            yield f"| {' | '.join(cells)} | {ratio(planned, measured)} | {parts} |"
