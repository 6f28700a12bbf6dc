"""algos/ppo.py, whose ranks count what they send, what they read from memory, and say who they are.

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

from spmdflow.runtime.process import node_identity
from spmdflow.transfer.lane import CountedTransport

sys.path.append(str(Path(__file__).parents[3] / "algos"))
from ppo import main as main  # noqa: E402

RANK = int(os.environ["RANK"])
SENT: Counter[int] = Counter()
"""Bytes that torch.distributed was asked to send, by destination: rows and their headers."""
READ: Counter[int] = Counter()
"""Bytes read from the memory of another rank, by source."""

_send, _read = dist.isend, CountedTransport.read


def _counting_send(tensor: torch.Tensor, destination: int, *args: Any, **kwargs: Any) -> Any:
    SENT[destination] += tensor.nbytes
    return _send(tensor, destination, *args, **kwargs)


def _counting_read(
    self: CountedTransport, frame: int, rows: Any, source: int, tensor: torch.Tensor
) -> None:
    READ[source] += tensor.nbytes
    _read(self, frame, rows, source, tensor)


def _write() -> None:
    found = {
        "node": node_identity(),
        "sent": SENT,
        "read": READ,
        "pids": os.readlink("/proc/self/ns/pid"),
    }
    (Path(os.environ["COUNTS"]) / f"rank-{RANK}.json").write_text(json.dumps(found))


dist.isend, CountedTransport.read = _counting_send, _counting_read  # type: ignore[method-assign]
atexit.register(_write)
