"""Text output of a run: a line for each step, a table of samples, a curve.

Texts come from a model, so they must not reach the terminal as commands. Control, format and
unassigned characters are shown as escapes, and markup is not interpreted.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from math import fsum, isfinite
from types import MappingProxyType
from typing import NamedTuple, TextIO

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

SHOWN_SHARE = 0.05
"""The line omits stages shorter than this share of a step; metrics.jsonl has all of them."""
LINE_COLUMNS = 126
"""Columns of the line of a step; with "[rank 0] HH:MM:SS INFO " in front it has less than 150."""
_STAGES_KEPT = 2
_OMITTED_FIRST = (
    "rollout/drift",
    "actor/loss",
    "critic/explained_variance",
    "actor/clip_fraction",
    "eval/mean",
    "actor/reference_kl",
)
"""Metrics that a long line omits, the first one first."""


def progress_line(
    step: int, total: int, metrics: Mapping[str, float], *, width: int = LINE_COLUMNS
) -> str:
    """Return one line of text for a step: its main metrics, tokens per second, and seconds.

    "step 12/100 reward 1.234 approx_kl 0.0012 3.4s: generate 1.2, actor 0.91"; the parts are two
    spaces apart. The metrics are those in FIELDS. Missing ones are omitted, and so are stages that
    take less than 5 % of the step. A value that is not finite is shown as nan.
    width: columns that the line may have. What does not fit is omitted: the shortest stages but
    two, then metrics in the order of _OMITTED_FIRST, then the other stages.
    """
    fields = _field_texts(metrics)
    stages = _stage_texts(metrics)
    line = _join(step, total, metrics, fields, stages)
    while len(line) > width and (fields.keys() & {*_OMITTED_FIRST} or stages):
        optional = [name for name in _OMITTED_FIRST if name in fields]
        if len(stages) > _STAGES_KEPT or not optional:
            stages.pop()
        else:
            del fields[optional[0]]
        line = _join(step, total, metrics, fields, stages)
    return line


def _field_texts(metrics: Mapping[str, float]) -> dict[str, str]:
    """Return metric -> "label value" of the metrics in FIELDS, in that order."""
    texts = {}
    for name, label, form in FIELDS:
        if name in metrics:
            value = metrics[name]
            shown = format(value, form) if form else _format_number(value)
            texts[name] = f"{label} {shown if isfinite(value) else 'nan'}"
    return texts


def _stage_texts(metrics: Mapping[str, float]) -> list[str]:
    """Return "stage seconds" of the stages that take at least 5 % of the step, longest first."""
    step_seconds = metrics.get(_STEP, 0.0)
    stages = sorted(stage_seconds(metrics).items(), key=lambda stage: -stage[1])
    texts = []
    for name, seconds in stages:
        if seconds >= SHOWN_SHARE * step_seconds:
            texts.append(f"{name} {_format_number(seconds)}")
    return texts


def _join(
    step: int,
    total: int,
    metrics: Mapping[str, float],
    fields: Mapping[str, str],
    stages: Sequence[str],
) -> str:
    """Return the line with these fields and stages."""
    parts = [f"step {step:>{len(str(total))}}/{total}", *fields.values()]
    if "perf/tokens_per_second" in metrics:
        rate = metrics["perf/tokens_per_second"]
        parts.append(f"{rate:.0f} tok/s" if rate < 10_000 else f"{rate / 1000:.1f}k tok/s")
    if _STEP in metrics:
        seconds = f"{_format_number(metrics[_STEP])}s"
        parts.append(f"{seconds}: {', '.join(stages)}" if stages else seconds)
    return "  ".join(parts)


def stage_seconds(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return stage -> seconds, from the metrics time/<stage>_seconds except time/step_seconds.

    Stages are in the metrics' order. Names lose compute_, update_ and _sequences (compute_values
    becomes values). The seconds of stages with the same short name are added.
    """
    stages: dict[str, float] = {}
    for name, seconds in metrics.items():
        if name.startswith("time/") and name.endswith("_seconds") and name != _STEP:
            stage = name.removeprefix("time/").removesuffix("_seconds")
            for verb in ("compute_", "update_"):
                stage = stage.removeprefix(verb)
            short = stage.removesuffix("_sequences")
            stages[short] = stages.get(short, 0.0) + seconds
    return stages


def _format_number(value: float) -> str:
    if abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.2g}"


_STEP = "time/step_seconds"
FIELDS: tuple[tuple[str, str, str], ...] = (
    ("reward/mean", "reward", ".3f"),
    ("eval/accuracy", "eval", ".1%"),
    ("actor/loss", "loss", ".3f"),
    ("reward_model/loss", "loss", ".3f"),
    ("eval/loss", "eval_loss", ".3f"),
    ("eval/mean", "eval_reward", ".3f"),
    ("actor/approx_kl", "approx_kl", ""),
    ("actor/reference_kl", "kl_ref", ""),
    ("actor/clip_fraction", "clip", ".1%"),
    ("critic/explained_variance", "ev", ".3f"),
    ("rollout/drift", "drift", ""),
)
"""Metric, label in the line, format (empty: two significant digits); see docs/METRICS.md."""


class Sample(NamedTuple):
    """One row of the table and of samples.jsonl. The facts, as far as the batch has them, are:

    - phase: train or eval (held-out prompts); group: number of the prompt in its batch;
    - advantage: mean over the trained tokens; cost, of a cost model; turns of an episode, and the
      tool calls of each turn: [[[name, arguments as JSON], ...], ...];
    - lengths: number of characters of the response per token; log_probs of the generator, in nats;
      gap: the trainer's log_probs minus the generator's (absent: not computed by the trainer);
      mask: a digit per token, 0 if the policy did not choose it (absent: it chose all tokens);
    - tokens: of the response, if its middle is omitted; " ... " then counts as one token above.
    """

    prompt: str
    response: str
    score: float
    terms: Mapping[str, float | str | None] = MappingProxyType({})
    """Components of the score, and other values that the reward functions returned."""
    facts: Mapping[str, object] = MappingProxyType({})
    """Group, advantage and tokens, as data for JSON."""

    def to_plain(self) -> dict[str, object]:
        """The sample as data for JSON; a score that is not finite becomes null."""
        score = float(self.score) if isfinite(self.score) else None
        record = {"prompt": self.prompt, "response": self.response, "score": score}
        return record | ({"terms": dict(self.terms)} if self.terms else {}) | dict(self.facts)


def print_samples(
    step: int,
    samples: Sequence[Sample],
    *,
    max_characters: int = 240,
    file: TextIO | None = None,
    width: int | None = None,
) -> None:
    """Print a table of samples (prompt, response, score) to a file, by default stderr.

    Control characters of the texts are escaped. max_characters: longer texts lose their middle.
    Rows have lines between them only if a text needs more than one line. width: by default the
    terminal's, otherwise COLUMNS or 80.
    """
    console = Console(file=file, stderr=file is None, width=width)
    rows = []
    for sample in samples:
        prompt = shorten_text(printable(sample.prompt), max_characters)
        response = shorten_text(printable(sample.response), max_characters)
        rows.append((prompt, response, f"{sample.score:.3g}"))
    longest = max((len(text) for row in rows for text in row), default=0)
    table = Table(
        title=f"samples of step {step}",
        title_justify="left",
        box=box.ASCII2,
        show_lines=longest > console.width // 3,
        expand=True,
    )
    table.add_column("prompt", ratio=2, overflow="fold")
    table.add_column("response", ratio=3, overflow="fold")
    table.add_column("score", justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*map(Text, row))
    console.print(table)


def printable(text: str) -> str:
    """The text on one line, with an escape for every invisible or control character."""
    return "".join(
        repr(character)[1:-1] if _is_hidden(character) else character for character in text
    )


def shorten_text(text: str, max_characters: int) -> str:
    """Return the text if it has at most max_characters, otherwise its start and end around " ... ".

    A shortened text has exactly max_characters. If max_characters is 5 or less, which is too short
    for the gap, it is only the start.
    """
    gap = " ... "
    if len(text) <= max_characters or max_characters <= len(gap):
        return text[:max_characters]
    room = max_characters - len(gap)
    return text[: room - room // 2] + gap + text[len(text) - room // 2 :]


def _is_hidden(character: str) -> bool:
    """Return whether a character is control, format, surrogate, private, unassigned or a separator.

    The plain space is not hidden.
    """
    kind = unicodedata.category(character)
    return kind.startswith("C") or kind in ("Zl", "Zp") or (kind == "Zs" and character != " ")


Point = tuple[float, float]


def text_curve(
    title: str, points: Sequence[Point], *, width: int = 60, height: int = 12
) -> list[str]:
    """Return the lines of a text plot of (x, y) points with ascending x, with title and axes.

    Points that are not finite are omitted; if no point is finite, one line says so. The curve is
    interpolated linearly between columns: `o` at measured points, `.` between them. If there are
    more points than columns, `*` is the mean of a column. A flat curve gets a margin of 10 % (1
    around 0).
    """
    points = [(float(x), float(y)) for x, y in points if isfinite(x) and isfinite(y)]
    if not points:
        return [f"{title}: no finite value"]
    first = points[0][0]
    last = points[-1][0]
    low = min(y for _, y in points)
    high = max(y for _, y in points)
    if low == high:  # a flat curve gets a margin above and below
        room = abs(low) * 0.1 or 1.0
        low = low - room
        high = high + room
    measured: dict[int, list[float]] = {}
    for x, y in points:
        if last > first:
            column = round((x - first) / (last - first) * (width - 1))
        else:
            column = 0
        measured.setdefault(column, []).append(y)
    means = {column: fsum(ys) / len(ys) for column, ys in measured.items()}
    mark = "*" if len(points) > width else "o"
    grid = [[" "] * width for _ in range(height)]
    for column in range(max(means) + 1):
        y = float(np.interp(column, list(means), list(means.values())))
        row = round((high - y) / (high - low) * (height - 1))
        grid[row][column] = mark if column in means else "."
    labels = [f"{high - (high - low) * row / (height - 1):.4g}" for row in range(height)]
    margin = max(map(len, labels))
    lines = [
        f"{label if row % 3 == 0 or row == height - 1 else '':>{margin}} |{''.join(marks)}".rstrip()
        for row, (label, marks) in enumerate(zip(labels, grid, strict=True))
    ]
    ends = f"{first:g}{f'step {last:g}':>{width - len(f'{first:g}')}}"
    return [title, *lines, f"{'':>{margin}} +{'-' * width}", f"{'':>{margin}}  {ends}"]
