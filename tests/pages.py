"""Code blocks of the documentation: what they are, and how a test runs them as a reader would.

A page is run in a folder of its own, its blocks in order:

- a block whose first line names a file (`# my_algo.py`, `# my.yaml`) is written into that file;
- another python block is run by Python, a bash block by bash, each with a limit;
- `<!-- run with: total_steps=2 -->` above a bash block is added to each of its runs, so that a page
  can show the real command;
- `<!-- not run: REASON -->` above a block leaves it out, as does `<!-- run by: FILE -->`, which
  names the script or test that runs these commands; text, console and unnamed yaml blocks are
  output or excerpts and are not run.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
_FENCE = re.compile(
    r"(?:^<!-- (?P<mark>not run|run by|run with): (?P<value>[^>]+?) -->\n+)?"
    r"^```(?P<language>\w*)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_FILE_NAME = re.compile(r"^# (?P<name>[\w./-]+\.(?:py|yaml|jsonl|sh))$")
_RUN = re.compile(
    r"^(?P<run>.*(?:-m spmdflow\.|\bspmdflow )run\b.*?)(?P<comment>\s+#.*)?$", re.MULTILINE
)


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    page: str
    line: int
    language: str
    text: str
    skipped: str | None = None
    """Why it is not run, if the page says so."""

    @property
    def file_name(self) -> str | None:
        """The file that its first line names."""
        found = _FILE_NAME.match(self.text.split("\n", 1)[0])
        return found["name"] if found else None

    @property
    def is_run(self) -> bool:
        """Whether running the page does something with it."""
        wanted = self.file_name is not None or self.language in ("bash", "python", "sh")
        return wanted and self.skipped is None


def blocks_of(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(
            page.name,
            text.count("\n", 0, found.start("language")) + 1,
            found["language"],
            _shortened(found["text"], found["value"] if found["mark"] == "run with" else None),
            found["value"] if found["mark"] in ("not run", "run by") else None,
        )
        for found in _FENCE.finditer(text)
    ]


def run_page(page: Path, folder: Path, *, seconds: float) -> list[str]:
    """Run the blocks of a page in folder; what failed, a text each. seconds: of one block."""
    failures = []
    for block in blocks_of(page):
        if not block.is_run:
            continue
        if block.file_name is not None:
            target = folder / block.file_name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(block.text, encoding="utf-8")
            continue
        interpreter = (
            [sys.executable, "-"] if block.language == "python" else ["bash", "-euo", "pipefail"]
        )
        done = subprocess.run(
            interpreter,
            input=block.text,
            env=_environment(),
            cwd=folder,
            timeout=seconds,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            tail = (done.stdout + done.stderr)[-3000:]
            failures.append(f"{block.page}:{block.line} ended with {done.returncode}\n{tail}")
    return failures


def _shortened(text: str, settings: str | None) -> str:
    if settings is None:
        return text
    joined = text.replace("\\\n", " ")  # a run may take several lines
    return _RUN.sub(lambda found: f"{found['run']} {settings}", joined)


def _environment() -> dict[str, str]:
    """As in a shell in which the project's virtual environment is active."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
