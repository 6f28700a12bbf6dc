"""placement=auto: what the search finds is a placement that a plan of the script proves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from spmdflow import run
from spmdflow.config.check import check
from spmdflow.config.load import Loaded, load
from spmdflow.config.placement import resolve_placement, roles_of
from spmdflow.errors import ConfigError
from spmdflow.mapping.machine import FOLDER, load_hardware
from spmdflow.plan import machine
from spmdflow.plan.auto import Automatic, dataflow_of, resolve
from spmdflow.plan.command import FINE, main
from spmdflow.plan.report import plan
from tests.unit.planned import ALGORITHMS, SMALL, SMALL_GROUPS, settings_of
from tests.unit.test_plan_command import large

MEGATRON = tuple(f"{role}.engine.kind=megatron" for role in ("actor", "critic", "reference"))


def found(script: str, world: int, *words: str) -> tuple[Loaded, Automatic]:
    loaded = load(ALGORITHMS / f"{script}.py", None, ["placement=auto", *words])
    return loaded, resolve(loaded.script, loaded.cfg, world, load_hardware("h100"))


def pools_of(cfg: Any, world: int) -> dict[str, Any]:
    return resolve_placement(cfg.placement, roles_of(cfg), world)


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("ppo", SMALL),
        ("grpo", SMALL_GROUPS),
        ("dapo", SMALL_GROUPS),
        ("sft", ("data.prompts_per_step=12", "actor.update.mini_batch_size=6", "eval_every=0")),
    ],
)
def test_placement_of_a_script_has_every_role_and_is_proved(
    script: str, words: tuple[str, ...]
) -> None:
    loaded, auto = found(script, 4, *words)

    report = plan(loaded.script, auto.cfg, settings_of(4), load_hardware("h100"))

    placed = [role for pool in pools_of(auto.cfg, 4).values() for role in pool.roles]
    assert sorted(placed) == sorted(roles_of(loaded.cfg))
    assert report.findings == []


def test_generator_of_its_own_gets_ranks_of_its_own() -> None:
    loaded, auto = found("grpo_async", 4, *SMALL_GROUPS)

    pools = pools_of(auto.cfg, 4).values()
    (generating,) = [pool for pool in pools if "generator" in pool.roles]
    assert set(generating.roles) <= {"generator", "reward"}
    report = plan(loaded.script, auto.cfg, settings_of(4), load_hardware("h100"))
    assert report.findings == []


def test_the_same_is_found_again_and_the_settings_stay_as_they_were() -> None:
    loaded, first = found("ppo", 8, *SMALL, *MEGATRON)
    _, second = found("ppo", 8, *SMALL, *MEGATRON)

    assert first.changed == second.changed
    assert first.cfg == second.cfg
    assert loaded.cfg.placement == "auto"


def test_layouts_are_searched_where_the_settings_have_their_default_and_kept_elsewhere(
    tmp_path: Path,
) -> None:
    words = [w for w in large(tmp_path) if not w.startswith(("critic.engine.l", "actor.engine.l"))]

    _, auto = found("ppo", 128, *words, "critic.engine.layout=t4p8", "actor.rollout.layout=auto")

    assert auto.cfg.critic.engine.layout == "t4p8"
    assert auto.cfg.actor.engine.layout != "t1"
    assert auto.cfg.actor.rollout.layout != "auto"
    assert auto.changed["actor.engine.layout"] == auto.cfg.actor.engine.layout


def test_models_that_fit_nowhere_are_refused_with_the_world_that_would(tmp_path: Path) -> None:
    words = [w for w in large(tmp_path) if "engine.layout" not in w]

    with pytest.raises(ConfigError, match=r"placement: got 8 ranks .* expected at least about"):
        found("ppo", 8, *words)


def test_calls_of_the_search_are_those_of_the_script() -> None:
    loaded, _ = found("ppo", 2, *SMALL)

    flow = dataflow_of(loaded.script, loaded.cfg, {})

    assert [call.title for call in flow.calls] == [
        "actor.generate_sequences",
        "actor.compute_log_prob",
        "critic.compute_values",
        "reference.compute_ref_log_prob",
        "critic.update_critic",
        "actor.update_actor",
    ]
    assert flow.stages == ("generation", "preparation", "learning")
    assert [call.workload.num_updates for call in flow.calls[-2:]] == [2, 2]


def test_run_resolves_it_before_its_checks_and_says_what_it_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine, "_own", lambda: "h100")
    loaded = load(ALGORITHMS / "ppo.py", None, ["placement=auto", *SMALL])

    placed = [run._placed(loaded, run.Place(rank, rank, 4)) for rank in range(4)]

    assert capsys.readouterr().out.startswith("auto   {")
    assert all(other.yaml_text == placed[0].yaml_text for other in placed)
    assert len(pools_of(placed[0].cfg, 4)) >= 1
    check(placed[0].cfg, 4)


def test_auto_that_nobody_resolved_is_refused_with_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"placement: got auto, .* spmdflow\.plan --auto"):
        resolve_placement("auto", ("actor",), 4)


def test_command_explains_the_best_and_why_the_others_lose(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [str(ALGORITHMS / "ppo.py"), *SMALL, *MEGATRON, "--world=4", "--hardware=h100"]

    assert main([*words, "--no-data", "--auto"]) == FINE
    text = capsys.readouterr().out
    assert main([*words, "--no-data", "--auto", "--json"]) == FINE
    plain = json.loads(capsys.readouterr().out)["auto"]

    assert max(map(len, text.splitlines())) <= 100
    assert "partitions of 3 models on 4 ranks" in text
    assert "the first as settings:" in text
    assert len(plain["best"]) == 5 == plain["partitions"]
    assert plain["best"][0]["ratio"] == 1
    assert all(placed["why"] for placed in plain["best"][1:])


def test_hardware_of_the_settings_is_what_a_run_searches_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = yaml.safe_load((FOLDER / "h100.yaml").read_text())
    slow["peak_flops_float32"]["value"] = 1e6
    (tmp_path / "slow.yaml").write_text(yaml.safe_dump(slow))
    words = ["placement=auto", *SMALL]

    said = []
    for name in ("h100", str(tmp_path / "slow.yaml")):
        loaded = load(ALGORITHMS / "ppo.py", None, [*words, f"run.hardware={name}"])
        run._placed(loaded, run.Place(0, 0, 4))
        said.append(capsys.readouterr().out)

    seconds = [float(text.partition(": ")[2].split()[0]) for text in said]
    assert seconds[1] > 100 * seconds[0]


@pytest.mark.parametrize("placement", ["auto", "colocate"])
def test_hardware_that_does_not_exist_is_refused_before_the_run_starts(
    placement: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    words = [str(ALGORITHMS / "ppo.py"), f"placement={placement}", "run.hardware=mine.yaml"]

    with pytest.raises(ConfigError, match=r"hardware: got mine\.yaml, expected one of a100_80gb"):
        run._prepare(run.parse_arguments(words), run.Place(0, 0, 4))


def test_command_plans_for_the_hardware_of_the_settings_unless_another_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [str(ALGORITHMS / "ppo.py"), *SMALL, "run.hardware=h200", "--world=2", "--no-data"]

    assert main(words) == FINE
    of_settings = capsys.readouterr().out
    assert main([*words, "--hardware=h100"]) == FINE
    named = capsys.readouterr().out

    assert "on 2 ranks of 1 node, h200" in of_settings
    assert "on 2 ranks of 1 node, h100" in named
