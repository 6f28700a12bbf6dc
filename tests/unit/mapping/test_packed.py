"""Micro-batches that a plan counts with, of packed and of padded rows."""

from __future__ import annotations

from dataclasses import replace

from spmdflow.mapping.dataflow import Engine, Model, Strategy, Workload
from spmdflow.mapping.seconds import micro_batches
from tests.simcuda.memory_cases import SHAPES


def test_packed_rows_fill_a_micro_batch_of_tokens_where_padded_ones_leave_a_remainder() -> None:
    work = Workload(64, 1024, 1024)  # 131,072 tokens on one rank
    packed = Engine("fsdp", micro_batch_tokens=5120)
    padded = replace(packed, options=("padded",))

    found = [
        micro_batches(
            Model("actor", SHAPES["1B"], trained=True, engine=each), work, Strategy(), trains=True
        )
        for each in (packed, padded)
    ]

    assert found == [(2.5, 26), (2, 32)]
