"""The page: one HTML file from the files in page/, the content of runs and plotly's script.

Content is data, never markup: JSON with "<" as an escape, and parts as compressed bytes in base64;
the page's scripts set it as text. A content security policy forbids every request.
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
from spmdflow.tracking.reading import RunFiles
from spmdflow.view.content import Part, content_of

logger = logging.getLogger(__name__)

PAGE_FILE = "view.html"
SCRIPTS = ("base", "metrics", "samples", "timeline", "comparison", "failures", "settings", "start")
"""Files of page/, in the order in which they are read."""


def write_page(run_dirs: Sequence[Path], path: Path, *, refresh_seconds: float = 0.0) -> int:
    """Write the page of some runs, atomically; returns its bytes.

    refresh_seconds: the page loads itself again so often; 0: never. ConfigError without plotly.
    """
    data = page_text([RunFiles(each) for each in run_dirs], refresh_seconds=refresh_seconds)
    write_atomically(path, data.encode())
    return len(data.encode())


def view_run(cfg: Any) -> None:
    """Write the page of a run that has just ended, and log where it is. Any: the settings.

    It never changes how a run ends: its own errors are logged.
    """
    path = path_of(cfg.run) / PAGE_FILE
    try:
        write_page([path.parent], path)
        logger.info("a page to look at: %s", path)
    except Exception as err:  # the run is over: what happened to it is told by others
        logger.warning("no page is written: %s: %s", type(err).__name__, err)


def page_text(runs: Sequence[RunFiles], *, refresh_seconds: float = 0.0) -> str:
    """The HTML of the page."""
    contents = []
    for number, run in enumerate(runs):
        contents.append(content_of(run, number))
    parts = []
    for content in contents:
        for part in content.parts:
            parts.append(part)
    parts.append(Part("plotly", plotly_script()))
    summary = {
        "made": datetime.now().strftime("%Y-%m-%d %H:%M:%S"),
        "refresh": refresh_seconds,
        "runs": [content.summary for content in contents],
    }
    pieces = {
        "title": ", ".join(run.name for run in runs),
        "style": _own("view.css"),
        "summary": as_data(summary),
        "parts": "\n".join(map(_element, parts)),
        "script": "\n".join(_own(f"{name}.js") for name in SCRIPTS),
    }
    text = _own("page.html")
    pieces["title"] = pieces["title"].replace("&", "&amp;").replace("<", "&lt;")
    before, *places = text.split("{{")
    filled = [before]
    for place in places:
        name, _, after = place.partition("}}")
        filled += [pieces[name], after]
    return "".join(filled)


def as_data(value: Any) -> str:
    """JSON that can stand in a script element: nothing in it ends the element."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c")


def plotly_script() -> str:
    """plotly.js, as its Python package carries it; ConfigError if that is not installed."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as err:
        got = f"no plotly ({err})"
        expected = "the package that carries plotly.js"
        raise ConfigError.of("view", got, expected, "pip install 'spmdflow[view]'") from err
    script: str = get_plotlyjs()
    return script


def _element(part: Part) -> str:
    plain = json.dumps(part.content, separators=(",", ":"), allow_nan=False).encode()
    coded = base64.b64encode(gzip.compress(plain, 6, mtime=0)).decode()
    return f'<script type="application/gzip" id="{part.name}">{coded}</script>'


def _own(name: str) -> str:
    return (files("spmdflow.view") / "page" / name).read_text(encoding="utf-8")
