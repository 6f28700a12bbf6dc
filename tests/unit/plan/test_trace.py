"""A dry run asks the ranks for what a run would: calls, rows, groups; it looks at no value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import spmdflow
from spmdflow.config.load import load
from spmdflow.errors import PlanError
from spmdflow.plan.example import KNOWN
from spmdflow.plan.record import bytes_by_edge, row_edges
from spmdflow.plan.trace import trace
from spmdflow.worker_api.register import map_spec, registered_methods
from spmdflow.worker_api.worker import Worker
from tests.proofs.batches import check_batches
from tests.proofs.rows import check_rows
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
    "grpo_agent": SMALL_GROUPS,
    "grpo_async": SMALL_GROUPS,
    "dapo": SMALL_GROUPS,
    "distill": SMALL[:2] + SMALL[3:],
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
    "evaluate": (
        "data.eval_prompts=12",
        "data.eval_samples=2",
    ),
}


UPDATED = """\
from spmdflow import compute_advantages
batch = actor.generate_sequences(next(prompts))
batch |= actor.compute_log_prob(batch)
batch |= reward.compute_reward(batch)
batch |= batch.map(compute_advantages, estimator='reinforce_pp', cfg=cfg.advantage)
result = actor.update_actor(batch)
"""
"""The lines of a step up to an update, whose metrics are `result`."""


def own_script(folder: Path, body: str, *words: str, **settings: Any) -> Any:
    loaded = load(write_script(folder, body), None, [*_own(), "eval_every=0", *words])
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

    labels = [call.label.partition(".")[2] for call in found.in_step()]
    ends_with = "compute_reward" if script == "evaluate" else "update_"
    assert found.steps == (1,)
    assert any(label.startswith(ends_with) for label in labels)


def test_no_bundled_script_is_left_out() -> None:
    assert sorted(SCRIPTS) == sorted(path.stem for path in ALGORITHMS.glob("*.py"))


def test_every_column_of_a_built_in_role_or_map_function_is_known() -> None:
    written = {
        name
        for public in spmdflow.__all__
        for thing in [getattr(spmdflow, public)]
        for spec in [*_specs(thing)]
        for name in spec.writes
    }

    assert len(written) > 20
    assert written - set(KNOWN) == set(), "say in plan/example.py what they look like"


def _specs(thing: Any) -> list[Any]:
    if isinstance(thing, type):
        return list(registered_methods(thing).values()) if issubclass(thing, Worker) else []
    return [map_spec(thing)] if hasattr(thing, "_spmdflow_map_function") else []


def test_bytes_of_the_recorded_transfers_are_those_of_the_controllers_account() -> None:
    found = traced("ppo", 6, *SMALL, "placement=standalone", node_size=3)

    counted = bytes_by_edge(row_edges(found.calls))

    assert counted == {edge: size for edge, size in found.edges.items() if size}
    assert sum(counted.values()) > 0


def test_row_counts_are_exact_and_lengths_are_those_of_the_settings() -> None:
    found = traced("ppo", 3, *SMALL, "data.max_prompt_tokens=7", "actor.rollout.max_new_tokens=5")

    tokens = {found.by_key[key].label: tokens for key, tokens in found.tokens.items()}
    assert tokens["actor.update_actor"].num_rows == 12
    assert tokens["actor.update_actor"].prompts == 7
    assert tokens["actor.update_actor"].responses == 5


def test_declared_response_tokens_replace_the_longest_ones() -> None:
    short = traced("ppo", 2, *SMALL, "placement=split", examples={"responses": 1})
    long = traced("ppo", 2, *SMALL, "placement=split", examples={"responses": [1, 3]})

    marks = 12  # one byte of `valid` for each row that the actor's rank gets
    assert 2 * (sum(short.edges.values()) - marks) == sum(long.edges.values()) - marks


def test_evaluation_before_the_first_step_is_traced_if_asked_for() -> None:
    settings = [text for text in SMALL if not text.startswith("eval_every")]

    found = traced("ppo", 2, *settings, "eval_every=2", with_evaluation=True)

    calls = [call for call in found.calls if call.label == "actor.generate_sequences"]
    assert [(call.phase, call.step) for call in calls] == [("eval", 0), ("train", 1)]


def test_loop_that_waits_for_data_is_traced_once_and_marked() -> None:
    found = traced("dapo", 2, *SMALL_GROUPS)

    calls = [o.label for o in found.calls if o.label == "actor.generate_sequences"]
    assert len(calls) == 1
    assert any(read.in_loop and "fetch scores" in read.what for read in found.reads)


def test_loop_that_never_sees_its_data_is_refused_with_its_line(tmp_path: Path) -> None:
    body = "batch = next(prompts)\nwhile len(batch):\n"
    body += "    batch = actor.generate_sequences(next(prompts))"

    with pytest.raises(PlanError, match=r"script line 11: got call 101 \(actor\.generate_seq.*100"):
        own_script(tmp_path, body)


def test_loop_before_the_first_step_is_refused_with_its_line(tmp_path: Path) -> None:
    path = write_script(tmp_path, "pass")
    text = path.read_text()
    at = text.index("    for step in")
    path.write_text(
        f"{text[:at]}    while True:\n        actor.generate_sequences(next(prompts))\n{text[at:]}"
    )
    loaded = load(path, None, [*_own(), "eval_every=0"])

    with pytest.raises(PlanError, match=r"script line 9: got call 101 .* before the first step"):
        trace(loaded.script, loaded.cfg, settings_of(2))


def test_loop_of_a_helper_that_waits_for_data_is_marked(tmp_path: Path) -> None:
    body = (
        "def refill():\n"
        "    batch = next(prompts)\n"
        "    while True:\n"
        "        batch = actor.generate_sequences(batch)\n"
        "        batch |= reward.compute_reward(batch)\n"
        "        if batch.mean('scores') < 1:\n"
        "            return batch\n"
        "batch = refill()"
    )

    found = own_script(tmp_path, body)

    marked = {read.line: (read.in_loop, read.waits) for read in found.reads}
    assert marked == {11: (True, True), 14: (True, True)}


def test_read_of_a_helper_that_a_loop_calls_is_marked(tmp_path: Path) -> None:
    body = (
        "batch = reward.compute_reward(actor.generate_sequences(next(prompts)))\n"
        "def is_low():\n"
        "    return batch.mean('scores') < 0.2\n"
        "while is_low():\n"
        "    pass\n"
        "batch.mean('scores')"
    )

    found = own_script(tmp_path, body)

    assert [(read.line, read.in_loop) for read in found.reads] == [
        (11, True),
        (14, False),
        (12, True),
    ]


def test_loop_that_reads_nothing_only_repeats(tmp_path: Path) -> None:
    body = "for _ in range(2):\n    batch = actor.generate_sequences(next(prompts))\n"
    body += "batch |= reward.compute_reward(batch)\nbatch.mean('scores')"

    found = own_script(tmp_path, body)

    assert [(r.line, r.in_loop, r.waits) for r in found.reads] == [
        (12, False, True),
        (9, True, False),
    ]
    assert found.reads[1].what == "loop over lines 9-10"


def test_loop_before_the_first_step_is_no_loop_of_the_step(tmp_path: Path) -> None:
    path = write_script(tmp_path, "batch = actor.generate_sequences(next(prompts))")
    text = path.read_text()
    at = text.index("    for step in")
    early = "    for _ in range(2):\n        actor.generate_sequences(next(prompts))\n"
    path.write_text(text[:at] + early + text[at:])
    loaded = load(path, None, [*_own(), "eval_every=0"])

    assert trace(loaded.script, loaded.cfg, settings_of(2)).reads == ()


def test_value_without_an_example_is_refused_with_its_line_and_what_to_declare(
    tmp_path: Path,
) -> None:
    body = "batch = actor.generate_sequences(next(prompts))\n"
    body += "batch |= reward.compute_reward(batch)\nbatch.mean('rollout_entropy')"

    with pytest.raises(PlanError, match=r"script line 11: no column 'rollout_entropy'"):
        own_script(tmp_path, body)


def test_metric_that_the_script_reads_comes_from_the_example(tmp_path: Path) -> None:
    body = "if result['actor/kl'] > 0.5:\n    step.log(big=1.0)"

    with pytest.raises(PlanError, match=r"script line 15: reads 'actor/kl', .* flow\.assume"):
        own_script(tmp_path, UPDATED + body)
    found = own_script(tmp_path, UPDATED + body, examples={"actor/kl": 0.1})

    assert any(read.line == 15 for read in found.reads)
    assert "actor/kl = 0.1" in found.assumptions
    assert (
        "big/kl = 0.2"
        not in own_script(
            tmp_path, UPDATED + body, examples={"actor/kl": 0.1, "big/kl": 0.2}
        ).assumptions
    )


def test_metric_that_is_lacking_has_the_default_of_get(tmp_path: Path) -> None:
    found = own_script(tmp_path, UPDATED + "assert result.get('actor/kl', 0.25) == 0.25")

    assert found.steps == (1,)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("1 / batch.mean('scores')", r"line 11: got ZeroDivisionError: .* \(scores = 0\.0\)"),
        ("len(batch.mean('scores'))", r"line 11: got TypeError: .* flow\.assume\(name=value\)"),
        ("{'a': 1}['b']", r"line 11: got KeyError: 'b', expected main to run"),
        ("raise SystemExit(0)", r"line 11: got SystemExit: 0, expected main to run"),
        ("import math\nmath.sqrt(-1)", r"line 12: got ValueError: .* \(none was read\)"),
    ],
)
def test_error_of_the_script_on_its_examples_is_refused_with_its_line(
    body: str, said: str, tmp_path: Path
) -> None:
    before = "batch = actor.generate_sequences(next(prompts))\n"
    before += "batch |= reward.compute_reward(batch)\n"

    with pytest.raises(PlanError, match=f"script {said}"):
        own_script(tmp_path, before + body, examples={"scores": 0.0})


def test_examples_of_the_script_are_taken_and_the_command_line_overrules_them(
    tmp_path: Path,
) -> None:
    body = "flow.assume(scores=[0.25])\nbatch = actor.generate_sequences(next(prompts))\n"
    body += "batch |= reward.compute_reward(batch)\nassert batch.mean('scores') == {}"

    own_script(tmp_path, body.format(0.25))
    own_script(tmp_path, body.format(0.75), examples={"scores": 0.75})


def test_error_that_the_script_would_meet_is_told_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"script line 9: actor\.compute_log_prob: the batch has"):
        own_script(tmp_path, "actor.compute_log_prob(next(prompts))")


KL = "advantage.kl_coef=0.05"
ONE_STEP = ("actor.update.mini_batch_size=12", "advantage.kl_coef=0")
SEVERAL = ("actor.update.mini_batch_size=6",)
ROLLOUT = "actor.update.old_log_probs=rollout"
RECOMPUTE = "actor.update.old_log_probs=recompute"
CERTIFIED = {"rollout/drift": 1e-6, "rollout/drift_max": 1e-4}


@pytest.mark.parametrize(
    ("script", "settings", "examples", "is_made"),
    [
        *((name, ONE_STEP, {}, False) for name in ("grpo", "ppo", "rloo", "remax", "reinforce_pp")),
        ("dapo", ONE_STEP[:1], {}, False),
        ("safe_rlhf", ONE_STEP, {}, False),
        ("grpo_async", ONE_STEP, {}, True),  # compute_rollout_weights reads them
        ("grpo_async", SEVERAL, CERTIFIED, False),
        ("grpo_async", (*SEVERAL, "correction.kind=sequence"), CERTIFIED, True),
        *((name, (*ONE_STEP, KL), {}, True) for name in ("ppo", "rloo", "safe_rlhf")),
        ("grpo", (*ONE_STEP, RECOMPUTE), {}, True),
        *((name, SEVERAL, {}, True) for name in ("grpo", "ppo", "dapo")),
        *((name, (*SEVERAL, ONE_STEP[1]), CERTIFIED, False) for name in ("grpo", "ppo")),
        ("grpo", SEVERAL, {**CERTIFIED, "rollout/drift_max": 0.2}, True),
        ("grpo", (*SEVERAL, ROLLOUT), {}, False),
        ("grpo_async", (*ONE_STEP, ROLLOUT), {}, False),
        ("ppo", (*ONE_STEP, KL, ROLLOUT), {}, False),
    ],
)
def test_log_probs_before_the_update_are_planned_only_where_they_are_computed(
    script: str, settings: tuple[str, ...], examples: dict[str, float], is_made: bool
) -> None:
    small = [word for word in SCRIPTS.get(script, SMALL) if "actor.update" not in word]

    found = traced(script, 2, *small, *settings, examples=examples)

    labels = [call.label for call in found.calls]
    assert labels.count("actor.compute_log_prob") == is_made
    (choice,) = found.choices or ("",)
    assert bool(choice) == (not {ROLLOUT, RECOMPUTE} & set(settings))
    assert not check_rows(found)
    assert not check_batches(found)


@pytest.mark.parametrize(
    "script",
    "ppo grpo rloo remax reinforce_pp dapo safe_rlhf distill grpo_agent grpo_async".split(),
)
def test_every_script_that_samples_weighs_its_rows_where_the_setting_says_so(script: str) -> None:
    words = ["actor.update.correction.kind=token"]
    words += ["max_staleness=0"] if script == "grpo_async" else []

    found = traced(script, 2, *SCRIPTS.get(script, SMALL), *words)

    labels = [call.label for call in found.calls]
    assert labels.count("actor.compute_log_prob") == 1
    weighed = labels.index("map.compute_rollout_weights")
    assert labels.index("actor.compute_log_prob") < weighed < labels.index("actor.update_actor")


def test_plan_names_the_line_of_a_call_that_waited() -> None:
    found = traced("ppo", 2, *SCRIPTS["ppo"], "actor.update.mini_batch_size=12", KL)

    lines = {call.label: call.line_number for call in found.calls if call.step}
    assert lines["actor.compute_log_prob"] + 1 == lines["critic.compute_values"]
