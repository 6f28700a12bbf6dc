"""Generation on real vLLM servers, compared with vLLM in process; servers end with their rank."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "tests" / "distributed" / "programs" / "served.py"
SECONDS = 600
NUM_ROWS = 40
ENDS_SECONDS = 10.0

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vllm"),
    pytest.mark.timeout(1800),
    pytest.mark.drill,
]


def begin(folder: Path, *words: str) -> subprocess.Popen[bytes]:
    """Start the program in a session of its own; its output is in folder/log."""
    variables = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    variables |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "ERROR"}
    if words[0] == "in-process":
        variables["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    with (folder / "log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, str(PROGRAM), *words],
            stdout=log,
            stderr=log,
            env=os.environ | variables,
            start_new_session=True,
        )


def generate(folder: Path, *words: str) -> dict[str, list[torch.Tensor]]:
    """Run the program; return responses and log-probabilities."""
    output = folder / "rows.pt"
    kind, *sizes = words
    process = begin(folder, kind, str(output), *sizes)
    try:
        assert process.wait(SECONDS) == 0, (folder / "log").read_text()[-3000:]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    rows: dict[str, list[torch.Tensor]] = torch.load(output)
    return rows


@pytest.fixture(scope="module")
def in_process(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[torch.Tensor]]:
    """Rows of vLLM in process, one at a time."""
    return generate(tmp_path_factory.mktemp("in-process"), "in-process", "1", "1")


def test_served_rows_in_exact_mode_equal_vllm_in_process_bit_for_bit(
    tmp_path: Path, in_process: dict[str, list[torch.Tensor]]
) -> None:
    served = generate(tmp_path, "served", "1", "1")

    for name, rows in in_process.items():
        assert all(map(torch.equal, served[name], rows)), name


def test_servers_on_two_ranks_draw_the_same_tokens_but_for_near_ties(
    tmp_path: Path, in_process: dict[str, list[torch.Tensor]]
) -> None:
    served = generate(tmp_path, "served", "2", "16")

    same = list(map(torch.equal, served["responses"], in_process["responses"]))
    assert sum(same) >= len(same) - 1  # one of 40 rows may have a near tie
    gaps = []
    for is_same, ours, theirs in zip(
        same, served["rollout_log_probs"], in_process["rollout_log_probs"], strict=True
    ):
        if is_same:
            gaps.append(float((ours - theirs).abs().max()))
    assert max(gaps) < 1e-5  # float32: sums over two ranks are rounded otherwise


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3_moe"])
def test_servers_with_models_of_other_families_draw_as_vllm_in_process(
    tmp_path: Path, family: str
) -> None:
    (tmp_path / "in-process").mkdir()
    in_process = generate(tmp_path / "in-process", "in-process", "1", "1", "gloo", family)
    (tmp_path / "served").mkdir()
    served = generate(tmp_path / "served", "served", "1", "1", "gloo", family)

    for name, rows in in_process.items():
        assert all(map(torch.equal, served[name], rows)), name
    assert len({tuple(row.tolist()) for row in served["responses"]}) > NUM_ROWS // 2


def processes_with(mark: str) -> list[int]:
    """Processes whose environment has a text."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and mark.encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def test_servers_end_within_ten_seconds_of_a_rank_that_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = f"SPMDFLOW_TEST_MARK={tmp_path}"
    monkeypatch.setenv(*mark.split("="))
    process: Any = begin(tmp_path, "served", str(tmp_path / "rows.pt"), "1", "1")
    try:
        end = time.monotonic() + SECONDS
        while len(processes_with(mark)) < 4:  # the rank, its keeper, the server, its engine
            assert time.monotonic() < end and process.poll() is None, (tmp_path / "log").read_text()
            time.sleep(0.1)
        process.kill()
        process.wait()
        killed = time.monotonic()
        while processes_with(mark):
            assert time.monotonic() - killed < ENDS_SECONDS, processes_with(mark)
            time.sleep(0.05)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
