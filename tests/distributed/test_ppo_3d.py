"""`algos/ppo.py` with Megatron actors and critics and vLLM generation, against a single rank.

Every case generates by itself with its own layout (token ids compared with the single rank's) and
then goes on with the single rank's rollouts: losses of three steps agree. Tolerances: float32 sums
in another order, twice two optimizer steps in between.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from tests.distributed.programs import ppo_3d
from tests.distributed.replayed import (
    check_old_log_probs,
    planned_as_counted,
    reported_weight_bytes,
    settings_of_run,
)
from tests.forked import torchrun

MODEL = Path(__file__).parents[2] / "algos" / "arithmetic" / "model"
SMALL = ("t2p2-t2",)
MATRIX = tuple(name for name in ppo_3d.CASES if name not in (*SMALL, "one"))
LOSSES = ("actor/loss", "actor/pg_loss", "actor/reference_kl", "actor/entropy", "critic/loss")
NORMS = ("actor/grad_norm", "critic/grad_norm")


def steps_of(runs, case):
    return [json.loads(line) for line in (runs / case / "metrics.jsonl").read_text().splitlines()]


def check(runs, case, *, reference="one"):
    for one, other in zip(steps_of(runs, reference), steps_of(runs, case), strict=True):
        for name in LOSSES:
            assert other[name] == pytest.approx(one[name], abs=1e-5, rel=0), name
        for name in NORMS:
            assert other[name] == pytest.approx(one[name], rel=1e-4), name
        assert other["replay/other_rows"] == 0
        assert other["replay/gap"] <= 2e-5  # Megatron multiplies by MKL, FSDP by oneDNN
        assert other["rollout/drift_max"] <= 1e-5
        assert other["rollout/weights_verified"] == 1
        assert other["controller/tensor_bytes"] == 0
        assert other["transfer/bytes"] == other["transfer/planned_bytes"]
    planned = planned_as_counted(ppo_3d, settings_of_run(runs / case), runs / case)
    for step in steps_of(runs, case)[1:]:
        assert step["rollout/synced_bytes"] == reported_weight_bytes(planned)


def run_cases(out, *names, num_ranks=4):
    words = [f"--nproc-per-node={num_ranks}", "-m", ppo_3d.__name__, str(out), *names]
    torchrun(words, out / "log.txt", seconds=900, with_vllm=True)
    return out


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return run_cases(tmp_path_factory.mktemp("ppo_3d"), "one", *SMALL)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    out = tmp_path_factory.mktemp("ppo_3d_mixed")
    write_judge(out / "judge")
    return run_cases(out, *ppo_3d.MIXED)


def write_judge(folder):
    """A random reward model with the bundled model's tokenizer."""
    config = AutoConfig.from_pretrained(MODEL, num_labels=1)
    torch.manual_seed(3)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    for file in MODEL.glob("tokenizer*"):
        shutil.copy(file, folder)


@pytest.mark.parametrize("case", SMALL)
def test_ppo_on_a_3d_layout_has_the_tokens_and_losses_of_a_single_rank(small, case):
    check(small, case)


@pytest.mark.drill
def test_megatron_actor_fsdp_critic_and_zero_reward_model_on_their_own_ranks(mixed):
    check(mixed, "mixed", reference="one-judged")
    assert all(step["transfer/bytes"] > 0 for step in steps_of(mixed, "mixed"))


@pytest.mark.drill
def test_old_log_probs_of_the_update_or_the_generator_teach_two_shards_the_same(mixed):
    check_old_log_probs(mixed / "old")


@pytest.fixture(scope="module")
def matrix(tmp_path_factory):
    return run_cases(tmp_path_factory.mktemp("ppo_3d_matrix"), "one", *MATRIX)


@pytest.mark.slow
@pytest.mark.parametrize("case", MATRIX)
def test_ppo_on_every_layout_has_the_tokens_and_losses_of_a_single_rank(matrix, case):
    check(matrix, case)


@pytest.mark.slow
def test_ppo_on_eight_ranks_has_the_tokens_and_losses_of_a_single_rank(tmp_path_factory):
    out = run_cases(tmp_path_factory.mktemp("ppo_3d_eight"), "one", *ppo_3d.LARGE, num_ranks=8)
    for case in ppo_3d.LARGE:
        check(out, case)
