"""Rows of preferences: marks of pairs and labelled rows, prompts inside answers, refusals."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from spmdflow.config.offline import PairDataConfig, PreferenceDataConfig
from spmdflow.data.ragged import rows_of
from spmdflow.errors import DataError
from spmdflow.models.rows import answer_rows
from tests.unit.datasets.test_datasets import BOS, EOS, EQUALS, MODEL, ONE, PLUS, TWO
from tests.unit.datasets.test_examples import (
    FORGETFUL,
    TURNS,
    chat_tokenizer,
    source_of,
    written,
)

SUM = [BOS, ONE, PLUS, ONE, EQUALS]
PAIR = {"prompt": "1+1=", "chosen": "2", "rejected": "11"}
LABELS: dict[str, Any] = {"label_column": "label"}


def preferences(path: Path, tokenizer: str = str(MODEL), **settings: Any) -> PreferenceDataConfig:
    return PreferenceDataConfig(train_path=str(path), tokenizer_path=tokenizer, **settings)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def test_both_answers_of_a_pair_are_marked_and_their_prompt_is_not(tmp_path: Path) -> None:
    batch = source_of(preferences(written(tmp_path / "p.jsonl", PAIR))).read_rows([0])

    assert batch["prompts"].values().tolist() == [*SUM, TWO, EOS, *SUM, ONE, ONE, EOS]
    learnt = [False] * 5 + [True] * 2 + [False] * 5 + [True] * 3
    assert batch["loss_mask"].values().tolist() == learnt
    rows = answer_rows(batch)
    assert [row.tolist() for row in rows_of(rows["prompts"])] == [SUM, SUM]
    responses = [row.tolist() for row in rows_of(rows["responses"])]
    assert responses == [[TWO, EOS], [ONE, ONE, EOS]]
    assert bool(rows["response_mask"].values().all())


@pytest.mark.parametrize("label", [True, 1, 1.0])
def test_labelled_row_has_its_answer_its_label_and_its_answer_alone(
    tmp_path: Path, label: object
) -> None:
    rows = [
        {"prompt": "1+1=", "completion": "2", "label": label},
        {"prompt": "2=", "completion": "11", "label": False},
    ]
    batch = source_of(preferences(written(tmp_path / "l.jsonl", *rows), **LABELS)).read_rows([0, 1])

    assert [row.tolist() for row in rows_of(batch["prompts"])] == [
        [*SUM, TWO, EOS],
        [BOS, TWO, EQUALS, ONE, ONE, EOS],
    ]
    assert batch["desirable"].tolist() == [True, False]
    assert [row.tolist() for row in rows_of(batch["answers"])] == [[TWO, EOS], [ONE, ONE, EOS]]
    assert (
        batch["loss_mask"].values().tolist() == [False] * 5 + [True] * 2 + [False] * 3 + [True] * 3
    )


def test_prompt_inside_both_answers_ends_behind_the_last_mark(tmp_path: Path) -> None:
    row = {"chosen": "1+1=2+1=2", "rejected": "1+1=2+1=1"}
    path = tmp_path / "p.jsonl.gz"
    path.write_bytes(gzip.compress((json.dumps(row) + "\n").encode()))

    batch = source_of(preferences(path, prompt_column=None, prompt_end="=")).read_rows([0])

    rows = answer_rows(batch)
    prompt = [*SUM, TWO, PLUS, ONE, EQUALS]
    assert [row.tolist() for row in rows_of(rows["prompts"])] == [prompt, prompt]
    assert [row.tolist() for row in rows_of(rows["responses"])] == [[TWO, EOS], [ONE, EOS]]


def test_pairs_in_parquet_are_the_same_pairs(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="the extra parquet is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist([PAIR]), tmp_path / "p.parquet")
    written(tmp_path / "p.jsonl", PAIR)

    one, other = (
        source_of(preferences(tmp_path / name)).read_rows([0]) for name in ("p.parquet", "p.jsonl")
    )

    for name in ("prompts", "loss_mask"):
        assert one[name].values().tolist() == other[name].values().tolist()


@pytest.mark.parametrize("apart", [True, False], ids=["own_prompt_column", "whole_conversations"])
def test_only_the_last_turn_of_a_conversation_is_the_answer(tmp_path: Path, apart: bool) -> None:
    asked = [user("1+1"), assistant("2"), user("2")]
    row: dict[str, Any] = {"chosen": [assistant("2")], "rejected": [assistant("1")]}
    if apart:
        row["prompt"] = asked
    else:
        row = {name: [*asked, *answer] for name, answer in row.items()}
    tokenizer = chat_tokenizer(tmp_path / "tokenizer", TURNS)
    column = "prompt" if apart else None
    path = written(tmp_path / "p.jsonl", row)
    cfg = preferences(path, tokenizer, chat_template=True, prompt_column=column)

    rows = answer_rows(source_of(cfg).read_rows([0]))

    prompt = [ONE, PLUS, ONE, EQUALS, TWO, EOS, TWO, EQUALS]
    assert [row.tolist() for row in rows_of(rows["prompts"])] == [prompt, prompt]
    assert [row.tolist() for row in rows_of(rows["responses"])] == [[TWO, EOS], [ONE, EOS]]


@pytest.mark.parametrize(
    ("row", "settings", "reason"),
    [
        ({"chosen": "2", "rejected": "1"}, {}, "has no column 'prompt'"),
        ({"prompt": "1=", "chosen": "2"}, {}, "has no 'rejected', expected text (the answer)"),
        ({"prompt": "1=", "chosen": "2", "rejected": 1}, {}, "has 'rejected' = number, expected"),
        ({"prompt": "1=", "chosen": "2", "rejected": ""}, {}, "has an empty 'rejected', expected"),
        ({"prompt": "1=", "completion": "1"}, LABELS, "has no 'label', expected true or false"),
        (
            {"prompt": "1=", "completion": "1", "label": "good"},
            LABELS,
            "has 'label' = text, expected true or false",
        ),
        ({"prompt": "1=", "label": True}, LABELS, "has no 'completion', expected text"),
        (
            {"chosen": "1=2", "rejected": "2"},
            {"prompt_column": None, "prompt_end": "="},
            "has no '=' in 'rejected', expected one before the answer",
        ),
        (
            {"chosen": "1=2", "rejected": "1="},
            {"prompt_column": None, "prompt_end": "="},
            "has an empty answer in 'rejected', expected text after the prompt",
        ),
        (
            {"chosen": "1=2", "rejected": "2=2"},
            {"prompt_column": None, "prompt_end": "="},
            "has 'chosen' and 'rejected' after prompts that differ",
        ),
    ],
)
def test_unusable_preference_is_named_with_file_line_and_field(
    tmp_path: Path, row: dict[str, Any], settings: dict[str, Any], reason: str
) -> None:
    good = {**PAIR, "completion": "1", "label": True}
    if settings.get("prompt_end"):
        good = {"chosen": "1=2", "rejected": "1=1"}
    path = written(tmp_path / "p.jsonl", good, row)

    with pytest.raises(DataError) as caught:
        source_of(preferences(path, **settings))

    assert f"{path}:2 {reason}" in str(caught.value)


@pytest.mark.parametrize(
    ("row", "column", "reason"),
    [
        ({"chosen": "2", "rejected": "1"}, None, "has 'chosen' = text, expected messages"),
        (
            {"chosen": [user("1")], "rejected": [user("2")]},
            None,
            "has 'chosen' that ends with role 'user', expected a turn of the assistant",
        ),
        (
            {"prompt": "1", "chosen": [user("1"), assistant("1")], "rejected": [assistant("2")]},
            "prompt",
            "has 'chosen' with 2 messages next to 'prompt', expected one (the answer)",
        ),
    ],
)
def test_unusable_conversation_is_named_with_file_line_and_field(
    tmp_path: Path, row: dict[str, Any], column: str | None, reason: str
) -> None:
    tokenizer = chat_tokenizer(tmp_path / "tokenizer", TURNS)
    path = written(tmp_path / "p.jsonl", row)

    with pytest.raises(DataError) as caught:
        source_of(preferences(path, tokenizer, chat_template=True, prompt_column=column))

    assert f"{path}:1 {reason}" in str(caught.value)


def test_template_that_writes_an_answer_elsewhere_is_refused_with_the_column(
    tmp_path: Path,
) -> None:
    tokenizer = chat_tokenizer(tmp_path / "tokenizer", FORGETFUL)
    asked = [user("1"), assistant("2"), user("1")]
    row = {"chosen": [*asked, assistant("1")], "rejected": [*asked, assistant("2")]}
    path = written(tmp_path / "p.jsonl", row)

    with pytest.raises(DataError, match="has message 4 of 'rejected', which the chat"):
        source_of(preferences(path, tokenizer, chat_template=True, prompt_column=None))


def test_reward_models_read_dialogues_too(tmp_path: Path) -> None:
    row = {"chosen": "1=\n\nAssistant:2", "rejected": "1=\n\nAssistant:1"}
    cfg = PairDataConfig(
        train_path=str(written(tmp_path / "p.jsonl", row)),
        tokenizer_path=str(MODEL),
        prompt_column=None,
    )

    batch = source_of(cfg).read_rows([0])

    assert batch["chosen_tokens"].tolist() == [len(batch["prompts"].values()) // 2]
