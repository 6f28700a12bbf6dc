"""What building an engine takes of the host's memory, and reads of the folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from spmdflow.weights.folder import folder_tensors

pytestmark = pytest.mark.drill

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).parent / "programs" / "startup_memory.py"
MIB = 1 << 20


def judge(folder: Path, size: str, cases: list[str], *, slack: int) -> None:
    """Every rank takes what it keeps and at most slack bytes more; all read the files once."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    model = folder / "model"
    output = folder / "found.json"
    for command in (
        [sys.executable, str(PROGRAM), "write", str(model), size],
        [*launch, str(PROGRAM), "measure", str(model), str(output), *cases],
    ):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=550)
        assert done.returncode == 0, done.stderr[-4000:]
    files = sum(tensor.nbytes for _, tensor in folder_tensors(model))
    for case, rows in json.loads(output.read_text()).items():
        over = [(row["peak"] - row["share"]) // MIB for row in rows]
        assert max(over) <= slack // MIB, (case, over)
        copies = len(rows) if case.startswith("zero1") else 1
        read = sum(row["read"] for row in rows)
        assert files <= read <= 1.1 * copies * files, (case, read, files)


def test_ranks_take_their_share_of_memory_and_read_each_byte_once(tmp_path: Path) -> None:
    # the whole model in float32 is 400 MiB
    cases = ["fsdp:4:float32:trains", "zero1:2:bfloat16:frozen", "megatron:p2:bfloat16:trains"]

    judge(tmp_path, "0.1B", cases, slack=150 * MIB)


@pytest.mark.slow  # writes 3 GB and takes 7 GiB of memory, about a minute
def test_1_5b_takes_its_share_and_300_mib_on_1_2_and_4_ranks(tmp_path: Path) -> None:
    data_parallel = [
        *(f"fsdp:{size}:{dtype}:frozen" for size in (1, 2, 4) for dtype in ("float32", "bfloat16")),
        *(f"zero3:{size}:bfloat16:frozen" for size in (1, 2, 4)),
    ]
    cut = [f"megatron:{layout}:bfloat16:frozen" for layout in ("t1", "t2", "p2", "t2.p2")]

    judge(tmp_path, "1.5B", data_parallel + cut, slack=300 * MIB)
