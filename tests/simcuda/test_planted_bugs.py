"""The tier has teeth: typical device bugs, planted one by one, do not pass unnoticed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.simcuda.conftest import Simulated
from tests.simcuda.programs.planted import BUGS

pytestmark = pytest.mark.drill


@pytest.fixture(scope="module")
def noticed(simulated: Simulated, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """Bug -> how it was noticed, "" if it was not; under "" the program without a bug."""
    program = Path(__file__).parent / "programs" / "planted.py"
    output = simulated(program, tmp_path_factory.mktemp("planted"))
    return dict(json.loads(output.splitlines()[-1]))


def test_program_without_a_bug_passes(noticed: Mapping[str, str]) -> None:
    assert noticed[""] == ""


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bug_is_noticed(noticed: Mapping[str, str], bug: str) -> None:
    assert noticed[bug], f"{bug}: {BUGS[bug].wrong} passes"
