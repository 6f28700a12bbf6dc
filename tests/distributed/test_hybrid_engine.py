"""The 3D-HybridEngine: actors that train in one layout and generate in another on the same ranks.

Three rounds of update, sync and generation for every mode; greedy and sampled tokens, and their
log-probs, against transformers with the trainer's weights (within 1e-5; rows excused where a
draw's margin is below 1e-5). Then what must not pass unnoticed is planted.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.distributed.programs.hybrid_engine_case import CASES
from tests.forked import torchrun
from tests.rollout_reference import FAMILIES, write_family

PROGRAM = Path(__file__).parent / "programs" / "hybrid_engine.py"
SMALL = ("blocks",)
MATRIX = tuple(name for name in CASES if name not in SMALL)


def run(folder: Path, names: tuple[str, ...], *, seconds: float) -> list[dict]:
    for family in FAMILIES:
        path = folder / family.replace(" ", "_")
        write_family(path, family, max_position_embeddings=512)
    words = ["--nproc-per-node=4", str(PROGRAM), str(folder), ",".join(names)]
    torchrun(words, folder / "log.txt", seconds=seconds, with_vllm=True)
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(4)]


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return run(tmp_path_factory.mktemp("hybrid"), SMALL, seconds=840)


def check(ranks, case):
    for found in ranks:
        rounds = found[case]["rounds"]
        assert [step["faults"] for step in rounds] == [[], [], []]
        assert len({json.dumps(step["tokens"]) for step in rounds}) == 3  # the weights do change
        assert all(step["synced"]["rollout/weights_verified"] == 1 for step in rounds)
        counted = {step["synced"]["rollout/synced_bytes"] for step in rounds}
        assert counted == {found[case]["planned"]}  # each rank's own, as spmdflow.plan has it
    drifts = [found[case]["drift"] for found in ranks if found[case]["drift"] is not None]
    assert drifts and max(drifts) <= 1e-5


@pytest.mark.parametrize("case", SMALL)
def test_generation_follows_the_trainer_through_three_updates(small, case):
    check(small, case)


@pytest.mark.slow
def test_generation_follows_the_trainer_on_every_layout_mode_and_family(tmp_path):
    ranks = run(tmp_path, MATRIX, seconds=900)
    for case in MATRIX:
        check(ranks, case)


@pytest.mark.parametrize(
    ("fault", "tensor"),
    [
        ("stale", "model.layers.1.mlp.gate_proj.weight"),
        ("swapped", "model.layers.1.self_attn.q_proj.weight"),
        ("vocabulary", "model.embed_tokens.weight"),
    ],
)
def test_wrong_weights_on_one_rank_stop_its_replica_and_name_the_tensor(small, fault, tensor):
    said = [found["faults"][fault] for found in small]

    for rank in (1, 3):  # rank 1 got the fault; its replica is ranks 1 and 3
        sync, generate = said[rank].split(" | ")
        assert sync.startswith("WeightSyncError: weight sync of version ")
        assert f"got rollout tensor {tensor} with hash" in sync
        assert "weights that were never synced" in generate


def test_kept_prefixes_of_old_weights_show_as_drift(small):
    for found in small:
        kept, forgotten = found["faults"]["cache"]
        assert kept > 1e-2
        assert forgotten <= 1e-5
