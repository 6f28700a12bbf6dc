"""The schedule of a step as a picture: models over time on their pools (paper Table 1).

Self-contained SVG, alone or inside HTML, without a library, script or font file. Each pool is a
band with one row for each of its models. Each call is a bar, and its colour shows the kind of work.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from spmdflow.config.parallel import spans
from spmdflow.errors import ConfigError
from spmdflow.plan.prediction import CallTime
from spmdflow.plan.report import PlanReport
from spmdflow.plan.text import seconds_of

_WIDTH = 1000
_LEFT = 190
_RIGHT = 20
_TOP = 74
_ROW = 30
_GAP = 16
_SPACE = _WIDTH - _LEFT - _RIGHT
_COLOURS = {
    "generate": ("#3b7dd8", "generation"),
    "infer": ("#8fbf6a", "inference"),
    "train": ("#e08a3c", "training"),
    "": ("#b9b9c2", "map functions and functions (host time only)"),
}
_FONT = 'font-family="Helvetica, Arial, sans-serif"'


class _Band(NamedTuple):
    """One pool's part of the picture."""

    ranks: tuple[int, ...]
    models: tuple[str, ...]
    top: int
    height: int


def write_picture(report: PlanReport, path: Path) -> None:
    """Write the schedule as .svg or .html.

    Raises ConfigError for another file extension, or for a step without calls.
    """
    where = "command line"
    if path.suffix not in (".svg", ".html"):
        expected = "a name that ends in .svg or .html"
        raise ConfigError.of(where, f"--picture {path}", expected, "rename it")
    if not report.prediction.calls:
        got = f"--picture {path} for a step without calls"
        expected = "a schedule"
        raise ConfigError.of(where, got, expected, "plan a script that calls a model")
    picture = "\n".join(_svg(report)) + "\n"
    if path.suffix == ".html":
        title = escape(Path(report.script).name)
        picture = (
            f"<!DOCTYPE html>\n<html><head><meta charset='utf-8'><title>{title}</title></head>\n"
            f"<body>{picture}</body></html>\n"
        )
    path.write_text(picture, encoding="utf-8")


def _svg(report: PlanReport) -> Iterator[str]:
    """Yield the lines of the SVG: title, time axis, a band for each pool with models, bars, legend.

    The axis reaches from 0 to the predicted seconds of the step, or to 1 s if they are 0.
    """
    bands: list[_Band] = []
    top = _TOP
    for name, pool in report.trace.pools.items():
        models = tuple(m.name for m in report.trace.models.values() if m.pool == name)
        if models:
            bands.append(_Band(tuple(pool.ranks), models, top, _ROW * len(models)))
            top += bands[-1].height + _GAP
    bottom = bands[-1].top + bands[-1].height if bands else _TOP
    height = bottom + 78
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        f'viewBox="0 0 {_WIDTH} {height}">'
    )
    yield f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>'
    yield from _title(report)
    total = report.prediction.seconds or 1.0
    for tick in range(6):
        at = _LEFT + _SPACE * tick / 5
        yield f'<line x1="{at:.1f}" y1="{_TOP - 6}" x2="{at:.1f}" y2="{bottom}" stroke="#e3e3e8"/>'
        words = seconds_of(total * tick / 5) if tick else "0"
        yield _text(at, bottom + 18, words, size=11, anchor="end" if tick == 5 else "middle")
    for band in bands:
        yield from _frame(band)
    for timed in report.prediction.calls:
        yield from _bars(bands, timed, scale=_SPACE / total)
    yield from _legend(bottom + 56)
    yield "</svg>"


def _title(report: PlanReport) -> Iterator[str]:
    """Yield two lines of text: script and ranks, then hardware, predicted seconds and tokens/s."""
    prediction = report.prediction
    name = Path(report.script).name
    heading = f"{name}, step {report.step} on {report.world_size} ranks"
    yield _text(16, 28, heading, size=17, bold=True)
    words = f"{prediction.hardware}: {seconds_of(prediction.seconds)} a step predicted, "
    yield _text(16, 50, f"{words}{prediction.tokens_per_second:,.0f} tokens/s", size=13)


def _frame(band: _Band) -> Iterator[str]:
    """Yield the outline of a pool's band, with the names of its models and its ranks."""
    yield (
        f'<rect x="{_LEFT}" y="{band.top}" width="{_SPACE}" height="{band.height}" fill="none" '
        f'stroke="#9a9aa5"/>'
    )
    for row, model in enumerate(band.models):
        yield _text(_LEFT - 10, band.top + _ROW * row + 20, model, size=13, anchor="end")
    yield (
        f'<text x="16" y="{band.top + 14}" {_FONT} font-size="10" fill="#77777f">'
        f"ranks {spans(band.ranks)}</text>"
    )


def _bars(bands: Sequence[_Band], timed: CallTime, *, scale: float) -> Iterator[str]:
    """Yield the bar of a call in its model's row.

    A map function has a bar in every pool that runs it. A bar is at least one pixel wide. It shows
    method and duration if they fit, otherwise the duration if that fits. Other calls, such as
    fetches, have no bar.
    scale: pixels of a second.
    """
    model = timed.call.model
    method = timed.call.method
    left = _LEFT + timed.start * scale
    width = max(1.0, timed.seconds * scale)
    duration = seconds_of(timed.seconds)
    hint = escape(f"{timed.call.label}: {duration} {timed.limit}")
    for band in bands:
        if model in band.models:
            row = band.models.index(model)
            height = _ROW - 6
        elif model == "map" and set(timed.call.commands) & set(band.ranks):
            row = 0
            height = band.height - 6
        else:
            continue
        top = band.top + _ROW * row + 3
        yield (
            f'<rect x="{left:.1f}" y="{top}" width="{width:.1f}" height="{height}" rx="2" '
            f'fill="{_COLOURS[timed.kind][0]}"><title>{hint}</title></rect>'
        )
        fitting = []
        for words in (f"{method} {duration}", duration):
            if width > 6.4 * len(words):
                fitting.append(words)
        for label in fitting[:1]:
            yield _text(left + 5, top + min(height, _ROW - 6) / 2 + 4, label, size=11)


def _legend(top: int) -> Iterator[str]:
    """Yield a coloured square and a name for each kind of work, from left to right."""
    at = _LEFT
    for colour, words in _COLOURS.values():
        yield f'<rect x="{at}" y="{top - 10}" width="12" height="12" fill="{colour}"/>'
        yield _text(at + 18, top, words, size=11)
        at += 40 + 7 * len(words)


def _text(
    x: float, y: float, words: str, *, size: int, anchor: str = "start", bold: bool = False
) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" {_FONT} font-size="{size}" text-anchor="{anchor}"'
        f'{weight} fill="#222228">{escape(words)}</text>'
    )
