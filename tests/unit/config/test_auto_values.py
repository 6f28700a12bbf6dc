"""What `auto` and settings that are left open become on a device, or stay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from spmdflow.config.load import load
from spmdflow.config.resolve import Choice, choices_text, choose_device_defaults, needs_plan
from spmdflow.config.schema import RolloutConfig
from spmdflow.errors import ConfigError
from spmdflow.program import prepare
from tests.unit.checkpoint_files import seal_settings
from tests.unit.planned import ALGORITHMS

PPO = ALGORITHMS / "ppo.py"


def set_defaults(cfg: Any, device: str) -> list[Choice]:
    """Sets what `auto` means on a device, with every package taken for installed."""
    choices = choose_device_defaults(cfg, device, here=False)
    for choice in choices:
        choice.set_in(cfg)
    return choices


def test_older_name_of_the_cache_is_refused_with_the_new_one() -> None:
    with pytest.raises(ConfigError, match=r"kv_cache_bytes, nearest is actor\.rollout\.kv_cache_"):
        load(PPO, None, ["actor.rollout.kv_cache_bytes=67108864"])


def test_rows_of_vllm_are_as_long_as_prompt_and_response_unless_a_class_says_otherwise() -> None:
    class Longer(RolloutConfig):
        max_model_len = 4096

    rollout = load(PPO, None, ["data.max_prompt_tokens=100", "actor.rollout.max_new_tokens=28"])

    assert rollout.cfg.actor.rollout.longest_row == 128
    assert RolloutConfig().longest_row is None and Longer().longest_row == 4096


def test_auto_on_cpu_is_what_it_was_and_needs_no_plan() -> None:
    cfg = load(PPO, None, []).cfg

    choices = {choice.key: choice.value for choice in set_defaults(cfg, "cpu")}

    assert {choices[f"{role}.model.dtype"] for role in ("actor", "critic")} == {"float32"}
    assert cfg.actor.rollout.engine == "builtin" and cfg.actor.rollout.dtype == "float32"
    assert cfg.actor.engine.offload == cfg.reference.engine.offload == []
    assert not needs_plan(cfg) and cfg.actor.engine.options == []


def test_overlap_is_chosen_on_cuda_unless_somebody_says_no() -> None:
    words = ["actor.engine.kind=megatron", "critic.engine.kind=megatron"]
    cfg = load(PPO, None, [*words, "critic.engine.options=[no_overlap,recompute]"]).cfg

    set_defaults(cfg, "cuda")

    assert cfg.actor.engine.options == ["overlap"]
    assert cfg.critic.engine.options == ["no_overlap", "recompute"]


def test_auto_on_cuda_is_bfloat16_and_leaves_memory_to_the_plan() -> None:
    cfg = load(PPO, None, ["critic.model.dtype=float32", "actor.engine.offload=[]"]).cfg

    text = choices_text(set_defaults(cfg, "cuda"))

    assert (
        "auto   dtype: bfloat16 (actor.model, actor.rollout, reference.model), engine: vllm" in text
    )
    assert text.endswith(", because the device is cuda") or "because the device is cuda\n" in text
    assert cfg.critic.model.dtype == "float32" and cfg.actor.rollout.engine == "vllm"
    assert cfg.critic.engine.offload is None and needs_plan(cfg)


def test_generator_and_reference_follow_the_actors_precision_on_a_cpu() -> None:
    words = ["actor.model.dtype=bfloat16", "critic.model.dtype=auto"]
    cfg = load(PPO, None, words).cfg

    text = choices_text(set_defaults(cfg, "cpu"))

    assert cfg.actor.rollout.dtype == cfg.reference.model.dtype == "bfloat16"
    assert cfg.critic.model.dtype == "float32"
    assert "(actor.rollout, reference.model), because actor.model.dtype is bfloat16" in text
    cfg = load(PPO, None, [*words, "reference.model.dtype=float32"]).cfg
    set_defaults(cfg, "cpu")
    assert cfg.reference.model.dtype == "float32", "what is set stays"


def test_way_of_weights_that_is_left_open_is_planned_on_devices_alone() -> None:
    words = [f"{role}.engine.offload=[]" for role in ("actor", "critic", "reference", "reward")]
    words += ["actor.rollout.engine=vllm", "actor.rollout.kv_cache_gib=0.0625"]
    auto, copy = (
        load(PPO, None, [*words, f"actor.rollout.weights={x}"]).cfg for x in ("auto", "copy")
    )

    assert needs_plan(auto, on_cpu=False) and not needs_plan(auto)
    assert not needs_plan(copy, on_cpu=False)


def test_resumed_run_keeps_the_precision_of_its_checkpoint(tmp_path: Path) -> None:
    words = [f"run.dir={tmp_path}"]
    text = "actor:\n  model: {dtype: bfloat16}\n  rollout: {dtype: bfloat16, engine: vllm}\n"
    seal_settings(tmp_path, text, num_ranks=1)

    loaded, text = prepare(load(PPO, None, [*words, "actor.rollout.engine=builtin"]), 1)

    assert loaded.cfg.actor.model.dtype == loaded.cfg.actor.rollout.dtype == "bfloat16"
    assert loaded.cfg.actor.rollout.engine == "builtin"  # what is set is not kept
    assert loaded.cfg.critic.model.dtype == "float32"
    line = (
        "auto   dtype: bfloat16 (actor.model, actor.rollout), because the checkpoint's run had it"
    )
    assert line in str(text)


def test_resumed_run_keeps_the_aggregation_of_its_checkpoint(tmp_path: Path) -> None:
    """A run of gspo that began when the mean over tokens was its default."""
    seal_settings(tmp_path, "actor:\n  loss: {aggregation: token-mean}\n", num_ranks=1)
    words = [f"run.dir={tmp_path}", "actor.loss.surrogate=gspo"]
    remax = ALGORITHMS / "remax.py"

    resumed, text = prepare(load(remax, None, words), 1)
    set_again, _ = prepare(
        load(remax, None, [*words, "actor.loss.aggregation=sequence-mean-token-mean"]), 1
    )

    assert resumed.cfg.actor.loss.aggregation == "token-mean"
    assert "aggregation: token-mean (actor.loss), because the checkpoint's run had it" in str(text)
    assert set_again.cfg.actor.loss.aggregation == "sequence-mean-token-mean"
