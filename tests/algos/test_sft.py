"""algos/sft.py and algos/reward_model.py from end to end: held-out loss, layouts, resuming."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from spmdflow.config.check import check
from spmdflow.config.load import load
from spmdflow.controller.script import run_flow
from spmdflow.errors import ConfigError
from tests.algos.runs import (
    ROOT,
    check_same_numbers,
    last_checkpoint,
    numbers_of,
    run_ranks,
    steps_of,
)

SFT = ROOT / "algos" / "sft.py"
REWARD_MODEL = ROOT / "algos" / "reward_model.py"
COMMON = ("data.prompts_per_step=32", "data.eval_prompts=24", "total_steps=3", "eval_every=3")
SMALL = {
    script: (
        *COMMON,
        f"{role}.update.mini_batch_size=16",
        f"{role}.engine.micro_batch_rows=6",
        f"{role}.optimizer.schedule=constant",
        f"{role}.optimizer.warmup_steps=0",
    )
    for script, role in ((SFT, "actor"), (REWARD_MODEL, "reward_model"))
}


def run(script: Path, run_dir: Path, *settings: str) -> list[dict[str, Any]]:
    loaded = load(script, None, [*SMALL[script], *settings, f"run.dir={run_dir}"])
    check(loaded.cfg, 1)
    assert run_flow(loaded.script, loaded.cfg, inproc=True) == 0
    steps = steps_of(run_dir)
    assert all(math.isfinite(value) for step in steps for value in step.values())
    return steps


def hugging_face(run_dir: Path) -> Path:
    (folder,) = (run_dir / "checkpoints").rglob("hugging_face")
    return folder


def rows_of_file(path: Path, count: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()[:count]]


def test_sft_reports_the_held_out_loss_of_hugging_face_and_lowers_it(tmp_path: Path) -> None:
    steps = run(SFT, tmp_path / "run", "total_steps=6", "eval_every=6", "save_every=6")

    source = ROOT / "algos" / "arithmetic"
    tokenizer = AutoTokenizer.from_pretrained(source / "model")
    for step, folder in ((0, source / "model"), (6, hugging_face(tmp_path / "run"))):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        nats = 0.0
        tokens = 0
        for row in rows_of_file(source / "eval.jsonl", 24):
            prompt = tokenizer(row["prompt"]).input_ids
            answer = tokenizer(row["answer"], add_special_tokens=False).input_ids
            answer = [*answer, tokenizer.eos_token_id]
            with torch.no_grad():
                logits = model(torch.tensor([prompt + answer])).logits[0].log_softmax(-1)
            nats -= sum(float(logits[len(prompt) - 1 + t, i]) for t, i in enumerate(answer))
            tokens += len(answer)
        # float32 sums in another order
        assert steps[step]["eval/loss"] == pytest.approx(nats / tokens, rel=1e-4)
    assert steps[6]["eval/loss"] < 0.8 * steps[0]["eval/loss"]


def test_reward_model_starts_at_log_2_and_scores_as_its_exported_folder(tmp_path: Path) -> None:
    steps = run(REWARD_MODEL, tmp_path / "run", "save_every=3")

    assert steps[0]["eval/loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert steps[0]["eval/accuracy"] == 0.5
    source = ROOT / "algos" / "arithmetic"
    tokenizer = AutoTokenizer.from_pretrained(source / "model")
    model = AutoModelForSequenceClassification.from_pretrained(hugging_face(tmp_path / "run"))
    losses = 0.0
    right = 0
    for row in rows_of_file(source / "pairs_eval.jsonl", 24):
        scores = []
        for name in ("chosen", "rejected"):
            ids = tokenizer(row["prompt"] + row[name]).input_ids
            ids = [*ids, tokenizer.eos_token_id] if ids[-1] != tokenizer.eos_token_id else ids
            with torch.no_grad():
                hidden = model.model(torch.tensor([ids])).last_hidden_state[0, -1]
                scores.append(float(model.score(hidden)))
        losses += math.log1p(math.exp(scores[1] - scores[0])) / 24
        right += scores[0] > scores[1]
    assert steps[3]["eval/loss"] == pytest.approx(losses, rel=1e-4)
    assert steps[3]["eval/accuracy"] == pytest.approx(right / 24)
    assert losses != pytest.approx(math.log(2), abs=1e-3)


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(SFT, id="sft"),
        pytest.param(REWARD_MODEL, id="reward_model", marks=pytest.mark.drill),
    ],
)
def test_run_resumes_bit_for_bit(tmp_path: Path, script: Path) -> None:
    run(script, tmp_path / "whole", "save_every=1")
    run(script, tmp_path / "halves", "save_every=1", "total_steps=2", "eval_every=3")
    run(script, tmp_path / "halves", "save_every=1")

    assert numbers_of(tmp_path / "halves")[-1] == numbers_of(tmp_path / "whole")[-1]
    assert last_checkpoint(tmp_path / "halves") == last_checkpoint(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("script", [SFT, REWARD_MODEL], ids=["sft", "reward_model"])
@pytest.mark.parametrize(
    "settings",
    [
        (),
        ("kind=megatron", "layout=t2"),
        ("kind=megatron", "layout=p2"),
        ("kind=zero1", "micro_batch_tokens=100"),
    ],
)
def test_two_ranks_give_the_numbers_of_one_process(
    tmp_path: Path, script: Path, settings: tuple[str, ...]
) -> None:
    role = "actor" if script == SFT else "reward_model"
    words = [f"{role}.engine.{setting}" for setting in settings]
    one = run(script, tmp_path / "one")

    run_ranks(tmp_path / "two", *words, num_ranks=2, script=script, small=SMALL[script])
    names = (f"{role}/loss", f"{role}/grad_norm", "eval/loss", "eval/margin")
    check_same_numbers(tmp_path / "two", one, names, rel=1e-4, abs=1e-5)


def test_conversations_without_a_chat_template_are_refused(tmp_path: Path) -> None:
    words = ["data.response_column=null", f"run.dir={tmp_path / 'run'}"]

    with pytest.raises(ConfigError, match="^data.response_column: got none without a chat templ"):
        check(load(SFT, None, words).cfg, 1)
