"""A run says that vLLM's own loader puts weights elsewhere than the recorded table of its plan."""

from __future__ import annotations

from dataclasses import replace

import torch

from scripts.families.tiny import FAMILIES, SIZES
from spmdflow.rollout.generator import Replica
from spmdflow.rollout.vllm_derived import DerivedTables
from spmdflow.rollout.vllm_weights import difference_from_recorded, stock_table
from spmdflow.weights.table import LocalTensor, shapes_by_name
from tests.unit.weight_shapes import family_architecture

REPLICA = Replica(1, (0, 1), (0, 1), (1,))
ARCHITECTURE = family_architecture(
    "granitemoe", SIZES | FAMILIES["granitemoe"] | {"vocab_size": 99, "pad_token_id": 2}
)
EXPERTS = "model.layers.1.block_sparse_moe.experts.routed_experts.w13_weight"


def difference(changes: dict[str, LocalTensor]) -> str:
    """What is said of the recorded table with some other tensors on the second of two ranks."""
    table = stock_table(ARCHITECTURE, REPLICA, 1) | changes
    shapes = {name: torch.Size(shape) for name, shape in shapes_by_name(ARCHITECTURE).items()}
    return difference_from_recorded(
        ARCHITECTURE, DerivedTables(shapes, [{}, table], frozenset()), REPLICA
    )


def test_recorded_table_has_no_difference() -> None:
    assert difference({}) == ""


def test_other_half_of_the_experts_is_named() -> None:
    other = stock_table(ARCHITECTURE, REPLICA, 0)[EXPERTS]

    assert difference({EXPERTS: other}) == f"{EXPERTS} has other elements"


def test_new_parameter_is_named() -> None:
    assert "only one of them has new.weight" in difference({"new.weight": LocalTensor((1,), ())})


def test_family_that_is_not_recorded_has_no_difference() -> None:
    arch = replace(ARCHITECTURE, family="new")
    nothing = DerivedTables({}, [{}, {}], frozenset())

    assert difference_from_recorded(arch, nothing, REPLICA) == ""
