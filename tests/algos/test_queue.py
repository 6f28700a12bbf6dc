"""Training from a queue: no token too old, no row lost, twice or out of turn, no bias by length."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client import parser

from spmdflow.config.load import load
from spmdflow.datasets.scan import PromptSource, scan
from spmdflow.datasets.stream import PromptOrder
from spmdflow.datasets.tokenizer import load_tokenizer
from spmdflow.replay import replay_folder
from spmdflow.tracking.reading import RunFiles
from spmdflow.tracking.servers import ServerRecord, write_servers
from tests.algos.runs import (
    ROOT,
    check_prediction,
    finish,
    kill_ranks,
    last_checkpoint,
    log_of,
    run_ranks,
    start,
    steps_of,
    torchrun,
    wait_for_step,
    wait_until,
)

ASYNC, SYNC = (ROOT / "algos" / f"{name}.py" for name in ("grpo_async", "grpo"))
QUEUED, UNSYNCED = (
    ROOT / "tests" / "algos" / "programs" / f"{name}.py" for name in ("queued", "unsynced")
)
SMALL = (
    "data.prompts_per_step=6",
    "data.samples_per_prompt=4",
    "actor.rollout.temperature=2.5",
    "actor.update.mini_batch_size=12",
    "actor.optimizer.schedule=constant",
    "actor.optimizer.warmup_steps=0",
    "data.eval_prompts=16",
    "run.sample_every=0",
    "total_steps=3",
    "eval_every=2",
)
TAIL = (
    f"data.train_path={ROOT}/algos/arithmetic/train.jsonl",
    "data.max_prompt_tokens=8",
    f"actor.model.path={ROOT}/algos/arithmetic/model",
    "reward.function=spmdflow.rewards.arithmetic:exact_match",
    "placement=split",
    "actor.rollout.temperature=40.0",  # the next token hardly depends on the model: a long tail
    "actor.rollout.max_new_tokens=48",
    "actor.rollout.max_batch_size=64",
    "actor.optimizer.lr=1e-9",
    "actor.update.mini_batch_size=32",
    "data.prompts_per_step=8",
    "data.samples_per_prompt=4",
    "max_staleness=2",
    "eval_every=0",
    "run.sample_every=0",
)
FEW_AT_ONCE = "actor.rollout.max_batch_size=16"
"""So few rows that step s never draws all that was begun; programs/queued.py leaves the others."""


def ks_p_value(one: Sequence[int], other: Sequence[int]) -> float:
    """Of the two-sample Kolmogorov-Smirnov test; asymptotic (Stephens 1970)."""
    values = np.union1d(one, other)
    size = len(one) * len(other) / (len(one) + len(other))
    ranks = [np.searchsorted(np.sort(x), values, side="right") / len(x) for x in (one, other)]
    distance = np.abs(ranks[0] - ranks[1]).max()
    scaled = (size**0.5 + 0.12 + 0.11 / size**0.5) * distance
    terms = np.arange(1, 101)
    total = 2 * ((-1.0) ** (terms - 1) * np.exp(-2 * (terms * scaled) ** 2)).sum()
    return float(np.clip(total, 0, 1)) if scaled > 0.2 else 1.0


def trained_of(run_dir: Path) -> list[dict[str, Any]]:
    """What each step learnt from; of a step that ran again after a kill, the last time."""
    lines = (run_dir / "trained.jsonl").read_text().splitlines()
    by_step = {found["step"]: found for found in map(json.loads, lines)}
    return [by_step[step] for step in sorted(by_step)]


def prompts_in_order(
    run_dir: Path, words: Sequence[str], num_steps: int, *, script: Path = QUEUED
) -> list[list[str]]:
    """The prompts of each step as a run without a queue would draw them, each for every sample."""
    cfg = load(script, None, [*words, f"run.dir={run_dir}"]).cfg
    data = cfg.data
    report = scan(data, data.train_path, load_tokenizer(data.tokenizer_path))
    size = data.prompts_per_step
    shuffle = data.shuffle
    order = PromptOrder(report, prompts_per_step=size, seed=cfg.run.seed, shuffle=shuffle)
    rows = [row for _ in range(num_steps) for row in order.next_rows()]
    texts = PromptSource(report.files, data).read_rows(rows)["prompt_text"]
    steps = [texts[start : start + size] for start in range(0, len(texts), size)]
    return [[text for text in step for _ in range(data.samples_per_prompt)] for step in steps]


def check_trained(run_dir: Path, words: Sequence[str], num_steps: int, *, bound: int) -> None:
    """Every prompt once and in its turn; no token older than the bound; versions only grow."""
    found = trained_of(run_dir)
    assert [step["prompts"] for step in found] == prompts_in_order(run_dir, words, num_steps)
    for step in found:
        oldest = step["step"] - 1 - bound
        for versions in step["versions"]:
            assert versions and versions == sorted(versions)
            assert oldest <= versions[0] and versions[-1] <= step["step"] - 1
    assert max(step["rollout/age_max"] for step in steps_of(run_dir)) <= bound


def test_without_staleness_every_bit_is_that_of_grpo(tmp_path: Path) -> None:
    words = (*SMALL, "actor.update.old_log_probs=auto", "save_every=3")
    dirs = tmp_path / "async", tmp_path / "sync"
    # in processes of their own: what a test leaves behind in this one may change last bits
    run_ranks(dirs[0], *words, "max_staleness=0", num_ranks=2, script=ASYNC, small=())
    run_ranks(dirs[1], *words, num_ranks=1, script=SYNC, small=())

    check_prediction(dirs[0])
    assert [tokens["stale"]["rows"] for tokens in RunFiles(dirs[0]).throughput] == [0, 0, 0]
    prefixes = ("actor/", "reward/", "eval/", "rollout/drift", "rollout/response")
    for step, other in zip(*map(steps_of, dirs), strict=True):  # first: they name the step
        names = {name for name in other if name.startswith(prefixes)}
        assert {name: step[name] for name in names} == {name: other[name] for name in names}
    mine, its = (
        {name: x for name, x in last_checkpoint(run).items() if name.startswith("actor/")}
        for run in dirs
    )
    assert mine == its != {}


@pytest.mark.slow
def test_a_kept_step_with_rows_of_several_versions_runs_again_to_the_same_bits(
    tmp_path: Path,
) -> None:
    run_dir = tmp_path / "run"
    capsule = tmp_path / "run" / "capsules" / "step-3"
    words = (
        *TAIL,
        FEW_AT_ONCE,
        "total_steps=8",
        "save_every=0",
        "run.save_last=false",
        "run.capture_step=3",
    )
    run_ranks(run_dir, *words, num_ranks=2, script=QUEUED, small=())
    (kept,) = (step for step in trained_of(run_dir) if step["step"] == 3)
    assert any(len(set(row)) > 1 for row in kept["versions"]), "no row went on over a sync"

    words = ("--nproc-per-node=2", "-m", "spmdflow.replay", str(capsule))
    log = tmp_path / "replay.log"
    process = start([sys.executable, "-m", "torch.distributed.run", "--standalone", *words], log)

    assert finish(process) == 0, log.read_text()[-3000:]
    assert "tensors bit for bit" in log.read_text()
    (again,) = trained_of(replay_folder(capsule))
    assert again == kept


def kill_and_restart(run_dir: Path, words: Sequence[str], rng: random.Random) -> None:
    """One launch, whose ranks are killed at some moment; it has saved at least once before."""
    process = torchrun(run_dir, *words, num_ranks=2, script=QUEUED, small=())
    before = len(steps_of(run_dir))
    wait_until(
        lambda: len(steps_of(run_dir)) != before or process.poll() is not None,
        run_dir,
    )
    with suppress(subprocess.TimeoutExpired):
        process.wait(rng.uniform(0.0, 1.5))
    kill_ranks(run_dir)
    finish(process)


@pytest.mark.drill
def test_a_killed_run_trains_every_prompt_once_and_no_token_that_is_too_old(
    tmp_path: Path,
) -> None:
    run_dir = tmp_path / "run"
    steps = 10
    latest = run_dir / "checkpoints" / "latest"
    hold = tmp_path / "run.hold-6"
    words = (*TAIL, FEW_AT_ONCE, f"total_steps={steps}", "save_every=2")
    hold.touch()
    process = torchrun(run_dir, *words, num_ranks=2, script=QUEUED, small=())
    wait_for_step(run_dir, 3)
    wait_until(latest.exists, run_dir)
    kill_ranks(run_dir)
    assert finish(process) != 0
    assert 3 <= steps_of(run_dir)[-1]["step"] < 6
    hold.unlink()

    process = torchrun(run_dir, *words, num_ranks=2, script=QUEUED, small=())

    assert finish(process) == 0, log_of(run_dir).read_text()[-3000:]
    check_trained(run_dir, words, steps, bound=2)
    for step, tokens in zip(trained_of(run_dir), RunFiles(run_dir).throughput, strict=True):
        num_old = sum(versions[0] < step["step"] - 1 for versions in step["versions"])
        assert num_old <= tokens["stale"]["rows"] <= tokens["trained"]["rows"] == 32
    rows = [row for step in trained_of(run_dir) for row in step["versions"]]
    assert any(len(set(row)) > 1 for row in rows), "no row went on over a sync"


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """RUN_DIR of three steps, during which the generator never ends by itself. The second has two
    batches.

    It has a page for Prometheus, and reports of servers that an earlier start has left.
    """
    run_dir = tmp_path_factory.mktemp("endless") / "run"
    run_dir.mkdir()
    write_servers(run_dir, 1, [ServerRecord("http://gone:1", "ready")])
    words = (*TAIL, "total_steps=3", "save_every=1", "run.keep_checkpoints=3", "run.metrics_port=0")
    run_ranks(run_dir, *words, num_ranks=2, script=UNSYNCED, small=())
    return run_dir


def test_steps_end_and_are_saved_while_rows_of_later_steps_have_no_end(endless: Path) -> None:
    assert [step["step"] for step in steps_of(endless)] == [1, 2, 3]
    sealed = sorted(path.parent.name for path in endless.glob("checkpoints/*/manifest.json"))
    assert sealed == ["step-1", "step-2", "step-3"]
    assert list(endless.glob("checkpoints/step-1/generator/ahead-*.safetensors")) != []


def test_second_batch_of_a_step_waits_for_its_own_rows_alone(endless: Path) -> None:
    """Its generator goes on with rows of later steps until it is halted: it would wait for ever."""
    trained = [tokens["trained"]["rows"] for tokens in RunFiles(endless).throughput]

    assert trained == [8 * 4, 2 * 8 * 4, 8 * 4]


def test_page_of_a_live_run_has_the_records_of_its_last_finished_step(endless: Path) -> None:
    first, second, _ = steps_of(endless)
    text = (endless / "scraped.txt").read_text()
    samples: dict[str, float] = {}
    metrics: dict[str, float] = {}
    for family in parser.text_string_to_metric_families(text):
        for sample in family.samples:
            assert sample.labels["run"] == "run"
            if sample.name == "spmdflow_metric":
                metrics[sample.labels["key"]] = sample.value
            else:
                samples[sample.name] = sample.value

    assert metrics == {name: x for name, x in second.items() if name != "step" and x is not None}
    assert (samples["spmdflow_step"], samples["spmdflow_steps"]) == (2, 3)
    assert samples["spmdflow_step_seconds"] == second["time/step_seconds"]
    assert samples["spmdflow_token_age_max"] == second["rollout/age_max"]
    assert samples["spmdflow_weights_version"] == second["rollout/weights_version"]
    names = ("rollout/prompt_tokens", "rollout/response_tokens")
    tokens = sum(step[name] for step in (first, second) for name in names)
    assert samples["spmdflow_trained_tokens_total"] == tokens > 0
    assert samples["spmdflow_queue_rows"] == 8 * 4, "step 3 is the only later one"
    assert samples["spmdflow_restarts_total"] == 0
    assert not any("server" in name for name in samples), "of an earlier start"


def test_page_ends_with_its_run(endless: Path) -> None:
    assert "metrics page: http://127.0.0.1:" in log_of(endless).read_text()
    assert not (endless / "metrics-url").exists()


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["t1", "t2"])
def test_rows_of_vllm_go_on_over_a_sync(tmp_path: Path, layout: str) -> None:
    run_dir = tmp_path / "run"
    steps = 16
    num_ranks = {"t1": 2, "t2": 3}[layout]
    generators = list(range(1, num_ranks))
    pools = (
        "placement={a: {roles: [actor, reference, reward], ranks: [0]}, "
        f"b: {{roles: [generator], ranks: {generators}}}}}"
    )
    engine = ("actor.rollout.engine=vllm", f"actor.rollout.layout={layout}", pools)
    words = (
        *TAIL,
        FEW_AT_ONCE,
        *engine,
        f"total_steps={steps}",
        "save_every=0",
        "run.save_last=false",
    )
    process = torchrun(run_dir, *words, num_ranks=num_ranks, script=QUEUED, small=())

    assert finish(process) == 0, log_of(run_dir).read_text()[-3000:]
    check_trained(run_dir, words, steps, bound=2)
    rows = [row for step in trained_of(run_dir) for row in step["versions"]]
    assert any(len(set(row)) > 1 for row in rows), "no row went on over a sync"


@pytest.mark.slow
def test_20_kills_at_random_moments_lose_no_prompt(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    steps = 400
    rng = random.Random(7)
    words = (*TAIL, f"total_steps={steps}", "save_every=3")
    for _ in range(20):
        kill_and_restart(run_dir, words, rng)
    assert steps_of(run_dir)[-1]["step"] < steps, "it ended before the last kill"

    process = torchrun(run_dir, *words, num_ranks=2, script=QUEUED, small=())

    assert finish(process) == 0, log_of(run_dir).read_text()[-3000:]
    check_trained(run_dir, words, steps, bound=2)


@pytest.mark.slow
@pytest.mark.parametrize("bound", [1, 4])
def test_200_steps_with_long_tails_train_lengths_as_they_are_drawn(
    tmp_path: Path, bound: int
) -> None:
    drawn = []
    steps = 200
    for name, staleness in (("queued", bound), ("waited for", 0)):
        run_dir = tmp_path / name
        words = (
            *TAIL,
            f"total_steps={steps}",
            "save_every=0",
            "run.save_last=false",
            f"max_staleness={staleness}",
        )
        process = torchrun(run_dir, *words, num_ranks=2, script=QUEUED, small=())
        assert finish(process) == 0, log_of(run_dir).read_text()[-3000:]
        check_trained(run_dir, words, steps, bound=staleness)
        rows = [row for step in trained_of(run_dir) for row in step["versions"]]
        drawn.append([len(row) for row in rows])

    assert all(len(lengths) >= 5000 for lengths in drawn)
    assert max(drawn[0]) == 48 > 8 * sorted(drawn[0])[len(drawn[0]) // 4]
    assert ks_p_value(*drawn) > 0.01
