"""Data of a run for the page, ready for JSON, in parts that the page decodes when it shows them.

Long runs are subsampled to MOST_STEPS points of a metric, MOST_SPANS spans in the timeline and
MOST_SAMPLES samples. Every n-th step is kept with all of its samples or spans. The page says how
many steps it omits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from spmdflow.tracking.reading import Record, RunFiles
from spmdflow.tracking.trace import Span

T = TypeVar("T")
MOST_STEPS = 4000
MOST_SPANS = 60_000
MOST_SAMPLES = 20_000
_PART_SAMPLES = 256
_PART_SPANS = 8000
"""Items in one part of the page, unless a single step has more."""


class PageData(NamedTuple):
    """Samples or spans of some steps of a run (step -> a list), or plotly's script."""

    name: str
    content: Mapping[int, Sequence[Any]] | str


@dataclass(frozen=True)
class RunContent:
    """A run on the page, which decodes `summary` at once and a part when a step of it is shown."""

    summary: Mapping[str, Any]
    parts: Sequence[PageData]


def content_of(files: RunFiles, number: int) -> RunContent:
    """The summary and the parts of a run. number: its index among the runs on the page."""
    notes: list[str] = []
    samples = _group_by_step(files.samples, lambda record: record["step"])
    spans = _group_by_step(files.spans, lambda span: span.step)
    samples = _subsample_steps(samples, MOST_SAMPLES, "samples.jsonl", notes)
    spans = _subsample_steps(spans, MOST_SPANS, "trace.json", notes)
    plain = {}
    for step, some in spans.items():
        plain[step] = _span_rows(some)
    parts = {
        "samples": _split_into_parts(f"samples-{number}", samples, _PART_SAMPLES),
        "spans": _split_into_parts(f"spans-{number}", plain, _PART_SPANS),
    }
    summary = {
        "name": files.name,
        "path": str(files.path),
        "live": files.is_live and not files.failures,  # a failed run writes its page, then ends
        "missing": files.missing,
        **_metric_columns(files.metrics, notes),
        "settings": _setting_texts(files.settings),
        "earlier": {name: _setting_texts(each) for name, each in files.earlier_settings.items()},
        "prediction": files.prediction,
        "failures": files.failures,
        "stacks": files.stacks,
        "notes": notes,
    }
    for kind, run_parts in parts.items():
        summary[kind] = {step: name for name, content in run_parts for step in content}
    return RunContent(summary, [part for run_parts in parts.values() for part in run_parts])


def _metric_columns(records: Sequence[Record], notes: list[str]) -> dict[str, Any]:
    """{"steps": [...], "metrics": {name: [value or None, ...]}}, values rounded to six digits.

    Adds a note to `notes` if steps are omitted.
    """
    every = -(-len(records) // MOST_STEPS) or 1
    if every > 1:
        notes.append(f"metrics.jsonl: every {every}th of {len(records)} steps is shown")
    records = records[::every]
    names = sorted({name for record in records for name in record if name != "step"})
    return {
        "steps": [record["step"] for record in records],
        "metrics": {name: [_round_float(record.get(name)) for record in records] for name in names},
    }


def _round_float(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    return value


def _setting_texts(settings: Mapping[str, Any]) -> dict[str, str]:
    """The settings as they are written on the command line."""
    names = {None: "null", True: "true", False: "false"}
    texts = {}
    for key, value in settings.items():
        texts[key] = names[value] if value is None or isinstance(value, bool) else str(value)
    return texts


def _group_by_step(items: Sequence[T], step_of: Callable[[T], int]) -> dict[int, list[T]]:
    """The items of each step, in the order of the steps."""
    items_by_step: dict[int, list[T]] = {}
    for item in items:
        items_by_step.setdefault(step_of(item), []).append(item)
    return dict(sorted(items_by_step.items()))


def _subsample_steps(
    steps: dict[int, list[T]], most: int, file: str, notes: list[str]
) -> dict[int, list[T]]:
    """Every n-th step back from the last; n is the smallest that leaves at most `most` items.

    Adds a note about the omitted steps to `notes`.
    """
    total = sum(map(len, steps.values()))
    every = 1
    shown_steps = steps
    while sum(map(len, shown_steps.values())) > most and len(shown_steps) > 1:
        every += 1
        shown_steps = {}
        for step in list(steps)[::-every][::-1]:
            shown_steps[step] = steps[step]
    if every > 1:
        shown = sum(map(len, shown_steps.values()))
        notes.append(
            f"{file}: {len(shown_steps)} of {len(steps)} steps are shown ({shown} of {total} lines)"
        )
    return shown_steps


def _split_into_parts(name: str, steps: Mapping[int, Sequence[Any]], size: int) -> list[PageData]:
    """Parts of consecutive steps with at most `size` items each, unless a single step has more."""
    chunks: list[dict[int, Sequence[Any]]] = []
    for step, items in steps.items():
        if not chunks or sum(map(len, chunks[-1].values())) + len(items) > size:
            chunks.append({})
        chunks[-1][step] = items
    parts = []
    for number, content in enumerate(chunks):
        parts.append(PageData(f"{name}-{number}", content))
    return parts


def _span_rows(spans: Sequence[Span]) -> list[list[Any]]:
    """[rank, lane, label, start, end, received bytes, host bytes] of each span.

    Start and end are seconds since the first span began.
    """
    first = min(span.start for span in spans)
    result = []
    for span in spans:
        result.append(
            [
                span.rank,
                span.lane,
                span.label,
                round(span.start - first, 6),
                round(span.end - first, 6),
                span.received_bytes,
                span.host_bytes,
            ]
        )
    return result
