"""docs/JUDGES.md: its judge asks its server, many times at once, and its failures are repeated."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from spmdflow.rewards.pool import RewardPool

PAGE = Path(__file__).parents[2] / "docs" / "JUDGES.md"

pytest.importorskip("httpx", reason="httpx is not installed")


def write_file(folder: Path, name: str) -> Path:
    """The page's block that begins with the file's name."""
    (text,) = re.findall(rf"```python\n(# {name}\n.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    path = folder / name
    path.write_text(text)
    return path


@pytest.fixture
def judge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The page's function, with its server running."""
    server = write_file(tmp_path, "judge_server.py")
    with subprocess.Popen(
        [sys.executable, str(server), "0"], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        monkeypatch.setenv("JUDGE_URL", process.stdout.readline().strip())
        yield f"{write_file(tmp_path, 'judge.py')}:grade"
        process.kill()


def test_judge_of_the_page_grades_by_its_server(judge: str) -> None:
    responses = ["r" * number for number in range(40)]

    with RewardPool({"judged": f"0.5 * {judge}"}, 1, sample_seconds=120, concurrency=16) as pool:
        results = pool.score([""] * 40, responses, [{}] * 40).results

    grades = [min(length, 10) / 10 for length in range(40)]
    assert [result["judged"] for result in results] == grades
    assert [result["score"] for result in results] == [grade / 2 for grade in grades]
    assert {result["unreadable"] for result in results} == {0.0}


def test_judge_without_a_server_fails_after_its_repetitions(
    judge: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_URL", "http://127.0.0.1:1/v1")

    with RewardPool(judge, 1, sample_seconds=120, retries=1, on_error="zero") as pool:
        judgement = pool.score([""], ["r"], [{}])

    assert [result["errors"] for result in judgement.results] == [1.0]
    assert "raised ConnectError" in judgement.first_failure
