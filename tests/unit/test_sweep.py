"""`spmdflow sweep`: which runs it makes, their names, and what it refuses before the first one."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmdflow import run, start, sweep
from spmdflow.errors import ConfigError
from tests.unit.config_folder import write_config_folder

KEYS = st.lists(
    st.lists(st.sampled_from("abc"), min_size=1, max_size=4).map(".".join),
    min_size=1,
    max_size=6,
    unique=True,
)


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_config_folder(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)


def runs_of(*words: str) -> list[sweep.SweepRun]:
    return sweep.runs_of(start.sort_command(words))


def test_several_keys_make_the_product_in_the_order_of_the_values() -> None:
    runs = runs_of(
        *("-n", "2", "ppo.py", "actor.optimizer.lr=1e-5,3e-5", "actor.loss.kl_coef=0,0.1"),
        *("total_steps=7", "run.dir=here"),
    )

    assert [each.name for each in runs] == [
        "lr=1e-5,kl_coef=0",
        "lr=1e-5,kl_coef=0.1",
        "lr=3e-5,kl_coef=0",
        "lr=3e-5,kl_coef=0.1",
    ]
    assert [each.folder for each in runs] == [Path("here") / each.name for each in runs]
    assert {each.num_steps for each in runs} == {7}
    words = runs[1].command.script_words
    assert {"ppo.py", "total_steps=7", "actor.optimizer.lr=1e-5", "actor.loss.kl_coef=0.1"} < {
        *words
    }
    assert f"run.dir={runs[1].folder}" in words and "run.dir=here" not in words
    assert runs[1].command.ranks == "2"


def test_folder_of_a_sweep_without_one_is_named_by_the_run() -> None:
    assert {each.folder.parent for each in runs_of("ppo.py", "total_steps=1,2")} == {
        Path("runs/ppo-sweep")
    }


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1", ["1"]),
        ("1,2", ["1", "2"]),
        ("[1,2]", ["[1,2]"]),
        ("[1,2],[3]", ["[1,2]", "[3]"]),
        ("{a: 1, b: 2},null", ["{a: 1, b: 2}", "null"]),
        ("mine.py:f(a=1, b=2)", ["mine.py:f(a=1, b=2)"]),
        ("'a,b',c", ["'a,b'", "c"]),
    ],
)
def test_commas_in_brackets_and_quotes_separate_no_values(text: str, values: list[str]) -> None:
    assert sweep.split_values(text) == values


@given(KEYS)
def test_labels_are_ends_of_their_keys_and_differ(keys: list[str]) -> None:
    labels = sweep.shortest_labels(keys)

    assert len(set(labels.values())) == len(keys)
    assert all(f".{key}".endswith(f".{label}") for key, label in labels.items())


def test_names_that_are_long_or_no_names_of_folders_are_numbered() -> None:
    runs = runs_of("ppo.py", "data.train_path=./train.jsonl,train.jsonl", "run.dir=here")

    assert [each.name for each in runs] == [
        "001-train_path=._train.jsonl",
        "train_path=train.jsonl",
    ]


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (("ppo.py", "total_steps=3"), ["several values", "separated by commas"]),
        (("ppo.py", "total_stepz=3,4"), ["total_stepz=3", "unknown key", "total_steps"]),
        (("ppo.py", "total_steps=3,x"), ["total_steps=x: ", "'x'"]),
        (("total_steps=3,4",), ["no SCRIPT"]),
    ],
)
def test_what_cannot_work_is_refused_before_the_first_run(
    words: tuple[str, ...], parts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert sweep.main(words) == run.REFUSED

    said = capsys.readouterr().err
    for part in parts:
        assert part in said


def test_wrong_combination_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^total_steps=-1: "):
        runs_of("-n", "2", "ppo.py", "total_steps=4,-1")
