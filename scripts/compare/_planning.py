"""Plans one script after another, with imports done once: `_planning.py WORK.json OUT.json`.

WORK.json: {"root": checkout, "cases": {name: words of `python -m spmdflow.plan`}}.
OUT.json: {name: {"status": exit code, "seconds", "plan": the JSON or null, "error": text}}. It is
written again after each plan.
"""

from __future__ import annotations

import contextlib
import io
import json
import runpy
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import spmdflow


def main() -> None:
    """Plan every case."""
    work = json.loads(Path(sys.argv[1]).read_text())
    out = Path(sys.argv[2])
    assert Path(spmdflow.__file__).is_relative_to(work["root"]), spmdflow.__file__
    results = {}
    for name, words in work["cases"].items():
        print(f"---- {name}: {' '.join(words)}", flush=True)
        results[name] = plan(words)
        print(f"status {results[name]['status']}, {results[name]['seconds']:.1f} s", flush=True)
        out.write_text(json.dumps(results))


def plan(words: list[str]) -> dict[str, Any]:
    """What the command line answers, and its plan; the public command alone is used."""
    output = io.StringIO()
    errors = io.StringIO()
    status: Any = 0
    started = time.perf_counter()
    with (
        patch.object(sys, "argv", ["spmdflow.plan", *words]),
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(errors),
    ):
        try:
            runpy.run_module("spmdflow.plan", run_name="__main__", alter_sys=False)
        except SystemExit as end:
            status = end.code
    text = output.getvalue()
    return {
        "status": status,
        "seconds": time.perf_counter() - started,
        "plan": json.loads(text) if text.startswith("{") else None,
        "error": errors.getvalue(),
    }


if __name__ == "__main__":
    main()
