"""What scripts do with batches is planned too: rename, rows that go on alone, joined rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from spmdflow.config.load import load
from spmdflow.errors import PlanError
from spmdflow.plan.check import check_group_members
from spmdflow.plan.trace import trace
from tests.proofs.rows import check_rows
from tests.unit.plan.test_trace import own_script
from tests.unit.planned import ALGORITHMS, SMALL_GROUPS, settings_of, traced

RECOMPUTE = "actor.update.old_log_probs=recompute"
LOOP = """\
from spmdflow import concatenate
batch = actor.generate_sequences(next(prompts))
batch |= reward.compute_reward(batch)
going = batch.where("scores")
done = batch.without(going)
again = going.drop("response_mask", "rollout_log_probs", "prompts", "scores", "valid")
again = again.drop("token_level_rewards", "response_text", "score_terms")
again = again.rename(prompts="responses")
again = actor.generate_sequences(again)
again |= reward.compute_reward(again)
batch = concatenate([done, again]).ordered_like(batch)
batch |= actor.compute_log_prob(batch)
if batch.metrics["actor/entropy"] > 0.5:
    step.log(batch.metrics)
"""


def test_loop_in_which_some_rows_go_on_is_planned_with_its_rows_and_lengths(tmp_path: Path) -> None:
    examples = {"actor/entropy": 0.7, "scores": [0.0, 1.0]}
    found = own_script(tmp_path, LOOP, RECOMPUTE, examples=examples)

    generated = [call for call in found.in_step() if call.label == "actor.generate_sequences"]
    rows = [sum(len(plain["ids"]) for plain in call.commands.values()) for call in generated]
    assert rows == [8, 4]
    assert found.tokens[generated[1].key].prompts == found.tokens[generated[0].key].responses
    assert check_rows(found) + check_group_members(found) == []
    assert "scores = [0.0, 1.0]" in found.assumptions


def test_episodes_are_planned_with_declared_lengths() -> None:
    found = traced("grpo_agent", 4, *SMALL_GROUPS, examples={"responses": [6, 12]})

    (played,) = [call for call in found.in_step() if call.label == "actor.run_episodes"]
    assert found.models["actor"].kind_of(played.method) == "generate"
    assert found.tokens[played.key].responses == 9
    assert "responses = [6, 12]" in found.assumptions
    assert check_rows(found) + check_group_members(found) == []


def test_evaluation_with_several_samples_of_a_prompt_is_planned() -> None:
    found = traced("grpo", 2, *SMALL_GROUPS, "data.eval_samples=4", "eval_every=1")

    evaluated = [call for call in found.in_step() if call.phase == "eval"]
    assert [call.method for call in evaluated].count("generate_sequences") == 2
    assert check_rows(found) + check_group_members(found) == []


def test_metric_of_a_batch_that_nobody_has_declared_names_its_line(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"^script line 21: reads 'actor/entropy', which only"):
        own_script(tmp_path, LOOP, RECOMPUTE)


def test_metric_of_a_call_that_computes_nothing_is_refused_with_the_setting(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="set actor.update.old_log_probs=recompute"):
        own_script(tmp_path, LOOP, examples={"actor/entropy": 0.7})


def test_calls_of_a_script_with_a_relative_path_have_their_lines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ALGORITHMS)
    loaded = load("grpo.py", None, SMALL_GROUPS)

    calls = trace(loaded.script, loaded.cfg, settings_of(2)).in_step()

    generation = next(call for call in calls if call.label == "actor.generate_sequences")
    lines = (ALGORITHMS / "grpo.py").read_text().splitlines()
    assert generation.line_number
    assert "actor.generate_sequences" in lines[generation.line_number - 1]
