"""Writes the page: one HTML file from the files in page/, the content of runs and plotly's script.

Content is embedded as data, never as markup: JSON in which "<" is escaped, and parts as gzip in
base64. The page's scripts insert it as text. A content security policy forbids every request.
"""

from __future__ import annotations

import base64
import gzip
import json
import logging
from collections.abc import Sequence
from datetime import datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

from spmdflow.checkpoint.disk import write_atomically
from spmdflow.checkpoint.run_dir import path_of
from spmdflow.errors import ConfigError
from spmdflow.requirement import install_command
from spmdflow.tracking.reading import RunFiles
from spmdflow.tracking.summary_table import differing_settings, summary_metrics
from spmdflow.view.content import PageData, content_of

logger = logging.getLogger(__name__)

PAGE_FILE = "view.html"
SCRIPTS = (
    "base",
    "runs",
    "metrics",
    "samples",
    "timeline",
    "comparison",
    "servers",
    "failures",
    "settings",
    "start",
)
"""Scripts of page/, in the order in which the browser runs them."""


def write_page(run_dirs: Sequence[Path], path: Path, *, refresh_seconds: float = 0.0) -> int:
    """Write the page of some runs atomically; returns its size in bytes.

    refresh_seconds: interval at which the page reloads itself; 0: never. ConfigError if plotly
    is not installed.
    """
    data = page_text([RunFiles(each) for each in run_dirs], refresh_seconds=refresh_seconds)
    write_atomically(path, data.encode())
    return len(data.encode())


def view_run(cfg: Any) -> None:
    """Write RUN_DIR/view.html of a run that has just ended, and log its path.

    An error here is only logged as a warning, so it never changes how the run ends. cfg: the run's
    settings.
    """
    path = path_of(cfg.run) / PAGE_FILE
    try:
        write_page([path.parent], path)
        logger.info("Report: %s", path)
    except Exception as err:  # the run has ended and reported its outcome already
        logger.warning("warning: no report written: %s: %s", type(err).__name__, err)


def page_text(runs: Sequence[RunFiles], *, refresh_seconds: float = 0.0) -> str:
    """Return the HTML of the page: page.html with its {{sections}} replaced.

    Each run is read from its files now. Settings, samples and texts are embedded as data that
    cannot end a script element, and the title is escaped. Raises ConfigError if plotly is not
    installed.
    refresh_seconds: interval at which the page reloads itself; 0: never.
    """
    contents = []
    for number, run in enumerate(runs):
        contents.append(content_of(run, number))
    parts = []
    for content in contents:
        for part in content.parts:
            parts.append(part)
    parts.append(PageData("plotly", plotly_script()))
    summary = {
        "made": datetime.now().strftime("%Y-%m-%d %H:%M:%S"),
        "refresh": refresh_seconds,
        "runs": [content.summary for content in contents],
        "table": {"settings": differing_settings(runs), "metrics": summary_metrics(runs)},
    }
    pieces = {
        "title": ", ".join(run.name for run in runs),
        "style": _read_page_file("view.css"),
        "summary": script_json(summary),
        "parts": "\n".join(map(_script_element, parts)),
        "script": "\n".join(_read_page_file(f"{name}.js") for name in SCRIPTS),
    }
    text = _read_page_file("page.html")
    pieces["title"] = pieces["title"].replace("&", "&amp;").replace("<", "&lt;")
    before, *sections = text.split("{{")
    filled = [before]
    for section in sections:
        name, _, after = section.partition("}}")
        filled += [pieces[name], after]
    return "".join(filled)


def script_json(value: Any) -> str:
    """JSON for a script element, escaped so that no value can end the element."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c")


def plotly_script() -> str:
    """Return plotly.js from the installed Python package plotly; ConfigError without it."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as err:
        got = f"no plotly ({err})"
        expected = "the Python package that contains plotly.js"
        raise ConfigError.of("view", got, expected, install_command("view")) from err
    script: str = get_plotlyjs()
    return script


def _script_element(part: PageData) -> str:
    plain = json.dumps(part.content, separators=(",", ":"), allow_nan=False).encode()
    coded = base64.b64encode(gzip.compress(plain, 6, mtime=0)).decode()
    return f'<script type="application/gzip" id="{part.name}">{coded}</script>'


def _read_page_file(name: str) -> str:
    return (files("spmdflow.view") / "page" / name).read_text(encoding="utf-8")
