"""Settings that are texts: residency, kv_cache; what `auto` becomes on a device, or stays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmdflow.config.leaf import PARTS, cache_of, moved_parts
from spmdflow.config.load import load
from spmdflow.config.resolve import Choice, choices_text, choose_device_defaults, needs_plan
from spmdflow.config.schema import RolloutConfig
from spmdflow.errors import ConfigError
from spmdflow.program import load_settings, prepare
from tests.unit.checkpoint_files import seal_settings
from tests.unit.planned import ALGORITHMS

PPO = ALGORITHMS / "ppo.py"


def set_defaults(cfg: Any, device: str) -> list[Choice]:
    """Sets what `auto` means on a device, with every package taken for installed."""
    choices = choose_device_defaults(cfg, device, here=False)
    for choice in choices:
        choice.set_in(cfg)
    return choices


@given(st.lists(st.sampled_from(PARTS), unique=True, min_size=1), st.sampled_from([",", ", "]))
def test_parts_are_read_in_any_order(parts: list[str], comma: str) -> None:
    assert moved_parts(comma.join(parts)) == tuple(part for part in PARTS if part in parts)


@pytest.mark.parametrize("text", ["", "moments", "optimizer, optimizer", "keep, optimizer"])
def test_parts_that_there_are_not_are_refused_with_the_choices(text: str) -> None:
    with pytest.raises(ConfigError, match=r"expected auto, keep, offload or some of parameters"):
        moved_parts(text, "actor.engine.residency")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("20 GiB", (20 << 30, "bytes")),
        ("1.5GB", (1.5e9, "bytes")),
        ("67108864", (1 << 26, "bytes")),
        ("0.6 of free", (0.6, "free")),
        ("auto", (0.9, "auto")),
    ],
)
def test_cache_sizes_are_read(text: str, expected: tuple[float, str]) -> None:
    assert cache_of(text) == expected


@pytest.mark.parametrize("text", ["0", "1.2 of free", "0 of free", "20 Gib", "-1", "half", ""])
def test_cache_sizes_that_are_none_are_refused_with_examples(text: str) -> None:
    with pytest.raises(ConfigError, match=r"kv_cache: got .*0\.6 of free.*20 GiB"):
        cache_of(text, "actor.rollout.kv_cache")


def test_old_name_of_the_cache_is_refused_with_the_new_one() -> None:
    with pytest.raises(ConfigError, match=r"kv_cache_bytes, nearest is actor\.rollout\.kv_cache;"):
        load(PPO, None, ["actor.rollout.kv_cache_bytes=67108864"])


def test_wrong_parts_and_sizes_are_refused_before_a_run() -> None:
    words = ["actor.engine.residency=moments", "actor.rollout.kv_cache=much"]

    with pytest.raises(ConfigError) as caught:
        load_settings(PPO, None, words, num_ranks=1)

    assert "actor.engine.residency: got 'moments'" in str(caught.value)
    assert "actor.rollout.kv_cache: got 'much'" in str(caught.value)


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
    assert cfg.actor.engine.residency == cfg.reference.engine.residency == "keep"
    assert not needs_plan(cfg) and cfg.actor.engine.options == []


def test_overlap_is_chosen_on_cuda_unless_somebody_says_no() -> None:
    words = ["actor.engine.kind=megatron", "critic.engine.kind=megatron"]
    cfg = load(PPO, None, [*words, "critic.engine.options=[no_overlap,recompute]"]).cfg

    set_defaults(cfg, "cuda")

    assert cfg.actor.engine.options == ["overlap"]
    assert cfg.critic.engine.options == ["no_overlap", "recompute"]


def test_auto_on_cuda_is_bfloat16_and_leaves_memory_to_the_plan() -> None:
    cfg = load(PPO, None, ["critic.model.dtype=float32", "actor.engine.residency=keep"]).cfg

    text = choices_text(set_defaults(cfg, "cuda"))

    assert (
        "auto   dtype: bfloat16 (actor.model, actor.rollout, reference.model), engine: vllm" in text
    )
    assert text.endswith(", because the device is cuda") or "because the device is cuda\n" in text
    assert cfg.critic.model.dtype == "float32" and cfg.actor.rollout.engine == "vllm"
    assert cfg.critic.engine.residency == "auto" and needs_plan(cfg)


def test_way_of_weights_that_is_left_open_is_planned_on_devices_alone() -> None:
    words = [f"{role}.engine.residency=keep" for role in ("actor", "critic", "reference", "reward")]
    words += ["actor.rollout.engine=vllm", "actor.rollout.kv_cache=64 MiB"]
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
