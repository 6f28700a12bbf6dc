"""Episodes that call the reference and earlier policies by name: whose weights reply, and that
nothing of it is trained."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.distributed.programs import episode_models as program

GAP = 1e-5
"""Largest distance of a log-probability from transformers' forward, float32."""


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory, spawn_ranks: Any) -> Path:
    folder: Path = tmp_path_factory.mktemp("models")
    spawn_ranks(program.run_all, 2, str(folder))
    return folder


def replies_of(out: Path, case: str, prefix: str = "") -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    for file in sorted((out / f"{case}-replies").glob(f"{prefix}[0-9]*.jsonl")):
        lines += map(json.loads, file.read_text().splitlines())
    return lines


def folder_of(out: Path, asked: str) -> Path:
    """The folder with the weights that a name means."""
    if asked in ("reference", "policy@0"):
        return program.TASK / "model"
    return out / "models-2" / "checkpoints" / "step-1" / "actor" / "hugging_face"


@pytest.mark.parametrize("asked", ["reference", "policy@0", "policy@1"])
def test_reply_is_that_of_the_named_weights_after_the_policy_has_been_trained(
    out: Path, asked: str
) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder_of(out, asked), dtype=torch.float32)
    start = AutoModelForCausalLM.from_pretrained(program.TASK / "model", dtype=torch.float32)
    is_start = all(map(torch.equal, model.parameters(), start.parameters()))
    assert is_start == (asked != "policy@1"), "the policy has learnt something"
    found = [x for x in replies_of(out, "models-2") if x["asked"] == asked and "error" not in x]
    num_greedy = 0
    worst = 0.0
    for said in found:
        assert said["model"] == asked
        size = len(said["prompt"])
        with torch.no_grad():
            ids = torch.tensor([said["prompt"] + said["tokens"]])
            scores = model(ids).logits[0, size - 1 : -1].log_softmax(-1)
        if said["temperature"] == 0:
            num_greedy += 1
            assert said["tokens"] == scores.argmax(-1).tolist()
        own = scores.gather(1, torch.tensor(said["tokens"])[:, None])[:, 0]
        gaps = (own - torch.tensor(said["log_probs"])).abs()
        worst = max(worst, float(gaps.max()))
    steps = 1 if asked == "policy@1" else 2
    assert num_greedy == 2 * program.NUM_EPISODES * steps
    assert worst < GAP


def test_policy_rows_are_bit_for_bit_those_without_other_models(out: Path) -> None:
    alone = json.loads((out / "alone.json").read_text())
    models = json.loads((out / "models.json").read_text())

    assert len(alone) == program.NUM_STEPS
    for without, step in zip(alone, models, strict=True):
        for name in program.COLUMNS:
            assert step[name] == without[name], name
        for name in ("actor/loss", "actor/grad_norm"):
            assert step["metrics"][name] == without["metrics"][name]
        assert len(step["scores"]) == program.NUM_EPISODES
        assert step["num_turns"] == [2] * program.NUM_EPISODES


def test_ranks_change_no_token_of_the_other_models(out: Path) -> None:
    def tokens(case: str) -> Counter[str]:
        lines = []
        for said in replies_of(out, case):
            if said["asked"] in ("reference", "policy@0"):
                key = (said["asked"], said["temperature"], said["prompt"], said["tokens"])
                lines.append(json.dumps(key))
        return Counter(lines)

    one = tokens("models")
    assert one == tokens("models-2") and len(one) > 10


def test_step_without_a_checkpoint_is_refused_with_those_that_exist(out: Path) -> None:
    refused = [said for said in replies_of(out, "models-2") if "error" in said]

    assert {said["asked"] for said in refused} == {"policy@1", "policy@9"}
    for said in refused:
        assert said["code"] == "model_not_found"
        assert f"got '{said['asked']}', expected a step whose checkpoint exists: 0" in said["error"]


def test_judge_answers_and_one_that_is_down_fails_its_request_but_no_episode(out: Path) -> None:
    said = replies_of(out, "models-2", "judge-")

    num_episodes = program.NUM_EPISODES * program.NUM_STEPS
    assert Counter(each["asked"] for each in said) == {"judge": num_episodes, "down": num_episodes}
    for each in said:
        if each["asked"] == "judge":
            assert (each["text"], each["model"]) == ("5 messages", "judge")
        else:
            assert each["code"] == "model_failed"
            assert "no answer of http://127.0.0.1:9/v1/chat/completions" in each["error"]


def test_requests_to_each_model_are_metrics(out: Path) -> None:
    lines = (out / "models-2" / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == program.NUM_STEPS
    for step, line in enumerate(lines):
        metrics = json.loads(line)
        num_episodes = program.NUM_EPISODES
        for name, requests, failed in (
            ("judge", num_episodes, 0),
            ("down", num_episodes, num_episodes),
            ("reference", 4 * num_episodes, 0),
            ("policy@step", 12 * num_episodes, (8 - 4 * step) * num_episodes),
        ):
            assert metrics[f"episodes/requests_{name}"] == requests
            assert metrics[f"episodes/failed_requests_{name}"] == failed
        assert metrics["episodes/tokens_reference"] > 0
        assert metrics["reward/dropped"] == 0
