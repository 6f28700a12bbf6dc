"""reward.function as one function or a map of weighted terms: reading it, adding them up."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmdflow.config.reward import RewardTerm, reward_terms, with_located_files
from spmdflow.errors import ConfigError
from spmdflow.rewards.pool import combine_terms
from tests.unit.config_folder import accept, write_config_folder


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_config_folder(tmp_path)
    (tmp_path / "own.py").write_text(
        "def good(prompt, response, row, *, limit, kind=''): return 1\n"
    )
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("text", "term"),
    [
        ("a.py:f", RewardTerm("x", "a.py:f")),
        (" a.b:f ", RewardTerm("x", "a.b:f")),
        ("0.5*a.py:f", RewardTerm("x", "a.py:f", 0.5)),
        ("-1e-3 * a.py:f()", RewardTerm("x", "a.py:f", -1e-3)),
        ("0 * model", RewardTerm("x", "model", 0.0)),
        ("models/my (1).py:f(a=1)", RewardTerm("x", "models/my (1).py:f", 1.0, (("a", 1),))),
        (
            "2 * m:f(a=-1.5, b='it: (x) * y', c=[True, None])",
            RewardTerm("x", "m:f", 2.0, (("a", -1.5), ("b", "it: (x) * y"), ("c", [True, None]))),
        ),
    ],
)
def test_term_has_weight_function_and_arguments(text: str, term: RewardTerm) -> None:
    assert reward_terms("key", {"x": text}) == (term,)


def test_terms_keep_their_order_and_null_takes_one_away() -> None:
    terms = reward_terms("key", {"b": "m:f", "a": "0.5 * model", "c": None})

    assert [(term.name, term.is_model) for term in terms] == [("b", False), ("a", True)]
    assert reward_terms("key", None) == reward_terms("key", {}) == ()


@pytest.mark.parametrize(
    "text",
    ["", "f", "0.5 *", "nan * m:f", "m:f(1)", "m:f(**x)", "m:f(a=b)", "m:f(a={1})", "m:f(", 3],
)
def test_unreadable_term_is_refused_with_its_key(text: object) -> None:
    with pytest.raises(ConfigError, match=r"^key\.x: got .*; write "):
        reward_terms("key", {"x": text})


TABLE = {"gsm8k": "2 * m:f(a=1)", "sums": "m:g", "code": None}


def test_table_gives_a_term_for_each_source_under_one_name() -> None:
    terms = reward_terms("key", {"right": TABLE, "short": "m:h"})

    assert terms == (
        RewardTerm("right", "m:f", 2.0, (("a", 1),), source="gsm8k"),
        RewardTerm("right", "m:g", source="sums"),
        RewardTerm("short", "m:h"),
    )
    assert [term.scores_rows_of("sums") for term in terms] == [False, True, True]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({}, "key.right: got an empty table, expected data source -> function"),
        ({"sums": "model"}, "key.right.sums: got the model in a table, but it scores the rows"),
        ({"sums": "f"}, "key.right.sums: got 'f', expected file.py:name, module:name or model"),
    ],
)
def test_unusable_table_is_refused_with_its_key(table: object, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        reward_terms("key", {"right": table})

    assert str(caught.value).startswith(message)


MIXTURE = (
    "data.train_path={easy: train.jsonl, hard: 2 * train.jsonl}",
    "data.eval_path=null",
    "eval_every=0",
)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (
            "{easy: reward.py:score, hrd: reward.py:score}",
            "reward.function.right.hrd: no source 'hrd' in data.train_path, "
            "expected one of easy, hard; did you mean hard?",
        ),
        (
            "{easy: reward.py:score}",
            "reward.function: no term scores the rows of 'hard' in data.train_path, expected an "
            "entry for it; write reward.function.right.hard=file.py:name",
        ),
        (
            "{easy: reward.py:score, hard: 'own.py:good'}",
            "reward.function.right.hard: got the arguments (), but good in own.py takes",
        ),
    ],
)
def test_table_is_held_against_the_sources_of_the_data(table: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        accept(*MIXTURE, f"reward.function={{right: {table}}}")

    assert str(caught.value).startswith(message)


def test_table_of_all_sources_or_with_a_term_for_the_others_is_accepted() -> None:
    table = "{right: {easy: reward.py:score, hard: own.py:good(limit=1)}}"
    rest = "{right: {easy: reward.py:score}, all: reward.py:score}"

    for function in (table, rest):
        accept(*MIXTURE, f"reward.function={function}")
    accept(f"reward.function={table}")  # a file, whose rows have the column
    accept(*MIXTURE, "reward.source_column=kind", "reward.function={right: {a: reward.py:score}}")


@given(st.text(max_size=80))
def test_no_text_is_another_error_than_a_refusal(text: str) -> None:
    try:
        reward_terms("key", text)
    except ConfigError as err:
        assert "expected" in str(err)


def test_files_are_found_beside_the_yaml_that_names_them(tmp_path: Path) -> None:
    def move(path: str) -> str:
        return f"there/{path}"

    terms = {"a": "0.5 * own.py:good(limit='x.py:y')", "b": "m:f", "c": "model", "d": None}

    assert with_located_files(terms, move) == {
        "a": "0.5 * there/own.py:good(limit='x.py:y')",
        "b": "m:f",
        "c": "model",
        "d": None,
    }
    assert with_located_files("own.py:good", move) == "there/own.py:good"
    assert with_located_files(["own.py:good"], move) == ["own.py:good"]


def test_command_line_adds_changes_and_removes_terms_of_the_yaml() -> None:
    Path("sub").mkdir()
    Path("own.py").rename("sub/own.py")
    text = (
        Path("ppo.yaml")
        .read_text()
        .replace(
            'function: "reward.py:score"',
            "function: {right: 'reward.py:score', short: '0.1 * own.py:good(limit=3)'}",
        )
    )
    Path("ppo.yaml").write_text(text.replace("own.py", "sub/own.py"))
    words = "reward.function.short=0.5 * sub/own.py:good(limit=4)"

    changed = accept(words, "reward.function.more=sub/own.py:good(limit=1)")
    removed = accept("reward.function.short=null")
    replaced = accept("reward.function=reward.py:score")

    assert changed.reward.function == {
        "right": "reward.py:score",
        "short": "0.5 * sub/own.py:good(limit=4)",
        "more": "sub/own.py:good(limit=1)",
    }
    assert [term.name for term in reward_terms("", removed.reward.function)] == ["right"]
    assert replaced.reward.function == "reward.py:score"


def test_model_and_functions_together_are_accepted_with_a_weight_for_each() -> None:
    function = "reward.function={judge: 0.5 * model, right: reward.py:score}"

    assert accept("reward.model.path=scorer", function).reward.model.path == "scorer"


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            "own.py:good",
            "got the arguments (), but good in own.py takes one or more of limit, kind (limit "
            "always), expected these; write good(limit=...)",
        ),
        (
            "own.py:good(limit=1, max=3)",
            "got the arguments (limit, max), but good in own.py takes one or more of limit, kind "
            "(limit always), expected these; write good(limit=...)",
        ),
    ],
)
def test_arguments_are_held_against_the_function(function: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        accept(f"reward.function={function}")

    assert str(caught.value) == f"reward.function: {message}"


def test_score_is_the_sum_in_order_and_terms_keep_their_own() -> None:
    terms = [RewardTerm("a", "m:f", 1.0), RewardTerm("b", "m:g", -0.5), RewardTerm("c", "m:h", 0.0)]
    results = [
        {"score": 0.25, "accuracy": 1.0, "b": 7.0, "errors": 0.0},
        {"score": 3.0, "accuracy": 0.0, "errors": 1.0},
        {"score": 9.0},
    ]

    assert combine_terms(terms, dict(enumerate(results))) == {
        "score": 0.25 - 1.5,
        "a": 0.25,
        "accuracy": 1.0,  # of the first term
        "a_b": 7.0,  # b is a term
        "b": 3.0,
        "b_accuracy": 0.0,
        "c": 9.0,
        "errors": 1.0,
    }


@given(st.floats(-1e6, 1e6), st.floats(-10, 10))
def test_one_function_alone_keeps_its_numbers(score: float, weight: float) -> None:
    alone = combine_terms([RewardTerm("", "m:f")], {0: {"score": score, "accuracy": 1.0}})
    scaled = combine_terms([RewardTerm("", "m:f", weight)], {0: {"score": score}})

    assert alone == {"score": score, "accuracy": 1.0}
    assert scaled == {"score": weight * score}
