"""An engine and a generator of a user, registered from the script; no file of the package changes.

PPO trains with both, a plan shows them, `placement=auto` places them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from spmdflow.config.check import check
from spmdflow.config.load import Loaded, load
from spmdflow.config.placement import resolve_placement, roles_of
from spmdflow.controller.script import run_flow
from spmdflow.errors import ConfigError
from spmdflow.hybrid_engine.factory import sync_mode
from spmdflow.mapping.hardware import load_hardware
from spmdflow.parallel.layout import Layout
from spmdflow.plan.__main__ import FINE, main
from spmdflow.plan.placement import find_placement
from spmdflow.plan.report import plan
from tests.algos.runs import (
    ROOT,
    SCRIPT,
    SMALL,
    check_prediction,
    numbers_of,
    run_ranks,
    steps_of,
)
from tests.pages import blocks_of
from tests.unit.planned import row_problems, settings_of

PROGRAMS = ROOT / "tests" / "algos" / "programs"
OWN = PROGRAMS / "own_kinds.py"
YAML = SCRIPT.with_suffix(".yaml")
ENGINES = tuple(f"{role}.engine.kind=ddp" for role in ("actor", "critic", "reference"))
KINDS = (*ENGINES, "actor.rollout.engine=plain")
SETTINGS = ("total_steps=2", "eval_every=0", "save_every=0", "run.save_last=false")
COMPARED = (
    *("actor/loss", "actor/pg_loss", "actor/grad_norm", "actor/kl_loss"),
    *("critic/loss", "critic/grad_norm", "reward/mean", "rollout/response_tokens"),
)


def loaded(*words: str) -> Loaded:
    return load(OWN, YAML, [*SMALL, *SETTINGS, *KINDS, *words])


@pytest.mark.parametrize(("name", "most"), [("ddp_engine", 150), ("plain_generator", 100)])
def test_kind_of_a_user_is_a_short_file(name: str, most: int) -> None:
    assert len((PROGRAMS / f"{name}.py").read_text().splitlines()) <= most


def test_ppo_with_both_on_two_ranks_gives_the_numbers_of_fsdp(tmp_path: Path) -> None:
    run_ranks(tmp_path / "given", str(YAML), *SETTINGS, num_ranks=2)
    run_ranks(tmp_path / "own", str(YAML), *SETTINGS, *KINDS, num_ranks=2, script=OWN)

    steps = list(zip(steps_of(tmp_path / "given"), steps_of(tmp_path / "own"), strict=True))
    assert len(steps) == 2
    for one, other in steps:
        for name in sorted({*COMPARED} & {*one}):
            # the same tokens; gradients and logits are float32 sums in another order
            assert other[name] == pytest.approx(one[name], rel=2e-5, abs=1e-6), name
        assert other["rollout/weights_verified"] == 1
    check_prediction(tmp_path / "own")  # rows and weights had the planned bytes


@pytest.mark.drill
def test_run_with_both_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    words = ("save_every=1", f"run.dir={tmp_path / 'whole'}")
    whole = loaded(*words, "total_steps=2")
    assert run_flow(whole.script, whole.cfg, inproc=True) == 0
    first = loaded("save_every=1", f"run.dir={tmp_path / 'cut'}", "total_steps=1")
    assert run_flow(first.script, first.cfg, inproc=True) == 0
    second = loaded("save_every=1", f"run.dir={tmp_path / 'cut'}", "total_steps=2")
    assert run_flow(second.script, second.cfg, inproc=True) == 0

    assert numbers_of(tmp_path / "cut")[-1] == numbers_of(tmp_path / "whole")[-1]


def test_plan_shows_both(capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(OWN), str(YAML), *SMALL, *SETTINGS, *KINDS, "--world=2", "--hardware=h100"]

    assert main(words) == FINE

    said = capsys.readouterr().out
    assert "ddp" in said and "plain" in said


def test_auto_placement_of_both_is_proved() -> None:
    made = loaded("placement=auto")

    auto = find_placement(made.script, made.cfg, 4, load_hardware("h100"))

    pools = resolve_placement(auto.cfg.placement, roles_of(auto.cfg), 4)
    placed = [role for pool in pools.values() for role in pool.roles]
    assert sorted(placed) == sorted(roles_of(made.cfg))
    assert (auto.cfg.actor.engine.kind, auto.cfg.actor.rollout.engine) == ("ddp", "plain")
    report = plan(made.script, auto.cfg, settings_of(4), load_hardware("h100"))
    assert report.problems + row_problems(report.trace) == []


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("actor.engine.layout=t2", "got t2 with engine.kind=ddp, expected none, as that engine is"),
        ("actor.rollout.layout=t2", "got t2 with rollout.engine=plain, expected t1, as it"),
        ("actor.engine.options=[recompute]", "got recompute with engine.kind=ddp, expected some"),
    ],
)
def test_what_a_kind_does_not_state_is_refused(setting: str, message: str) -> None:
    made = loaded(setting)

    with pytest.raises(ConfigError, match=message.replace("[", r"\[")):
        check(made.cfg, 2)


def test_weights_that_neither_lends_or_borrows_are_refused_in_place() -> None:
    layout = Layout.data_parallel((0, 1))

    with pytest.raises(ConfigError, match="got flat, expected copy here, because engine.kind=ddp"):
        sync_mode(loaded("actor.rollout.weights=flat").cfg.actor, layout)
    assert sync_mode(loaded().cfg.actor, layout) == "copy"


def test_page_has_the_files_that_are_tested() -> None:
    blocks = {block.file_name: block.text for block in blocks_of(ROOT / "docs" / "OWN_ENGINE.md")}

    for name in ("ddp_engine.py", "plain_generator.py", "own_kinds.py"):
        assert blocks[name] == (PROGRAMS / name).read_text(), name
