"""Squared probabilities, a baseline for each token and marked tokens, from end to end."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from spmdflow.config.load import load
from spmdflow.controller.script import run_flow
from tests.algos.runs import FEW_SUMS, ROOT, check_prediction, run_ranks, steps_of
from tests.algos.test_own_roles import MODEL

PROGRAM = ROOT / "tests" / "algos" / "programs" / "marked_tokens.py"
YAML = ROOT / "algos" / "grpo.yaml"
SMALL = (
    *FEW_SUMS,
    *(
        "data.prompts_per_step=6",
        "data.samples_per_prompt=4",
        "total_steps=2",
        "save_every=0",
        "run.save_last=false",
    ),
    *("actor.update.mini_batch_size=12", "actor.rollout.temperature=2.0", "run.sample_every=0"),
    *("actor.optimizer.schedule=constant", "actor.optimizer.warmup_steps=0"),
    *("actor.loss.kl_coef=0", "actor.loss.surrogate=kl_cov", "actor.loss.covariance_share=0.1"),
    *("actor.loss.covariance_kl_coef=1.0", "advantage.estimator=optimal_token_baseline"),
)


def test_squared_probabilities_are_those_of_transformers_and_a_tenth_is_marked(
    tmp_path: Path,
) -> None:
    loaded = load(PROGRAM, YAML, [*SMALL, "eval_every=1", f"run.dir={tmp_path / 'run'}"])
    loaded.script.SEEN.clear()

    assert run_flow(loaded.script, loaded.cfg, inproc=True) == 0

    first = loaded.script.SEEN[0]
    model = AutoModelForCausalLM.from_pretrained(MODEL)
    rows = zip(*(first[name] for name in ("prompts", "responses", "squared_probs")), strict=True)
    for prompt, response, found in rows:
        with torch.no_grad():
            logits = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
        expected = (logits / 2.0).softmax(-1).square().sum(-1)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    marks = torch.cat(list(first["covariant"]))
    assert int(marks.sum()) >= int(0.1 * len(marks)) > 0
    for step in steps_of(tmp_path / "run", own=("share",)):
        assert step["share"] == pytest.approx(step["actor/covariant_share"])
        assert step["actor/grad_norm"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("surrogate", ["kl_cov", "clip_cov"])
def test_two_ranks_give_the_numbers_of_one_process(surrogate: str, tmp_path: Path) -> None:
    more = (f"actor.loss.surrogate={surrogate}", "eval_every=0")
    more += ("actor.loss.covariance_bounds=[0.05, 5.0]",)
    loaded = load(PROGRAM, YAML, [*SMALL, *more, f"run.dir={tmp_path / 'one'}"])
    assert run_flow(loaded.script, loaded.cfg, inproc=True) == 0
    one = steps_of(tmp_path / "one", own=("share",))

    settings = (str(YAML), *SMALL, *more)

    run_ranks(tmp_path / "two", num_ranks=2, script=PROGRAM, small=settings)
    check_prediction(tmp_path / "two")
    for mine, other in zip(one, steps_of(tmp_path / "two", own=("share",)), strict=True):
        for key in ("reward/mean", "actor/pg_loss", "actor/grad_norm", "actor/covariant_share"):
            assert other[key] == pytest.approx(mine[key], rel=5e-5, abs=1e-6), key
        assert mine["actor/covariant_share"] > 0
