"""Roles that a script defines on FSDPWorker and ZeROWorker train like the given ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from spmdflow import ActorWorker, ConfigError, FSDPWorker, ThreeDParallelWorker, ZeROWorker
from spmdflow.config.load import load
from spmdflow.config.schema import ActorConfig, EngineConfig
from spmdflow.controller.script import launch
from spmdflow.parallel.layout import Layout
from tests.algos.runs import ROOT, SCRIPT, SMALL, finish, log_of, steps_of, torchrun

OWN = ROOT / "tests" / "algos" / "programs" / "own_roles.py"
SETTINGS = ("total_steps=2", "eval_every=0", "critic.loss.clip_range=null")


def run(script: Path, run_dir: Path) -> list[dict[str, float]]:
    words = [*SMALL, *SETTINGS, f"run.dir={run_dir}"]
    loaded = load(script, SCRIPT.with_suffix(".yaml"), words)
    assert launch(loaded.script, loaded.cfg, inproc=True) == 0
    return steps_of(run_dir)


def test_own_critic_and_zero_actor_give_the_numbers_of_the_given_roles(tmp_path: Path) -> None:
    given = run(SCRIPT, tmp_path / "given")
    own = run(OWN, tmp_path / "own")

    assert len(own) == len(given) == 2
    for one, other in zip(given, own, strict=True):
        for name in ("critic/loss", "critic/grad_norm", "actor/pg_loss", "actor/grad_norm"):
            assert other[name] == pytest.approx(one[name], rel=1e-6), name
    assert own[1]["critic/loss"] != own[0]["critic/loss"]


@pytest.mark.slow
def test_zero_stages_from_settings_alone_give_the_numbers_of_fsdp(tmp_path: Path) -> None:
    given = run(SCRIPT, tmp_path / "given")
    run_dir = tmp_path / "run"
    kinds = ("actor.engine.kind=zero1", "critic.engine.kind=zero2", "reference.engine.kind=zero1")

    status = finish(torchrun(run_dir, *SETTINGS, *kinds, num_ranks=2), seconds=200)

    assert status == 0, log_of(run_dir).read_text()[-3000:]
    for one, other in zip(given, steps_of(run_dir), strict=True):
        for name in ("critic/loss", "critic/grad_norm", "actor/pg_loss", "actor/grad_norm"):
            # float32 sums in another order
            assert other[name] == pytest.approx(one[name], rel=2e-5, abs=1e-6), name


@pytest.mark.parametrize(
    ("base", "kind", "bound"),
    [
        (FSDPWorker, "fsdp", "fsdp"),
        (ZeROWorker, "fsdp", "zero3"),
        (ZeROWorker, "zero1", "zero1"),
        (ThreeDParallelWorker, "fsdp", "megatron"),
    ],
)
def test_base_class_binds_its_engine_where_the_settings_leave_the_default(
    base: type, kind: str, bound: str
) -> None:
    role = type("Role", (base, ActorWorker), {})
    cfg = replace(ActorConfig(), engine=EngineConfig(kind=kind, micro_batch="3 rows"))

    made = role.bind_engine(cfg).engine

    assert (made.kind, made.micro_batch) == (bound, "3 rows")
    assert role.bind_engine(cfg).rollout is cfg.rollout


def test_engine_of_another_base_class_is_refused_with_both_names() -> None:
    cfg = replace(ActorConfig(), engine=EngineConfig(kind="zero2"))

    with pytest.raises(ConfigError, match=r"got zero2, but FSDPWorker is bound to fsdp; leave it"):
        FSDPWorker.bind_engine(cfg)


def test_only_zero1_needs_a_group_for_each_rank() -> None:
    layout = Layout.data_parallel((2, 5))
    groups = {
        kind: ZeROWorker.needed_groups(replace(ActorConfig(), engine=EngineConfig(kind)), layout)
        for kind in ("zero1", "zero2", "zero3")
    }

    assert groups["zero1"] == [(2, 5), (2,), (5,)]
    assert groups["zero2"] == groups["zero3"] == [(2, 5)]
