"""algos/grpo_agent.py from end to end: a game of many turns is learned, a coin is not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from spmdflow.config.check import check
from spmdflow.config.load import load
from spmdflow.controller.script import run_flow
from spmdflow.errors import RewardError
from tests.algos.runs import ROOT, check_prediction, run_ranks, steps_of

AGENT = ROOT / "algos" / "grpo_agent.py"
SMALL = (
    "data.prompts_per_step=8",
    "data.samples_per_prompt=4",
    "actor.update.mini_batch_size=16",
    "run.sample_every=1",
    "total_steps=2",
    "eval_every=1",
    "save_every=0",
    "run.save_last=false",
)
BROKEN = '''
import random

from algos.guess import game

async def episode(row, *, base_url, model, api_key, fails="", leaves=""):
    score = await game.episode(row, base_url=base_url, model=model, api_key=api_key)
    if str(row["digit"]) in fails:
        raise ValueError("no such digit")
    return None if str(row["digit"]) in leaves else score

async def shuffled(row, *, base_url, model, api_key):
    """The score of another game, as far as anybody knows."""
    won = await game.episode(row, base_url=base_url, model=model, api_key=api_key)
    return {"score": float(random.random() < 0.2), "won": won}
'''


def run(folder: Path, *words: str, environment: str) -> int:
    (folder / "broken.py").write_text(BROKEN)
    key = "actor.rollout.episode.environment"
    own = (f'{key}="{folder}/broken.py:{environment}"', f"run.dir={folder}/run")
    loaded = load(AGENT, None, [*SMALL, *own, *words])
    check(loaded.cfg, 1)
    return run_flow(loaded.script, loaded.cfg, inproc=True)


@pytest.fixture(scope="module")
def with_failures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("agent")
    words = ("actor.rollout.episode.max_failed_fraction=0.6",)
    assert run(folder, *words, environment="episode(fails='23', leaves='0145')") == 0
    return folder / "run"


def test_failed_episodes_are_dropped_and_counted(with_failures: Path) -> None:
    start, *steps = steps_of(with_failures)

    assert sum(step["reward/dropped"] for step in steps) > 0
    assert sum(step["episodes/left_out"] for step in steps) > 0
    for step in steps:
        assert step["reward/dropped_share"] == pytest.approx(step["reward/dropped"] / 32)
        assert step["reward/penalised_mean"] == pytest.approx(step["reward/mean"])
        assert 1 <= step["episodes/turns"] <= 4
        assert step["rollout/drift_max"] < 1e-5
    assert start["eval/dropped"] == 20 and "eval/mean" in start
    lines = (with_failures / "samples.jsonl").read_text().splitlines()
    samples = [sample for sample in map(json.loads, lines) if sample["score"] is not None]
    assert {sample["phase"] for sample in samples} == {"train", "eval"}
    for sample in samples:  # the mask of one reply alone has no 0 and is left out
        mask = sample.get("mask", "1")
        assert len(mask.replace("0", " ").split()) == sample["turns"] and mask[-1] == "1"
        assert sum(sample["lengths"]) == len(sample["response"])


def test_run_ends_at_a_failed_episode_if_it_shall(tmp_path: Path) -> None:
    words = ("actor.rollout.episode.on_error=raise", "eval_every=0")
    with pytest.raises(RewardError, match="no such digit"):
        run(tmp_path, *words, environment="episode(fails='0123456789')")


def test_run_ends_if_too_many_episodes_fail(tmp_path: Path) -> None:
    with pytest.raises(RewardError, match="expected at most 0.1"):
        run(tmp_path, "eval_every=0", environment="episode(fails='0123456789')")


@pytest.mark.slow
def test_rows_of_episodes_move_as_planned_to_a_reference_on_other_ranks(tmp_path: Path) -> None:
    words = (*SMALL, "placement=standalone", "eval_every=0")
    run_ranks(tmp_path, *words, num_ranks=2, script=AGENT, small=())

    check_prediction(tmp_path)
    assert all(step["transfer/bytes"] > 0 for step in steps_of(tmp_path))


MEGATRON = ("actor.engine.kind=megatron", "actor.engine.layout=t2")
VLLM = ("actor.rollout.engine=vllm",)
ENGINES = {"usual": (), "megatron": MEGATRON, "vllm": VLLM, "megatron and vllm": MEGATRON + VLLM}


@pytest.mark.slow
def test_actor_plays_the_same_games_whatever_trains_and_generates(tmp_path: Path) -> None:
    """Trainer and generator share two ranks; the seeds of a turn know no rank and no engine."""
    played = {}
    for name, own in ENGINES.items():
        folder = tmp_path / name.replace(" ", "-")
        run_ranks(folder, *SMALL, "eval_every=0", *own, num_ranks=2, script=AGENT, small=())
        check_prediction(folder)
        first, second = steps_of(folder)
        assert max(first["rollout/drift_max"], second["rollout/drift_max"]) < 1e-5, name
        facts = ("reward/mean", "episodes/turns", "rollout/response_tokens")
        played[name] = [first[fact] for fact in facts]

    assert all(found == played["usual"] for found in played.values()), played


@pytest.mark.slow
@pytest.mark.timeout(1900)
def test_the_game_is_learned_and_a_coin_is_not(tmp_path: Path) -> None:
    """From about 20 % to at least 80 % of the games, sampled. Scores of a coin teach nothing, but
    they move the policy: their expected gradient is 0, their sum wanders. A policy that heeds no
    hint wins at most 40 %: four different digits of ten.
    """
    words = ("run.sample_every=0", "save_every=0", "run.save_last=false", "eval_every=0")
    (tmp_path / "broken.py").write_text(BROKEN)
    coin = f"actor.rollout.episode.environment={tmp_path}/broken.py:shuffled"
    for name, own in (("game", ()), ("coin", (coin,))):
        run_ranks(tmp_path / name, *words, *own, num_ranks=2, script=AGENT, small=(), seconds=900)

    assert json.loads((tmp_path / "game" / "prediction.json").read_text())["bytes_agree"]
    rewards = [step["reward/mean"] for step in steps_of(tmp_path / "game")]
    assert len(rewards) == 250 and 0.15 < sum(rewards[:5]) / 5 < 0.3
    assert sum(rewards[-10:]) / 10 >= 0.8
    steps = steps_of(tmp_path / "coin")
    assert 0.18 < sum(step["reward/mean"] for step in steps) / len(steps) < 0.22
    won = [step["reward/won"] for step in steps]
    assert all(sum(won[at : at + 10]) / 10 < 0.4 for at in range(len(won) - 9))
