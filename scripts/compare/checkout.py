"""A commit in a git worktree of its own, and programs that run from there.

All commits share one Python environment, in which spmdflow may be installed from one checkout. A
program therefore gets the worktree as its PYTHONPATH, which comes before installed packages, and
`check_package` asks a process which spmdflow it has imported.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
_STOP_SECONDS = 60.0
"""What a program gets to stop its ranks, which torchrun itself gives 30."""
_LOG_END = 4000
"""Characters of a log that an error shows."""


@dataclass(frozen=True)
class Checkout:
    """The files of a commit in a folder."""

    root: Path
    text: str
    """The commit for a reader."""


@contextmanager
def check_out(commit: str) -> Iterator[Checkout]:
    """The commit in a temporary worktree, which is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="spmdflow-commit-") as folder:
        root = Path(folder) / "tree"
        _git("worktree", "add", "--quiet", "--detach", str(root), commit)
        try:
            yield Checkout(root, f"{_commit_line(root)}, in {root}")
        finally:
            _git("worktree", "remove", "--force", str(root))


def describe_working_tree(root: Path) -> Checkout:
    """A folder as it is, uncommitted changes included."""
    changed = _git("status", "--porcelain", "--untracked-files=no", root=root)
    more = ", with uncommitted changes" if changed else ""
    return Checkout(root, f"{_commit_line(root)}{more}, in {root}")


def _commit_line(root: Path) -> str:
    return _git("log", "-1", "--format=%h %s", root=root).strip()


def _git(*words: str, root: Path = ROOT) -> str:
    return subprocess.run(
        ["git", "-C", str(root), *words], check=True, stdout=subprocess.PIPE, text=True
    ).stdout


def variables_of(checkout: Checkout, *, num_threads: int = 1) -> dict[str, str]:
    """Environment of a program that imports the checkout's spmdflow, offline."""
    return {
        **os.environ,
        "PYTHONPATH": str(checkout.root),
        "OMP_NUM_THREADS": str(num_threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def check_package(checkout: Checkout) -> None:
    """Exit if programs of this checkout import another spmdflow."""
    code = "import spmdflow; print(spmdflow.__file__)"
    process = subprocess.run(
        [sys.executable, "-c", code],
        env=variables_of(checkout),
        cwd=checkout.root,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    found = Path(process.stdout.strip())
    expected = checkout.root / "spmdflow" / "__init__.py"
    if found.resolve() != expected.resolve():
        sys.exit(f"compare_commits: {found} was imported instead of {expected}")


def run_program(
    checkout: Checkout,
    words: Sequence[str],
    log: Path,
    *,
    seconds: float,
    variables: Mapping[str, str] | None = None,
) -> int:
    """Run `python WORDS` in the checkout and return its exit status.

    Its output is appended to the log. Exits if the program is not done after so many seconds.
    """
    with log.open("a") as output:
        process = subprocess.Popen(
            [sys.executable, *words],
            env=variables_of(checkout) | dict(variables or {}),
            cwd=checkout.root,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            sys.exit(f"compare_commits: not done after {seconds} s: {words}\n{end_of_log(log)}")
        finally:
            _stop(process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End a program that still runs. torchrun ends its ranks when it is asked to stop."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)


def torchrun_words(num_ranks: int) -> list[str]:
    """Words before a program that torchrun starts on ranks of this node."""
    return ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]


def end_of_log(log: Path) -> str:
    """The last lines of a program's output."""
    return log.read_text(errors="replace")[-_LOG_END:]
