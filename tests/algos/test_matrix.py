"""Each script under every placement, engine and generator that it applies to, unchanged.

A covering set of 15 runs of two steps (every pair of settings, every script); the full matrix by
name. The first step is compared with the same script on one rank without any parallelism.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from spmdflow.config.check import check
from spmdflow.config.load import load
from spmdflow.config.placement import roles_of
from spmdflow.errors import ConfigError
from tests.algos.matrix import (
    ENGINES,
    NONE,
    PLACEMENTS,
    ROLES,
    ROLLOUTS,
    WITHOUT_TRAINING,
    WORLDS,
    Combination,
    covering_set,
    full_matrix,
    pairs_of,
    reason_against,
    settings_of,
)
from tests.algos.programs.matrix import ALGOS, run_all
from tests.algos.runs import LIMIT
from tests.distributed.ranks import RanksFailed, run_ranks
from tests.distributed.replayed import check_planned_bytes

FULL = full_matrix()
DISTILL = Combination("distill", "zero1", "split", "vllm", 4)
COVERING = [*covering_set([run for run in FULL if run.script != "distill"], seed=21), DISTILL]
QUICK = [
    run for run in COVERING if run.rollout != "vllm" and run.engine in ("zero1", "zero2", "zero3")
]
"""Run by default, as the others need Megatron's or vLLM's imports or more seconds."""
LOSSES = ("actor/loss", "actor/pg_loss", "critic/loss", "cost_critic/loss", "reward_model/loss")
NORMS = ("actor/grad_norm", "critic/grad_norm", "reward_model/grad_norm")
EXACT = ("reward/mean", "cost/mean", "eval/accuracy", "eval/sampled/accuracy")


def one_rank(run: Combination) -> Combination:
    """The same script on one rank (grpo_async: one for each side), FSDP, the built-in generator.

    Both generators make one draw, so responses are the same.
    """
    engine = NONE if run.script in WITHOUT_TRAINING else "fsdp"
    rollout = NONE if run.rollout == NONE else "builtin"
    placement, world = ("split", 2) if run.script == "grpo_async" else ("colocate", 1)
    return Combination(run.script, engine, placement, rollout, world)


ELSEWHERE = {
    "ppo": "fsdp zero1 zero2 zero3 megatron-t2 split standalone vllm 2 4",
    "grpo": "fsdp colocate split builtin 1 2",
    "grpo_async": "zero1 megatron-t2 builtin 2",
    "remax": "fsdp colocate 1",
    "rloo": "fsdp colocate 1 2",
    "reinforce_pp": "fsdp colocate 1 2",
    "dapo": "megatron-t2 split colocate 1",
    "safe_rlhf": "fsdp megatron-t2 split builtin 1",
    "distill": "fsdp colocate split builtin 1 2",
    "sft": "fsdp zero1 1",
    "reward_model": "fsdp zero1 megatron-t2 2",
    "dpo": "fsdp zero1 megatron-t2 colocate 1 2",
    "evaluate": "split vllm 1 2",
}
"""Script -> settings under which other tests run it (their files begin with its name)."""


def table() -> list[str]:
    """Rows of docs/ALGORITHMS.md: x covering set, o other tests, . neither, - not applicable."""
    columns = [*ENGINES, *PLACEMENTS, *ROLLOUTS, *map(str, WORLDS)]

    def cell(script: str, name: str) -> str:
        if not any(run.script == script and name in map(str, run) for run in FULL):
            return "-"
        if any(run.script == script and name in map(str, run) for run in COVERING):
            return "x"
        return "o" if name in ELSEWHERE[script].split() else "."

    return [
        f"| {' | '.join([f'`{script}`', *(cell(script, name) for name in columns)])} |"
        for script in ROLES
    ]


def steps_of(folder: Path, run: Combination) -> list[dict[str, Any]]:
    path = folder / str(run) / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def num_steps(run: Combination) -> int:
    return 1 if run.script in WITHOUT_TRAINING else 2


def check_run(folder: Path, run: Combination) -> None:
    steps = steps_of(folder, run)
    first, *_ = steps_of(folder, one_rank(run))
    assert [step["step"] for step in steps] == [1, 2][: num_steps(run)]
    for step in steps:
        assert [name for name, value in step.items() if not math.isfinite(value)] == []
        assert step["controller/tensor_bytes"] == 0
        assert step["transfer/bytes"] == step["transfer/planned_bytes"]
    compared = 0
    for names, tolerance in (
        (LOSSES, {"abs": 1e-5, "rel": 0}),  # float32 sums in another order
        (NORMS, {"rel": 1e-4}),
        (EXACT, {"rel": 1e-12}),  # the same responses
    ):
        for name in set(names) & first.keys():
            compared += 1
            assert steps[0][name] == pytest.approx(first[name], **tolerance), name
    assert compared >= 2
    check_planned_bytes(ALGOS / f"{run.script}.py", folder / str(run))


def run_group(folder: Path, runs: Sequence[Combination], *, seconds: float = LIMIT) -> None:
    """The runs and their references in one world, as large as the largest: imports count once."""
    wanted = list(dict.fromkeys([*map(one_rank, runs), *runs]))
    wanted = [run for run in wanted if not (folder / str(run) / "metrics.jsonl").exists()]
    world = max(run.world for run in wanted)
    run_ranks(run_all, world, str(folder), tuple(map(tuple, wanted)), seconds=seconds)


def run_each(folder: Path, runs: Sequence[Combination]) -> dict[Combination, str]:
    """All of the runs in few worlds; what went wrong with those that did not end.

    A run that fails ends its world: the next world has the runs behind it.
    """
    failures: dict[Combination, str] = {}
    left = list(runs)
    while left:
        try:
            run_group(folder, left[:7])
            left = left[7:]
        except RanksFailed as err:
            done = [run for run in left if len(steps_of(folder, run)) == num_steps(run)]
            failed = next(run for run in left if run not in done)
            failures[failed] = str(err)
            left = [run for run in left if run not in done and run != failed]
    return failures


def test_covering_set_has_at_most_15_runs_and_every_pair_that_applies() -> None:
    wanted = set().union(*map(pairs_of, FULL))

    assert set().union(*map(pairs_of, COVERING)) == wanted
    assert len(COVERING) == len(set(COVERING)) <= 15
    assert {run.script for run in COVERING} == set(ROLES)
    assert {run.engine for run in COVERING} == {*ENGINES, NONE}
    on_worlds = (4 * 3 - 1) + (3 * 3 - 2)  # no t2, split or standalone on one rank
    assert len(wanted) == len(ROLES) + 4 * 3 + 4 * 2 + 3 * 2 + 2 * 3 + on_worlds


def test_every_script_is_in_the_matrix_with_its_models() -> None:
    scripts = {path.stem for path in ALGOS.glob("*.py")}

    assert scripts - {"grpo_agent"} == set(ROLES)  # which is grpo but for its episodes
    for script, roles in ROLES.items():
        assert roles_of(load(ALGOS / f"{script}.py", None, []).cfg) == roles


def test_page_shows_what_is_tested_and_what_is_not() -> None:
    page = (ALGOS.parent / "docs" / "ALGORITHMS.md").read_text(encoding="utf-8")

    assert "\n".join(table()) in page, "\n".join(table())
    for run in COVERING:
        assert f"`{run}`" in page


@pytest.mark.parametrize("script", [pytest.param(s, marks=pytest.mark.slow) for s in ROLES][:-3])
def test_settings_that_do_not_apply_are_refused_and_all_others_accepted(
    script: str, tmp_path: Path
) -> None:
    """Of placement, engine and world; what has no generator or no engine has no such setting."""
    known = [run for run in FULL if run.script == script]
    rollout = known[0].rollout
    for engine in ENGINES:
        for placement in PLACEMENTS:
            for world in WORLDS:
                run = Combination(script, engine, placement, rollout, world)
                if placement != "colocate" and len(ROLES[script]) == 1:
                    continue  # standalone is accepted: it is the same
                if placement == "colocate" and script == "grpo_async":
                    continue  # refused when its generator is connected: test_grpo_async.py
                words = []
                try:
                    words = list(settings_of(run, str(tmp_path / "run")))
                    check(load(ALGOS / f"{script}.py", None, words).cfg, world)
                    refused = None
                except ConfigError as err:
                    refused = str(err)
                assert (refused is None) == (reason_against(run) is None), (run, refused)


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("matrix")
    run_group(folder, QUICK)
    return folder


@pytest.mark.drill
@pytest.mark.parametrize("run", QUICK, ids=str)
def test_run_of_the_covering_set_has_the_first_step_of_one_rank(
    quick: Path, run: Combination
) -> None:
    check_run(quick, run)


@pytest.fixture(scope="module")
def covered(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> tuple[Path, dict[Combination, str]]:
    """The chosen runs of the covering set, and which of them failed."""
    chosen = [
        item.callspec.params["run"]
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.originalname == EACH
    ]
    folder = tmp_path_factory.mktemp("covering")
    return folder, run_each(folder, sorted(chosen, key=lambda run: (run.rollout == "vllm", run)))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("run", COVERING, ids=str)
def test_each_run_of_the_covering_set_has_the_first_step_of_one_rank(
    covered: tuple[Path, dict[Combination, str]], run: Combination
) -> None:
    folder, failures = covered
    assert run not in failures, failures[run]
    check_run(folder, run)


EACH = test_each_run_of_the_covering_set_has_the_first_step_of_one_rank.__name__


def in_full_matrix() -> list[Combination]:
    """Those named by SPMDFLOW_MATRIX: all, or the scripts it lists; hours for all 648."""
    wanted = os.environ.get("SPMDFLOW_MATRIX", "").split(",")
    return [run for run in FULL if wanted == ["all"] or run.script in wanted]


@pytest.mark.slow
@pytest.mark.parametrize("run", in_full_matrix(), ids=str)
def test_combination_of_the_full_matrix_has_the_first_step_of_one_rank(
    tmp_path: Path, run: Combination
) -> None:
    run_group(tmp_path, [run])
    check_run(tmp_path, run)
