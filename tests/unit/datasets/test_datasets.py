"""Files of prompts: reading by number, tokens, chat templates, other fields."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spmdflow.config.schema import DataConfig
from spmdflow.data.ragged import rows_of
from spmdflow.datasets.line_file import LineFile
from spmdflow.datasets.scan import PromptSource, scan
from spmdflow.datasets.tokenizer import eos_token_id, load_tokenizer
from spmdflow.errors import DataError

MODEL = Path(__file__).parents[3] / "algos/arithmetic/model"
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}={% endif %}"
)
VOCABULARY = json.loads((MODEL / "tokenizer.json").read_text())["model"]["vocab"]
BOS, EOS, PAD, PLUS, EQUALS, ONE, TWO = (
    VOCABULARY[token] for token in ("<bos>", "<eos>", "<pad>", "+", "=", "1", "2")
)


def edited_tokenizer(folder: Path, edit: Callable[[dict[str, Any], dict[str, Any]], None]) -> str:
    """A copy of the bundled tokenizer; edit changes (tokenizer.json, tokenizer_config.json)."""
    folder.mkdir()
    names = ("tokenizer.json", "tokenizer_config.json")
    documents = [json.loads((MODEL / name).read_text()) for name in names]
    edit(*documents)
    for name, document in zip(names, documents):
        (folder / name).write_text(json.dumps(document))
    return str(folder)


def source_of(path: Path, tokenizer_path: str = str(MODEL), **settings: Any) -> PromptSource:
    """Scan a file and open it as a rank does."""
    cfg = DataConfig(train_path=str(path), tokenizer_path=tokenizer_path, **settings)
    return PromptSource(scan(cfg, path, load_tokenizer(tokenizer_path)).files, cfg)


def token_lists(source: PromptSource, numbers: list[int]) -> list[list[int]]:
    """Prompt ids of rows."""
    return [row.tolist() for row in rows_of(source.read_rows(numbers)["prompts"])]


@pytest.fixture
def three_rows(tmp_path: Path) -> Path:
    """Three prompts and a blank line, in Windows and Unix line ends, the last without one."""
    path = tmp_path / "p.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf{"prompt": "1+2=", "answer": "3", "level": 1}\r\n\n'
        b'{"prompt": "2", "answer": null}\n{"prompt": "12+1="}'
    )
    return path


def test_rows_read_by_number_in_any_order_have_their_text_and_other_fields(three_rows):
    source = source_of(three_rows)

    batch = source.read_rows([3, 0, 0])

    assert set(batch.keys()) == {"prompts", "prompt_text", "row"}
    assert batch["prompt_text"] == ["12+1=", "1+2=", "1+2="]
    assert [json.loads(row) for row in batch["row"]] == [{}, *2 * [{"answer": "3", "level": 1}]]
    assert token_lists(source, [0]) == [[BOS, ONE, PLUS, TWO, EQUALS]]


def test_no_rows_give_empty_columns_of_the_same_kinds(three_rows):
    batch = source_of(three_rows).read_rows([])

    assert batch.batch_size == (0,)
    assert batch["prompts"].is_nested and batch["prompts"].values().numel() == 0
    assert list(batch["prompt_text"]) == list(batch["row"]) == []


def test_packed_files_and_parquet_give_the_rows_of_the_plain_file(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [{"prompt": f"{n}+{n}=", "answer": str(2 * n), "n": n} for n in range(3000)]
    plain = tmp_path / "p.jsonl"
    plain.write_text("".join(json.dumps(row) + "\n" for row in rows))
    packed = tmp_path / "p.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    with pyarrow.output_stream(str(tmp_path / "p.jsonl.zst"), compression="zstd") as zstd:
        zstd.write(plain.read_bytes())
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "p.parquet")
    numbers = [2999, 0, 1024, 1023, 7]

    batches = [source_of(tmp_path / name).read_rows(numbers) for name in FILES]

    for batch in batches:
        assert batch["prompt_text"] == [f"{n}+{n}=" for n in numbers]
        assert [json.loads(row) for row in batch["row"]] == [
            {"answer": str(2 * n), "n": n} for n in numbers
        ]


FILES = ("p.jsonl", "p.jsonl.gz", "p.jsonl.zst", "p.parquet")


def test_parquet_dates_become_text(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    from datetime import date

    table = pyarrow.Table.from_pylist([{"prompt": "1", "day": date(2024, 2, 3)}])
    parquet.write_table(table, tmp_path / "p.parquet")

    batch = source_of(tmp_path / "p.parquet").read_rows([0])

    assert batch["row"] == ['{"day": "2024-02-03"}']


def test_lines_longer_than_a_block_are_read_whole(tmp_path):
    path = tmp_path / "p.jsonl"
    lines = [b"a" * 3_000_000 + b"\n", b"\n", b"b\n", b"c" * 1_500_000]
    path.write_bytes(b"".join(lines))

    file = LineFile(path)

    assert list(file.lines()) == lines
    assert len(file) == 4
    assert file.read([3, 1, 0, 2]) == [lines[3], lines[1], lines[0], lines[2]]


def test_two_passes_over_a_file_do_not_disturb_each_other(three_rows):
    file = LineFile(three_rows)

    pairs = list(zip(file.lines(), file.lines()))

    assert len(pairs) == len(file) == 4
    assert all(a == b for a, b in pairs)


def test_trailing_end_token_of_a_tokenizer_is_left_out(tmp_path):
    def add_eos(document: dict[str, Any], config: dict[str, Any]) -> None:
        processor = document["post_processor"]
        processor["single"].append({"SpecialToken": {"id": "<eos>", "type_id": 0}})
        processor["special_tokens"]["<eos>"] = {"id": "<eos>", "ids": [EOS], "tokens": ["<eos>"]}

    folder = edited_tokenizer(tmp_path / "t", add_eos)
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "1+2="}\n{"prompt": ""}\n')
    assert load_tokenizer(folder)("1").input_ids == [BOS, ONE, EOS]

    assert token_lists(source_of(path, folder), [0, 1]) == [[BOS, ONE, PLUS, TWO, EQUALS], [BOS]]


def test_tokenizer_whose_end_is_its_beginning_keeps_the_leading_token(tmp_path):
    folder = edited_tokenizer(tmp_path / "t", lambda _, config: config.update(eos_token="<bos>"))
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "1"}\n')

    assert eos_token_id(load_tokenizer(folder)) == BOS
    assert token_lists(source_of(path, folder), [0]) == [[BOS, ONE]]


def test_tokenizer_of_a_folder_is_loaded_once():
    assert load_tokenizer(str(MODEL)) is load_tokenizer(str(MODEL))


def test_chat_template_renders_text_and_messages_alike_up_to_the_answer(tmp_path):
    folder = edited_tokenizer(
        tmp_path / "t", lambda _, config: config.update(chat_template=TEMPLATE)
    )
    path = tmp_path / "p.jsonl"
    message = {"role": "user", "content": "1+2"}
    rows = [{"q": "1+2", "a": 1}, {"q": [message]}, {"q": [message, message]}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    source = source_of(path, folder, prompt_column="q", chat_template=True)

    once = [ONE, PLUS, TWO]
    assert token_lists(source, [0, 1, 2]) == [
        [BOS, *once, EQUALS],
        [BOS, *once, EQUALS],
        [BOS, *once, *once, EQUALS],
    ]
    batch = source.read_rows([0, 1])
    assert batch["prompt_text"] == ["<bos>1+2=", "<bos>1+2="]
    assert batch["row"] == ['{"a": 1}', "{}"]


def test_scan_reports_good_over_long_and_unreadable_rows(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "1"}\n{"prompt": 5}\n{"prompt": "123456"}\n\n{"prompt": "12"}\n')
    cfg = DataConfig(train_path="", max_prompt_tokens=3, max_bad_rows=1)

    report = scan(cfg, path, load_tokenizer(str(MODEL)))

    assert report.rows.tolist() == [0, 4]
    assert report.tokens_of([4, 0, 4]).tolist() == [3, 2, 3]
    assert (report.num_rows, report.num_too_long, report.longest_tokens) == (4, 1, 3)
    assert report.bad_rows == [f"{path}:2 has 'prompt' = number, expected text"]
    assert report.describe() == (
        f"{path}: 2 prompts of at most 3 tokens, 1 too long, skipped, 1 unreadable, skipped"
    )


def test_fingerprint_changes_with_content_and_with_the_set_of_good_rows(tmp_path):
    path = tmp_path / "p.jsonl"
    copy = tmp_path / "copy.jsonl"
    path.write_text('{"prompt": "1"}\n{"prompt": "123"}\n')
    shutil.copy(path, copy)
    other = tmp_path / "other.jsonl"
    other.write_text('{"prompt": "2"}\n{"prompt": "123"}\n')
    tokenizer = load_tokenizer(str(MODEL))

    def fingerprint(file: Path, limit: int) -> str:
        return scan(DataConfig(train_path="", max_prompt_tokens=limit), file, tokenizer).fingerprint

    assert fingerprint(path, 9) == fingerprint(copy, 8)
    assert len({fingerprint(path, 9), fingerprint(other, 9), fingerprint(path, 2)}) == 3


def test_rank_with_a_file_of_another_size_is_refused(three_rows):
    cfg = DataConfig(train_path="", tokenizer_path=str(MODEL))
    files = scan(cfg, three_rows, load_tokenizer(str(MODEL))).files
    size = three_rows.stat().st_size
    with three_rows.open("ab") as file:
        file.write(b"\n")

    with pytest.raises(DataError) as caught:
        PromptSource(files, cfg)

    assert str(caught.value) == (
        f"{three_rows}: got a file of {size + 1} bytes, expected the {size} bytes that rank 0 "
        f"scanned; give every node the same file"
    )


def test_row_that_changed_after_the_scan_is_named(three_rows):
    source = source_of(three_rows)
    three_rows.write_bytes(three_rows.read_bytes().replace(b'"2"', b"222"))

    with pytest.raises(DataError) as caught:
        source.read_rows([0, 2])

    assert str(caught.value) == (
        f"{three_rows}:3 has 'prompt' = number, expected text; expected the good row that rank 0 "
        f"scanned; leave the file as it is during a run, and give every node the same one"
    )
