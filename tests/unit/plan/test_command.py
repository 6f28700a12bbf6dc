"""`python -m spmdflow.plan` as a user meets it: text, data, picture, refusals, exit codes."""

from __future__ import annotations

import json
import re
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest

from spmdflow.config.load import load
from spmdflow.config.location import to_yaml
from spmdflow.hybrid_engine.reshard import ReshardPlan, plan_reshard
from spmdflow.mapping.hardware import load_hardware
from spmdflow.plan.__main__ import FINE, REFUSED, WRONG, main
from spmdflow.plan.report import PlanReport, plan
from spmdflow.plan.text import bytes_of, plan_text, seconds_of
from tests.unit.planned import ALGORITHMS, SMALL, row_problems, settings_of, write_script

PPO = str(ALGORITHMS / "ppo.py")
LLAMA_70B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}


def large(folder: Path) -> list[str]:
    """Four 70B models by their config.json alone, t8p8, 1024 prompts of 1024 tokens."""
    names = {"actor": LLAMA_70B, "judge": LLAMA_70B | {"num_labels": 1}}
    names["judge"]["architectures"] = ["LlamaForSequenceClassification"]
    for name, config in names.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    words = [
        "data.train_path=/nowhere/train.jsonl",
        "data.max_prompt_tokens=1024",
        "data.prompts_per_step=1024",
        f"data.tokenizer_path={folder}/actor",
        "eval_every=0",
        "reward.function=null",
        f"reward.model.path={folder}/judge",
        f"actor.model.path={folder}/actor",
        f"critic.model.path={folder}/judge",
        "actor.rollout.engine=vllm",
        "actor.rollout.layout=t8",
        "actor.rollout.dtype=bfloat16",
        "actor.rollout.max_new_tokens=1024",
        f"actor.rollout.kv_cache_gib={20e9 / 2**30}",
        "actor.update.mini_batch_size=128",
        "critic.update.mini_batch_size=128",
    ]
    for role in ("actor", "critic", "reference", "reward"):
        sizes = "t8p8" if role in ("actor", "critic") else "t8p4"
        words += [
            f"{role}.model.dtype=bfloat16",
            f"{role}.engine.kind=megatron",
            f"{role}.engine.layout={sizes}",
            f"{role}.engine.micro_batch_rows=1",
        ]
    return words


def located_settings() -> str:
    """PPO's settings, as a file of any folder."""
    text = (ALGORITHMS / "ppo.yaml").read_text()
    return text.replace("arithmetic/", f"{ALGORITHMS}/arithmetic/")


def planned(words: list[str], world: int, *, node_size: int = 8) -> PlanReport:
    loaded = load(PPO, None, words)
    settings = settings_of(world, node_size=node_size, backend="nccl")
    return plan(loaded.script, loaded.cfg, settings, load_hardware("h100"))


def test_text_is_at_most_100_columns_and_says_what_matters(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [PPO, *SMALL, "placement=split", "--world", "4", "--hardware=h100", "--no-data"]

    assert main(words) == FINE

    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 100
    for part in (
        "pools",
        "actor+reference ranks 0-1: actor, reference",
        "tokens/s",
        "rows between ranks: ",
        "weights from trainer to generator",
        "memory of a rank in GB",
        "process groups: 5",
        "run all ranks (transfer, gloo): [0, 1, 2, 3]",
        "critic pool (compute, nccl): [2, 3]",
        "transfer 1 of actor.generate_sequences: 0 -> 2 ",
        "by stage: generate_sequences ",
        "order of commands by rank",
        "no problems",
        "all members enter",
    ):
        assert part in text, part


def test_text_prints_every_group_and_transfer_of_small_worlds_only() -> None:
    sizes = [f"{role}.engine.kind=megatron" for role in ("actor", "critic")]
    sizes += [f"{role}.engine.layout=t2p2" for role in ("actor", "critic")]

    small, large = (plan_text(planned([*SMALL, *sizes], world)) for world in (16, 24))

    assert "actor tp (compute, nccl): [0, 1], [2, 3], [4, 5], [6, 7], [8, 9]" in small
    assert "  transfer 1 of" in small and "--json" not in small
    assert "--json lists every group with its ranks" in large
    assert "--json lists the transfers of every rank" in large
    assert "[0, 1]" not in large and "  transfer 1 of" not in large


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (999, "999 B"),
        (1000, "1 kB"),
        (999_499, "999 kB"),
        (999_999, "1 MB"),
        (1_234_567, "1.23 MB"),
        (999_999_999, "1 GB"),
        (1_234e12, "1,234 TB"),
    ],
)
def test_bytes_have_three_digits_and_the_unit_of_the_rounded_number(size: float, text: str) -> None:
    assert bytes_of(size) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0123, "12.3 ms"), (0.99999, "1 s"), (0.00099999, "1 ms"), (1e-5, "10 us")],
)
def test_seconds_have_the_unit_of_the_rounded_number(value: float, text: str) -> None:
    assert seconds_of(value) == text


def test_json_has_the_same_facts(capsys: pytest.CaptureFixture[str]) -> None:
    words = [PPO, *SMALL, "placement=split", "--world=4", "--hardware=h100", "--no-data", "--json"]

    assert main(words) == FINE

    plain = json.loads(capsys.readouterr().out)
    assert plain["ok"] is True
    assert plain["pools"]["critic+reward"] == {"ranks": [2, 3], "roles": ["critic", "reward"]}
    assert sum(edge[2] for edge in plain["edges"]) == sum(
        route["intra_bytes"] + route["inter_bytes"] for route in plain["routes"]
    )
    assert plain["groups"][0] == {
        "ranks": [0, 1, 2, 3], "lane": "transfer", "backend": "gloo", "made_by": "run",
    }  # fmt: skip
    assert plain["seconds"]["step"] > 0
    assert plain["seconds"]["stages"]["update_actor"] > 0
    assert {"ranks", "compute", "transfer"} == set(plain["order"][0])


@pytest.mark.parametrize("ending", ["svg", "html"])
def test_picture_shows_every_model_on_its_pool(ending: str, tmp_path: Path) -> None:
    file = tmp_path / f"schedule.{ending}"
    words = [PPO, *SMALL, "placement=split", "--world=4", "--hardware=h100", "--no-data"]

    assert main([*words, "--picture", str(file)]) == FINE

    text = file.read_text()
    svg = ElementTree.fromstring(text[text.index("<svg") : text.index("</svg>") + 6])
    words_shown = {element.text for element in svg.iter() if element.tag.endswith("text")}
    assert {"actor", "critic", "reference", "reward", "ranks 0-1", "ranks 2-3"} <= words_shown
    hints = " ".join(element.text or "" for element in svg.iter() if element.tag.endswith("title"))
    assert all(call in hints for call in ("actor.generate_sequences", "critic.update_critic"))


def test_calls_of_disjoint_pools_overlap_in_the_schedule() -> None:
    report = planned([*SMALL, "placement=split"], 4)

    times = {timed.call.label: timed for timed in report.prediction.calls}
    critic = times["critic.update_critic"]
    actor = times["actor.update_actor"]
    assert critic.start < actor.end and actor.start < critic.end
    assert times["critic.compute_values"].start >= times["actor.generate_sequences"].end


COMMAND_LINES = {
    "nothing.py --world 2": r"script: no file nothing\.py",
    f"{PPO} more": r"got 'more', expected SCRIPT \[CONFIG\.yaml\]",
    f"{PPO} --world 0": r"got --world 0, expected at least 1 rank",
    f"{PPO} --hardware=abacus": r"got abacus, expected one of a100_80gb",
    f"{PPO} --hardware=h100 --assume scores": r"got --assume scores, expected NAME=VALUE",
    f"{PPO} --hardware=h100 --picture a.bmp --no-data": r"ends in \.svg or \.html",
    f"{PPO} --hardware=h100 --picture /nonexist/a.svg": r"got --picture /nonexist/a\.svg",
    f"{PPO} --hardware=h100 --assume scores={{": r"got --assume scores=\{, expected a number",
    f"{PPO} --hardware=h100 --no-data --assume responses=[]": r"got \[\], expected a number or",
    f"{PPO} --hardware=h100 --no-data --assume responses=a,b": r"'a,b', expected a dtype",
    f"{PPO} --hardware=h100 placement=splat": r"placement: got 'splat'",
    f"{PPO} --hardware=h100 --no-data --assume responses='x'": r"expected a dtype",
}


@pytest.mark.parametrize("line", COMMAND_LINES)
def test_command_line_that_makes_no_sense_is_refused(
    line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(line.split()) == REFUSED
    assert re.search(COMMAND_LINES[line], capsys.readouterr().err)


def test_assumed_column_may_have_a_shape_with_commas(capsys: pytest.CaptureFixture[str]) -> None:
    words = [PPO, *SMALL, "placement=split", "--world=4", "--hardware=h100", "--no-data", "--json"]

    sizes = []
    for form in ("float32", "float32[2,3]"):
        assert main([*words, "--assume", f"values={form}"]) == FINE
        sizes.append(sum(edge[2] for edge in json.loads(capsys.readouterr().out)["edges"]))

    assert sizes[1] > sizes[0]


def test_picture_that_cannot_be_written_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.svg").mkdir()
    words = [PPO, *SMALL, "--world=2", "--hardware=h100", "--no-data"]

    assert main([*words, "--picture", str(tmp_path / "a.svg")]) == REFUSED

    assert "a.svg: Is a directory, expected a writable file" in capsys.readouterr().err


def test_examples_of_the_configuration_win_over_the_script_and_lose_to_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = "flow.assume({'scores': 0.1, 'responses': 3})\n"
    body += "batch = actor.generate_sequences(next(prompts))\n"
    body += "batch |= reward.compute_reward(batch)\nbatch.mean('scores')"
    script = write_script(tmp_path, body)
    config = tmp_path / "own.yaml"
    section = "assume:\n  scores: [0.2, 0.4]\n  judge.describe: short\n"
    config.write_text(located_settings() + section)
    words = [str(script), "--world=2", "--hardware=h100", "--no-data", "--json"]

    said = {}
    for more in ("", "assume.scores=0.5", "--assume=scores=0.6"):
        assert main([*words, *SMALL, *filter(None, [more])]) == FINE
        said[more] = json.loads(capsys.readouterr().out)["assumed"]

    assert "scores = [0.2, 0.4]" in said[""] and "responses = 3" in said[""]
    assert "scores = 0.5" in said["assume.scores=0.5"]
    assert "scores = 0.6" in said["--assume=scores=0.6"]


def test_run_takes_no_notice_of_examples(tmp_path: Path) -> None:
    plain = tmp_path / "plain.yaml"
    assuming = tmp_path / "assuming.yaml"
    plain.write_text(located_settings())
    assuming.write_text(located_settings() + "assume: {scores: 0.2, actor: {kl: 1}}\n")

    loaded = load(PPO, assuming, ["assume.scores=[0, 1]"])

    assert loaded.assume == {"scores": [0, 1], "actor.kl": 1}
    assert loaded.cfg == load(PPO, plain, []).cfg
    assert "assume" not in to_yaml(loaded.cfg)


def test_examples_of_the_configuration_that_have_no_names_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own.yaml").write_text(located_settings() + "assume: 0.5\n")

    assert main([PPO, str(tmp_path / "own.yaml"), "--world=2"]) == REFUSED
    assert "assume got 0.5, expected examples by name" in capsys.readouterr().err
    assert main([PPO, "asume.scores=1", "--world=2"]) == REFUSED
    assert "unknown key asume, nearest is assume" in capsys.readouterr().err


def test_copies_of_weights_are_proved_and_their_faults_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["actor.engine.kind=megatron", "actor.engine.layout=t2p2"]
    words = [PPO, *SMALL, *sizes, "actor.rollout.weights=copy", "--world=4", "--hardware=h100"]
    words.append("--no-data")

    assert main(words) == FINE
    assert "ok       weights   4 ranks get each element" in capsys.readouterr().out

    def without_last_bucket(*parts: object, **more: object) -> ReshardPlan:
        right = plan_reshard(*parts, **more)  # type: ignore[arg-type]
        return replace(right, buckets=right.buckets[:-1])

    monkeypatch.setattr("spmdflow.hybrid_engine.reshard.plan_reshard", without_last_bucket)
    assert main(words) == WRONG
    assert re.search(
        r"weights: weights of actor to actor: edge \d.* -> \d: got no", capsys.readouterr().out
    )
    assert main([*words, "--json"]) == WRONG
    assert json.loads(capsys.readouterr().out)["checks"]["weights"] is False


def test_settings_that_cannot_work_are_told_all_at_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["actor.update.mini_batch_size=5", "actor.rollout.top_p=2", "advantage.gamma=3"]

    status = main([PPO, *SMALL, *words, "--world=2", "--hardware=h100", "--no-data"])

    text = capsys.readouterr().out
    assert status == WRONG
    assert "3 problems" in text
    for key in ("mini_batch_size: got 5", "top_p: got 2", "gamma: got 3"):
        assert key in text


def test_models_that_do_not_fit_are_told_with_a_knob(tmp_path: Path) -> None:
    words = [text.replace("t8p8", "t8p1").replace("t8p4", "t8p1") for text in large(tmp_path)]

    report = planned([*words, "data.prompts_per_step=128"], 8)

    memory = [problem.text for problem in report.problems if problem.check == "memory"]
    assert any("actor.update_actor: got" in text and "expected at most" in text for text in memory)
    assert any("engine.layout" in text or "offload=[optimizer]" in text for text in memory)


def test_what_only_this_machine_lacks_is_no_fault_of_the_plan(tmp_path: Path) -> None:
    report = planned(large(tmp_path), 64)

    assert report.problems == [f for f in report.problems if f.check == "memory"]
    assert "no *.safetensors" in (report.missing_here or "")
    assert "missing on this node" in plan_text(report)


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["colocate", "split", "standalone"])
def test_four_70b_models_on_1024_ranks_take_less_than_ten_seconds(
    placement: str, tmp_path: Path
) -> None:
    started = time.process_time()  # others share the machine

    report = planned([*large(tmp_path), f"placement={placement}"], 1024)

    assert time.process_time() - started < 10
    assert [f for f in report.problems if f.check != "memory"] == []
    assert row_problems(report.trace) == []
    assert len(report.edge_bytes) > 10_000
