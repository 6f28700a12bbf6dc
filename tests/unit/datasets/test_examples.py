"""Rows with answers: what is learnt, pairs, conversations, and what is refused with its line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from spmdflow.config.offline import ExampleDataConfig, PairDataConfig
from spmdflow.config.schema import DataConfig
from spmdflow.data.ragged import lengths_of, rows_of
from spmdflow.datasets.scan import PromptSource, join_reports, scan
from spmdflow.datasets.tokenizer import load_tokenizer
from spmdflow.errors import DataError
from spmdflow.models.rows import example_rows, pair_rows
from tests.unit.datasets.test_datasets import (
    BOS,
    EOS,
    EQUALS,
    MODEL,
    ONE,
    PLUS,
    TWO,
    edited_tokenizer,
)

TURNS = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}={% else %}"
    "{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
FORGETFUL = "{{ messages[-1].content }}="
COUNTS = "{{ messages | length > 2 }}" + TURNS


def written(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def source_of(cfg: DataConfig) -> PromptSource:
    tokenizer = load_tokenizer(cfg.tokenizer_path)
    return PromptSource(scan(cfg, cfg.train_path, tokenizer).files, cfg)


def examples(path: Path, tokenizer: str = str(MODEL), **settings: Any) -> ExampleDataConfig:
    return ExampleDataConfig(train_path=str(path), tokenizer_path=tokenizer, **settings)


def chat_tokenizer(folder: Path, template: str) -> str:
    return edited_tokenizer(folder, lambda _, config: config.update(chat_template=template))


def test_answer_and_its_end_are_learnt_and_the_prompt_is_not(tmp_path: Path) -> None:
    path = written(tmp_path / "e.jsonl", {"prompt": "1+1=", "response": "2"})

    batch = source_of(examples(path)).read_rows([0])

    (ids,) = rows_of(batch["prompts"])
    (mask,) = rows_of(batch["loss_mask"])
    assert ids.tolist() == [BOS, ONE, PLUS, ONE, EQUALS, TWO, EOS]
    assert mask.tolist() == [False] * 5 + [True] * 2
    assert lengths_of(batch["responses"]).tolist() == [0]
    rows = example_rows(batch)
    assert rows["prompts"].values().tolist() == [BOS, ONE, PLUS, ONE, EQUALS]
    assert rows["responses"].values().tolist() == [TWO, EOS]
    assert rows["response_mask"].values().tolist() == [True, True]


def test_every_turn_of_the_assistant_is_learnt_and_nothing_between(tmp_path: Path) -> None:
    said = [("user", "1+1"), ("assistant", "2"), ("user", "1"), ("assistant", "1"), ("user", "2")]
    messages = [{"role": role, "content": content} for role, content in said]
    path = written(tmp_path / "e.jsonl", {"messages": messages})
    tokenizer = chat_tokenizer(tmp_path / "tokenizer", TURNS)
    cfg = examples(
        path, tokenizer, prompt_column="messages", response_column=None, chat_template=True
    )

    batch = source_of(cfg).read_rows([0])

    ids = batch["prompts"].values().tolist()
    mask = batch["loss_mask"].values().tolist()
    assert ids == [
        ONE,
        PLUS,
        ONE,
        EQUALS,
        TWO,
        EOS,
        ONE,
        EQUALS,
        ONE,
        EOS,
    ]  # the last is unanswered
    assert mask == [False] * 4 + [True] * 2 + [False] * 2 + [True] * 2
    rows = example_rows(batch)
    assert rows["response_mask"].values().tolist() == mask[4:]


def test_chat_prompt_with_a_response_is_a_conversation_of_one_answer(tmp_path: Path) -> None:
    path = written(tmp_path / "e.jsonl", {"prompt": "1+1", "response": "2"})
    tokenizer = chat_tokenizer(tmp_path / "tokenizer", TURNS)

    batch = source_of(examples(path, tokenizer, chat_template=True)).read_rows([0])

    assert batch["prompts"].values().tolist() == [ONE, PLUS, ONE, EQUALS, TWO, EOS]
    assert batch["loss_mask"].values().tolist() == [False] * 4 + [True] * 2


def test_pair_becomes_two_sequences_with_the_same_prompt(tmp_path: Path) -> None:
    rows = [
        {"prompt": "1+1=", "chosen": "2", "rejected": "11"},
        {"prompt": "2=", "chosen": "2", "rejected": "1"},
    ]
    path = written(tmp_path / "p.jsonl", *rows)
    cfg = PairDataConfig(train_path=str(path), tokenizer_path=str(MODEL))

    sequences = [
        row.tolist() for row in rows_of(pair_rows(source_of(cfg).read_rows([0, 1]))["prompts"])
    ]

    sums = [BOS, ONE, PLUS, ONE, EQUALS]
    assert sequences == [
        [*sums, TWO, EOS],
        [BOS, TWO, EQUALS, TWO, EOS],
        [*sums, ONE, ONE, EOS],
        [BOS, TWO, EQUALS, ONE, EOS],
    ]


def test_scan_counts_the_tokens_from_the_first_learnt_one_on(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(MODEL))
    pairs = [
        {"prompt": "1+1=", "chosen": "2", "rejected": "11"},
        {"prompt": "2=", "chosen": "2", "rejected": "1"},
    ]
    path = written(tmp_path / "p.jsonl", *pairs)
    cfg = PairDataConfig(train_path=str(path), tokenizer_path=str(MODEL))
    single = examples(written(tmp_path / "e.jsonl", {"prompt": "1+1=", "response": "2"}))

    both = scan(cfg, cfg.train_path, tokenizer)
    one = scan(single, single.train_path, tokenizer)

    for report, config in ((both, cfg), (one, single)):
        batch = source_of(config).read_rows(report.rows.tolist())
        masks = [int(mask.sum()) for mask in rows_of(batch["loss_mask"])]
        assert report.answers_of(report.rows.tolist()).tolist() == masks
        assert join_reports([report.part(0, 1), report.part(1, 9)]).answers_of([0]) == masks[0]
    assert both.answers_of([1, 0]).tolist() == [4, 5]


def test_rows_longer_than_the_limit_with_their_answers_are_left_out(tmp_path: Path) -> None:
    rows = [{"prompt": "1+1=", "response": "2"}, {"prompt": "1+1=", "response": "2222"}]
    cfg = examples(written(tmp_path / "e.jsonl", *rows), max_prompt_tokens=7)

    report = scan(cfg, cfg.train_path, load_tokenizer(str(MODEL)))

    assert (report.rows, report.token_lengths, report.num_too_long) == ([0], [7], 1)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "1="}, "has no 'response', expected text"),
        ({"prompt": "1=", "response": 2}, "has 'response' = number, expected text"),
        ({"prompt": "1=", "response": ""}, "has an empty 'response', expected text"),
        ({"response": "1"}, "has no column 'prompt'"),
    ],
)
def test_unusable_example_is_named_with_file_line_and_field(
    tmp_path: Path, row: dict[str, Any], reason: str
) -> None:
    path = written(tmp_path / "e.jsonl", {"prompt": "1=", "response": "1"}, row)

    with pytest.raises(DataError) as caught:
        source_of(examples(path))

    assert f"{path}:2 {reason}" in str(caught.value)


def test_pair_of_equal_answers_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "p.jsonl", {"prompt": "1=", "chosen": "1", "rejected": "1"})

    with pytest.raises(DataError, match="p.jsonl:1 has the same answer in 'chosen' and 'rejected'"):
        source_of(PairDataConfig(train_path=str(path), tokenizer_path=str(MODEL)))


@pytest.mark.parametrize(
    ("roles", "template", "reason"),
    [
        (("user",), TURNS, "has no answer in 'messages', expected a turn of an assistant"),
        (("user", "assistant"), FORGETFUL, "has message 2 of 'messages', which the chat template"),
        (("user", "assistant") * 2, COUNTS, "has message 4 of 'messages', before which the chat"),
    ],
)
def test_conversation_that_cannot_be_marked_is_refused(
    tmp_path: Path, roles: tuple[str, ...], template: str, reason: str
) -> None:
    messages = [{"role": role, "content": str(n + 1)} for n, role in enumerate(roles)]
    path = written(tmp_path / "e.jsonl", {"messages": messages})
    tokenizer = chat_tokenizer(tmp_path / "tokenizer", template)
    cfg = examples(
        path, tokenizer, prompt_column="messages", response_column=None, chat_template=True
    )

    with pytest.raises(DataError) as caught:
        source_of(cfg)

    assert f"{path}:1 {reason}" in str(caught.value)
