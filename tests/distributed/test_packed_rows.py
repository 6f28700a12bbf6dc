"""Packed rows against padded ones, on every data-parallel engine. One torchrun measures.

Tiny random models of four families, with sliding windows shorter than the rows; prompts and
responses of mixed length. Gaps are relative to the largest number of a tensor.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.forked import torchrun

pytestmark = pytest.mark.drill

PROGRAM = Path(__file__).parent / "programs" / "packed_rows.py"
TOLERANCE = {"float32": 1e-5, "float64": 1e-12}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What four gloo ranks measured."""
    folder = tmp_path_factory.mktemp("packed")
    words = ["--nproc-per-node=4", str(PROGRAM), str(folder)]
    torchrun(words, folder / "log.txt", seconds=840)
    return json.loads((folder / "results.json").read_text())


@pytest.fixture
def cases(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Both ways on one engine each."""
    return found["cases"]


@pytest.mark.parametrize("what", ["answers", "losses", "gradients"])
def test_packed_rows_give_the_numbers_of_padded_ones(
    cases: list[dict[str, Any]], what: str
) -> None:
    assert {case["dp"] for case in cases} == {1, 2, 3, 4}
    assert {case["kind"] for case in cases} == {"fsdp", "zero1", "zero2", "zero3"}
    for case in cases:
        assert case[what] <= TOLERANCE[case["dtype"]], case


def test_model_computes_as_many_positions_as_rows_have_tokens(cases: list[dict[str, Any]]) -> None:
    for case in cases:
        assert sum(case["padded_positions"]) > sum(case["tokens"])
        if case["dp"] > 2:
            assert case["positions"] == case["tokens"], case


def test_prompt_of_several_rows_is_computed_once(cases: list[dict[str, Any]]) -> None:
    shared = [case for case in cases if case["dp"] <= 2]
    assert {case["kind"] for case in shared} == {"fsdp", "zero1", "zero2", "zero3"}
    for case in shared:
        assert sum(case["positions"]) <= 0.8 * sum(case["tokens"]), case


def test_rows_do_not_move_when_others_of_their_micro_batch_do(found: dict[str, Any]) -> None:
    """Matrix products over all rows may round a row otherwise at another place: 4e-7 measured."""
    for family, (permuted, replaced) in found["moved"].items():
        assert permuted <= 1e-6 and replaced == 0.0, family
