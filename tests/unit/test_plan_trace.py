"""A dry run asks the ranks for what a run would: calls, rows, groups; it looks at no value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import spmdflow
from spmdflow.config.load import load
from spmdflow.plan.column import KNOWN
from spmdflow.plan.edge import bytes_by_edge, row_edges
from spmdflow.plan.refusal import Refusal
from spmdflow.plan.trace import trace
from spmdflow.transfer.register import registered_methods
from spmdflow.transfer.row_maths import row_maths_spec
from spmdflow.transfer.worker import Worker
from tests.unit.planned import (
    ALGORITHMS,
    SMALL,
    SMALL_GROUPS,
    settings_of,
    traced,
    write_script,
)

SCRIPTS: dict[str, tuple[str, ...]] = {
    "ppo": SMALL,
    "safe_rlhf": (*SMALL, "cost_critic.update.mini_batch_size=6", "pretrain.prompts_per_step=12"),
    "grpo": SMALL_GROUPS,
    "grpo_async": SMALL_GROUPS,
    "dapo": SMALL_GROUPS,
    "rloo": SMALL_GROUPS,
    "remax": SMALL[:2] + SMALL[3:],
    "reinforce_pp": SMALL[:2] + SMALL[3:],
    "dpo": ("data.prompts_per_step=12", "actor.update.mini_batch_size=6", "eval_every=0"),
    "sft": ("data.prompts_per_step=12", "actor.update.mini_batch_size=6", "eval_every=0"),
    "reward_model": (
        "data.prompts_per_step=12",
        "reward_model.update.mini_batch_size=6",
        "eval_every=0",
    ),
    "evaluate": ("data.eval_prompts=12 x 2 samples",),
}


def own_script(folder: Path, body: str, **settings: Any) -> Any:
    loaded = load(write_script(folder, body), None, [*_own(), "eval_every=0"])
    return trace(loaded.script, loaded.cfg, settings_of(2, **settings))


def _own() -> list[str]:
    task = ALGORITHMS / "arithmetic"
    return [
        f"data.train_path={task}/train.jsonl",
        f"data.eval_path={task}/eval.jsonl",
        f"actor.model.path={task}/model",
        "data.prompts_per_step=8",
        "actor.update.mini_batch_size=8",
        "critic.update.mini_batch_size=8",
    ]


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_bundled_script_is_traced_to_the_end_of_its_step(script: str) -> None:
    found = traced(script, 4, *SCRIPTS[script])

    labels = [order.label.partition(".")[2] for order in found.in_step()]
    ends_with = "compute_reward" if script == "evaluate" else "update_"
    assert found.steps == (1,)
    assert any(label.startswith(ends_with) for label in labels)


def test_no_bundled_script_is_left_out() -> None:
    assert sorted(SCRIPTS) == sorted(path.stem for path in ALGORITHMS.glob("*.py"))


def test_every_column_of_a_built_in_role_or_row_maths_is_known() -> None:
    written = {
        name
        for public in spmdflow.__all__
        for thing in [getattr(spmdflow, public)]
        for spec in [*_specs(thing)]
        for name in spec.writes
    }

    assert len(written) > 20
    assert written - set(KNOWN) == set(), "say in plan/column.py what they look like"


def _specs(thing: Any) -> list[Any]:
    if isinstance(thing, type):
        return list(registered_methods(thing).values()) if issubclass(thing, Worker) else []
    return [row_maths_spec(thing)] if hasattr(thing, "_spmdflow_row_maths") else []


def test_bytes_of_the_recorded_transfers_are_those_of_the_controllers_account() -> None:
    found = traced("ppo", 6, *SMALL, "placement=standalone", node_size=3)

    counted = bytes_by_edge(row_edges(found.orders))

    assert counted == {edge: size for edge, size in found.edges.items() if size}
    assert sum(counted.values()) > 0


def test_row_counts_are_exact_and_lengths_are_those_of_the_settings() -> None:
    found = traced("ppo", 3, *SMALL, "data.max_prompt_tokens=7", "actor.rollout.max_new_tokens=5")

    tokens = {found.orders[place].label: tokens for place, tokens in found.tokens.items()}
    assert tokens["actor.update_actor"].num_rows == 12
    assert tokens["actor.update_actor"].prompts == 7
    assert tokens["actor.update_actor"].responses == 5


def test_declared_response_tokens_replace_the_longest_ones() -> None:
    short = traced("ppo", 2, *SMALL, "placement=split", examples={"responses": 1})
    long = traced("ppo", 2, *SMALL, "placement=split", examples={"responses": [1, 3]})

    assert 2 * sum(short.edges.values()) == sum(long.edges.values())


def test_evaluation_before_the_first_step_is_traced_if_asked_for() -> None:
    settings = [text for text in SMALL if not text.startswith("eval_every")]

    found = traced("ppo", 2, *settings, "eval_every=2", with_evaluation=True)

    calls = [order for order in found.orders if order.label == "actor.generate_sequences"]
    assert [(order.phase, order.step) for order in calls] == [("eval", 0), ("train", 1)]


def test_loop_that_waits_for_data_is_traced_once_and_marked() -> None:
    found = traced("dapo", 2, *SMALL_GROUPS)

    calls = [o.label for o in found.orders if o.label == "actor.generate_sequences"]
    assert len(calls) == 1
    assert any(read.in_loop and "fetch scores" in read.what for read in found.reads)


def test_loop_that_never_sees_its_data_is_refused_with_its_line(tmp_path: Path) -> None:
    body = "batch = next(prompts)\nwhile len(batch):\n"
    body += "    batch = actor.generate_sequences(next(prompts))"

    with pytest.raises(Refusal, match=r"script line 11: got call 101 \(actor\.generate_seq.*100"):
        own_script(tmp_path, body)


def test_value_without_an_example_is_refused_with_its_line_and_what_to_declare(
    tmp_path: Path,
) -> None:
    body = "batch = actor.generate_sequences(next(prompts))\n"
    body += "batch |= reward.compute_reward(batch)\nbatch.mean('rollout_entropy')"

    with pytest.raises(Refusal, match=r"script line 11: column 'rollout_entropy'"):
        own_script(tmp_path, body)


def test_metric_that_the_script_reads_comes_from_the_example(tmp_path: Path) -> None:
    body = "result = actor.update_actor(batch)\nif result['actor/kl'] > 0.5:\n    step.log(big=1.0)"
    before = "batch = actor.generate_sequences(next(prompts))\n"
    before += "batch |= actor.compute_log_prob(batch)\nbatch |= reward.compute_reward(batch)\n"
    before += "from spmdflow import compute_advantages\n"
    before += (
        "batch |= batch.map(compute_advantages, estimator='reinforce_pp', cfg=cfg.advantage)\n"
    )

    with pytest.raises(Refusal, match=r"script line 15: reads 'actor/kl', .* flow\.assume"):
        own_script(tmp_path, before + body)
    found = own_script(tmp_path, before + body, examples={"actor/kl": 0.1})

    assert any(read.line == 15 for read in found.reads)


def test_examples_of_the_script_are_taken_and_the_command_line_overrules_them(
    tmp_path: Path,
) -> None:
    body = "flow.assume(scores=[0.25])\nbatch = actor.generate_sequences(next(prompts))\n"
    body += "batch |= reward.compute_reward(batch)\nassert batch.mean('scores') == {}"

    own_script(tmp_path, body.format(0.25))
    own_script(tmp_path, body.format(0.75), examples={"scores": 0.75})


def test_error_that_the_script_would_meet_is_told_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match=r"script line 9: actor\.compute_log_prob: the batch has"):
        own_script(tmp_path, "actor.compute_log_prob(next(prompts))")
