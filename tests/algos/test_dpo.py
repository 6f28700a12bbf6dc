"""algos/dpo.py from end to end: margins on held-out pairs, every loss, layouts, resuming."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from transformers import AutoModelForCausalLM, AutoTokenizer

from spmdflow.config.check import check
from spmdflow.config.load import load
from spmdflow.controller.script import run_flow
from spmdflow.errors import ConfigError
from spmdflow.workers.engine import TrainEngine
from spmdflow.workers.micro_batch import MicroBatch
from tests.algos.runs import (
    ROOT,
    check_same_numbers,
    last_checkpoint,
    numbers_of,
    run_ranks,
    steps_of,
)

SCRIPT = ROOT / "algos" / "dpo.py"
TASK = ROOT / "algos" / "arithmetic"
SMALL = (
    "data.prompts_per_step=32",
    "data.eval_prompts=24",
    "actor.update.mini_batch_size=16",
    "actor.engine.micro_batch_rows=6",
    "reference.engine.micro_batch_rows=5",
    "actor.optimizer.schedule=constant",
    "actor.optimizer.warmup_steps=0",
    "total_steps=3",
    "eval_every=3",
)
COMPARED = (
    "actor/loss",
    "actor/grad_norm",
    "actor/margin",
    "actor/kl",
    "actor/desirable_reward",
    "eval/loss",
    "eval/margin",
    "eval/undesirable_reward",
)


def run(run_dir: Path, *settings: str) -> list[dict[str, Any]]:
    loaded = load(SCRIPT, None, [*SMALL, *settings, f"run.dir={run_dir}"])
    check(loaded.cfg, 1)
    assert run_flow(loaded.script, loaded.cfg, inproc=True) == 0
    steps = steps_of(run_dir)
    assert all(math.isfinite(value) for step in steps for value in step.values())
    return steps


def labelled(folder: Path) -> tuple[str, ...]:
    """Settings of KTO on the bundled pairs, taken apart into rows with a label each."""
    for part in ("train", "eval"):
        rows = []
        for number, line in enumerate((TASK / f"pairs_{part}.jsonl").read_text().splitlines()):
            pair = json.loads(line)
            good = number % 3 != 0
            answer = pair["chosen"] if good else pair["rejected"]
            rows.append({"prompt": pair["prompt"], "completion": answer, "label": good})
        (folder / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return (
        "actor.loss.name=kto",
        "data.label_column=label",
        f"data.train_path={folder / 'train.jsonl'}",
        f"data.eval_path={folder / 'eval.jsonl'}",
    )


@pytest.mark.drill
def test_dpo_raises_the_margin_on_pairs_it_was_not_trained_on(tmp_path: Path) -> None:
    steps = run(
        tmp_path / "run",
        "data.eval_prompts=256",
        "data.prompts_per_step=128",
        "actor.update.mini_batch_size=64",
        "actor.engine.micro_batch_rows=64",
        "reference.engine.micro_batch_rows=64",
        "actor.optimizer.lr=4e-4",
        "total_steps=8",
        "eval_every=8",
    )

    first = steps[0]
    last = steps[-1]
    assert first["eval/loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert first["eval/margin"] == first["eval/chosen_reward"] == 0.0
    assert first["eval/accuracy"] == 0.5
    assert last["eval/margin"] > 0.5
    assert last["eval/accuracy"] > 0.7
    assert last["eval/loss"] < 0.6


@pytest.mark.parametrize(
    ("name", "beta", "start"),
    [
        pytest.param("ipo", 0.1, 25.0, marks=pytest.mark.drill),
        pytest.param("slic", 0.02, None, marks=pytest.mark.drill),
        pytest.param("hinge", 0.1, 1.0, marks=pytest.mark.drill),
    ],
)
def test_other_losses_of_pairs_start_where_they_should_and_fall(
    tmp_path: Path, name: str, beta: float, start: float | None
) -> None:
    words = (f"actor.loss.name={name}", f"actor.loss.beta={beta}", "actor.optimizer.lr=2e-5")
    steps = run(tmp_path / "run", *words, "total_steps=6", "eval_every=6")

    if start is not None:  # ipo: (1 / (2 * 0.1))^2
        assert steps[0]["eval/loss"] == pytest.approx(start, abs=1e-4)
    assert steps[-1]["eval/loss"] < steps[0]["eval/loss"]
    assert steps[-1]["eval/margin"] > 0.1 * beta  # 0.1 nats


@pytest.mark.drill
def test_kto_tells_good_answers_from_bad_ones(tmp_path: Path) -> None:
    steps = run(tmp_path / "run", *labelled(tmp_path), "total_steps=8", "eval_every=8")

    assert steps[0]["eval/desirable_reward"] == steps[0]["eval/undesirable_reward"] == 0.0
    assert steps[1]["actor/loss"] == pytest.approx(0.5, abs=0.05)  # 0.5 before its second half
    assert steps[-1]["eval/desirable_reward"] - steps[-1]["eval/undesirable_reward"] > 0.02
    assert all(step["actor/kl"] >= 0 for step in steps[1:])


@pytest.mark.parametrize("kind", [pytest.param("dpo", marks=pytest.mark.drill), "kto"])
def test_forwards_are_filled_with_tokens_whatever_rows_a_role_makes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    limit = 100
    seen = list[list[MicroBatch]]()
    made = TrainEngine.micro_batches

    def noted(engine: TrainEngine, batch: TensorDict, count: int) -> list[MicroBatch]:
        seen.append(made(engine, batch, count))
        return seen[-1]

    monkeypatch.setattr(TrainEngine, "micro_batches", noted)
    words = [f"{role}.engine.micro_batch_tokens={limit}" for role in ("actor", "reference")]
    run(tmp_path / "run", *words, *(labelled(tmp_path) if kind == "kto" else ()))

    for micros in seen:
        tokens = [micro.input_ids.numel() for micro in micros]
        assert max(tokens) <= limit
        # rows of up to 12 tokens: more than 88 in each, but for one part more of even parts
        assert len(micros) <= sum(tokens) / (limit - 12) + 1


def test_held_out_loss_and_margin_are_those_of_hugging_face(tmp_path: Path) -> None:
    words = ("actor.loss.label_smoothing=0.1", "actor.loss.beta=0.3", "save_every=3")
    steps = run(tmp_path / "run", *words)

    (folder,) = (tmp_path / "run" / "checkpoints").rglob("hugging_face")
    tokenizer = AutoTokenizer.from_pretrained(TASK / "model")
    policy, reference = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        for path in (folder, TASK / "model")
    )
    losses = []
    margins = []
    for line in (TASK / "pairs_eval.jsonl").read_text().splitlines()[:24]:
        row = json.loads(line)
        ratios = []
        for name in ("chosen", "rejected"):
            prompt = tokenizer(row["prompt"]).input_ids
            answer = tokenizer(row[name], add_special_tokens=False).input_ids
            answer = [*answer, tokenizer.eos_token_id]
            ids = torch.tensor([prompt + answer])
            picked = torch.tensor([answer])[..., None]
            with torch.no_grad():
                parts = [
                    model(ids).logits[:, len(prompt) - 1 : -1].log_softmax(-1).gather(2, picked)
                    for model in (policy, reference)
                ]
            ratios.append(float(parts[0].sum() - parts[1].sum()))
        margin = 0.3 * (ratios[0] - ratios[1])
        margins.append(margin)
        losses.append(0.9 * math.log1p(math.exp(-margin)) + 0.1 * math.log1p(math.exp(margin)))
    # float32 sums in another order
    assert steps[3]["eval/margin"] == pytest.approx(sum(margins) / 24, rel=1e-3)
    assert steps[3]["eval/loss"] == pytest.approx(sum(losses) / 24, rel=1e-4)
    assert abs(steps[3]["eval/margin"]) > 1e-3


@pytest.mark.parametrize("kind", [pytest.param("dpo", marks=pytest.mark.slow), "kto"])
def test_run_resumes_bit_for_bit(tmp_path: Path, kind: str) -> None:
    words = labelled(tmp_path) if kind == "kto" else ()
    run(tmp_path / "whole", *words, "save_every=1")
    run(tmp_path / "halves", *words, "save_every=1", "total_steps=2")
    run(tmp_path / "halves", *words, "save_every=1")

    assert numbers_of(tmp_path / "halves")[-1] == numbers_of(tmp_path / "whole")[-1]
    assert last_checkpoint(tmp_path / "halves") == last_checkpoint(tmp_path / "whole")


def compare(tmp_path: Path, *words: str, num_ranks: int, shared: tuple[str, ...] = ()) -> None:
    """A run on several ranks has the numbers of one process."""
    one = run(tmp_path / "one", *shared)

    run_ranks(tmp_path / "many", *shared, *words, num_ranks=num_ranks, script=SCRIPT, small=SMALL)
    check_same_numbers(tmp_path / "many", one, COMPARED, rel=1e-4, abs=1e-5)


@pytest.mark.drill
def test_reference_on_ranks_of_its_own_changes_no_number(tmp_path: Path) -> None:
    compare(tmp_path, "placement=standalone", num_ranks=2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dpo", "kto"])
@pytest.mark.parametrize(
    ("num_ranks", "settings"),
    [
        (2, ()),
        (2, ("actor.engine.kind=megatron", "actor.engine.layout=t2")),
        (2, ("actor.engine.kind=megatron", "actor.engine.layout=p2", "placement=colocate")),
        (
            3,
            (
                "actor.engine.kind=zero1",
                "reference.engine.kind=zero3",
                "actor.engine.micro_batch_tokens=100",
                "placement={a: {roles: [actor], ranks: [0, 1]}, "
                "b: {roles: [reference], ranks: [2]}}",
            ),
        ),
    ],
    ids=["dp2", "t2", "p2", "zero_apart"],
)
def test_every_layout_gives_the_numbers_of_one_process(
    tmp_path: Path, kind: str, num_ranks: int, settings: tuple[str, ...]
) -> None:
    shared = labelled(tmp_path) if kind == "kto" else ()
    compare(tmp_path, *settings, num_ranks=num_ranks, shared=shared)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dpo", "kto"])
def test_ranks_without_rows_change_no_number(tmp_path: Path, kind: str) -> None:
    few = ("data.prompts_per_step=6", "actor.update.mini_batch_size=3", "data.eval_prompts=2")
    shared = (*(labelled(tmp_path) if kind == "kto" else ()), *few)

    compare(tmp_path, num_ranks=4, shared=shared)


def test_loss_that_nobody_registered_is_refused_with_the_choices(tmp_path: Path) -> None:
    loaded = load(SCRIPT, None, [*SMALL, "actor.loss.name=dop", f"run.dir={tmp_path / 'run'}"])

    with pytest.raises(ConfigError, match="got 'dop', expected one of dpo.*preference_loss"):
        run_flow(loaded.script, loaded.cfg, inproc=True)
