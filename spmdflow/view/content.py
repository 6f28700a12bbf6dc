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
from spmdflow.tracking.servers import ServerRecord
from spmdflow.tracking.summary_table import STATE_NAMES
from spmdflow.tracking.trace import Span

T = TypeVar("T")
MOST_STEPS = 4000
MOST_SPANS = 60_000
MOST_SAMPLES = 20_000
MOST_SERVERS = 1000
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
    """Return the summary and the parts of a run for the page.

    Samples and spans of long runs are subsampled, which the summary's notes say. "samples" and
    "spans" of the summary give the name of the part that has each step. "live" is false once the
    run failed.
    number: index of the run among the runs on the page.
    """
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
        "state": STATE_NAMES[files.run_state],
        "missing": files.missing,
        **_metric_columns(files.metrics, notes),
        "settings": _setting_texts(files.settings),
        "earlier": {name: _setting_texts(each) for name, each in files.earlier_settings.items()},
        "prediction": files.prediction,
        "failures": files.failures,
        "stacks": files.stacks,
        "servers": _server_rows(files.servers, notes),
        "notes": notes,
    }
    for kind, run_parts in parts.items():
        summary[kind] = {step: name for name, content in run_parts for step in content}
    return RunContent(summary, [part for run_parts in parts.values() for part in run_parts])


def _metric_columns(records: Sequence[Record], notes: list[str]) -> dict[str, Any]:
    """Return {"steps": [...], "metrics": {name: [value or None, ...]}} of a run.

    Floats are rounded to six significant digits. Of more than MOST_STEPS records, every n-th is
    taken, and a note is added to `notes`.
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


def _server_rows(servers: Sequence[ServerRecord], notes: list[str]) -> list[list[Any]]:
    """Return [url, state, weights version, rows running, restarts, recomputed tokens, reason, rank,
    Unix time of the report] of each generation server.

    Of more than MOST_SERVERS, the first are taken, and a note is added to `notes`.
    """
    if len(servers) > MOST_SERVERS:
        notes.append(f"servers: {MOST_SERVERS} of {len(servers)} are shown")
    rows: list[list[Any]] = []
    for each in servers[:MOST_SERVERS]:
        row: list[Any] = [each.url, each.state, each.weights_version, each.running_rows]
        row += [each.restarts, each.recomputed_tokens, each.reason, each.rank, each.time]
        rows.append(row)
    return rows


def _round_float(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    return value


def _setting_texts(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings as written on the command line: null, true, false, otherwise str()."""
    names = {None: "null", True: "true", False: "false"}
    texts = {}
    for key, value in settings.items():
        texts[key] = names[value] if value is None or isinstance(value, bool) else str(value)
    return texts


def _group_by_step(items: Sequence[T], step_of: Callable[[T], int]) -> dict[int, list[T]]:
    """Return step -> its items, steps ascending, items in their order."""
    items_by_step: dict[int, list[T]] = {}
    for item in items:
        items_by_step.setdefault(step_of(item), []).append(item)
    return dict(sorted(items_by_step.items()))


def _subsample_steps(
    steps: dict[int, list[T]], most: int, file: str, notes: list[str]
) -> dict[int, list[T]]:
    """Return every n-th step back from the last, in order, each with all of its items.

    n is the smallest number that leaves at most `most` items, or a single step. If steps are
    omitted, a note about `file` is added to `notes`.
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
    """Split steps into parts of consecutive steps with at most `size` items each.

    A single step with more items is a part of its own. Parts are named `name`-0, `name`-1, ...
    """
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
    """Return [rank, lane, label, start, end, received bytes, host bytes] of each span, in order.

    Start and end are seconds since the first of these spans began, rounded to microseconds.
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
