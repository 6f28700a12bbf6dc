"""Deliberate faults: each still fits the code, and each is noticed by a test."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from tests.mutants.run import REPOSITORY, main, mutants


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_every_mutant_fits_the_code() -> None:
    misfits = {}
    for mutant in mutants():
        words = ["git", "apply", "--check", str(mutant.path)]
        done = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True)
        if done.returncode:
            misfits[mutant.name] = done.stderr

    assert misfits == {}, "make the change of these again: git diff > tests/mutants/NAME.patch"


def test_every_mutant_names_tests_that_exist() -> None:
    named = {test.partition("::")[0] for mutant in mutants() for test in mutant.tests}

    assert {name for name in named if not (REPOSITORY / name).is_file()} == set()
    assert len(mutants()) >= 46


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_every_mutant_is_noticed() -> None:
    assert main([]) == 0
