"""Algorithms that a user writes with public names alone: they run, learn and are planned.

Four of them are those of docs/OWN_ALGORITHM.md, as they stand on the page.
"""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from spmdflow.config.check import check
from spmdflow.config.load import Loaded, load
from spmdflow.controller.script import run_flow
from spmdflow.mapping.hardware import load_hardware
from spmdflow.plan.placement import find_placement
from spmdflow.plan.record import Trace
from spmdflow.plan.report import plan
from spmdflow.plan.trace import trace
from tests.algos.runs import FEW_SUMS, ROOT, finish, log_of, steps_of, torchrun
from tests.pages import blocks_of
from tests.policy.house import imported_names
from tests.unit.planned import row_problems, settings_of

PAGE = ROOT / "docs" / "OWN_ALGORITHM.md"
PROGRAMS = ROOT / "tests" / "algos" / "programs"
SMALL = (
    *FEW_SUMS,
    "data.prompts_per_step=8",
    "data.samples_per_prompt=2",
    "actor.update.mini_batch_size=8",
    "actor.optimizer.schedule=constant",
    "actor.optimizer.warmup_steps=0",
    "actor.loss.kl_coef=0",
    "data.eval_prompts=16",
    "total_steps=2",
    "eval_every=0",
    "save_every=0",
    "run.save_last=false",
    "run.sample_every=0",
)
SECOND = ("second.function=spmdflow.rewards.arithmetic:unwanted_digit",)
OWN = {"two_rewards": SECOND, "best_of_n": (), "online_dpo": (), "calculator": (), "own_judge": ()}


def program(name: str, folder: Path) -> Path:
    """The script: the page's, written into folder, or one of the tests' own."""
    if name == "own_judge":
        return PROGRAMS / "own_judge.py"
    (block,) = (block for block in blocks_of(PAGE) if block.file_name == f"{name}.py")
    script = folder / f"{name}.py"
    script.write_text(block.text)
    return script


METRICS = (
    *(
        "reward/second_weight",
        "second/mean",
        "second/distinct_2",
        "entropy",
        "best",
        "all",
        "pairs/differ",
    ),
    "judge/mean",
)
"""What the programs report under names of their own."""


def loaded(name: str, *words: str) -> Loaded:
    """One of the programs with the bundled task's settings."""
    yaml = (ROOT / "algos" / "grpo.yaml").read_text()
    if name == "own_judge":
        yaml = _without(yaml, "reward")
    path = Path(words[-1].removeprefix("run.dir=")).parent / f"{name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.replace("arithmetic/", f"{ROOT}/algos/arithmetic/"))
    script = program(name, path.parent)
    more = [f"reward.function={script}:last_answer"] if name == "calculator" else []
    return load(script, path, [*SMALL, *OWN[name], *more, *words])


def _without(yaml: str, section: str) -> str:
    lines = []
    left = False
    for line in yaml.splitlines():
        left = line.startswith(f"{section}:") if line[:1].strip() else left
        lines += [] if left else [line]
    return "\n".join(lines)


def run(name: str, run_dir: Path, *words: str) -> list[dict[str, float]]:
    made = loaded(name, *words, f"run.dir={run_dir}")
    check(made.cfg, 1)
    assert run_flow(made.script, made.cfg, inproc=True) == 0
    return steps_of(run_dir, own=METRICS)


def dry(name: str, folder: Path, world: int, *words: str) -> Trace:
    made = loaded(name, *words, f"run.dir={folder / 'run'}")
    check(made.cfg, world)
    return trace(made.script, made.cfg, settings_of(world))


@pytest.mark.parametrize("name", OWN)
def test_own_algorithms_use_public_names_only(name: str, tmp_path: Path) -> None:
    names = imported_names(ast.parse(program(name, tmp_path).read_text()))

    homes = {module for _, module, _ in names if module.startswith("spmdflow")}
    assert homes == {"spmdflow"}


def test_two_rewards_are_weighted_by_step(tmp_path: Path) -> None:
    steps = run("two_rewards", tmp_path / "run")

    assert [step["reward/second_weight"] for step in steps] == [0.5, 1.0]
    assert all({"reward/mean", "second/mean", "first_mean"} <= set(step) for step in steps)
    assert all(step["first_mean"] == step["reward/mean"] > 0 for step in steps)
    assert all(step["actor/grad_norm"] > 0 for step in steps)


def test_best_of_n_imitates_the_better_half(tmp_path: Path) -> None:
    steps = run("best_of_n", tmp_path / "run", "data.samples_per_prompt=4")

    assert all(step["best"] > step["all"] for step in steps)
    assert all(step["actor/optimizer_steps"] == 1 for step in steps)
    assert steps[1]["actor/loss"] != steps[0]["actor/loss"]


def test_policy_that_generates_and_learns_from_preferences_moves_its_margin(tmp_path: Path) -> None:
    words = ("data.prompts_per_step=16", "data.samples_per_prompt=1", "actor.update.num_epochs=5")
    more = ("total_steps=1", "eval_every=1", "save_every=1")
    before, after = run("online_dpo", tmp_path / "run", *words, *more)

    assert after["pairs/differ"] > 0
    assert after["actor/margin"] > 0.02  # over 10 steps on the same pairs; 0 before the first
    assert after["actor/loss"] < 0.693  # log 2 is that of a policy that is its reference
    assert before["eval/mean"] != after["eval/mean"] > 0  # held-out prompts are scored, no pairs
    assert (tmp_path / "run" / "export" / "actor" / "config.json").exists()


@pytest.mark.drill
def test_calculator_trains_and_is_evaluated_also_if_nobody_asks_it(tmp_path: Path) -> None:
    words = ("eval_every=2", "data.eval_prompts=8", "data.eval_samples=4")
    steps = run("calculator", tmp_path / "run", *words)

    trained = [step for step in steps if "actor/grad_norm" in step]
    assert all(step["rollout/no_room"] == step["reward/asked"] == 0 for step in trained)
    assert all(step["actor/grad_norm"] > 0 for step in trained)
    evaluated = [step for step in steps if "eval/pass@4" in step]
    assert len(evaluated) == 2  # before step 1, and after step 2


def test_plan_of_the_calculator_has_the_rows_that_go_on_and_longer_responses(
    tmp_path: Path,
) -> None:
    planned = dry("calculator", tmp_path, 4, "actor.rollout.max_new_tokens=16")

    calls = [o for o in planned.in_step() if o.label == "actor.generate_sequences"]
    read = [planned.tokens[call.key] for call in calls]
    assert [tokens.num_rows for tokens in read] == [16, 8, 8]  # every other row is told something
    assert [tokens.prompts for tokens in read] == [8, 8 + 6, 8 + 13]  # with the response so far
    assert [tokens.responses for tokens in read] == [6, 1 + 6, 16 - 13]
    assert "tool_text = ['', '62']" in planned.assumptions


def test_own_worker_with_plain_settings_needs_neither_a_place_nor_a_reward(tmp_path: Path) -> None:
    steps = run("own_judge", tmp_path / "run")

    assert all(step["judge/mean"] >= 0 for step in steps)
    assert len(steps) == 2


MAPS = {
    "map": "{train: {roles: [actor, reference], ranks: [0, 2]}, score: {roles: [reward, second], "
    "ranks: [1]}}",
    "judge": "{a: {roles: [judge], ranks: [1]}, b: {roles: [actor, reference], ranks: [0]}}",
}
PLACES = {
    ("two_rewards", "colocate", 4): {"reward": (0, 1, 2, 3), "second": (0, 1, 2, 3)},
    ("two_rewards", "split", 4): {"reward": (2, 3), "second": (2, 3)},
    ("two_rewards", "standalone", 5): {"reward": (3,), "second": (4,)},
    ("two_rewards", MAPS["map"], 3): {"reward": (1,), "second": (1,)},
    ("own_judge", "colocate", 2): {"actor": (0, 1), "judge": (0, 1)},
    ("own_judge", "split", 2): {"actor": (0,), "judge": (1,)},
    ("own_judge", "standalone", 2): {"actor": (0,), "judge": (1,)},
    ("own_judge", MAPS["judge"], 2): {"actor": (0,), "judge": (1,)},
}


@pytest.mark.parametrize(("name", "placement", "world"), PLACES)
def test_models_run_on_the_pool_of_their_name_or_their_role(
    name: str, placement: str, world: int, tmp_path: Path
) -> None:
    found = dry(name, tmp_path, world, f"placement={placement}")

    ranks = {model: found.models[model].layout.ranks for model in PLACES[name, placement, world]}
    assert ranks == PLACES[name, placement, world]


@pytest.mark.parametrize("name", OWN)
def test_own_algorithms_are_placed_by_auto_and_proved_by_a_plan(name: str, tmp_path: Path) -> None:
    made = loaded(name, "placement=auto", f"run.dir={tmp_path / 'run'}")
    auto = find_placement(made.script, made.cfg, 4, load_hardware("h100"))

    check(auto.cfg, 4)
    report = plan(made.script, auto.cfg, settings_of(4), load_hardware("h100"))

    assert report.problems + row_problems(report.trace) == []


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model that was shown how to ask the calculator, as the page does."""
    folder = tmp_path_factory.mktemp("shown")
    lines = (ROOT / "algos" / "arithmetic" / "train.jsonl").read_text().splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines]
    calls = [json.dumps({"prompt": prompt, "answer": prompt}) for prompt in prompts]
    (folder / "calls.jsonl").write_text("\n".join(calls))
    words = (f"data.train_path={folder}/calls.jsonl", "data.eval_path=null", "eval_every=0")
    steps = ("actor.optimizer.lr=4e-3", "total_steps=32", "save_every=32")
    made = load(ROOT / "algos" / "sft.py", None, [*words, *steps, f"run.dir={folder}/run"])
    assert run_flow(made.script, made.cfg, inproc=True) == 0
    return folder / "run" / "export" / "actor"


@pytest.mark.slow
@pytest.mark.parametrize("name", OWN)
def test_own_algorithms_give_the_same_rewards_under_every_placement(
    name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    asking: list[str] = []
    if name == "calculator":
        model = request.getfixturevalue("shown")
        asking = [f"actor.model.path={model}", "actor.rollout.max_new_tokens=16"]
    rewards = []
    for placement in ("colocate", "split", "standalone"):
        ranks = 5 if name == "two_rewards" else 4
        if name == "own_judge" and placement == "split":
            ranks = 2
        run_dir = tmp_path / placement
        made = [*SMALL, *OWN[name], *asking, f"placement={placement}"]
        config = tmp_path / f"{name}.yaml"
        script = Path(loaded(name, f"run.dir={run_dir}").script.__file__ or "")
        made += [f"reward.function={script}:last_answer"] if name == "calculator" else []
        process = torchrun(run_dir, *made, num_ranks=ranks, script=script, small=(str(config),))
        assert finish(process) == 0, log_of(run_dir).read_text()[-3000:]
        keys = ("reward/mean", "judge/mean", "best", "pairs/differ", "reward/asked")
        rewards.append([[step.get(key) for key in keys] for step in steps_of(run_dir, own=METRICS)])

        if asking:
            assert all(step["reward/asked"] > 0.5 for step in steps_of(run_dir, own=METRICS))

    assert rewards[0] == rewards[1] == rewards[2]
