"""scripts/delta_syncs.py: updates reach receivers bit for bit, in the planned bytes.

docs/lab/DELTAS.md has the figures of longer runs.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from delta_syncs import ARITHMETIC, Case, Result, run_case


@pytest.fixture
def world() -> Iterator[None]:
    """A process group of this process alone, which a train engine needs."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def run(lr: float, precision: str, num_syncs: int) -> Result:
    """A case with the bundled model."""
    return run_case(
        Case(
            model=str(ARITHMETIC / "model"),
            data=str(ARITHMETIC / "train.jsonl"),
            lr=lr,
            precision=precision,
            num_syncs=num_syncs,
            most_tokens=64,
        )
    )


def test_a_few_syncs_arrive_bit_for_bit_as_deltas_in_bfloat16_and_whole_in_float32(
    world: None,
) -> None:
    small = run(1e-6, "bfloat16", num_syncs=4)
    precise = run(1e-6, "float32", num_syncs=2)

    assert 0 < max(small.shares) < 0.1
    assert max(small.byte_counts) < 0.3 * small.whole_bytes
    assert min(precise.shares) > 0.9
    assert precise.byte_counts == [precise.whole_bytes] * 2


@pytest.mark.drill
def test_500_syncs_arrive_bit_for_bit_and_more_values_change_at_a_higher_rate(world: None) -> None:
    results = []
    for lr, num_syncs in ((1e-6, 200), (1e-5, 200), (1e-4, 100)):
        results.append(run(lr, "bfloat16", num_syncs))

    means = [sum(each.shares) / len(each.shares) for each in results]
    assert means[0] < 0.05 < means[1] < 1 / 3 < means[2]
    assert sum(each.num_checks for each in results) > 2 * 500
    byte_counts = [sum(each.byte_counts) / len(each.byte_counts) for each in results]
    assert sorted(byte_counts) == byte_counts
