"""Megatron with TransformerEngine's layers and Adam, in stand-ins of plain torch (device/te).

Tolerances: float32 sums in another order. Measured: stand-ins 4.8e-6 (gradients reach 100); logits
6e-7, loss and gradient norm 9e-6, weights after two steps 2.8e-5 (Adam's first steps are signs, and
of a rounding error nobody agrees), generation 1.2e-6. In bfloat16 a weight may differ by its last
bit: 2^-7 at 1.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.simcuda.conftest import Simulated

pytestmark = pytest.mark.drill

PROGRAM = Path(__file__).parent / "programs" / "transformer_engine_rounds.py"
LAYERS = ["TELayerNormColumnParallelLinear", "TEPackedAttention", "TERowParallelLinear"]
Found = Sequence[dict[str, Any]]


@pytest.fixture(scope="module")
def found(simulated: Simulated, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What each of four ranks measured."""
    if find_spec("megatron") is None:
        pytest.skip("the megatron extra is not installed")
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4")
    folder = tmp_path_factory.mktemp("te")
    output = simulated(*torchrun, PROGRAM, folder, transformer_engine=True)
    return list(json.loads(output.splitlines()[-1]))


def engines(found: Found) -> list[tuple[str, dict[str, Any]]]:
    """(case, what a rank of it measured)."""
    return [
        (name, x)
        for rank in found
        for name, x in rank.items()
        if isinstance(x, dict) and "adams" in x
    ]


def test_stand_ins_equal_the_modules_of_torch(found: Found) -> None:
    for rank in found[:2]:
        assert len(rank["modules"]) == 10
        assert all(gap <= 1e-5 for gap in rank["modules"].values()), rank["modules"]


def test_stand_ins_on_the_meta_device_are_marked_when_they_get_memory(found: Found) -> None:
    assert all(rank["meta"] == [False, True] for rank in found)


def test_engine_takes_the_layers_of_transformer_engine_and_torchs_optimizer(found: Found) -> None:
    for name, x in engines(found):
        assert [layer for layer in x["layers"] if layer != "RMSNorm"] == LAYERS, name
        assert x["adams"] == ["AdamW", "AdamW"], name


def test_update_equals_the_one_without_transformer_engine(found: Found) -> None:
    exact = [(name, x) for name, x in engines(found) if name != "bfloat16"]
    assert len(exact) == 3 * 4
    for name, x in exact:
        assert x["outputs"] <= 1e-5 and x["metrics"] <= 5e-5 and x["weights"] <= 1e-4, (name, x)


def test_update_in_bfloat16_differs_by_a_last_bit(found: Found) -> None:
    for rank in found:
        assert rank["bfloat16"]["outputs"] <= 0.05
        assert rank["bfloat16"]["weights"] <= 2**-7


def test_state_of_one_continues_in_the_other(found: Found) -> None:
    for name, x in engines(found):
        assert x["exchanged"] <= (2**-7 if name == "bfloat16" else 1e-4), (name, x)


def test_generation_follows_the_trainer_through_tables_and_sync(found: Found) -> None:
    for rank in found:
        assert len(rank["followed"]) == 3
        for x in rank["followed"]:
            assert x["verified"] == 1 and x["gap"] <= 1e-5 and x["worse"] <= 1e-5
