"""On-policy distillation and token-level rewards: numbers, layouts, refusals, learning."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForSequenceClassification, LlamaConfig

from spmdflow.config.check import check
from spmdflow.config.load import load
from spmdflow.controller.script import run_flow
from spmdflow.errors import ConfigError
from tests.algos.runs import FEW_SUMS, ROOT, check_same_numbers, run_ranks, steps_of
from tests.algos.test_own_roles import JUDGES, MODEL
from tests.rollout_reference import LLAMA

SCRIPT = ROOT / "algos" / "distill.py"
SMALL = (
    *FEW_SUMS,
    "data.prompts_per_step=12",
    "actor.update.mini_batch_size=6",
    "actor.rollout.temperature=1.5",  # so that log-probs differ
    "actor.optimizer.schedule=constant",
    "actor.optimizer.warmup_steps=0",
    "data.eval_prompts=16",
    "run.sample_every=0",
    "total_steps=2",
    "eval_every=2",
    "save_every=0",
    "run.save_last=false",
)
COMPARED = ("actor/reference_kl", "actor/pg_loss", "actor/grad_norm", "eval/accuracy")


def write_teacher(folder: Path) -> Path:
    """The bundled model with noise in its weights."""
    shutil.copytree(MODEL, folder)
    generator = torch.Generator().manual_seed(0)
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        for name, x in tensors.items():
            noise = torch.randn(x.shape, generator=generator)
            tensors[name] = (x + 0.2 * x.float().std() * noise).to(x.dtype)
        save_file(tensors, file, metadata={"format": "pt"})
    return folder


def run(run_dir: Path, *settings: str, small: tuple[str, ...] = SMALL) -> list[dict[str, Any]]:
    loaded = load(SCRIPT, None, [*small, *settings, f"run.dir={run_dir}"])
    check(loaded.cfg, 1)
    assert run_flow(loaded.script, loaded.cfg, inproc=True) == 0
    steps = steps_of(run_dir)
    assert all(math.isfinite(value) for step in steps for value in step.values())
    return steps


def test_two_ranks_give_the_numbers_of_one_process(tmp_path: Path) -> None:
    teacher = f"teacher.model.path={write_teacher(tmp_path / 'teacher')}"
    one = run(tmp_path / "one", teacher)
    run_dir = tmp_path / "two"

    run_ranks(run_dir, teacher, "placement=split", num_ranks=2, script=SCRIPT, small=SMALL)
    two = check_same_numbers(run_dir, one, COMPARED)
    assert [step["step"] for step in two] == [0, 1, 2]
    assert two[1]["actor/grad_norm"] > 0 and two[1]["actor/reference_kl"] > 0
    # on the policy's own samples the loss before any clip is the KL: -mean of A r, r = 1
    whole = ("actor.update.mini_batch_size=12", "total_steps=1", "eval_every=0")
    (step,) = run(tmp_path / "whole", teacher, *whole)
    assert step["actor/pg_loss"] == pytest.approx(step["actor/reference_kl"], rel=1e-4)


def test_a_teacher_that_is_the_student_teaches_nothing(tmp_path: Path) -> None:
    recompute = "actor.update.old_log_probs=recompute"

    (step,) = run(tmp_path / "run", "total_steps=1", "eval_every=0", recompute)

    assert abs(step["actor/reference_kl"]) < 1e-6 and abs(step["actor/pg_loss"]) < 1e-6
    assert step["actor/grad_norm"] < 1e-4


def test_a_teacher_with_another_tokenizer_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "teacher"
    shutil.copytree(MODEL, folder)
    tree = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tree["model"]["vocab"]
    tree["model"]["vocab"] = vocabulary | {"1": vocabulary["2"], "2": vocabulary["1"]}
    (folder / "tokenizer.json").write_text(json.dumps(tree))

    with pytest.raises(ConfigError) as caught:
        run(tmp_path / "run", f"teacher.model.path={folder}")

    message = str(caught.value)
    assert message.startswith("teacher.model.path: got another tokenizer ('1' is ")
    assert message.endswith(
        "expected the same ids, as every model reads the actor's tokens; give a model with that "
        "tokenizer"
    )


@torch.no_grad()
def token_scores(folder: Path, seen: dict[str, Any]) -> list[Tensor]:
    """Each response token's score by transformers: the head at every place of one row."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    rows = zip(seen["prompts"], seen["responses"], strict=True)
    found = []
    for prompt, response in rows:
        hidden = model.model(torch.cat([prompt, response])[None]).last_hidden_state
        found.append(model.score(hidden)[0, len(prompt) :, 0])
    return found


def test_reward_model_scores_each_token_as_transformers_does(tmp_path: Path) -> None:
    judge = tmp_path / "judge"
    shutil.copytree(MODEL, judge, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    torch.manual_seed(3)
    vocab_size = json.loads((MODEL / "config.json").read_text())["vocab_size"]
    config = LlamaConfig(**LLAMA | {"vocab_size": vocab_size, "num_labels": 1})
    AutoModelForSequenceClassification.from_config(config).save_pretrained(judge)
    words = [
        *("total_steps=1", "eval_every=0", f"run.dir={tmp_path / 'run'}", "run.sample_every=0"),
        *(f"data.train_path={MODEL.parent / 'train.jsonl'}", "data.prompts_per_step=8"),
        *("data.samples_per_prompt=4", "data.max_prompt_tokens=8", f"actor.model.path={MODEL}"),
        *("actor.rollout.max_new_tokens=6", "actor.update.mini_batch_size=32"),
        *(f"helpful.model.path={judge}", f"harmless.model.path={judge}", "actor.loss.kl_coef=0"),
        *("helpful.per_token=true", "helpful.engine.micro_batch_rows=5"),
        *("harmless.per_token=true", "harmless.engine.micro_batch_tokens=40"),
        "harmless.function={danger: -0.5 * model, right: spmdflow.rewards.arithmetic:exact_match}",
    ]
    loaded = load(JUDGES, None, words)
    check(loaded.cfg, 1)
    loaded.script.SEEN.clear()

    assert run_flow(loaded.script, loaded.cfg, inproc=True) == 0

    (seen,) = loaded.script.SEEN
    each = token_scores(judge, seen)
    # 1e-5: float32 sums in another order
    sums = torch.stack([row.sum() for row in each])
    torch.testing.assert_close(seen["helpful"], sums, rtol=0, atol=1e-5)
    right = seen["harmless"] + 0.5 * sums  # what the function says: between 0 and 1
    assert ((right > -1e-5) & (right < 1 + 1e-5)).all()
    for i, row in enumerate(seen["token_level_rewards"]):
        expected = 0.5 * each[i]
        expected[-1] += right[i]
        torch.testing.assert_close(row, expected, rtol=0, atol=1e-5)
        assert len(each[i]) < 2 or row[:-1].any()


@pytest.mark.slow
def test_student_comes_near_the_teacher_and_a_control_does_not_move(tmp_path: Path) -> None:
    settings = (
        "total_steps=20",
        "eval_every=10",
        "run.sample_every=0",
        "save_every=0",
        "run.save_last=false",
    )
    short = ("total_steps=60", "eval_every=0", "save_every=60")
    sft = load(ROOT / "algos" / "sft.py", None, [*short, f"run.dir={tmp_path / 'teacher'}"])
    assert run_flow(sft.script, sft.cfg, inproc=True) == 0
    teacher = f"teacher.model.path={tmp_path / 'teacher'}"

    taught = run(tmp_path / "taught", teacher, small=settings)
    recompute = "actor.update.old_log_probs=recompute"  # else rewards are of rounding
    control = run(tmp_path / "control", recompute, small=settings)

    assert taught[1]["actor/reference_kl"] > 0.25
    last = [step["actor/reference_kl"] for step in taught[-5:]]
    assert sum(last) / len(last) < 0.1
    assert taught[0]["eval/accuracy"] < 0.6 and taught[-1]["eval/accuracy"] > 0.85
    assert control[-1]["eval/accuracy"] == control[0]["eval/accuracy"]
    assert all(step["actor/grad_norm"] == 0 for step in control[1:])
