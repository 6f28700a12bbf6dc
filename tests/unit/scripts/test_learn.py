"""scripts/learn.py: its table fits the scripts, finished runs are kept, misses are said."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

from scripts.learn.curves import medians, points_of, table, write_entry, write_group
from scripts.learn.entry import Entry
from scripts.learn.runs import Run, finished_or_none
from scripts.learn.samples import samples_of
from scripts.learn.table import ENTRIES
from scripts.matrix.case import MODEL
from spmdflow.config.load import load

ROOT = Path(__file__).parents[3]
ENTRY = Entry("sums", "some", "grpo", ("total_steps=4",), metric="eval/accuracy", target=0.9)


def run_of(folder: Path, seed: int, *accuracies: float) -> Run:
    """A finished run with an evaluation every second step."""
    run_dir = folder / ENTRY.run_name(seed)
    run_dir.mkdir(parents=True)
    records = [{"step": 2 * i, "eval/accuracy": value} for i, value in enumerate(accuracies)]
    lines = [json.dumps(record) for record in [*records, {"step": 5, "reward/mean": 0.5}]]
    (run_dir / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    mark: dict[str, Any] = {
        "seed": seed,
        "commit": "abc",
        "seconds": 1.0,
        "cpu_seconds": None,
        "judged": None,
    }
    (run_dir / "learned.json").write_text(json.dumps(mark))
    return Run(run_dir=run_dir, **mark)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_settings_of_every_entry_fit_its_script(
    entry: Entry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPMDFLOW_DATA", str(tmp_path))
    script, *words = entry.words(3, str(tmp_path / "run"))
    yaml = next((ROOT / word for word in words if word.endswith(".yaml")), None)

    bundled = str(ROOT / "algos" / "arithmetic" / "model")  # the real model may be absent
    settings = [word.replace(MODEL, bundled) for word in words if "=" in word]

    cfg = load(ROOT / script, yaml, settings).cfg

    assert (cfg.run.seed, cfg.run.dir) == (3, str(tmp_path / "run"))
    assert cfg.eval_every and cfg.total_steps % cfg.eval_every == 0, "the end is evaluated"


def test_names_are_used_once() -> None:
    names = [entry.name for entry in ENTRIES] + sorted({entry.group for entry in ENTRIES})

    assert len(names) == len(set(names))


def test_a_finished_run_is_known_by_its_settings_and_other_settings_are_open(
    tmp_path: Path,
) -> None:
    run = run_of(tmp_path, 1, 0.5, 0.9)

    assert finished_or_none(ENTRY, 1, tmp_path) == run
    assert finished_or_none(ENTRY, 2, tmp_path) is None
    assert finished_or_none(replace(ENTRY, settings=("total_steps=8",)), 1, tmp_path) is None
    assert finished_or_none(replace(ENTRY, target=0.95), 1, tmp_path) == run


def test_medians_leave_out_steps_that_a_seed_has_not_reached(tmp_path: Path) -> None:
    runs = [
        run_of(tmp_path, 0, 0.5, 0.7, 0.9),
        run_of(tmp_path, 1, 0.5, 0.8),
        run_of(tmp_path, 2, 0.5, 0.9),
    ]

    assert medians(points_of(runs, "eval/accuracy")) == [(0, 0.5), (2, 0.8)]


def test_samples_are_the_same_held_out_prompts_before_and_after(tmp_path: Path) -> None:
    run = run_of(tmp_path, 0, 0.5, 0.9)
    rows = [
        {
            "step": step,
            "phase": phase,
            "prompt": prompt,
            "response": f"{prompt}{step}",
            "score": 1 / 3,
        }
        for step in (0, 2, 4)
        for phase in ("train", "eval")
        for prompt in "abcdefg"
    ]
    lines = [json.dumps(row) for row in [*rows, {"step": 5, "phase": "train"}]]
    (run.run_dir / "samples.jsonl").write_text("\n".join(lines) + "\n")

    found = samples_of(run)

    assert [each["prompt"]["text"] for each in found] == ["a", "d", "g"]
    assert found[1]["before"] == {"text": "d0", "score": 0.333}
    assert found[1]["after"] == {"text": "d4", "score": 0.333}


@pytest.mark.parametrize(("accuracy", "verdict"), [(0.9, "met"), (0.89, "**missed**")])
def test_the_table_says_whether_the_median_met_the_target(
    tmp_path: Path, accuracy: float, verdict: str
) -> None:
    runs = [run_of(tmp_path / "runs", seed, 0.5, accuracy) for seed in range(3)]

    samples = [{"prompt": {"text": "1+1="}, "before": {"text": "3"}, "after": {"text": "2"}}]
    made = write_entry(ENTRY, runs, tmp_path / "docs", samples=samples)
    write_group("some", [made], tmp_path / "docs")

    assert json.loads((tmp_path / "docs" / "sums.json").read_text()) == made
    assert verdict in table([made]).splitlines()[-1]
    assert (tmp_path / "docs" / "some.png").stat().st_size < 100_000
    assert "eval/accuracy, median of 3 seeds" in (tmp_path / "docs" / "some.txt").read_text()


def test_seconds_that_are_not_known_are_left_out_and_never_null(tmp_path: Path) -> None:
    made = write_entry(ENTRY, [run_of(tmp_path, 1, 0.5, 0.95)], tmp_path / "docs", samples=[])

    assert made["cpu_seconds"] == []
    for path in [*(ROOT / "docs" / "learning").glob("*.json"), *(tmp_path / "docs").glob("*.json")]:
        assert None not in json.loads(path.read_text())["cpu_seconds"], path


def test_an_unknown_name_is_refused_with_the_names(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_from_file_location("learn_command", ROOT / "scripts" / "learn.py")
    assert spec is not None and spec.loader is not None
    monkeypatch.setattr(sys, "path", list(sys.path))
    command = module_from_spec(spec)
    spec.loader.exec_module(command)

    with pytest.raises(SystemExit, match="got grop, expected some of .*grpo"):
        command.choose(["grop"])
    assert [entry.name for entry in command.choose(["grpo", "offline"])][:2] == [
        "grpo",
        "sft_stories",
    ]
    assert import_module("scripts.learn.table").ENTRIES is ENTRIES
