"""Files that users edit are imported as they are now."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from spmdflow.source_file import import_file


def test_file_rewritten_within_its_second_with_the_same_size_runs_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    path = tmp_path / "mine.py"
    values = []
    for value in (1, 2):
        path.write_text(f"value = {value}\n")
        os.utime(path, (1e9, 1e9))
        values.append(import_file("file_of_this_test", path).value)
    del sys.modules["file_of_this_test"]

    assert values == [1, 2]
    assert [each.name for each in tmp_path.iterdir()] == ["mine.py"]
