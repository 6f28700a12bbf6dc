"""How many rows share a prompt in each call of a script: what the simulators count with."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from spmdflow.config.load import load
from spmdflow.mapping.hardware import load_hardware
from spmdflow.plan.prediction import predict
from spmdflow.plan.record import Trace
from spmdflow.plan.trace import trace
from spmdflow.plan.workload import rows_by_rank, simulate_calls
from tests.unit.planned import (
    ALGORITHMS,
    SMALL,
    SMALL_GROUPS,
    find,
    settings_of,
    traced,
    write_script,
)

CPU = load_hardware("cpu")


def rows_per_prompt(found: Trace) -> list[tuple[str, int, int]]:
    """(call, rows, rows that share a prompt) of each simulated call."""
    step = simulate_calls(found, found.calls)
    result = []
    for call in step.calls.values():
        result.append((call.title, call.workload.num_sequences, call.workload.rows_per_prompt))
    return result


@pytest.mark.parametrize("script", ["grpo", "rloo", "grpo_async", "grpo_agent"])
def test_samples_of_a_prompt_share_it_in_every_call(script: str) -> None:
    found = rows_per_prompt(traced(script, 2, *SMALL_GROUPS))

    assert len(found) >= 3
    assert {(rows, shared) for _, rows, shared in found} == {(12, 3)}


def test_rows_of_several_rounds_share_their_prompts_after_they_were_joined() -> None:
    found = rows_per_prompt(traced("dapo", 2, "eval_every=0"))

    assert {shared for _, _, shared in found} == {8}


@pytest.mark.parametrize(
    ("script", "settings"),
    [("ppo", SMALL), ("sft", ("eval_every=0",)), ("reward_model", ("eval_every=0",))],
)
def test_rows_of_their_own_prompts_share_none(script: str, settings: tuple[str, ...]) -> None:
    found = rows_per_prompt(traced(script, 2, *settings))

    assert found and {shared for _, _, shared in found} == {1}


LABELS = ("actor.loss.name=kto", "data.label_column=label", "data.completion_column=answer")


@pytest.mark.parametrize(
    ("script", "settings", "reference", "update"),
    [
        ("dpo", (), (20, 2), (20, 2)),  # both answers behind one prompt
        ("dpo", LABELS, (20, 2), (10, 1)),  # an answer, and another row's
        ("reward_model", (), None, (20, 1)),  # a reward model scores whole sequences
    ],
)
def test_rows_with_answers_are_planned_as_the_sequences_that_are_computed(
    script: str,
    settings: tuple[str, ...],
    reference: tuple[int, int] | None,
    update: tuple[int, int],
) -> None:
    words = ("eval_every=0", "data.prompts_per_step=10", "data.max_prompt_tokens=22", *settings)
    found = traced(script, 2, *words)
    step = simulate_calls(found, found.calls)
    by_kind = {call.kind: call.workload for call in step.calls.values()}

    if reference is not None:
        work = by_kind["infer"]
        assert (work.num_sequences, work.rows_per_prompt) == reference
        assert (work.prompt_tokens, work.response_tokens) == ((1, 21) if settings else (1, 10))
    work = by_kind["train"]
    assert (work.num_sequences, work.rows_per_prompt) == update
    assert work.num_forwards == 1  # they are scored before each step
    whole = 22 * 10
    assert work.num_sequences * work.tokens == whole


def test_a_supervised_update_computes_the_head_for_answers_and_no_forward_before() -> None:
    found = traced("sft", 2, "eval_every=0", "data.max_prompt_tokens=22")
    step = simulate_calls(found, found.calls)

    (call,) = step.calls.values()
    assert (call.workload.prompt_tokens, call.workload.response_tokens) == (1, 21)
    assert call.workload.num_forwards == 0
    assert step.dataflow is not None and step.dataflow.models[0].shape.head == "causal_lm"


def test_greedy_responses_share_no_prompt_beside_samples_that_do() -> None:
    found = rows_per_prompt(traced("remax", 2, *SMALL_GROUPS))

    generations = [rest for title, *rest in found if title == "actor.generate_sequences"]
    assert generations == [[12, 3], [4, 1]]
    assert ("actor.update_actor", 12, 3) in found


def test_held_out_prompts_are_shared_by_their_samples_alone() -> None:
    settings = ("data.eval_prompts=10", "data.eval_samples=4")

    found = rows_per_prompt(traced("evaluate", 2, *settings))

    assert [rest for _, *rest in found] == [[10, 1], [40, 4]]


def test_evaluation_of_a_training_shares_no_prompt() -> None:
    settings = (*SMALL_GROUPS[:-1], "eval_every=1", "data.eval_prompts=10")

    found = rows_per_prompt(traced("grpo", 2, *settings))

    assert ("actor.generate_sequences", 10, 1) in found
    assert ("actor.generate_sequences", 12, 3) in found


def planned_script(folder: Path, body: str) -> Trace:
    path = write_script(folder, body)
    task = ALGORITHMS / "arithmetic"
    settings = [
        f"data.train_path={task}/train.jsonl",
        f"data.eval_path={task}/eval.jsonl",
        f"actor.model.path={task}/model",
        *SMALL_GROUPS,
    ]
    loaded = load(path, None, settings)
    return trace(loaded.script, loaded.cfg, settings_of(2, examples={"responses": 2}))


def test_response_that_goes_on_is_a_prompt_that_no_other_row_has(tmp_path: Path) -> None:
    body = "batch = actor.generate_sequences(next(prompts), max_new_tokens=2)\n"
    body += "batch = actor.generate_sequences(batch)\n"
    body += "batch |= actor.compute_log_prob(batch)\n"

    found = rows_per_prompt(planned_script(tmp_path, body))

    assert [shared for _, _, shared in found] == [3, 1, 3]


def test_part_of_the_samples_shares_what_it_has(tmp_path: Path) -> None:
    body = "actor.generate_sequences(next(prompts).select([0, 1, 3, 4, 5, 9]))\n"

    found = planned_script(tmp_path, body)

    assert rows_per_prompt(found) == [("actor.generate_sequences", 6, 2)]
    (rows,) = rows_by_rank(found, find(found, "actor.generate_sequences"), "generate")
    for share in rows.shares:
        _, samples = np.unique(share.keys, return_counts=True)
        assert sorted(samples) == [1, 2]


def test_plan_of_groups_takes_less_time_and_memory_than_that_of_as_many_prompts() -> None:
    words = ["data.max_prompt_tokens=80", "actor.rollout.max_new_tokens=10", "eval_every=0"]
    words += ["actor.update.mini_batch_size=32", "actor.engine.micro_batch_rows=32"]
    words += ["advantage.estimator=reinforce_pp"]
    predictions = []
    for prompts, samples in ((8, 8), (64, 1)):
        sizes = [f"data.prompts_per_step={prompts}", f"data.samples_per_prompt={samples}"]
        found = traced("grpo", 2, *words, *sizes)
        predictions.append(predict(found, found.in_step(), CPU))
    groups, alone = predictions

    phases = [{phase.phase: phase.parts for phase in one.memory} for one in predictions]
    for method in ("generate_sequences", "update_actor"):
        assert groups.stage_seconds()[method] < alone.stage_seconds()[method]
        shared, whole = (phase[f"actor.{method}"] for phase in phases)
        assert shared["activations"] < 0.6 * whole["activations"]
    caches = [phase["actor.generate_sequences"]["kv_cache"] for phase in phases]
    assert caches[0] / caches[1] == pytest.approx((4 * 80 + 32 * 10) / (32 * 90))
