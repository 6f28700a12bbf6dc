"""The stacks of a rank, in RUN_DIR/stacks-rank<k>.txt; what NCCL knows, next to it.

A rank writes them itself (`dump_stacks`), or on a signal: that also works while C code
holds the interpreter, and for a stopped process in the moment when it goes on.
"""

from __future__ import annotations

import contextlib
import faulthandler
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from spmdflow.failure.process import STACKS_SIGNAL
from spmdflow.failure.user_code import is_own

_DUMP_SECONDS = 1.0
_FRAME = re.compile(r'File "(.*)", line (\d+) in (\S+)')


def stacks_path(run_dir: Path, rank: int) -> Path:
    """The file of a rank."""
    return run_dir / f"stacks-rank{rank}.txt"


def dump_stacks(path: Path, header: str, owns_folder: Callable[[], bool] = lambda: True) -> None:
    """Append header and the Python stack of every thread of this process to path.

    Nothing is written unless owns_folder(): whether the folder of path is still this run's.
    With NCCL its flight recorder goes into the same name with .nccl (torch's own format).
    A bad disk raises nothing, and one that hangs holds the caller for a second.
    """
    writer = threading.Thread(target=_write, args=(path, header, owns_folder), daemon=True)
    writer.start()
    writer.join(_DUMP_SECONDS)


def _write(path: Path, header: str, owns_folder: Callable[[], bool]) -> None:
    with contextlib.suppress(OSError, RuntimeError):
        if not owns_folder():
            return
        with path.open("a", encoding="utf-8") as file:
            file.write(f"{time.strftime('%H:%M:%S')} {header}\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
        record = getattr(torch._C._distributed_c10d, "_dump_nccl_trace", None)
        if record is not None and torch.accelerator.is_available():
            path.with_suffix(".nccl").write_bytes(record())


def line_in_stacks(path: Path) -> str:
    """Where the compute lane was, as the last stacks in path tell: "file:line in function".

    The user's own line, if one was running. Where the lane had nothing to do: the script's.
    """
    found = {}
    with contextlib.suppress(OSError):
        for stack in path.read_text(encoding="utf-8", errors="replace").split("\n\n"):
            frames = _FRAME.findall(stack)
            names = {function for _, _, function in frames}
            for outer in names & {"_run_lanes", "_run_script"}:
                own = []
                for frame in frames:
                    if is_own(frame[0]):
                        own.append(frame)
                found[outer] = frames[0], (own or frames)[0]
    inner, shown = found.get("_run_lanes", (("", "", "run"), ("", "", "")))
    if inner[2] == "run":  # of the lane itself: it waits for a command
        shown = found.get("_run_script", (inner, shown))[1]
    if shown[0]:
        return "{}:{} in {}".format(*shown)
    return ""


@contextlib.contextmanager
def stacks_on_signal(path: Path) -> Iterator[None]:
    """Within the context STACKS_SIGNAL appends the stacks to path.

    The file is open from the start; it is removed at the end if it is empty.
    """
    with contextlib.ExitStack() as at_end:
        with contextlib.suppress(OSError):
            file = at_end.enter_context(path.open("a", encoding="utf-8"))
            faulthandler.register(STACKS_SIGNAL, file, all_threads=True)
            at_end.callback(faulthandler.unregister, STACKS_SIGNAL)
        yield
    with contextlib.suppress(OSError):
        if path.stat().st_size == 0:
            path.unlink()
