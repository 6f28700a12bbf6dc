"""Rows that are far too long: counted without being tokenised, and read in bounded memory."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from spmdflow.config.schema import DataConfig
from spmdflow.datasets.line_file import LineFile
from spmdflow.datasets.scan import scan
from spmdflow.datasets.tokenizer import longest_token
from tests.unit.datasets.families import tokenizer_of

REPOSITORY = Path(__file__).parents[3]


class ListeningTokenizer(PreTrainedTokenizerFast):
    """A tokenizer that notes how many characters it was given, at most together."""

    most_characters = 0

    def __call__(self, text: Any, *args: Any, **more: Any) -> Any:
        size = sum(map(len, text)) if isinstance(text, list) else len(text)
        self.most_characters = max(self.most_characters, size)
        return super().__call__(text, *args, **more)


def listening() -> ListeningTokenizer:
    known = tokenizer_of("llama3")
    return ListeningTokenizer(tokenizer_object=known.backend_tokenizer, eos_token="<|eot_id|>")


def written(path: Path, *prompts: str) -> Path:
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    return path


def test_text_that_cannot_fit_is_counted_as_too_long_and_not_tokenised(tmp_path: Path) -> None:
    tokenizer = listening()
    path = written(tmp_path / "p.jsonl", "the user", "the " * 10_000, "the user asks " * 10)
    cfg = DataConfig(train_path=str(path), max_prompt_tokens=100)

    report = scan(cfg, path, tokenizer)

    assert (list(report.rows), report.num_too_long, report.num_rows) == ([0, 2], 1, 3)
    assert tokenizer.most_characters < 1_000


def test_long_texts_are_not_tokenised_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spmdflow.datasets.scan._CHARACTERS_AT_A_TIME", 1_000)
    tokenizer = listening()
    path = written(tmp_path / "p.jsonl", *["the user asks " * 60] * 8)
    cfg = DataConfig(train_path=str(path), max_prompt_tokens=1 << 20)

    report = scan(cfg, path, tokenizer)

    assert len(report.rows) == 8
    assert tokenizer.most_characters < 2_000


def test_no_token_stands_for_more_characters_than_the_longest() -> None:
    tokenizer = listening()
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    longest = longest_token(tokenizer)
    assert longest is not None
    draw = random.Random(0)
    marks = "aeA\u0301\u0323\u0302 \n\u1ed9\U0001f600<the user asks assistant>"

    for _ in range(200):
        text = "".join(draw.choices(marks, k=draw.randrange(1, 40)))
        ids = tokenizer(text, add_special_tokens=False).input_ids
        assert len(text) <= longest * len(ids)


@pytest.mark.parametrize(
    "model",
    [
        models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"),
        models.BPE({"<unk>": 0, "a": 1}, [], unk_token="<unk>", fuse_unk=True),
    ],
    ids=["words", "no byte fallback"],
)
def test_a_tokenizer_with_unknown_words_has_no_longest_token(model: Any) -> None:
    tokenizer = listening()
    tokenizer.backend_tokenizer.model = model

    assert longest_token(tokenizer) is None


@pytest.mark.parametrize(
    ("normalizer", "pre_tokenizer"),
    [
        (normalizers.Strip(), None),
        (normalizers.Replace("aa", "a"), None),
        (None, pre_tokenizers.WhitespaceSplit()),
        (None, pre_tokenizers.Split(" ", "removed")),
    ],
)
def test_a_tokenizer_that_drops_characters_has_no_longest_token(
    normalizer: Any, pre_tokenizer: Any
) -> None:
    tokenizer = listening()
    if normalizer is not None:
        tokenizer.backend_tokenizer.normalizer = normalizer
    if pre_tokenizer is not None:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizer

    assert longest_token(tokenizer) is None


def test_lines_longer_than_a_block_are_read_whole(tmp_path: Path) -> None:
    block = 1 << 20
    sizes = (block - 1, block, block + 1, 3 * block, 0, 5)
    data = b"\n".join(b"x" * size for size in sizes)
    path = tmp_path / "lines.jsonl"
    path.write_bytes(data)

    lines = list(LineFile(path).lines())

    assert [len(line.rstrip(b"\n")) for line in lines] == list(sizes)
    assert b"".join(lines) == data


MEASURE = """
import resource, sys
from spmdflow.config.schema import DataConfig
from spmdflow.datasets.scan import scan
from tests.unit.datasets.families import tokenizer_of
tokenizer = tokenizer_of("llama3")
cfg = DataConfig(train_path=sys.argv[1])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
report = scan(cfg, sys.argv[1], tokenizer)
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
assert report.num_too_long == 1, report
print((after - before) // 1024)
"""


@pytest.mark.slow  # a process of its own, and a file of 100 MB
def test_row_of_100_mb_takes_less_than_1_gb(tmp_path: Path) -> None:
    path = written(tmp_path / "p.jsonl", "the user", "the user asks " * 7_200_000)

    measured = subprocess.run(
        [sys.executable, "-c", MEASURE, str(path)],
        cwd=REPOSITORY,
        check=True,
        capture_output=True,
        text=True,
    )

    assert int(measured.stdout) < 1_000
