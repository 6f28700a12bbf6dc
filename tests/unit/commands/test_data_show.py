"""`spmdflow data show SCRIPT`: the tokens of rows, marked as the run's own encoder marks them."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from spmdflow.__main__ import main
from spmdflow.config.leaf import parts_of
from spmdflow.config.load import load
from spmdflow.config.schema import DataSettings
from spmdflow.data.ragged import rows_of
from spmdflow.datasets.scan import PromptSource, scan
from spmdflow.datasets.tokenizer import load_tokenizer, token_texts
from spmdflow.preview.text import token_text
from tests.unit.datasets.families import byte_level_bpe

BUNDLED = Path(__file__).parents[3] / "algos" / "arithmetic" / "model"
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
USER = {"role": "user", "content": "a  b\t<|im_end|> \U0001f600"}
TURNS = [
    {"role": "system", "content": "the system"},
    USER,
    {"role": "assistant", "content": "the answer\n\nand more"},
    {"role": "user", "content": "again"},
    {"role": "assistant", "content": "it is 2"},
]
ESCAPES = re.compile("\x1b\\[[0-9;]*m")


class Shown(NamedTuple):
    """A row as it was printed."""

    title: str
    tokens: list[tuple[str, str, bool]]
    """(label, token, is trained)."""

    def texts(self, *labels: str) -> list[str]:
        return [token for label, token, _ in self.tokens if label in labels]

    def marks(self, *labels: str) -> list[bool]:
        return [is_trained for label, _, is_trained in self.tokens if label in labels]


def show(*words: str | Path) -> int:
    return main(["data", "show", *map(str, words)])


def rows_in(text: str) -> list[Shown]:
    """The rows of plain output."""
    rows: list[Shown] = []
    for line in text.splitlines():
        if re.match(r"row \d+", line):
            rows.append(Shown(line, []))
        elif re.match(r"[> ] (prompt|answer|chosen|rejected) ", line):
            label, *tokens = line[2:].split()
            rows[-1].tokens.extend((label, token, line[0] == ">") for token in tokens)
    return rows


def written(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model without weights: config.json, and a tokenizer with ChatML."""
    folder = tmp_path_factory.mktemp("model")
    names = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(byte_level_bpe()), **names
    )
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(folder)
    config = json.loads((BUNDLED / "config.json").read_text())
    config |= {"eos_token_id": tokenizer.eos_token_id, "vocab_size": len(tokenizer)}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def of_chats(path: Path, model: Path, *words: str) -> list[str]:
    own = [f"data.train_path={path}", f"actor.model.path={model}", "data.chat_template=true"]
    return [*own, "data.eval_path=null", "eval_every=0", "data.max_prompt_tokens=4096", *words]


def encoded(script: str, words: list[str]) -> list[tuple[list[str], list[bool], int]]:
    """(texts, marks, tokens of the chosen sequence) of all rows by the functions of a run."""
    cfg = load(script, None, words).cfg
    data = next(part for key, part in parts_of(cfg, DataSettings) if key == "data")
    tokenizer = load_tokenizer(data.tokenizer_path)
    report = scan(data, data.train_path, tokenizer)
    batch = PromptSource(report.files, data).read_rows(report.rows.tolist())
    rows = []
    for number, ids in enumerate(rows_of(batch["prompts"])):
        texts = [token_text(text) for text in token_texts(tokenizer, ids.tolist())]
        mask = [False] * len(texts)
        if "loss_mask" in batch.keys():
            mask = rows_of(batch["loss_mask"])[number].tolist()
        chosen = int(batch["chosen_tokens"][number]) if "chosen_tokens" in batch.keys() else 0
        rows.append((texts, mask, chosen))
    return rows


CONVERSATION = ("data.prompt_column=messages", "data.response_column=null")
CASES = {
    "prompts": ("grpo", {"prompt": TURNS[:4]}, ()),
    "one row of several turns": ("sft", {"messages": TURNS}, CONVERSATION),
    "a row for each answer": (
        "sft",
        {"messages": TURNS},
        (*CONVERSATION, "data.rows_per_conversation=answers"),
    ),
    "a prompt with a response": ("sft", {"prompt": TURNS[:2], "answer": "2"}, ()),
    "labels": (
        "dpo",
        {"prompt": TURNS[:4], "completion": "no", "label": False},
        ("data.label_column=label", "actor.loss.name=kto"),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_printed_tokens_and_marks_are_those_of_the_runs_encoder(
    name: str, tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script, row, settings = CASES[name]
    words = of_chats(written(tmp_path / "rows.jsonl", row, row), model, *settings)

    assert show(script, *words, "--plain", "--rows", "9") == 0

    rows = rows_in(capsys.readouterr().out)
    expected = encoded(script, words)
    assert len(rows) == len(expected) >= 2
    for shown, (texts, mask, _) in zip(rows, expected, strict=True):
        assert shown.texts("prompt", "answer") == texts
        assert shown.marks("prompt", "answer") == mask
        assert f" {len(texts)} tokens, {sum(mask)} trained" in shown.title
        assert {label for label, _, is_trained in shown.tokens if is_trained} <= {"answer"}


def test_pair_is_its_prompt_once_and_both_answers(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"prompt": TURNS[:4], "chosen": "the answer", "rejected": "no"}
    words = of_chats(written(tmp_path / "rows.jsonl", row), model)

    assert show("dpo", *words, "--plain") == 0

    (shown,) = rows_in(capsys.readouterr().out)
    ((texts, mask, cut),) = encoded("dpo", words)
    assert shown.texts("prompt", "chosen") == texts[:cut]
    assert shown.texts("prompt", "rejected") == texts[cut:]
    assert shown.marks("prompt", "chosen") == mask[:cut]
    assert shown.marks("prompt", "rejected") == mask[cut:]
    assert f" {len(texts)} tokens, {sum(mask)} trained" in shown.title


def test_prompts_are_shown_as_they_will_be_rendered_with_the_end_of_a_response(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"prompt": [USER], "answer": "2"}
    words = of_chats(written(tmp_path / "rows.jsonl", row), model, "actor.rollout.max_new_tokens=7")

    assert show("ppo", *words, f"critic.model.path={model}", "--plain") == 0

    text = capsys.readouterr().out
    (shown,) = rows_in(text)
    end = load_tokenizer(str(model)).eos_token_id
    assert shown.texts("prompt")[:1] == ["<|im_start|>"]
    assert shown.texts("prompt")[-1] == "\u21b5"
    assert shown.texts("prompt").count("<|im_end|>") == 1  # the user's is text
    assert '  row         {"answer": "2"}' in text.splitlines()
    said = " ".join(text.split())
    assert "begins after the last token of its prompt" in said
    assert f"ends with <|im_end|> ({end}), which is part of it, or is cut off after" in said
    assert "actor.rollout.max_new_tokens=7 tokens" in said
    assert "A row of more than data.max_prompt_tokens=4096 tokens is omitted." in said


def test_other_rows_say_what_the_loss_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert show("reward_model", "--rows", "1", "--plain") == 0
    scored = capsys.readouterr().out
    assert show("safe_rlhf", "--rows", "1", "--plain") == 0
    with_texts = capsys.readouterr().out
    assert show("evaluate", "--rows", "1", "--plain") == 0
    held_out = capsys.readouterr().out

    assert "It predicts no token." in " ".join(scored.split())
    assert "15 tokens" not in scored and ": 22 tokens, 0 trained" in scored
    assert "pretrain.train_path, with the tokenizer of" in with_texts
    prompt, text = rows_in(with_texts)
    assert prompt.marks("prompt") == [False] * 7
    assert text.marks("prompt", "answer") == [False] + [True] * 8
    assert "Nothing is trained." in held_out and "data.eval_path, with" in held_out


def test_rows_that_are_too_long_or_unreadable_are_counted_with_the_first_of_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": "1"}, {"prompt": "123456"}, {"prompt": 5}, {"prompt": "12345"}]
    path = written(tmp_path / "p.jsonl", *rows, {"prompt": "2"}, {"prompt": "3"})
    words = [f"data.train_path={path}", "data.max_prompt_tokens=3", "data.max_bad_rows=1"]

    assert show("grpo", *words, "--rows", "2", "--plain") == 0

    text = capsys.readouterr().out
    assert [row.title.split(":")[1] for row in rows_in(text)] == ["1", "5"]
    assert f"{path}: 3 prompts of at most 2 tokens, 2 too long, skipped, 1 unreadable" in text
    assert f"the first that is too long: {path}:2 has 7 tokens" in text
    assert f"the first that is unreadable: {path}:3 has 'prompt' = number, expected text" in text


def test_first_rows_of_every_source_of_a_mixture_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    easy = written(tmp_path / "easy.jsonl", {"prompt": "1"}, {"prompt": "2"})
    hard = written(tmp_path / "hard.jsonl", {"prompt": "12"}, {"prompt": "21"})
    mixture = f"data.train_path={{easy: {easy}, hard: 3 * {hard}}}"

    assert show("grpo", mixture, "--rows", "1", "--plain") == 0

    titles = [row.title for row in rows_in(capsys.readouterr().out)]
    assert titles == [
        "row 1, easy: easy.jsonl:1: 2 tokens, 0 trained",
        "row 2, hard: hard.jsonl:1: 3 tokens, 0 trained",
    ]


def test_colours_change_no_character(
    tmp_path: Path,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = written(tmp_path / "rows.jsonl", {"messages": TURNS})
    words = ["sft", *of_chats(path, model, *CONVERSATION)]
    for name, value in {"FORCE_COLOR": "1", "TERM": "xterm", "COLUMNS": "100"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)

    assert show(*words) == 0
    coloured = capsys.readouterr().out
    assert show(*words, "--plain") == 0
    plain = capsys.readouterr().out
    monkeypatch.setenv("NO_COLOR", "1")
    assert show(*words) == 0
    without = capsys.readouterr().out

    assert ESCAPES.sub("", coloured) == plain == ESCAPES.sub("", without)
    assert "\x1b" not in plain
    assert "\x1b[32mthe\x1b[0m" in coloured and "\x1b[1;32m<|im_end|>\x1b[0m" in coloured
    assert "\x1b[35m<|im_start|>\x1b[0m" in coloured
    assert "\x1b[32m" not in without and "\x1b[35m" not in without


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (" the", "\u00b7the"),
        ("a\n\n", "a\u21b5\u21b5"),
        ("\t", "\u21e5"),
        ("\x1b[31m\r", "\\x1b[31m\\r"),
        ("\u00a0\u202e", "\\xa0\\u202e"),
        ("\u00b7\u21b5", "\\xb7\\u21b5"),
        ("\ufffd", "\ufffd"),
    ],
)
def test_what_cannot_be_seen_is_a_mark_or_an_escape(text: str, shown: str) -> None:
    assert token_text(text) == shown


def test_texts_of_tokens_are_the_text_of_the_row(model: Path) -> None:
    tokenizer = load_tokenizer(str(model))
    said = "<|im_start|> the  system\n\u00e4\u20ac\U0001f600<|im_end|>"
    ids = tokenizer(said).input_ids

    texts = token_texts(tokenizer, ids)

    assert len(texts) == len(ids)
    assert "".join(texts).replace("\ufffd", "") == said
    assert texts.count("\ufffd") == 1 + 2 + 3  # bytes of a character before its last one
    assert texts[0] == "<|im_start|>" and texts[-1] == "<|im_end|>"
    assert token_texts(tokenizer, []) == []


def test_no_weights_and_no_process_group_are_needed(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path / "rows.jsonl", {"messages": TURNS})

    assert list(model.glob("*.safetensors")) == []
    assert show("sft", *of_chats(path, model, *CONVERSATION)) == 0
    assert not dist.is_initialized()


def test_tokenizer_without_a_model_says_that_the_end_is_not_known(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(model, tmp_path / "tokenizer")
    (folder / "config.json").unlink()
    path = written(tmp_path / "rows.jsonl", {"messages": TURNS})

    assert show("sft", *of_chats(path, folder, *CONVERSATION)) == 0

    said = " ".join(capsys.readouterr().out.split())
    assert f"a token that is not known here ({folder} has no config.json)" in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["data"], "command line: got nothing, expected show; write spmdflow data show SCRIPT"),
        (["data", "list"], "command line: got list, expected show; write spmdflow data show"),
        (["data", "show"], "got no SCRIPT, expected a script such as sft, or a RUN_DIR; name what"),
        (["data", "show", "sft", "--rows", "0"], "got --rows 0, expected at least 1 row; set --ro"),
        (["data", "show", "nothing"], "script: no file nothing in"),
        (["data", "show", "sft", "data.rows=3"], "unknown key data.rows"),
        (["data", "show", "sft", "data.train_path=no.jsonl"], "data.train_path: no file no.jsonl"),
        (["data", "show", "sft", "data.max_prompt_tokens=0"], "got 0, expected at least 1; change"),
        (["data", "show", "sft", "data.chat_template=true"], "data.chat_template: got true, but"),
        (["data", "show", "sft", "data.response_column=x"], "unreadable rows, expected at most 0"),
        (["data", "show", "sft", "data.max_prompt_tokens=2"], "got no usable prompt in 4132 rows"),
        (["data", "show", "dpo", "actor.loss.name=kto"], "expected kto for labelled rows and"),
        (["data", "show", "sft", "data.tokenizer_path=no"], "data.tokenizer_path: no tokenizer in"),
    ],
)
def test_what_cannot_be_shown_is_refused_with_what_to_change(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2

    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.err.startswith("spmdflow: ")
    assert printed.out == ""
