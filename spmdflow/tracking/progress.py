"""What a run shows as text: a line for each step, a table of samples, a curve.

Texts come from a model, so nothing in them may reach the terminal as a command: control,
format and unassigned characters are shown as escapes, and markup is not interpreted.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from math import isfinite
from types import MappingProxyType
from typing import NamedTuple, TextIO

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

SHOWN_SHARE = 0.05
"""Stages shorter than this share of a step are left out of the line (metrics.jsonl has all)."""


def progress_line(step: int, total: int, metrics: Mapping[str, float]) -> str:
    """Step, the metrics of FIELDS that are there, seconds of the step and of its stages.

    "step  12/100  reward 1.234  approx_kl 0.0012  ...  3.4s: generate 1.2, actor 0.91".
    """
    parts = [f"step {step:>{len(str(total))}}/{total}"]
    parts += [
        f"{label} {_shown(metrics[name], form)}" for name, label, form in FIELDS if name in metrics
    ]
    if "perf/tokens_per_second" in metrics:
        parts.append(f"{_shown(metrics['perf/tokens_per_second'], _rounded)} tok/s")
    return "  ".join(parts + _seconds(metrics))


def stage_seconds(metrics: Mapping[str, float]) -> dict[str, float]:
    """Seconds by stage, in the metrics' order, under short names: compute_values is values."""
    stages: dict[str, float] = {}
    for name, seconds in metrics.items():
        if name.startswith("time/") and name.endswith("_seconds") and name != _STEP:
            stage = name.removeprefix("time/").removesuffix("_seconds")
            for verb in ("compute_", "update_"):
                stage = stage.removeprefix(verb)
            short = stage.removesuffix("_sequences")
            stages[short] = stages.get(short, 0.0) + seconds
    return stages


def _seconds(metrics: Mapping[str, float]) -> list[str]:
    """["3.4s: generate 1.2, actor 0.91"]; [] without the step's seconds."""
    if _STEP not in metrics:
        return []
    whole = metrics[_STEP]
    stages = [
        f"{name} {_small(seconds)}"
        for name, seconds in stage_seconds(metrics).items()
        if seconds >= SHOWN_SHARE * whole
    ]
    return [f"{_small(whole)}s: {', '.join(stages)}" if stages else f"{_small(whole)}s"]


def _shown(value: float | None, form: Callable[[float], str]) -> str:
    return form(value) if value is not None and isfinite(value) else "nan"


def _signed(value: float) -> str:
    return f"{value:.3f}"


def _percent(value: float) -> str:
    return f"{100 * value:.1f}%"


def _small(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.2g}"


def _rounded(value: float) -> str:
    return f"{value:.0f}" if value < 10_000 else f"{value / 1000:.1f}k"


_STEP = "time/step_seconds"
FIELDS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("reward/mean", "reward", _signed),
    ("eval/accuracy", "eval", _percent),
    ("actor/loss", "loss", _signed),
    ("reward_model/loss", "loss", _signed),
    ("eval/loss", "eval_loss", _signed),
    ("eval/mean", "eval_reward", _signed),
    ("actor/approx_kl", "approx_kl", _small),
    ("actor/reference_kl", "kl_ref", _small),
    ("actor/clip_fraction", "clip", _percent),
    ("critic/explained_variance", "ev", _signed),
    ("rollout/drift", "drift", _small),
)
"""Metric, label in the line, form; explained in docs/METRICS.md."""


class Sample(NamedTuple):
    """One row of the table and of samples.jsonl."""

    prompt: str
    response: str
    score: float
    terms: Mapping[str, float | str | None] = MappingProxyType({})
    """What the score is made of, and what else the functions returned."""


class SampleTable:
    """Prints a few samples every so many steps.

    As wide as the terminal; in a log, COLUMNS or 80.
    """

    def __init__(
        self,
        every: int,
        *,
        num_rows: int = 5,
        max_characters: int = 240,
        file: TextIO | None = None,
        width: int | None = None,
    ) -> None:
        """every: steps between tables, 0 for none; file: stderr if None."""
        self.every = every
        self._num_rows, self._max_characters = num_rows, max_characters
        self._console = Console(file=file, stderr=file is None, width=width)

    def is_due(self, step: int) -> bool:
        """Whether a table belongs to this step."""
        return self.every > 0 and step % self.every == 0

    def show(self, step: int, samples: Sequence[Sample]) -> None:
        """Print the first samples as a table."""
        shown = islice(samples, self._num_rows)
        self._console.print(_table(f"samples of step {step}", shown, self._max_characters))


def printable(text: str) -> str:
    """text with every character that is not plainly visible as its escape, on one line."""
    return "".join(
        repr(character)[1:-1] if _is_hidden(character) else character for character in text
    )


def shortened(text: str, max_characters: int) -> str:
    """text, or its beginning and end with " ... " between, at most max_characters long."""
    gap = " ... "
    if len(text) <= max_characters or max_characters <= len(gap):
        return text[:max_characters]
    room = max_characters - len(gap)
    return text[: room - room // 2] + gap + text[len(text) - room // 2 :]


def _is_hidden(character: str) -> bool:
    """Control, format, surrogate, private, unassigned; separators but the space."""
    kind = unicodedata.category(character)
    return kind.startswith("C") or kind in ("Zl", "Zp") or (kind == "Zs" and character != " ")


def _table(title: str, samples: Iterable[Sample], max_characters: int) -> Table:
    table = Table(title=title, title_justify="left", box=box.ASCII2, show_lines=True, expand=True)
    table.add_column("prompt", ratio=2, overflow="fold")
    table.add_column("response", ratio=3, overflow="fold")
    table.add_column("score", justify="right", no_wrap=True)
    for sample in samples:
        texts = (
            Text(shortened(printable(text), max_characters))
            for text in (sample.prompt, sample.response)
        )
        table.add_row(*texts, f"{sample.score:.3g}")
    return table


Point = tuple[float, float]


def text_curve(
    title: str, points: Sequence[Point], *, width: int = 60, height: int = 12
) -> list[str]:
    """Lines of a plot of (x, y) points in rising x; points that are not finite are left out.

    The curve is drawn by linear interpolation, `o` at measured points, `.` between them (only
    `*`, the mean of a column, where there are more points than columns).
    """
    points = [(float(x), float(y)) for x, y in points if isfinite(x) and isfinite(y)]
    if not points:
        return [f"{title}: no finite value"]
    first, last = points[0][0], points[-1][0]
    low, high = _limits([y for _, y in points])
    grid = [[" "] * width for _ in range(height)]
    for column, y, mark in _columns(points, width):
        grid[round((high - y) / (high - low) * (height - 1))][column] = mark
    labels = [f"{high - (high - low) * row / (height - 1):.4g}" for row in range(height)]
    margin = max(map(len, labels))
    lines = [
        f"{label if row % 3 == 0 or row == height - 1 else '':>{margin}} |{''.join(marks)}".rstrip()
        for row, (label, marks) in enumerate(zip(labels, grid, strict=True))
    ]
    ends = f"{first:g}{f'step {last:g}':>{width - len(f'{first:g}')}}"
    return [title, *lines, f"{'':>{margin}} +{'-' * width}", f"{'':>{margin}}  {ends}"]


def _limits(values: Sequence[float]) -> Point:
    """Lowest and highest y of the plot; a flat curve gets room above and below."""
    low, high = min(values), max(values)
    if low == high:
        room = abs(low) * 0.1 or 1.0
        return low - room, high + room
    return low, high


def _columns(points: Sequence[Point], width: int) -> list[tuple[int, float, str]]:
    """(column, y, mark) of everything that is drawn, measured points last."""
    span = points[-1][0] - points[0][0]
    measured: dict[int, list[float]] = {}
    for x, y in points:
        column = round((x - points[0][0]) / span * (width - 1)) if span else 0
        measured.setdefault(column, []).append(y)
    mark = "*" if len(points) > width else "o"
    means = [(column, sum(ys) / len(ys), mark) for column, ys in measured.items()]
    between = []
    for (left, y_left, _), (right, y_right, _) in zip(means, means[1:], strict=False):
        for column in range(left + 1, right):
            y = y_left + (y_right - y_left) * (column - left) / (right - left)
            between.append((column, y, "."))
    return between + means
