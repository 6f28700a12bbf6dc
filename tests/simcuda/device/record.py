"""What a process starts on its groups, and where its host waits for a device, as a file.

One JSON a rank: operations in the order in which they were started, waits by line of the project.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import sys
import threading
import time
from collections import Counter, defaultdict
from itertools import count
from pathlib import Path
from typing import Any

import surface
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

operations: list[dict[str, Any]] = []
waits: Counter[tuple[str, str, str]] = Counter()
wait_bytes: Counter[tuple[str, str, str]] = Counter()
launches: defaultdict[str, Counter[str]] = defaultdict(Counter)
memory: defaultdict[str, dict[int, tuple[int, int]]] = defaultdict(dict)
_run = ""
_DROP_SECONDS = 5.0
_batches = count()
_local = threading.local()


def listen(folder: str) -> None:
    """Record from now on, and write it to the folder when the process ends."""
    surface.native.on_operation(_operation)
    surface.native.on_sync(_wait)
    surface.sync = _wait
    stock = c10d.batch_isend_irecv

    def batch_isend_irecv(p2p_op_list: Any) -> Any:
        _local.batch = next(_batches)
        try:
            return stock(p2p_op_list)
        finally:
            _local.batch = None

    c10d.batch_isend_irecv = dist.batch_isend_irecv = batch_isend_irecv
    atexit.register(write, Path(folder))


def mark(name: str) -> None:
    """What follows belongs to the run `name`."""
    global _run
    _close_run()
    _run = name


def measure(step: int) -> None:
    """Note (bytes, blocks) of tensors on the rank's device as those after a step.

    A rank may still drop what it has answered with: more blocks than after the step before are
    looked at again for a while.
    """
    device = int(os.environ.get("LOCAL_RANK", "0"))
    before = memory[_run].get(step - 1)
    end = time.monotonic() + _DROP_SECONDS
    while True:
        gc.collect()
        used, _, _, blocks = surface.native.memory(device)
        if before is None or blocks <= before[1] or time.monotonic() > end:
            break
        time.sleep(0.05)
    memory[_run][step] = (used, blocks)


def _close_run() -> None:
    """What was started since the last call belongs to the run that ends."""
    before = sum(launches.values(), Counter())
    launches[_run] += Counter(surface.native.launches()) - before


def _wait(what: str, size: int) -> None:
    key = (_run, what, surface.line_of(sys._getframe().f_back))
    waits[key] += 1
    wait_bytes[key] += size


def _operation(group: str, op: str, shapes: list[Any], peer: int, tag: int) -> None:
    operations.append(
        {
            "run": _run,
            "group": group,
            "op": op,
            "shapes": shapes,
            "peer": peer,
            "tag": tag,
            "thread": threading.current_thread().name,
            "line": surface.line_of(sys._getframe().f_back),
            "batch": getattr(_local, "batch", None),
        }
    )


def write(folder: Path) -> None:
    """RANK-PID.json, unless this process has neither started nor awaited anything."""
    if not operations and not waits:
        return
    _close_run()
    rank = int(os.environ.get("RANK", "0"))
    listed = [[*key, number, wait_bytes[key]] for key, number in waits.most_common()]
    folder.mkdir(parents=True, exist_ok=True)
    found = {"rank": rank, "operations": operations, "waits": listed}
    text = json.dumps(found | {"launches": launches, "memory": memory})
    (folder / f"{rank}-{os.getpid()}.json").write_text(text)
