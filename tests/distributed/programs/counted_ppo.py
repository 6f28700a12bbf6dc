"""algos/ppo.py, whose ranks count what they send, and say who they are.

At its end every rank writes a JSON file into the folder COUNTS.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from spmdflow.failure.process import node_identity

sys.path.append(str(Path(__file__).parents[3] / "algos"))
from ppo import main as main  # noqa: E402

RANK = int(os.environ["RANK"])
SENT: Counter[int] = Counter()
"""Bytes that torch.distributed was asked to send, by destination: rows and their headers."""

_send = dist.isend


def _counting_send(tensor: torch.Tensor, destination: int, *args: Any, **kwargs: Any) -> Any:
    SENT[destination] += tensor.nbytes
    return _send(tensor, destination, *args, **kwargs)


def _write() -> None:
    found = {
        "node": node_identity(),
        "sent": SENT,
        "pids": os.readlink("/proc/self/ns/pid"),
    }
    (Path(os.environ["COUNTS"]) / f"rank-{RANK}.json").write_text(json.dumps(found))


dist.isend = _counting_send
atexit.register(_write)
