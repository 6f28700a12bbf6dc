"""docs/DATA.md quotes what `spmdflow data show` prints for rows of SmolLM2."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest

from spmdflow.__main__ import main
from tests.pages import ROOT, Block, blocks_of
from tests.smollm2 import SMOLLM2, needs_smollm2

BLOCKS = blocks_of(ROOT / "docs" / "DATA.md")
COMMAND = "$ spmdflow data show "
QUOTED = [block for block in BLOCKS if block.text.startswith(COMMAND)]


def test_page_quotes_examples_and_pairs() -> None:
    assert [block.text.split()[4] for block in QUOTED] == ["sft", "dpo"]


@needs_smollm2
@pytest.mark.parametrize("block", QUOTED, ids=lambda block: block.text.split()[4])
def test_quoted_rows_are_those_that_the_command_prints(
    block: Block,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (rows,) = [each.text for each in BLOCKS if "cat > chats.jsonl" in each.text]
    subprocess.run(["bash", "-eu"], input=rows, text=True, cwd=tmp_path, check=True)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "SmolLM2-135M-Instruct").symlink_to(SMOLLM2)
    monkeypatch.chdir(tmp_path)
    command, _, output = block.text.replace("\\\n", " ").partition("\n")

    assert main(["data", "show", *shlex.split(command.removeprefix(COMMAND))]) == 0

    assert capsys.readouterr().out == output
