"""What the page is given of a run, as data for JSON, in parts that are read when they are shown.

Long runs are thinned: MOST_STEPS points of a metric, MOST_SPANS pieces of work in the timeline and
MOST_SAMPLES samples, in whole steps at even distances. What was left out is told on the page.
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
"""In a part of the page, unless one step has more."""


class Part(NamedTuple):
    """Some steps of a run's samples or spans: step -> a list; or plotly's script."""

    name: str
    content: Mapping[int, Sequence[Any]] | str


@dataclass(frozen=True)
class RunContent:
    """A run on the page: `summary` is read at once, a part when one of its steps is shown."""

    summary: Mapping[str, Any]
    parts: Sequence[Part]


def content_of(files: RunFiles, number: int) -> RunContent:
    """Everything of a run; number: its place on the page."""
    notes: list[str] = []
    samples = _by_step(files.samples, lambda record: record["step"])
    spans = _by_step(files.spans, lambda span: span.step)
    samples = _thinned(samples, MOST_SAMPLES, "samples.jsonl", notes)
    spans = _thinned(spans, MOST_SPANS, "trace.json", notes)
    plain = {}
    for step, some in spans.items():
        plain[step] = _plain_spans(some)
    parts = {
        "samples": _parts(f"samples-{number}", samples, _PART_SAMPLES),
        "spans": _parts(f"spans-{number}", plain, _PART_SPANS),
    }
    summary = {
        "name": files.name,
        "path": str(files.path),
        "live": files.is_live and not files.failures,  # a failed run writes its page, then ends
        "missing": files.missing,
        **_metrics(files.metrics, notes),
        "settings": _texts(files.settings),
        "earlier": {name: _texts(each) for name, each in files.earlier_settings.items()},
        "prediction": files.prediction,
        "failures": files.failures,
        "stacks": files.stacks,
        "notes": notes,
    }
    for kind, found in parts.items():
        summary[kind] = {step: name for name, content in found for step in content}
    return RunContent(summary, [part for found in parts.values() for part in found])


def _metrics(records: Sequence[Record], notes: list[str]) -> dict[str, Any]:
    """{"steps": [...], "metrics": {name: [value or None, ...]}}, values with six digits."""
    every = -(-len(records) // MOST_STEPS) or 1
    if every > 1:
        notes.append(f"metrics.jsonl: every {every}th of {len(records)} steps is shown")
    records = records[::every]
    names = sorted({name for record in records for name in record if name != "step"})
    return {
        "steps": [record["step"] for record in records],
        "metrics": {name: [_short(record.get(name)) for record in records] for name in names},
    }


def _short(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    return value


def _texts(settings: Mapping[str, Any]) -> dict[str, str]:
    """Settings as one writes them on the command line."""
    names = {None: "null", True: "true", False: "false"}
    texts = {}
    for key, value in settings.items():
        texts[key] = names[value] if value is None or isinstance(value, bool) else str(value)
    return texts


def _by_step(items: Sequence[T], step_of: Callable[[T], int]) -> dict[int, list[T]]:
    found: dict[int, list[T]] = {}
    for item in items:
        found.setdefault(step_of(item), []).append(item)
    return dict(sorted(found.items()))


def _thinned(
    steps: dict[int, list[T]], most: int, file: str, notes: list[str]
) -> dict[int, list[T]]:
    """Whole steps at even distances, with at most `most` items, but at least the last step."""
    total = sum(map(len, steps.values()))
    every = 1
    kept = steps
    while sum(map(len, kept.values())) > most and len(kept) > 1:
        every += 1
        kept = {}
        for step in list(steps)[::-every][::-1]:
            kept[step] = steps[step]
    if every > 1:
        shown = sum(map(len, kept.values()))
        notes.append(
            f"{file}: {len(kept)} of {len(steps)} steps are shown ({shown} of {total} lines)"
        )
    return kept


def _parts(name: str, steps: Mapping[int, Sequence[Any]], size: int) -> list[Part]:
    """Neighbouring steps together, about `size` items each."""
    found: list[dict[int, Sequence[Any]]] = []
    for step, items in steps.items():
        if not found or sum(map(len, found[-1].values())) + len(items) > size:
            found.append({})
        found[-1][step] = items
    parts = []
    for number, content in enumerate(found):
        parts.append(Part(f"{name}-{number}", content))
    return parts


def _plain_spans(spans: Sequence[Span]) -> list[list[Any]]:
    """[rank, lane, label, start, end, received bytes, host bytes]; seconds since the first."""
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
