"""placement=auto: what the search finds is a placement that a plan of the script proves."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from spmdflow import run
from spmdflow.config.check import check
from spmdflow.config.load import Loaded, load
from spmdflow.config.location import to_yaml
from spmdflow.config.parallel import sizes_of
from spmdflow.config.placement import resolve_placement, roles_of
from spmdflow.controller.transcript import TRANSCRIPT_FILE
from spmdflow.errors import ConfigError
from spmdflow.mapping.hardware import FOLDER, load_hardware
from spmdflow.message import encode
from spmdflow.plan import workload
from spmdflow.plan.__main__ import FINE, main
from spmdflow.plan.comparison import compare_run
from spmdflow.plan.fit import find_fit
from spmdflow.plan.placement import PlacementSearch, dataflow_of, find_placement
from spmdflow.plan.report import plan
from spmdflow.program import prepare
from tests.unit.checkpoint_files import seal_settings
from tests.unit.plan.test_command import large
from tests.unit.plan.test_trace import SCRIPTS
from tests.unit.planned import (
    ALGORITHMS,
    SMALL,
    SMALL_GROUPS,
    row_problems,
    settings_of,
    write_script,
)

MEGATRON = tuple(f"{role}.engine.kind=megatron" for role in ("actor", "critic", "reference"))


PRECISE = ("actor.model", "actor.rollout", "critic.model", "reference.model")


def found(script: str, world: int, *words: str) -> tuple[Loaded, PlacementSearch]:
    loaded = load(ALGORITHMS / f"{script}.py", None, ["placement=auto", *words])
    return loaded, find_placement(loaded.script, loaded.cfg, world, load_hardware("h100"))


def pools_of(cfg: Any, world: int) -> dict[str, Any]:
    return resolve_placement(cfg.placement, roles_of(cfg), world)


@pytest.mark.parametrize("script", SCRIPTS)
def test_placement_of_every_bundled_script_has_every_role_and_is_proved(script: str) -> None:
    loaded, auto = found(script, 4, *SCRIPTS[script])

    report = plan(loaded.script, auto.cfg, settings_of(4), load_hardware("h100"))

    placed = [role for pool in pools_of(auto.cfg, 4).values() for role in pool.roles]
    assert sorted(placed) == sorted(roles_of(loaded.cfg))
    assert report.problems + row_problems(report.trace) == []


def large_groups(folder: Path) -> list[str]:
    """GRPO with a generator of its own: three 70B models, sizes at their defaults."""
    words = [w for w in large(folder) if not w.startswith("critic") and "layout" not in w]
    return [*words, "data.samples_per_prompt=1"]


@pytest.mark.parametrize(
    ("engine", "layout"),
    [
        ("megatron", "t8"),
        *[
            pytest.param(*case, marks=pytest.mark.drill)
            for case in (("megatron", ""), ("megatron", "t4p2"), ("fsdp", ""))
        ],
    ],
)
def test_sizes_of_a_large_generator_of_its_own_are_searched_or_those_of_the_settings(
    engine: str, layout: str, tmp_path: Path
) -> None:
    words = [f"actor.rollout.layout={layout}"] if layout else []
    words.append(f"actor.engine.kind={engine}")
    offload = [
        "actor.engine.offload=[parameters,gradients,optimizer]",
        "actor.engine.options=[recompute]",
    ]
    hardware = load_hardware("h100")

    loaded, auto = found("grpo_async", 128, *large_groups(tmp_path), *words, *offload)

    pool = auto.mapping.best[0].pool_of("generator")
    strategy = pool.strategies["generator"]
    assert str(strategy).startswith(layout or "t")
    assert (strategy.tp, strategy.pp) == (strategy.gen_tp, strategy.gen_pp)
    assert not strategy.recompute
    weights = 2 * 69e9 / (strategy.tp * strategy.pp)
    assert weights < pool.memory_bytes <= hardware.usable_bytes
    sizes = sizes_of("actor.rollout.layout", auto.changed["actor.rollout.layout"])[:2]
    assert sizes == (strategy.tp, strategy.pp)
    settings = settings_of(128, node_size=8, backend="nccl")
    report = plan(loaded.script, auto.cfg, settings, hardware)
    assert report.problems + row_problems(report.trace) == []


def test_models_of_different_sizes_get_layouts_of_their_own(tmp_path: Path) -> None:
    words = [w for w in large(tmp_path) if "layout" not in w]
    config = json.loads((tmp_path / "actor/config.json").read_text())
    sizes = {"hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40}
    heads = {"num_attention_heads": 40, "num_key_value_heads": 40}
    (tmp_path / "actor/config.json").write_text(json.dumps(config | sizes | heads))

    loaded, auto = found("ppo", 128, *words)

    actor, critic = (
        auto.mapping.best[0].pool_of(role).strategies[role] for role in ("actor", "critic")
    )
    assert actor.tp * actor.pp < critic.tp * critic.pp
    settings = settings_of(128, node_size=8, backend="nccl")
    report = plan(loaded.script, auto.cfg, settings, load_hardware("h100"))
    assert report.problems + row_problems(report.trace) == []


def test_generator_of_its_own_gets_ranks_of_its_own() -> None:
    loaded, auto = found("grpo_async", 4, *SMALL_GROUPS)

    pools = pools_of(auto.cfg, 4).values()
    (generating,) = [pool for pool in pools if "generator" in pool.roles]
    assert set(generating.roles) <= {"generator", "reward"}
    idle = min(auto.mapping.best[0].pools, key=lambda pool: sum(pool.stage_seconds.values()))
    (scoring,) = [pool for pool in pools if "reward" in pool.roles]
    assert set(idle.roles) < set(scoring.roles)
    report = plan(loaded.script, auto.cfg, settings_of(4), load_hardware("h100"))
    assert report.problems + row_problems(report.trace) == []


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


@pytest.mark.parametrize(
    ("engine", "generator", "num_layers"),
    [
        ("megatron", "vllm", 60),
        pytest.param("fsdp", "vllm", 80, marks=pytest.mark.drill),
        pytest.param("megatron", "builtin", 40, marks=pytest.mark.drill),
    ],
)
def test_models_that_need_host_memory_are_placed_and_their_plan_takes_as_long(
    engine: str, generator: str, num_layers: int, tmp_path: Path
) -> None:
    words = [w for w in large(tmp_path) if "layout" not in w and "kv_cache" not in w]
    for name in ("actor", "judge"):
        path = tmp_path / name / "config.json"
        sizes = {"hidden_size": 5120, "intermediate_size": 13824, "num_attention_heads": 40}
        sizes |= {"num_key_value_heads": 8, "num_hidden_layers": num_layers}
        path.write_text(json.dumps(json.loads(path.read_text()) | sizes))
    roles = ("actor", "critic", "reference", "reward")
    words += [f"{role}.engine.kind={engine}" for role in roles]
    words.append(f"actor.rollout.engine={generator}")
    with pytest.raises(ConfigError, match=r"placement: got 8 ranks"):
        found("ppo", 8, *words, *(f"{role}.engine.offload=[]" for role in roles))

    loaded, auto = found("ppo", 8, *words)

    hardware = load_hardware("h100")
    best = auto.mapping.best[0]
    for choice in find_fit(loaded.script, auto.cfg, 8, hardware):
        choice.set_in(auto.cfg)
    report = plan(loaded.script, auto.cfg, settings_of(8, node_size=8, backend="nccl"), hardware)
    assert report.problems + row_problems(report.trace) == []
    assert any(pool.moved for pool in best.pools)
    # the plan counts the rows that travel, and the weights by edge
    assert report.prediction.seconds == pytest.approx(best.seconds, rel=0.05)


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


def test_second_model_of_a_role_is_refused(tmp_path: Path) -> None:
    body = "batch = actor.generate_sequences(next(prompts))\nbatch |= other.compute_log_prob(batch)"
    path = write_script(tmp_path, body)
    second = "    other = flow.spawn(ActorWorker, cfg.actor, name='other')\n    for step"
    path.write_text(path.read_text().replace("    for step", second))
    model = ALGORITHMS / "arithmetic/model"
    loaded = load(path, None, ["placement=auto", f"actor.model.path={model}"])

    with pytest.raises(
        ConfigError, match=r"got auto .* other besides its roles, expected one model"
    ):
        find_placement(loaded.script, loaded.cfg, 4, load_hardware("h100"))


def test_evaluation_keeps_the_sizes_of_its_settings(tmp_path: Path) -> None:
    words = [w for w in large(tmp_path) if w.startswith(("actor.model", "actor.rollout"))]

    loaded, auto = found("evaluate", 16, *SCRIPTS["evaluate"], *words)

    assert auto.cfg.actor.rollout.layout == "t8p1"
    assert loaded.cfg.actor.rollout.layout == "t8"
    settings = settings_of(16, node_size=8, backend="nccl")
    report = plan(loaded.script, auto.cfg, settings, load_hardware("h100"))
    assert report.problems + row_problems(report.trace) == []


@pytest.mark.parametrize("folders", [("critic",), ("actor", "critic", "reference")])
def test_missing_model_folder_is_refused_with_its_name(folders: tuple[str, ...]) -> None:
    words = [f"{role}.model.path=/nowhere/{role}" for role in folders]

    with pytest.raises(ConfigError, match=rf"the sizes of .*{folders[0]}.* /nowhere/{folders[0]}"):
        found("ppo", 4, *SMALL, *words, "data.tokenizer_path=/nowhere")


def test_run_resolves_it_before_its_checks_and_says_what_it_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(workload, "_local_hardware", lambda: "h100")
    loaded = load(ALGORITHMS / "ppo.py", None, ["placement=auto", *SMALL])

    placed = [prepare(loaded, 4) for _ in range(4)]

    first, text = placed[0]
    assert text is not None and "auto   placement: {" in text
    assert all(to_yaml(other.cfg) == to_yaml(first.cfg) for other, _ in placed)
    assert len(pools_of(first.cfg, 4)) >= 1
    check(first.cfg, 4)


def test_resumed_run_keeps_its_placement_and_another_world_is_placed_afresh(tmp_path: Path) -> None:
    words = ["placement=auto", *SMALL, *MEGATRON, "run.hardware=h100", f"run.dir={tmp_path}"]
    first, _ = prepare(load(ALGORITHMS / "ppo.py", None, words), 4)
    pools = {"all": {"roles": list(roles_of(first.cfg)), "ranks": [0, 1, 2, 3]}}
    first.cfg.placement = pools
    first.cfg.actor.engine.layout = "t4"
    seal_settings(tmp_path, to_yaml(first.cfg), num_ranks=4)

    resumed, said = prepare(load(ALGORITHMS / "ppo.py", None, words), 4)
    other, said_other = prepare(load(ALGORITHMS / "ppo.py", None, words), 2)
    engine = [*words, "actor.engine.kind=fsdp"]
    _, said_engine = prepare(load(ALGORITHMS / "ppo.py", None, engine), 4)

    assert to_yaml(resumed.cfg) == to_yaml(first.cfg)
    assert "auto   placement: {" in str(said)
    assert "layout: t4 (actor.engine)" in str(said)
    assert "because the checkpoint's run had it" in str(said)
    assert set(next(iter(pools_of(other.cfg, 2).values())).ranks) <= {0, 1}
    assert "s a step; the checkpoint's run had 4 ranks, now 2" in str(said_other)
    assert "; the checkpoint's run had actor.engine.kind=megatron, now fsdp" in str(said_engine)


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
    assert "for one way to share the models out into pools" in text
    assert len(plain["best"]) == 5 == plain["partitions"]
    assert plain["best"][0]["ratio"] == 1
    assert all(placed["why"] for placed in plain["best"][1:])


@pytest.mark.parametrize("world", [4, 128])
def test_printed_settings_give_the_same_without_a_search(
    world: int, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*SMALL, *MEGATRON, "data.prompts_per_step=120", "critic.engine.options=[no_overlap]"]
    words.append("actor.engine.options=[recompute,no_overlap]")
    words += [f"{role}.dtype=bfloat16" for role in PRECISE]
    words.append("actor.rollout.engine=builtin")
    path = str(ALGORITHMS / "ppo.py")
    _, auto = found("ppo", world, *words)

    main([path, *words, f"--world={world}", "--hardware=h100", "--no-data", "--auto"])
    text = capsys.readouterr().out
    printed = text.partition("settings of a command line:\n\n")[2].partition("\n\n")[0]
    pasted = load(path, None, [*words, *words_of_shell(printed)])

    assert max(map(len, text.splitlines())) <= 100
    assert pasted.cfg == auto.cfg


def words_of_shell(text: str) -> list[str]:
    """What a program is given when the text is pasted behind its name."""
    command = ["bash", "-c", f"printf '%s\\0' {text}"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return done.stdout.split("\0")[:-1]


def test_one_model_is_shared_out_in_one_way(capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(ALGORITHMS / "sft.py"), *SCRIPTS["sft"], "--world=4", "--hardware=h100"]

    assert main([*words, "--no-data", "--auto"]) == FINE

    text = capsys.readouterr().out
    assert "one model: there is one way to share ranks, {actor}@1" in text
    assert "fits" not in text


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
        said.append(prepare(loaded, 4)[1] or "")

    seconds = [float(text.partition("fastest by prediction, ")[2].split()[0]) for text in said]
    assert seconds[1] > 100 * seconds[0]


@pytest.mark.parametrize("placement", ["auto", "colocate"])
def test_hardware_that_does_not_exist_is_refused_before_the_run_starts(
    placement: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    words = [str(ALGORITHMS / "ppo.py"), f"placement={placement}", "run.hardware=mine.yaml"]

    with pytest.raises(ConfigError, match=r"hardware: got mine\.yaml, expected one of a100_80gb"):
        run.prepare_rank(run.parse_arguments(words), run.RankEnvironment(0, 0, 4))


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


def test_run_on_a_device_that_no_file_describes_says_why_nothing_is_predicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workload, "own_device", lambda: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA L4")
    loaded = load(ALGORITHMS / "ppo.py", None, [*SMALL, f"run.dir={tmp_path}"])
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "time/step_seconds": 2.0}\n')
    record = {"orders": [], "start": None, "ranks": [0, 1], "nodes": [0, 0]}
    record["steps"] = [{"step": 1, "edges": [], "metrics": {}}]
    (tmp_path / TRANSCRIPT_FILE).write_bytes(encode(record))

    compare_run(loaded.cfg)

    text = (tmp_path / "prediction.txt").read_text()
    assert "not predicted: hardware: got NVIDIA L4, expected a device that a packaged" in text
    with pytest.raises(ConfigError, match=r"got NVIDIA L4, .*; measure it with scripts/calibrate"):
        prepare(load(ALGORITHMS / "ppo.py", None, ["placement=auto"]), 2)
