"""Another process that holds the lock of a RUN_DIR, and is killed."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_HOLD = """
import sys, time
from pathlib import Path
from spmdflow.checkpoint.lock import claim_run_dir
lock = claim_run_dir(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(600)
"""


@contextmanager
def forked_holder(run_dir: Path) -> Iterator[int]:
    """Within the context a process holds the lock; it is killed at the end. Gives its pid."""
    words = [sys.executable, "-c", _HOLD, str(run_dir)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "held\n"
        yield process.pid
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
