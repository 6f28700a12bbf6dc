"""A tiny mixture of experts end to end: replayed routes, balanced experts, export, split ranks."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import transformers

from scripts.families.tiny import save_tiny_model
from spmdflow.weights.folder import folder_tensors
from tests.algos.runs import ROOT, check_prediction, last_checkpoint, log_of, run_ranks, steps_of

GRPO, GRPO_ASYNC, GRPO_AGENT = (
    ROOT / "algos" / f"{name}.py" for name in ("grpo", "grpo_async", "grpo_agent")
)
ROUTED = (
    "actor.update.router=replay",
    "actor.update.old_log_probs=recompute",
    "data.prompts_per_step=6",
    "data.samples_per_prompt=4",
    "actor.update.mini_batch_size=12",
    "total_steps=2",
    "eval_every=0",
    "run.sample_every=0",
)


def models(folder: Path, family: str, tokenizer: str) -> tuple[str, ...]:
    """Settings of a tiny model of a family, which is its own reference."""
    path = save_tiny_model(family, folder / family, tokenizer=ROOT / "algos" / tokenizer / "model")
    return (f"actor.model.path={path}", f"reference.model.path={path}")


def check_routed(run_dir: Path) -> None:
    """The trainer's log-probs are the generator's; the routes are among the planned bytes."""
    check_prediction(run_dir)
    for step in steps_of(run_dir):
        assert step["rollout/drift_max"] < 1e-5
        assert 0.0 <= step["actor/expert_load_min"] <= 1.0 <= step["actor/expert_load_max"] <= 4.0
        assert 0.0 < step["actor/router_entropy"] < 2.08  # log 8


def test_grpo_balances_experts_and_its_export_has_the_tensors_of_the_folder(tmp_path: Path) -> None:
    """deepseek_v3 on FSDP with e2, then the same run on ZeRO 1, from the checkpoint of step 1."""
    words = (*models(tmp_path, "deepseek_v3", "arithmetic"), *ROUTED)
    words += ("actor.update.router_balance_coef=0.01", "save_every=1")
    run_dir = tmp_path / "run"

    divided = ("actor.engine.layout=e2", "total_steps=1")

    run_ranks(run_dir, *words, *divided, num_ranks=2, script=GRPO, small=())
    said = re.search(r"actor: read ([\d.]+) of ([\d.]+) MB", log_of(run_dir).read_text())
    run_ranks(run_dir, *words, "actor.engine.kind=zero1", num_ranks=1, script=GRPO, small=())

    check_routed(run_dir)
    assert said is not None and 0 < float(said[1]) < 0.75 * float(said[2])
    assert any("gate.e_score_correction_bias[" in name for name in last_checkpoint(run_dir))
    source = dict(folder_tensors(tmp_path / "deepseek_v3"))
    exported = run_dir / "export" / "actor"
    found = dict(folder_tensors(exported))
    assert found.keys() == source.keys()
    same = [name for name, values in source.items() if torch.equal(found[name], values)]
    assert any(name.endswith("e_score_correction_bias") for name in same)
    assert len(same) < 0.2 * len(source)  # experts without a token do not change
    _, facts = transformers.AutoModelForCausalLM.from_pretrained(exported, output_loading_info=True)
    assert not facts["missing_keys"] and not facts["unexpected_keys"]


@pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed")
def test_divided_experts_train_and_resume_on_another_engine(tmp_path: Path) -> None:
    """qwen3_moe on Megatron with e2, then on FSDP, from the checkpoint of step 1."""
    words = (*models(tmp_path, "qwen3_moe", "arithmetic"), *ROUTED)
    words += ("actor.update.router_balance_coef=0.01", "save_every=1")
    megatron = ("actor.engine.kind=megatron", "actor.engine.layout=e2")
    run_dir = tmp_path / "run"

    run_ranks(run_dir, *words, *megatron, "total_steps=1", num_ranks=2, script=GRPO, small=())
    run_ranks(run_dir, *words, num_ranks=1, script=GRPO, small=())

    check_routed(run_dir)
    assert [step["actor/optimizer_steps"] for step in steps_of(run_dir)] == [2, 2]
    exported = dict(folder_tensors(run_dir / "export" / "actor"))
    assert exported.keys() == dict(folder_tensors(tmp_path / "qwen3_moe")).keys()


@pytest.mark.parametrize(
    ("script", "data", "more"),
    [(GRPO_ASYNC, "arithmetic", ("max_staleness=0",)), (GRPO_AGENT, "guess", ())],
    ids=["queue", "episodes"],
)
def test_routes_come_with_rows_of_a_queue_and_of_episodes(
    script: Path, data: str, more: tuple[str, ...], tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"

    words = (*models(tmp_path, "qwen3_moe", data), *ROUTED, *more)
    run_ranks(run_dir, *words, num_ranks=2, script=script, small=())

    check_routed(run_dir)
