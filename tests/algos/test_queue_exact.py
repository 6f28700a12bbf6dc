"""Rows of a queue, computed again: several batches in a step, adapters, vLLM, segments, kill -9."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor

from tests.algos.queue_reference import (
    Found,
    Versions,
    compare_rows,
    grad_norm_of,
    loss_of,
    steps_of_rows,
)
from tests.algos.runs import ROOT, numbers_of, run_ranks, steps_of
from tests.algos.test_queue import prompts_in_order

ROWS, EPISODES = (
    ROOT / "tests" / "algos" / "programs" / f"queue_{name}.py" for name in ("rows", "episodes")
)
SUMS_MODEL = ROOT / "algos" / "arithmetic" / "model"
GUESS_MODEL = ROOT / "algos" / "guess" / "model"
PROMPTS = 8
SAMPLES = 4
BOUND = 2
CLIP = 0.2
CAP = 1.05
"""Of importance weights, so small that it changes some."""
COMMON = (
    "placement=split",
    "actor.optimizer.schedule=constant",
    "actor.optimizer.warmup_steps=0",
    "actor.update.mini_batch_size=32",
    "actor.update.old_log_probs=recompute",
    "actor.loss.kl_coef=0",
    "actor.loss.aggregation=sequence-mean-token-mean",
    f"actor.loss.clip_ratio={CLIP}",
    "actor.rollout.max_batch_size=16",
    f"data.prompts_per_step={PROMPTS}",
    f"data.samples_per_prompt={SAMPLES}",
    f"max_staleness={BOUND}",
    "eval_every=0",
    "run.sample_every=0",
    "run.keep_checkpoints=100",
)
TEMPERATURE = 8.0
SUMS = (
    *COMMON,
    f"data.train_path={ROOT}/tests/algos/sums/train.jsonl",
    "data.max_prompt_tokens=8",
    f"actor.model.path={SUMS_MODEL}",
    "reward.function=spmdflow.rewards.arithmetic:exact_match",
    f"actor.rollout.temperature={TEMPERATURE}",  # a long tail of lengths
    "actor.rollout.max_new_tokens=24",
    "actor.optimizer.lr=1e-3",
)
ENVIRONMENT = ROOT / "tests" / "distributed" / "programs" / "episode_env.py"
GUESS = (
    *COMMON,
    f"data.train_path={ROOT}/algos/guess/train.jsonl",
    "data.prompt_column=prompt",
    "data.max_prompt_tokens=8",
    f"actor.model.path={GUESS_MODEL}",
    "actor.rollout.max_new_tokens=32",
    f"actor.rollout.episode.environment={ENVIRONMENT}:several(by_segment=False)",
    "actor.rollout.episode.seconds=600",
    "actor.optimizer.lr=1e-2",
)
LOG_PROB_GAP = 2e-6
"""Of log-probabilities in float32 from float64."""
SUMS_GAP = 5e-6
"""The same of the model of sums, whose logits reach 21."""
WEIGHT_GAP = 2e-6
"""Of weights, relative: the same rounding."""
LOSS_GAP = 1e-6
"""Of a loss, relative to the sum of its terms' sizes."""
GRADIENT_GAP = 1e-4
"""Of the norm of a gradient, relative."""
SECONDS = 60.0
"""Only for processes that never end."""


def check_order(steps: dict[int, list[Found]], calls: Sequence[int], *, bound: int) -> None:
    """Every batch in its turn, with all of its rows; no token older than the bound."""
    drawn: list[list[int]] = []
    for step, batches in steps.items():
        assert len(batches) == calls[(step - 1) % len(calls)]
        for found in batches:
            drawn.append(found["drawn"])
            for versions, mask in zip(found["token_versions"], found["response_mask"], strict=True):
                drawn_by = versions[mask].tolist()
                assert all(step - 1 - bound <= version <= step - 1 for version in drawn_by)
                assert drawn_by == sorted(drawn_by)
    assert list(steps) == list(range(1, len(steps) + 1))
    size = PROMPTS * SAMPLES
    for number, ids in enumerate(drawn):  # prompts have ids too: of each group of samples
        first = drawn[0][0] + number * (size + PROMPTS)
        assert ids == list(range(first, first + size))


def check_prompts(
    run_dir: Path, steps: dict[int, list[Found]], words: Sequence[str], script: Path
) -> None:
    """The prompts are those that a run without a queue would draw, in the same order."""
    batches = [found["prompt_text"] for step in steps.values() for found in step]
    assert batches == prompts_in_order(run_dir, words, len(batches), script=script)


def same(one: Any, other: Any) -> bool:
    """Whether two things that were written are equal, bit for bit."""
    if isinstance(one, Tensor):
        return torch.equal(one.view(-1).view(torch.uint8), other.view(-1).view(torch.uint8))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(x, other[name]) for name, x in one.items())
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def different_columns(one: Path, other: Path) -> list[str]:
    """What differs between the rows of two runs: step, batch and column."""
    steps = steps_of_rows(one)
    others = steps_of_rows(other)
    assert steps.keys() == others.keys()
    result = []
    for step, batches in steps.items():
        assert len(batches) == len(others[step])
        for number, (mine, its) in enumerate(zip(batches, others[step], strict=True)):
            for name in mine:
                if name != "metrics" and not same(mine[name], its[name]):
                    result.append(f"step {step}, batch {number}: {name}")
    return result


def different_numbers(one: Path, other: Path) -> set[str]:
    """Names of metrics that differ between two runs; a resumed one sends its weights once more."""
    result: set[str] = set()
    for mine, its in zip(numbers_of(one), numbers_of(other), strict=True):
        for name in mine.keys() | its.keys():
            if mine.get(name) != its.get(name):
                result.add(name)
    return result - {"rollout/synced_bytes"}


def wait_for_end(run_dir: Path) -> None:
    """Until none of the processes of the last kill lives."""
    lines = (run_dir / "killed.jsonl").read_text().splitlines()
    left = [tuple(each) for each in json.loads(lines[-1])]
    limit = time.monotonic() + SECONDS
    while left:
        assert time.monotonic() < limit, f"left: {left}"
        left = [each for each in left if lives(*each)]
        time.sleep(0.05)


def lives(pid: int, began: float) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        process = psutil.Process(pid)
        return process.create_time() == began and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def run_killed(run_dir: Path, words: Sequence[str], kills: Iterable[str], script: Path) -> int:
    """A run that is started again after each kill; return how many of them it reached."""
    reached = 0
    for kill in kills:
        before = num_kills(run_dir)
        status = -9 if kill.startswith("run") else 1
        run_ranks(
            run_dir, *words, f"kill={kill}", num_ranks=2, script=script, small=(), status=status
        )
        assert num_kills(run_dir) == before + 1
        wait_for_end(run_dir)
        reached += 1
    run_ranks(run_dir, *words, num_ranks=2, script=script, small=())
    return reached


def num_kills(run_dir: Path) -> int:
    path = run_dir / "killed.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


CALLS = [2, 1, 3]
WHOLE = (*SUMS, f"calls={CALLS}", "total_steps=12", "save_every=2")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve steps with one to three batches, without a break."""
    run_dir = tmp_path_factory.mktemp("queue") / "whole"
    run_ranks(run_dir, *WHOLE, num_ranks=2, script=ROWS, small=())
    return run_dir


@pytest.mark.drill
def test_steps_of_several_batches_train_every_row_once_in_its_turn(whole: Path) -> None:
    steps = steps_of_rows(whole)

    check_order(steps, CALLS, bound=BOUND)
    check_prompts(whole, steps, WHOLE, ROWS)
    assert max(step["rollout/age_max"] for step in steps_of(whole)) == BOUND


def random_kills(seed: int, number: int, *, num_kinds: int = 4) -> list[str]:
    """Moments at which a run is killed: in the script, while it generates, among its files.

    num_kinds: 3 without the files of the generator, which episodes do not have.
    """
    rng = random.Random(seed)
    kinds = [("script", 0, 9), ("draw", 1, 60), ("file", 0, 20), ("file", 1, 8)][:num_kinds]
    kills = []
    for index in range(number):
        kind, rank, most = kinds[index % len(kinds)]
        kills.append(f"{rng.choice(['run', 'rank'])}:{rank}:{kind}:{rng.randint(1, most)}")
    return kills


@pytest.mark.drill
@pytest.mark.timeout(1800)
def test_run_that_is_killed_at_random_moments_ends_with_the_bits_of_one_that_is_not(
    whole: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"

    run_killed(run_dir, WHOLE, random_kills(seed=1, number=4), ROWS)

    assert different_columns(run_dir, whole) == []
    assert different_numbers(run_dir, whole) == set()
    assert (run_dir / "finished").exists()


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("seed", range(2, 6))
def test_run_that_is_killed_at_ten_random_moments_ends_with_the_same_bits(
    whole: Path, tmp_path: Path, seed: int
) -> None:
    run_dir = tmp_path / "run"
    words = (*WHOLE[:-2], "total_steps=12", "save_every=2")

    run_killed(run_dir, words, random_kills(seed, number=10), ROWS)

    assert different_columns(run_dir, whole) == []
    assert different_numbers(run_dir, whole) == set()


PLAYED = (*GUESS, "actor.optimizer.lr=3e-3", "calls=[1, 2]", "total_steps=8", "save_every=1")


@pytest.mark.drill
@pytest.mark.timeout(1800)
def test_episodes_of_a_run_that_is_killed_at_random_moments_are_trained_once_in_their_turn(
    tmp_path: Path,
) -> None:
    run_dir = tmp_path / "run"

    run_killed(run_dir, PLAYED, random_kills(seed=3, number=3, num_kinds=3), EPISODES)

    steps = steps_of_rows(run_dir)
    check_order(steps, [1, 2], bound=BOUND)
    assert [step["step"] for step in steps_of(run_dir)] == list(range(1, 9))
    gaps = compare_rows(steps, Versions(run_dir, GUESS_MODEL), 1.0)
    assert gaps.rollout < LOG_PROB_GAP and gaps.old < LOG_PROB_GAP
    assert gaps.num_old > 0 and gaps.oldest <= BOUND


@pytest.mark.drill
@pytest.mark.timeout(1800)
def test_killed_run_of_episodes_without_staleness_ends_with_the_bits_of_one_that_is_not(
    tmp_path: Path,
) -> None:
    words = (*PLAYED, "max_staleness=0", "actor.rollout.max_batch_size=1", "total_steps=4")
    run_ranks(tmp_path / "whole", *words, num_ranks=2, script=EPISODES, small=())

    run_killed(tmp_path / "run", words, ["run:0:script:4", "rank:1:draw:40"], EPISODES)

    assert different_columns(tmp_path / "run", tmp_path / "whole") == []


@pytest.mark.drill
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("old", ["recompute", "rollout"])
def test_importance_weights_loss_and_gradient_are_those_of_plain_torch(
    tmp_path: Path, old: str
) -> None:
    run_dir = tmp_path / "run"
    words = (*GUESS, f"actor.update.old_log_probs={old}", f"correction.cap={CAP}")
    words = (*words, "total_steps=4", "save_every=1")
    run_ranks(run_dir, *words, num_ranks=2, script=EPISODES, small=())

    steps = steps_of_rows(run_dir)
    versions = Versions(run_dir, GUESS_MODEL)
    check_order(steps, [1], bound=BOUND)
    gaps = compare_rows(steps, versions, 1.0, cap=CAP)
    assert gaps.rollout < LOG_PROB_GAP, gaps
    assert gaps.num_mixed > 0 and gaps.num_old > 0 and gaps.oldest == BOUND
    if old == "recompute":
        assert gaps.old < LOG_PROB_GAP and gaps.weight < WEIGHT_GAP and gaps.num_capped > 0, gaps
    for step, (found,) in steps.items():
        terms = loss_of(found, step - 1, versions, 1.0, clip=CLIP)
        metrics = found["metrics"]
        assert abs(metrics["actor/pg_loss"] - float(terms.loss)) < LOSS_GAP * terms.size
        norm = grad_norm_of(terms, versions.model(step - 1))
        assert metrics["actor/grad_norm"] == pytest.approx(norm, rel=GRADIENT_GAP)


LORA = ("actor.model.lora.rank=4", "actor.optimizer.lr=3e-3", "reference.shares=null")


@pytest.mark.drill
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "engine",
    [
        ("actor.rollout.engine=builtin",),
        ("actor.rollout.engine=vllm",),
        ("actor.rollout.engine=vllm", "actor.rollout.weights=adapter"),
        ("actor.rollout.engine=served",),
    ],
    ids=["builtin", "vllm", "vllm adapter", "served"],
)
def test_adapters_of_every_version_have_sampled_what_the_queue_says(
    tmp_path: Path, engine: tuple[str, ...]
) -> None:
    if "builtin" not in engine[0]:
        pytest.importorskip("vllm", reason="vLLM is not installed")
    run_dir = tmp_path / "run"
    words = (*SUMS, *LORA, *engine, "calls=[1, 2]", "total_steps=4", "save_every=1")
    run_ranks(run_dir, *words, num_ranks=2, script=ROWS, small=())

    steps = steps_of_rows(run_dir)
    check_order(steps, [1, 2], bound=BOUND)
    gaps = compare_rows(steps, Versions(run_dir, SUMS_MODEL), TEMPERATURE)
    assert gaps.rollout < SUMS_GAP and gaps.old < SUMS_GAP, gaps
    assert gaps.num_old > 0
    # when servers have drawn a row's first token depends on time
    assert gaps.num_mixed > 0 or "served" in engine[0], "no row went on over a sync"
    versions = Versions(run_dir, SUMS_MODEL)
    found = steps[4][0]
    row = found["prompts"][0], found["responses"][0]
    first, last = (versions.log_probs(number, *row, TEMPERATURE).detach() for number in (0, 3))
    assert float((first - last).abs().max()) > 100 * SUMS_GAP, "the adapter has learnt nothing"
