"""Files, rows and tokenizers that are refused, with the exact message."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from spmdflow.config.schema import DataConfig
from spmdflow.datasets.scan import ScanReport, scan
from spmdflow.datasets.tokenizer import eos_token_id, load_tokenizer
from spmdflow.errors import ConfigError, DataError, SpmdflowError
from spmdflow.requirement import install_command

MODEL = Path(__file__).parents[3] / "algos/arithmetic/model"
SPECIAL = json.loads((MODEL / "tokenizer_config.json").read_text())["eos_token"]
"""Text of a special token: where there is one, messages are searched to the last level."""
NESTED = b"[" * 100_000
DEPTH = 600 if sys.version_info < (3, 12) else 1100
DEEP: Any = json.loads("[" * DEPTH + "]" * DEPTH)
"""As deep as JSON is still read. Python 3.12 and later spend one call less on each level."""


def scan_text(
    path: Path, text: str | bytes, *, template: str | None = None, **settings: Any
) -> ScanReport:
    """Write a file and scan it with the bundled tokenizer."""
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    tokenizer = load_tokenizer(str(MODEL))
    tokenizer.chat_template = template
    try:
        return scan(DataConfig(train_path=str(path), **settings), path, tokenizer)
    finally:
        tokenizer.chat_template = None


def message_of(kind: type[SpmdflowError], path: Path, text: str | bytes, **settings: Any) -> str:
    """What the refusal says, the file's path written as FILE."""
    with pytest.raises(kind) as caught:
        scan_text(path, text, **settings)
    return str(caught.value).replace(str(path), "FILE")


def one_bad_row(reason: str) -> str:
    """The message about a file whose second row is bad."""
    return (
        "FILE: got 1 unreadable rows, expected at most 0 (data.max_bad_rows); fix or remove "
        "them, correct data.prompt_column, or raise data.max_bad_rows\n  FILE:2 " + reason
    )


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"prompt": "1",}', "is not valid JSON (@)"),
        (b'{"prompt": "\xff"}', "is not UTF-8 (byte 13 of the line)"),
        (b"[1]", "is a JSON list, expected an object"),
        (b"7", "is a JSON number, expected an object"),
        (b'{"text": "1", "answer": "2"}', "has no column 'prompt' (it has 'text', 'answer')"),
        (b"{}", "has no column 'prompt' (it has no columns)"),
        (b'{"prompt": 12}', "has 'prompt' = number, expected text"),
        (b'{"prompt": null}', "has 'prompt' = null, expected text"),
        (
            b'{"prompt": [{"role": "user", "content": "1"}]}',
            "has 'prompt' = list, expected text; chat messages need data.chat_template=true",
        ),
        (b'{"prompt": "\\ud800"}', "has half a character (a lone surrogate) in 'prompt'"),
    ],
)
def test_bad_row_is_refused_with_its_file_line_and_reason(tmp_path, line, reason):
    text = b'{"prompt": "1"}\n' + line + b"\n"

    message = message_of(DataError, tmp_path / "p.jsonl", text)

    if "@" in reason:  # the wording is Python's own
        with pytest.raises(json.JSONDecodeError) as caught:
            json.loads(line)
        reason = reason.replace("@", f"{caught.value.msg} at column {caught.value.colno}")
    assert message == one_bad_row(reason)


def test_row_of_brackets_without_end_is_refused(tmp_path):
    message = message_of(DataError, tmp_path / "p.jsonl", b'{"prompt": "1"}\n' + NESTED)

    assert "FILE:2 is not JSON that can be read (maximum recursion depth exceeded" in message


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ([], "has 'prompt' = list, expected text or messages"),
        (3, "has 'prompt' = number, expected text or messages"),
        (
            [{"role": "user", "content": "1"}, {"role": "assistant", "content": None}],
            "has 'prompt' with message 2, whose content = null, expected text",
        ),
        (
            [{"role": "user", "content": [{"type": "text", "text": "1"}]}],
            "has 'prompt' with message 1, whose content = list, expected text",
        ),
        (
            [{"role": ["user"], "content": "1"}],
            "has 'prompt' with message 1, whose role = list, expected text",
        ),
        (
            [{"role": "user", "content": "1", "more": [DEEP, SPECIAL]}],
            "has lists or objects in a message, or in a tool, that are nested too deeply; "
            "remove them",
        ),
        (
            [{"role": "user", "content": "1"}, "2"],
            'has \'prompt\' with message 2 = text, expected {"role": ..., "content": ...}',
        ),
        (
            [{"role": "user"}],
            "has 'prompt' with message 1 = object with 'role', "
            'expected {"role": ..., "content": ...}',
        ),
        (
            [{"role": "system", "content": "1"}],
            "the chat template refuses the messages (no system)",
        ),
    ],
)
def test_bad_chat_row_is_refused_with_its_reason(tmp_path, prompt, reason):
    template = (
        "{% for m in messages %}{{ raise_exception('no system') if m.role == 'system' "
        "else m.content }}{% endfor %}"
    )
    text = "".join(json.dumps({"prompt": value}) + "\n" for value in ("1", prompt))

    message = message_of(
        DataError, tmp_path / "p.jsonl", text, template=template, chat_template=True
    )

    assert message == one_bad_row(reason)


def test_more_bad_rows_than_allowed_are_listed_up_to_five(tmp_path):
    text = '{"prompt": "1"}\n' + "x\n" * 20

    message = message_of(DataError, tmp_path / "p.jsonl", text, max_bad_rows=2)

    first, *lines = message.splitlines()
    assert first == (
        "FILE: got at least 7 unreadable rows, expected at most 2 (data.max_bad_rows); fix or "
        "remove them, correct data.prompt_column, or raise data.max_bad_rows"
    )
    bad = "is not valid JSON (Expecting value at column 1)"
    assert lines == [*(f"  FILE:{n} {bad}" for n in range(2, 7)), "  ... and 2 more"]


def test_as_many_bad_rows_as_allowed_are_skipped_and_logged(tmp_path, caplog):
    path = tmp_path / "p.jsonl"

    report = scan_text(path, 'x\n{"prompt": "1"}\nx\n', max_bad_rows=2)

    assert report.rows == [1]
    assert [record.getMessage().partition(" is ")[0] for record in caplog.records] == [
        f"skipped {path}:1",
        f"skipped {path}:3",
    ]


def test_empty_file_is_refused(tmp_path):
    assert message_of(DataError, tmp_path / "p.jsonl", "\n\n") == (
        "FILE: got an empty file, expected at least one prompt; fill it"
    )


def test_file_of_over_long_prompts_only_is_refused(tmp_path):
    text = '{"prompt": "1234"}\n{"prompt": "123"}\nx\n'

    message = message_of(DataError, tmp_path / "p.jsonl", text, max_prompt_tokens=3, max_bad_rows=1)

    assert message == (
        "FILE: got no usable prompt in 3 rows (2 longer than 3 tokens, 1 unreadable), expected "
        "at least one; raise data.max_prompt_tokens or fix the file"
    )


def test_unknown_extension_is_refused_with_the_known_ones(tmp_path):
    assert message_of(DataError, tmp_path / "p.csv", "prompt\n1\n") == (
        "FILE: got the extension '.csv', expected one of .jsonl, .jsonl.gz, .jsonl.zst, .parquet; "
        "convert the file, or rename it if it is one of these"
    )


@pytest.mark.parametrize(("make", "got"), [(False, "no such file"), (True, "a folder")])
def test_missing_file_and_folder_are_refused(tmp_path, monkeypatch, make, got):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "p.jsonl"
    if make:
        path.mkdir()

    with pytest.raises(DataError) as caught:
        scan(DataConfig(train_path="p.jsonl"), "p.jsonl", load_tokenizer(str(MODEL)))

    assert str(caught.value) == (
        f"p.jsonl: got {got}, expected a file of prompts; correct data.train_path or "
        f"data.eval_path (relative paths start in {tmp_path})"
    )


def test_damaged_gzip_file_is_refused(tmp_path):
    whole = gzip.compress(b'{"prompt": "1"}\n' * 500)

    assert message_of(DataError, tmp_path / "p.jsonl.gz", whole[:40]) == (
        "FILE: got a damaged or cut-off gzip file (Compressed file ended before the "
        "end-of-stream marker was reached); expected gzip; copy it again"
    )
    assert message_of(DataError, tmp_path / "q.jsonl.gz", b"plain") == (
        "FILE: got a damaged or cut-off gzip file (Not a gzipped file (b'pl')); "
        "expected gzip; copy it again"
    )


def test_damaged_zstd_file_is_refused(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    whole = tmp_path / "whole.jsonl.zst"
    with pyarrow.output_stream(str(whole), compression="zstd") as file:
        file.write(b'{"prompt": "1"}\n' * 500)

    for name, content in {"p.jsonl.zst": whole.read_bytes()[:-5], "q.jsonl.zst": b"plain"}.items():
        message = message_of(DataError, tmp_path / name, content)
        assert message.startswith("FILE: got a damaged or cut-off zstd file (")
        assert message.endswith("); expected zstd; copy it again")


def test_damaged_parquet_file_is_refused(tmp_path):
    pytest.importorskip("pyarrow")

    message = message_of(DataError, tmp_path / "p.parquet", b"no parquet at all")

    assert message.startswith("FILE: got a file that pyarrow cannot read (")
    assert message.endswith("); expected Parquet; copy it again, or correct its extension")


def test_parquet_without_pyarrow_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)

    assert message_of(ConfigError, tmp_path / "p.parquet", b"") == (
        "FILE: got a Parquet file, expected pyarrow to read it with; "
        f"{install_command('parquet')}, or convert the file to .jsonl"
    )


def test_chat_template_without_a_template_is_refused(tmp_path):
    message = message_of(ConfigError, tmp_path / "p.jsonl", "", chat_template=True)

    assert message == (
        f"data.chat_template: got true, but the tokenizer {str(MODEL)!r} has no chat template; "
        f"expected one in its folder; set data.chat_template=false, or use the tokenizer of a "
        f"chat model"
    )


@pytest.mark.parametrize(
    ("make", "got"), [(True, "a folder without one"), (False, "no such folder")]
)
def test_folder_without_a_tokenizer_is_refused(tmp_path, make, got):
    folder = tmp_path / "model"
    if make:
        folder.mkdir()

    with pytest.raises(ConfigError) as caught:
        load_tokenizer(str(folder))

    assert str(caught.value) == (
        f"data.tokenizer_path: got {str(folder)!r}, {got}; expected a folder with "
        f"tokenizer.json; correct it, or save the model's tokenizer there (save_pretrained)"
    )


def test_damaged_tokenizer_is_refused(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")

    with pytest.raises(ConfigError) as caught:
        load_tokenizer(str(tmp_path))

    assert str(caught.value) == (
        f"data.tokenizer_path: got {str(tmp_path)!r}, whose tokenizer cannot be read "
        f"(KeyError: 'added_tokens'); expected tokenizer.json and tokenizer_config.json; "
        f"copy them again"
    )


def test_tokenizer_without_an_end_token_is_refused(tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((MODEL / "tokenizer.json").read_bytes())

    with pytest.raises(ConfigError) as caught:
        eos_token_id(load_tokenizer(str(tmp_path)))

    assert str(caught.value) == (
        f"data.tokenizer_path: got {str(tmp_path)!r}, which names no end-of-sequence token; "
        f"expected eos_token in its tokenizer_config.json; add it"
    )
