"""`spmdflow status RUN_DIR --live`: a panel in another terminal, redrawn every second.

It reads the same files as `spmdflow status`. A bar shows the seconds of a call relative to its
median so far. The ranks of a call that takes long are listed below it. A table shows the generation
servers, if the run has any. The panel ends with the run.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from spmdflow.checkpoint.lock import STATUS_FILE
from spmdflow.tracking.progress import progress_line
from spmdflow.tracking.reading import RunFiles, read_json
from spmdflow.tracking.servers import TITLES, ServerRecord

_EVERY = 1.0
_START_SECONDS = 60.0
_BAR = 24
_RECENT = 20
_MOST_SERVERS = 20
_STEP = "time/step_seconds"


def watch(run_dir: Path, console: Console) -> None:
    """Redraw the panel every second until the run has ended.

    Waits up to 60 s for a run that is not live yet. Ctrl-C passes through as KeyboardInterrupt.
    """
    seen = False
    began = time.monotonic()
    with Live(console=console, auto_refresh=False) as live:
        while True:
            files = RunFiles(run_dir)
            state = read_json(run_dir / STATUS_FILE)
            is_live = files.is_live
            live.update(panel(files, state if is_live else {}, time.time()), refresh=True)
            if not is_live and (seen or time.monotonic() - began > _START_SECONDS):
                return
            seen = seen or is_live
            time.sleep(_EVERY)


def panel(files: RunFiles, state: Mapping[str, Any], now: float) -> RenderableType:
    """Return the panel: step and time left, calls with their bars, metrics, slow, failed, servers.

    The time left is the remaining steps times the median of the last 20 steps' seconds.
    state: content of status.json, {} without a live run. now: Unix time.
    """
    grid = Table.grid(padding=(0, 2))
    total = files.settings.get("total_steps")
    records = files.metrics
    step = int(records[-1]["step"]) if records else 0
    durations = []
    for record in records[-_RECENT:]:
        if record.get(_STEP):
            durations.append(record[_STEP])
    if total and durations:
        left = f"{_duration((total - step) * median(durations))} left"
    else:
        left = ""
    of = f"step {step} of {total}" if total else f"step {step}"
    grid.add_row(Text(files.name, "bold"), _bar(step, total or 0), of, left)
    if "planning" in state:
        grid.add_row("", "", state["planning"], "")
    elif state:
        path = files.path / "metrics.jsonl"
        began = path.stat().st_mtime if path.exists() else 0.0
        for row in _calls(state, now, began, began - 3 * median(durations) if durations else 0.0):
            grid.add_row(*row)
    else:
        grid.add_row("", "", "no run is live")
    lines = [progress_line(step, total or step, records[-1])] if records else []
    lines += [f"slow: {text}" for text in state.get("slow", ())]
    lines += [f"failed: {name}" for name in files.failures]
    parts: list[RenderableType] = [grid]
    for line in lines:
        parts.append(Text(line, "dim"))
    if state and files.servers:
        parts.append(_server_table(files.servers))
    return Group(*parts)


def _server_table(servers: Sequence[ServerRecord]) -> Table:
    """Return a table of generation servers, those first that are not ready; at most 20 rows."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for title in TITLES:
        table.add_column(title)
    ordered = sorted(servers, key=lambda server: server.state == "ready")
    for server in ordered[:_MOST_SERVERS]:
        style = "" if server.state == "ready" else "bold"
        table.add_row(*(Text(cell, style) for cell in server.row()))
    if len(servers) > _MOST_SERVERS:
        table.add_row(Text(f"{len(servers) - _MOST_SERVERS} more", "dim"))
    return table


def _calls(
    state: Mapping[str, Any], now: float, began: float, recent: float
) -> Iterator[tuple[RenderableType, ...]]:
    """Yield (name, bar, seconds, ranks) of each kind of call: idle ones, then running ones.

    An idle kind has a full bar if it ended in this step. A running one shows its seconds so far
    relative to its median.
    began: Unix time at which the current step began. Idle kinds that last ended before `recent` are
    omitted. state, now: as in `panel`.
    """
    since = now - state["written"]
    running = {}
    for label, phase, *rest in state.get("open", ()):
        running[(label, phase)] = rest
    kinds = {}
    for label, phase, *rest in state.get("kinds", ()):
        kinds[(label, phase)] = rest
    for key, (usual, ended) in kinds.items():
        if key not in running and ended > recent and "." in key[0]:  # no reading of metrics
            is_done = ended > began
            yield _name(*key), _bar(is_done, 1), f"{usual:.2g} s" if is_done else "", ""
    for key, (seconds, num_ranks) in running.items():
        usual = kinds.get(key, (0.0, 0.0))[0]
        works = seconds > 0
        seconds += since if works else 0.0
        about = f"{seconds:.1f} s" + (f" of about {usual:.2g}" if usual else "")
        ranks = f"{num_ranks} rank{'s'[: num_ranks > 1]} {'at work' if works else 'to begin'}"
        yield _name(*key), _bar(min(seconds, usual), usual), about, ranks


def _name(label: str, phase: str) -> str:
    if phase == "train":
        return label
    return f"{label} ({phase})"


def _bar(completed: float, total: float) -> ProgressBar:
    """Empty where the total is not known."""
    return ProgressBar(total=total or 1, completed=completed if total else 0, width=_BAR)


def _duration(seconds: float) -> str:
    hours, minutes = divmod(round(seconds / 60), 60)
    return (
        f"{hours} h {minutes} min" if hours else f"{minutes} min" if minutes else "under a minute"
    )
