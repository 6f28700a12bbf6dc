"""`scripts/compare_commits.py`: what counts as equal, and how differences are named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from compare import bits, files, plans, speed
from compare.equality import (
    MISSING,
    Difference,
    JsonRules,
    compare_json,
    compare_metrics,
    compare_tensors,
    read_tensors,
)
from compare_commits import format_table
from safetensors.torch import save_file

from tests.policy.house import REPOSITORY


def test_metrics_are_equal_only_in_every_bit() -> None:
    old = [{"step": 1, "loss": 0.1, "zero": 0.0, "count": 1, "none": None}]
    close = [{"step": 1, "loss": 0.1 + 1e-18, "zero": -0.0, "count": 1.0, "none": None}]
    off = [{"step": 1, "loss": 0.10000000000000002, "zero": 0.0, "count": 1, "none": None}]

    assert compare_metrics(old, old) == []
    assert [each.where for each in compare_metrics(old, close)] == ["step 1 count", "step 1 zero"]
    assert compare_metrics(old, off) == [Difference("step 1 loss", 0.1, 0.10000000000000002)]


def test_clocks_are_not_compared_and_missing_metrics_and_steps_are_named() -> None:
    old = [{"step": 1, "time/step_seconds": 1.0, "a": 1}, {"step": 2}]
    new = [{"step": 1, "time/step_seconds": 2.0, "b": 1}]

    found = compare_metrics(old, new, ignored=("time/",))

    assert found == [
        Difference("steps", 2, 1),
        Difference("step 1 a", 1, MISSING),
        Difference("step 1 b", MISSING, 1),
    ]


def test_renamed_metric_is_compared_under_its_new_name_and_under_the_old_one_if_it_stays() -> None:
    old = [{"step": 1, "drift": 0.5}]
    renamed = {"drift": "mismatch"}

    assert compare_metrics(old, [{"step": 1, "mismatch": 0.5}], renamed=renamed) == []
    both = [{"step": 1, "mismatch": 0.5, "drift": 0.25}]
    assert compare_metrics(old, both, renamed=renamed) == [Difference("step 1 drift", 0.5, 0.25)]


def test_tensors_are_compared_by_bits_and_the_gap_is_told() -> None:
    nan = torch.tensor([float("nan"), 1.0])
    changed = torch.tensor([float("nan"), 1.25])

    assert compare_tensors({"a": nan}, {"a": nan.clone()}) == []
    (gap,) = compare_tensors({"a": torch.zeros(2)}, {"a": torch.tensor([0.0, -0.5])})
    assert str(gap) == "a: 1 of 2 numbers, the largest gap: 0.0 -> 0.5"
    assert compare_tensors({"a": torch.zeros(1)}, {"a": -torch.zeros(1)}) != []
    assert compare_tensors({"a": nan}, {"a": changed}) != []


def test_missing_tensor_other_shape_and_other_type_are_named() -> None:
    old = {"gone": torch.zeros(2), "shape": torch.zeros(2, 3), "type": torch.zeros(2)}
    new = {"shape": torch.zeros(3, 2), "type": torch.zeros(2).bfloat16()}

    assert compare_tensors(old, new) == [
        Difference("gone", "float32 [2]", MISSING),
        Difference("shape", "float32 [2, 3]", "float32 [3, 2]"),
        Difference("type", "float32 [2]", "bfloat16 [2]"),
    ]


def test_tensors_of_a_checkpoint_are_read_with_their_file(tmp_path: Path) -> None:
    (tmp_path / "actor").mkdir()
    save_file({"w[0:2]": torch.ones(2)}, tmp_path / "actor" / "rank-0.safetensors")

    assert list(read_tensors(tmp_path)) == ["actor/rank-0.safetensors w[0:2]"]


def test_json_differs_by_values_and_apart_from_them_by_sentences() -> None:
    rules = JsonRules(omitted=("seconds",), worded=("why", "notes"), renamed={"calls.pool": "on"})
    old = {"seconds": 1, "why": "is so", "notes": {"a": "x"}, "calls": [{"pool": "all", "n": 1}]}
    new = {"seconds": 2, "why": "so it is", "notes": {"a": "y"}, "calls": [{"on": "all", "n": 2}]}

    values, words = compare_json(old, new, rules)

    assert values == [Difference(".calls[0].n", 1, 2)]
    assert [each.where for each in words] == [".notes.a", ".why"]


def test_json_lists_of_other_lengths_missing_keys_and_missing_sentences_differ() -> None:
    rules = JsonRules(worded=("why",))

    values, words = compare_json({"x": [1, 2], "why": "a", "k": 1}, {"x": [1]}, rules)

    assert words == []
    assert values == [
        Difference(".k", 1, MISSING),
        Difference(".why", "a", MISSING),
        Difference(".x length", 2, 1),
    ]


def test_plan_is_compared_without_its_folder_and_line_numbers(tmp_path: Path) -> None:
    script = tmp_path / "algos" / "own.py"
    script.parent.mkdir()
    script.write_text("first\n    second()\n")
    plan = {"script": str(script), "calls": [{"line": 2, "text": f"in {tmp_path}/a"}, {"line": 0}]}

    neutral = plans.to_neutral(plan, tmp_path)

    calls = [{"line": "second()", "text": "in ROOT/a"}, {"line": 0}]
    assert neutral == {"script": "ROOT/algos/own.py", "calls": calls}


def test_every_yaml_file_of_algos_is_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPMDFLOW_DATA", str(tmp_path))

    cases = plans.cases_of(REPOSITORY, tmp_path)

    recipes = {path.stem for path in (REPOSITORY / "algos").glob("*.yaml")}
    assert {name.split()[0] for name in cases} == recipes
    assert cases["grpo_async auto"][0] == "algos/grpo_async.py"
    assert cases["grpo_countdown 1 h100"][0] == "algos/grpo.py"
    config = json.loads((tmp_path / "models/ppo_70b/reward/config.json").read_text())
    assert config["architectures"] == ["LlamaForSequenceClassification"]


def test_twelve_layouts_of_ppo_and_one_of_grpo_async_have_one_rule_of_old_log_probs() -> None:
    scripts = [layout.script for layout in bits.LAYOUTS]
    assert (scripts.count("ppo"), scripts.count("grpo_async")) == (12, 1)
    for layout in bits.LAYOUTS:
        words = layout.settings(Path("run"), num_steps=3, old_log_probs="recompute")
        assert "actor.update.old_log_probs=recompute" in words
        assert "actor.engine.micro_batch=3 rows" in words


def test_run_that_began_from_step_1_is_told_from_one_that_continued(tmp_path: Path) -> None:
    first = {"step": 1, "time/step_seconds": 0.25}
    lines = {
        "before": [first],
        "continued": [first, {"step": 2, "time/step_seconds": 0.5}],
        "from scratch": [
            {"step": 1, "time/step_seconds": 0.75},
            {"step": 2, "time/step_seconds": 0.5},
        ],
    }
    for name, steps in lines.items():
        (tmp_path / name).mkdir()
        text = "".join(json.dumps(step) + "\n" for step in steps)
        (tmp_path / name / "metrics.jsonl").write_text(text)

    assert files.has_continued(tmp_path / "continued", tmp_path / "before")
    assert not files.has_continued(tmp_path / "from scratch", tmp_path / "before")


def test_last_line_of_a_replay_is_its_result() -> None:
    text = "replay: script has changed since\nreplay: equal: 7 tensors\nwarning: late\n"

    assert files.last_reported(text) == "equal: 7 tensors"
    assert files.last_reported("a\nTraceback: b\n") == "Traceback: b"


def test_speed_is_the_ratio_of_medians_and_fails_above_the_limit() -> None:
    old = {"1 MB": [1.0, 2.0, 9.0], "gone": [1.0]}
    new = {"1 MB": [2.0, 2.2, 2.5]}

    (row,) = speed.compare_values("transfers", old, new, limit=1.05)
    (allowed,) = speed.compare_values("transfers", old, new, limit=1.2)

    assert (row["old"], row["new"], row["ratio"]) == (2.0, 2.2, pytest.approx(1.1))
    assert row["result"] == speed.ABOVE
    assert allowed["result"] == speed.WITHIN


def test_rows_of_a_bench_are_named_by_their_key_columns() -> None:
    rows = [{"kind": "real", "ranks": 4, "p50_ms": 1.5}]

    assert speed.read_rows(rows, ("kind", "ranks"), "p50_ms") == {"real 4": 1.5}


def test_table_has_a_line_for_each_row() -> None:
    text = format_table([{"name": "a", "seconds": 0.5}, {"name": "longer", "seconds": 1.25}])

    assert text.splitlines() == [
        "name    seconds",
        "------  -------",
        "a       0.500",
        "longer  1.250",
    ]


def test_settings_that_were_texts_are_compared_under_their_typed_keys() -> None:
    chosen = [
        {"key": "actor.engine.residency", "value": "keep", "why": "x"},
        {"key": "critic.engine.residency", "value": "gradients, optimizer", "why": "x"},
        {"key": "actor.rollout.kv_cache", "value": "3120 MiB", "why": "x"},
        {"key": "actor.model.dtype", "value": "bfloat16", "why": "x"},
    ]

    typed = plans.with_typed_settings({"chosen": chosen})["chosen"]

    assert [(each["key"], each["value"]) for each in typed] == [
        ("actor.engine.offload", []),
        ("critic.engine.offload", ["gradients", "optimizer"]),
        ("actor.rollout.kv_cache_gib", 3.046875),
        ("actor.model.dtype", "bfloat16"),
    ]
    assert plans.with_typed_settings(None) is None
