"""RUN_DIR/servers: what each rank reports about the generation servers that it uses.

Each such rank replaces RUN_DIR/servers/rank-<R>.json atomically. The file is one JSON object:

    {"rank": 0, "time": 1790000000.0, "servers": [{"url": "http://10.0.0.7:8000", "state": "ready",
     "weights_version": 12, "restarts": 0, "running_rows": 5, "tokens": 91000,
     "recomputed_tokens": 0, "reason": ""}]}

Readers (the page for Prometheus, `spmdflow status` and `spmdflow view`) skip a file that is too
large or damaged, because a report may be missing at any time. A run that uses no servers has no
folder. This file knows no server and no generator.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from math import isfinite
from pathlib import Path
from typing import Any

from spmdflow.tracking.progress import printable, shorten_text

SERVERS_FOLDER = "servers"
STATES = ("ready", "starting", "syncing", "slow", "dead", "refused")
MAX_FILE_BYTES = 16 << 20
"""More than the largest report that `write_servers` writes."""
MAX_BYTES = 32 << 20
"""Of all reports together: later ranks are omitted."""
MAX_FILES = 4096
MAX_SERVERS_OF_A_RANK = 1024
MAX_TEXT = 500
"""Characters of a url or a reason."""
_MAX_COUNT = 1 << 62
_FILE = re.compile(r"rank-(0|[1-9][0-9]{0,8})\.json")
_COUNTS = ("weights_version", "restarts", "running_rows", "tokens", "recomputed_tokens")


@dataclass(frozen=True)
class ServerRecord:
    """What a rank last reported about one generation server."""

    url: str
    state: str
    """One of STATES."""
    weights_version: int = 0
    restarts: int = 0
    """How often the server was started again."""
    running_rows: int = 0
    """Rows that it generates at the moment."""
    tokens: int = 0
    """Tokens that it has generated since the run began."""
    recomputed_tokens: int = 0
    """Tokens that had to be computed again, since the run began."""
    reason: str = ""
    """Why the state is what it is; "" if there is nothing to say."""
    rank: int = 0
    """The rank that reports it; `write_servers` sets it."""
    time: float = 0.0
    """Unix time of the report; `write_servers` sets it."""

    @property
    def url_text(self) -> str:
        """The url for a terminal: printable, at most 120 characters."""
        return _shown_text(self.url)

    @property
    def reason_text(self) -> str:
        """The reason for a terminal, likewise."""
        return _shown_text(self.reason)

    def row(self) -> list[str]:
        """Return the cells of a table, as TITLES names them."""
        numbers = (self.weights_version, self.running_rows, self.restarts, self.recomputed_tokens)
        return [self.url_text, self.state, *map(str, numbers), self.reason_text]


TITLES = (
    "server",
    "state",
    "weights version",
    "rows running",
    "restarts",
    "recomputed tokens",
    "reason",
)
"""Columns of `ServerRecord.row`."""
_MAX_SHOWN = 120
_OF_THE_REPORT = {"rank", "time"}


def read_servers(run_dir: Path) -> list[ServerRecord]:
    """Return the servers in RUN_DIR/servers, by rank, in the order in which a rank reports them.

    [] without the folder. A file is skipped if it has more than 16 MiB, more than 1,024 servers, or
    a field that is missing or of a wrong type; so are further ranks after 32 MiB.
    """
    paths: dict[int, Path] = {}
    try:
        for path in (run_dir / SERVERS_FOLDER).iterdir():
            match = _FILE.fullmatch(path.name)
            if match is not None and len(paths) < MAX_FILES:
                paths[int(match[1])] = path
    except OSError:
        return []
    records = []
    left = MAX_BYTES
    for rank, path in sorted(paths.items()):
        with contextlib.suppress(OSError):
            left -= path.stat().st_size
        if left < 0:
            break
        records += _records_of(read_small_json(path, max_bytes=MAX_FILE_BYTES), rank)
    return records


def write_servers(run_dir: Path, rank: int, records: Sequence[ServerRecord]) -> None:
    """Replace RUN_DIR/servers/rank-<rank>.json atomically with these records and the current time.

    The file is not fsynced. Disk errors are ignored, because the next report replaces the file, and
    a report must not end a run. Texts are cut to 500 characters, and records to the first 1,024.
    RUN_DIR is not made if it is gone.
    """
    servers = []
    for record in records[:MAX_SERVERS_OF_A_RANK]:
        assert record.state in STATES, (record.state, STATES)
        plain = asdict(record)
        for name in _OF_THE_REPORT:
            del plain[name]
        plain["url"] = encodable(record.url)[:MAX_TEXT]
        plain["reason"] = encodable(record.reason)[:MAX_TEXT]
        assert _is_server(plain), plain
        servers.append(plain)
    report = {"rank": rank, "time": time.time(), "servers": servers}
    path = run_dir / SERVERS_FOLDER / f"rank-{rank}.json"
    with contextlib.suppress(OSError):
        path.parent.mkdir(exist_ok=True)
        new = path.with_suffix(".new")
        new.write_text(json.dumps(report), encoding="utf-8")
        new.replace(path)


def remove_servers(run_dir: Path) -> None:
    """Remove the reports of an earlier start; logs of servers stay. Disk errors are ignored."""
    with contextlib.suppress(OSError):
        for path in (run_dir / SERVERS_FOLDER).iterdir():
            if _FILE.fullmatch(path.name):
                path.unlink()


def read_small_json(path: Path, *, max_bytes: int) -> dict[str, Any]:
    """Return the JSON object in a regular file of at most max_bytes; {} for anything else."""
    try:
        if not path.is_file():
            return {}
        with path.open("rb") as file:
            data = file.read(max_bytes + 1)
        if len(data) > max_bytes:
            return {}
        value = json.loads(data)
    except (OSError, ValueError, RecursionError):
        return {}
    if isinstance(value, dict):
        return value
    return {}


def encodable(text: str) -> str:
    """Return a text with "?" for each character that UTF-8 cannot encode (half a surrogate)."""
    return text.encode("utf-8", "replace").decode("utf-8")


def is_number(value: object) -> bool:
    """Whether a JSON value is a finite number, and neither true nor false."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return isfinite(value)
    except OverflowError:  # an integer that no float can hold
        return False


def _records_of(report: dict[str, Any], rank: int) -> list[ServerRecord]:
    """Return the servers of a report; [] if anything in it is not as the module's docstring says.

    rank: of the file's name, which the report must repeat. Unknown fields are ignored.
    """
    servers = report.get("servers")
    reported_at = report.get("time")
    if report.get("rank") != rank or not is_number(reported_at) or not isinstance(servers, list):
        return []
    if len(servers) > MAX_SERVERS_OF_A_RANK:
        return []
    records = []
    for server in servers:
        if not _is_server(server):
            return []
        values = {}
        for each in fields(ServerRecord):
            if each.name not in _OF_THE_REPORT:
                values[each.name] = server[each.name]
        records.append(ServerRecord(**values, rank=rank, time=float(report["time"])))
    return records


def _is_server(server: object) -> bool:
    """Whether a JSON value has every field of a server, each of its type and within its bounds."""
    if not isinstance(server, dict) or server.get("state") not in STATES:
        return False
    for name in ("url", "reason"):
        text = server.get(name)
        if not isinstance(text, str) or len(text) > MAX_TEXT or encodable(text) != text:
            return False
    for name in _COUNTS:
        count = server.get(name)
        if type(count) is not int or not 0 <= count <= _MAX_COUNT:
            return False
    return True


def _shown_text(text: str) -> str:
    return shorten_text(printable(text), _MAX_SHOWN)
