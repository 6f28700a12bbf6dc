"""`bench.py trl`: the work that both trainers do, its products, and how steps are timed."""

from __future__ import annotations

import importlib
import sys
from itertools import count
from pathlib import Path
from types import ModuleType

import pytest

from tests.policy.house import REPOSITORY

BURNING = """
import pathlib, sys, time
for number in range(3):
    end = time.process_time() + 0.3
    while time.process_time() < end:
        pass
    print("step", file=open(sys.argv[1], "a"))
    while not pathlib.Path(f"{sys.argv[1]}-{number}").exists():
        time.sleep(0.05)  # until somebody has looked, however busy the machine
    time.sleep(0.1)
"""


@pytest.fixture(autouse=True)
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    """scripts/ is importable."""
    monkeypatch.syspath_prepend(str(REPOSITORY / "scripts"))


def load(name: str) -> ModuleType:
    return importlib.import_module(f"bench.{name}")


def test_prompts_of_the_second_setting_have_their_lengths_and_no_end(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    module = load("_trl_work")

    work = module.vocabulary(tmp_path, threads=2, steps=2)

    lengths = sum(work.prompt_tokens(), [])
    shortest, longest = module.LENGTHS
    assert len(lengths) == 2 * work.num_prompts
    assert shortest <= min(lengths) < max(lengths) <= longest
    tokens = work.num_samples * (sum(lengths) / 2 + work.num_prompts * work.new_tokens)
    assert work.tokens() == tokens
    tokenizer = AutoTokenizer.from_pretrained(work.model)
    ids = tokenizer(Path(work.prompts).read_text().split('"')[3]).input_ids
    assert tokenizer.eos_token_id == module.END and module.END not in ids
    products = load("_products").products
    whole = products(work)
    assert whole.seconds > 0
    assert products(work, shares_prompts=True).flops < whole.flops, "prompts are computed once"


def test_steps_of_a_program_are_timed_with_its_cpu_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [sys.executable, "-c", BURNING, str(tmp_path / "steps")]
    module = load("_steps")
    looks = count()
    cpu_seconds = module.cpu_seconds

    def look(pid: int) -> float:
        seconds = cpu_seconds(pid)
        (tmp_path / f"steps-{next(looks)}").touch()
        return seconds

    monkeypatch.setattr(module, "cpu_seconds", look)
    seen = module.run_watched(command, tmp_path / "steps", tmp_path / "log", cwd=tmp_path, more={})

    assert seen.peak_bytes > 4e6, "of a Python process"
    assert len(seen.steps) == 2
    for step in seen.steps:
        assert 0.2 < step.cpu < 0.5 and step.wall > 0.35


def test_program_that_fails_is_told_with_its_log(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "raise SystemExit('no step today')"]

    with pytest.raises(SystemExit, match="status 1\nno step today"):
        load("_steps").run_watched(
            command, tmp_path / "steps", tmp_path / "log", cwd=tmp_path, more={}
        )
