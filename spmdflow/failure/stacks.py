"""The stacks of a rank in RUN_DIR/stacks-rank<k>.txt, and NCCL's flight recorder next to it.

A rank writes them itself (`dump_stacks`) or on a signal. The signal also works while C code holds
the interpreter. A stopped process writes them as soon as it continues.
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

    With NCCL, its flight recorder is written to the same name with the suffix .nccl (torch's own
    format). Disk errors are ignored, and a disk that hangs delays the caller for at most a second.

    owns_folder: whether the folder of path still belongs to this run. Otherwise nothing is written.
    """
    writer = threading.Thread(target=_write, args=(path, header, owns_folder), daemon=True)
    writer.start()
    writer.join(_DUMP_SECONDS)


def _write(path: Path, header: str, owns_folder: Callable[[], bool]) -> None:
    """Append header and all stacks to path, and write NCCL's flight recorder next to it.

    Runs in the thread of `dump_stacks`. Nothing is written if owns_folder() is false. OSError and
    RuntimeError are ignored.
    """
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
    """Return the line of the compute lane in the last stacks of path: "file:line in function".

    The user's innermost line, otherwise the innermost of all. If the compute lane waits for a
    command, the line of the script's thread instead. "" if the file is missing or has no such
    stack.
    """
    lines = {}
    with contextlib.suppress(OSError):
        for stack in path.read_text(encoding="utf-8", errors="replace").split("\n\n"):
            frames = _FRAME.findall(stack)
            names = {function for _, _, function in frames}
            for outer in names & {"_run_lanes", "_run_script"}:
                own_frames = []
                for frame in frames:
                    if is_own(frame[0]):
                        own_frames.append(frame)
                lines[outer] = frames[0], (own_frames or frames)[0]
    innermost, shown = lines.get("_run_lanes", (("", "", "run"), ("", "", "")))
    if innermost[2] == "run":  # Lane.run itself: the lane waits for a command
        shown = lines.get("_run_script", (innermost, shown))[1]
    if shown[0]:
        return "{}:{} in {}".format(*shown)
    return ""


@contextlib.contextmanager
def stacks_on_signal(path: Path) -> Iterator[None]:
    """Within the context, STACKS_SIGNAL makes this process append its stacks to path.

    Works while C code holds the interpreter. The file is opened at the start, and removed at the
    end if it is empty. If it cannot be opened, the context does nothing.
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
