"""What is kept of the runs: docs/learning/<name>.json, and a picture and text of each group."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.learn.entry import Entry
from scripts.learn.runs import Run
from spmdflow.tracking.progress import text_curve

Points = dict[int, list[float]]
"""Step -> the value of each seed that measured it."""


def points_of(runs: Sequence[Run], metric: str) -> Points:
    """The metric's values by step."""
    points: Points = {}
    for run in runs:
        for record in run.records():
            if record.get(metric) is not None:
                points.setdefault(record["step"], []).append(round(record[metric], 5))
    return points


def medians(points: Points) -> list[tuple[int, float]]:
    """(step, median over seeds) where every seed measured."""
    most = max((len(values) for values in points.values()), default=0)
    return [(s, statistics.median(v)) for s, v in sorted(points.items()) if len(v) == most]


def write_entry(
    entry: Entry, runs: Sequence[Run], docs: Path, *, samples: Sequence[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """Write <name>.json; returns what it holds. samples: of `samples.samples_of`."""
    metrics = {
        name: {str(step): values for step, values in sorted(points_of(runs, name).items())}
        for name in (entry.metric, *(name for name, _ in entry.drawn), *entry.more_metrics)
    }
    curve = medians(points_of(runs, entry.metric))
    by_step = dict(curve)
    reached = by_step[entry.target_step] if entry.target_step is not None else curve[-1][1]
    made = {
        "name": entry.name,
        "group": entry.group,
        "command": entry.command(runs[0].seed),
        "settings": list(entry.settings),
        "seeds": [run.seed for run in runs],
        "commits": [run.commit for run in runs],
        "seconds": [run.seconds for run in runs],
        # of a run that was continued they are not known: no number, and never a null
        "cpu_seconds": [run.cpu_seconds for run in runs if run.cpu_seconds is not None],
        "hardware": hardware(),
        "metric": entry.metric,
        "start": curve[0][1],
        "end": curve[-1][1],
        "steps": curve[-1][0],
        "target": entry.target,
        "target_step": entry.target_step,
        "at_least": entry.at_least,
        "met": entry.target is None
        or (reached >= entry.target if entry.at_least else reached <= entry.target),
        "drawn": [[entry.metric, entry.target], *map(list, entry.drawn)],
        "judged": [run.judged for run in runs if run.judged is not None],
        "samples": list(samples),
        "points": metrics,
    }
    docs.mkdir(parents=True, exist_ok=True)
    (docs / f"{entry.name}.json").write_text(_compact(made) + "\n")
    return made


def _compact(made: dict[str, Any]) -> str:
    """JSON with one line for each key of the first two levels."""
    lines = []
    for name, value in made.items():
        if name == "points":
            inner = [f"  {json.dumps(key)}: {json.dumps(points)}" for key, points in value.items()]
            lines.append('"points": {\n' + ",\n".join(inner) + "\n}")
        elif name == "samples":
            lines.append('"samples": [\n' + ",\n".join(map(json.dumps, value)) + "\n]")
        else:
            lines.append(f"{json.dumps(name)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(lines) + "\n}"


def hardware() -> str:
    """Cores, processor and Python of this machine."""
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    cores = len(os.sched_getaffinity(0))
    return f"{cores} virtual cores, {names[0] if names else platform.machine()}, shared"


def read_all(docs: Path) -> list[dict[str, Any]]:
    """Everything that `write_entry` wrote there."""
    return [json.loads(path.read_text()) for path in sorted(docs.glob("*.json"))]


@dataclass(frozen=True)
class Panel:
    """One metric of one entry."""

    title: str
    metric: str
    level: float | None
    points: Points


def panels_of(entries: Sequence[dict[str, Any]]) -> list[Panel]:
    """The curves of a group, in order."""
    return [
        Panel(
            made["name"],
            metric,
            level,
            {int(step): values for step, values in made["points"][metric].items()},
        )
        for made in entries
        for metric, level in made["drawn"]
    ]


def write_group(group: str, entries: Sequence[dict[str, Any]], docs: Path) -> None:
    """<group>.txt and <group>.png: the median curves, in the picture each seed thinly too."""
    panels = panels_of(entries)
    lines: list[str] = []
    for panel in panels:
        seeds = max(map(len, panel.points.values()))
        title = f"{panel.title}: {panel.metric}, median of {seeds} seed{'s'[: seeds > 1]}"
        lines += [*text_curve(title, medians(panel.points), width=48, height=8), ""]
    (docs / f"{group}.txt").write_text("\n".join(lines))
    draw(panels, docs / f"{group}.png")


def draw(panels: Sequence[Panel], path: Path, *, dpi: int = 80) -> None:
    """A picture with a plot for each; a dashed line where the level to reach is."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(2.6 * columns, 2.1 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    for place, panel in enumerate(panels, start=1):
        axis = figure.add_subplot(rows, columns, place)
        for seed in range(max(map(len, panel.points.values()))):
            own = [(s, v[seed]) for s, v in panel.points.items() if seed < len(v)]
            axis.plot(*zip(*own), color="tab:blue", alpha=0.3, linewidth=0.8)
        axis.plot(*zip(*medians(panel.points)), color="tab:blue", marker="o", markersize=2)
        if panel.level is not None:
            axis.axhline(panel.level, color="tab:red", linewidth=0.8, linestyle="--")
        axis.set_title(panel.title, fontsize=8)
        axis.set_ylabel(panel.metric, fontsize=6)
        axis.tick_params(labelsize=6)
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=dpi)


def table(entries: Sequence[dict[str, Any]]) -> str:
    """Markdown: one line for each entry."""
    lines = [
        "| run | metric | start | end (each seed) | target | steps | CPU seconds | commit |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for made in entries:
        points = made["points"][made["metric"]]
        last = points[str(made["steps"])]
        ends = ", ".join(f"{value:.3f}" for value in last)
        sign = ">=" if made["at_least"] else "<="
        when = f" at step {made['target_step']}" if made["target_step"] is not None else ""
        target = "" if made["target"] is None else f"{sign} {made['target']:g}{when}: "
        verdict = ("met" if made["met"] else "**missed**") if target else "-"
        known = made["cpu_seconds"]
        cpu = f"{statistics.median(known):.0f}" if known else "-"
        lines.append(
            f"| {made['name']} | {made['metric']} | {made['start']:.3f} | **{made['end']:.3f}** "
            f"({ends}) | {target}{verdict} | {made['steps']} | {cpu} "
            f"| {', '.join(dict.fromkeys(made['commits']))} |"
        )
    return "\n".join(lines)


def judged_table(entries: Sequence[dict[str, Any]]) -> str:
    """Markdown: what stories_metrics.py says of the last checkpoints."""
    lines = [
        "| run | sampling | responses | reward | KL, nats per response "
        "| distinct 3-grams within / corpus | VADER |",
        "|---|---|---|---|---|---|---|",
    ]
    for made in entries:
        for row in (row for rows in made["judged"] for row in rows):
            # of greedy text it is no mean over the policy's samples
            kl = f"{row['kl']:.1f}" if row["sampling"] == "sampled" else "-"
            lines.append(
                f"| {made['name']}, {row['model']} | {row['sampling']} | {row['num_responses']} "
                f"| {row['reward']:.2f} +- {row['reward_error']:.2f} | {kl} "
                f"| {row['within']:.3f} / {row['corpus']:.3f} | {row['vader']:.2f} |"
            )
    return "\n".join(lines)


def write_page(page: Path, tables: Mapping[str, str]) -> None:
    """Replace what stands between `<!-- NAME -->` and `<!-- end -->` by that table."""
    text = page.read_text(encoding="utf-8")
    for name, made in tables.items():
        mark = f"<!-- {name} -->"
        if mark in text:
            before, _, rest = text.partition(mark)
            text = f"{before}{mark}\n\n{made}\n\n{rest[rest.index('<!-- end -->') :]}"
    page.write_text(text, encoding="utf-8")
