"""The environment of the tests: a program in its own virtual environment, as a process.

The program gets the episode's address and key by the variables that it reads anyway, or as its
arguments; nothing of it is changed. What it prints last is its result.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import tempfile
from pathlib import Path
from typing import Any

CLIENTS = Path(__file__).parent / "clients"
_LIMIT_SECONDS = 240.0
_INHERITED = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "SSL_CERT_FILE")


async def episode(
    row: dict[str, Any], *, base_url: str, model: str, api_key: str
) -> dict[str, Any]:
    """Runs the program of the row, and writes its result to a folder in the one of the row.

    row: python, program (file of `clients`), variables ({name: value}), folder. The score is 1 if
    the program ended well. A result may have the "segment_scores" of the episode.
    """
    folder = Path(tempfile.mkdtemp(dir=row["folder"]))
    told = {"base_url": base_url, "model": model, "api_key": api_key}
    told["clients"] = str(CLIENTS)
    told["root_url"] = base_url.removesuffix("/v1")
    variables = {}
    for name in _INHERITED:
        if name in os.environ:
            variables[name] = os.environ[name]
    for name, value in row["variables"].items():
        variables[name] = value.format(**told)
    process = await asyncio.create_subprocess_exec(
        *(row["python"], "-P", str(CLIENTS / row["program"]), base_url, model, api_key),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=folder,
        env=variables,
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(_LIMIT_SECONDS):
            out, err = await process.communicate()
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
    text = out.decode(errors="replace")
    (folder / "stdout.txt").write_text(text)
    (folder / "stderr.txt").write_text(err.decode(errors="replace"))
    if process.returncode:
        return {"score": 0.0}
    result = json.loads(text.strip().splitlines()[-1])
    (folder / "result.json").write_text(json.dumps(result))
    scores = {"segment_scores": result["segment_scores"]} if "segment_scores" in result else {}
    return {"score": 1.0, **scores}


def keep_messages(row: dict[str, Any], messages: list[dict[str, Any]]) -> float:
    """The score of the bridge to MCP: writes the messages as the result."""
    folder = Path(tempfile.mkdtemp(dir=row["folder"]))
    results = [message["content"] for message in messages if message["role"] == "tool"]
    result = {
        "roles": [message["role"] for message in messages],
        "difference": json.loads(results[0])["time_difference"],
        "answer": messages[-1]["content"],
    }
    (folder / "result.json").write_text(json.dumps(result))
    return 1.0
