"""Bytes and seconds of attention where ranks divide rows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from spmdflow.mapping.context import (
    attention_bytes,
    attention_bytes_of_token,
    attention_message_seconds,
)
from spmdflow.mapping.dataflow import Engine, Model, Strategy
from spmdflow.mapping.hardware import load_hardware
from spmdflow.weights.architecture import Architecture

H100 = load_hardware("h100")
EIGHT = Architecture(
    family="llama",
    num_layers=3,
    hidden_size=64,
    ffn_size=160,
    num_heads=8,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=97,
    tied=False,
    max_positions=128,
)
NINE = replace(EIGHT, num_heads=9, num_kv_heads=3)


def model_of(shape: Architecture, attention: str) -> Model:
    engine = Engine(kind="fsdp", context_attention=attention, dtype="bfloat16")
    return Model("actor", shape, engine=engine)


@pytest.mark.parametrize(
    ("shape", "attention", "cp", "forward", "backward"),
    [
        # queries and results of 64, keys and values of 16 repeated to 32; 3/4 leave; 2 bytes each
        (EIGHT, "ulysses", 4, 2 * (64 + 32) * 3 / 4 * 2, 2 * (64 + 32) * 3 / 4 * 2),
        (EIGHT, "auto", 4, 2 * (64 + 32) * 3 / 4 * 2, 2 * (64 + 32) * 3 / 4 * 2),
        (EIGHT, "ulysses", 2, 2 * (64 + 16) / 2 * 2, 2 * (64 + 16) / 2 * 2),
        # keys and values of 24 go to three others, in a ring also for the backward
        (NINE, "gather", 4, 2 * 24 * 3 * 2, 2 * 24 * 3 * 2),
        (NINE, "ring", 4, 2 * 24 * 3 * 2, 2 * 2 * 24 * 3 * 2),
        (NINE, "auto", 4, 2 * 24 * 3 * 2, 2 * 2 * 24 * 3 * 2),
        (EIGHT, "ring", 1, 0, 0),
    ],
)
def test_bytes_of_a_token_are_those_of_a_formula(
    shape: Architecture, attention: str, cp: int, forward: float, backward: float
) -> None:
    model = model_of(shape, attention)
    cut = Strategy(1, 1, 1, cp=cp)

    assert attention_bytes(model, cut) == pytest.approx((forward, backward))
    assert attention_bytes_of_token(model, cut) == pytest.approx(3 * (forward + backward))
    again = replace(cut, recompute=True)
    assert attention_bytes_of_token(model, again) == pytest.approx(3 * (2 * forward + backward))


def test_a_ring_waits_only_for_what_attention_does_not_hide() -> None:
    cut = Strategy(1, 1, 1, cp=4)
    gather, ring = (model_of(NINE, attention) for attention in ("gather", "ring"))

    def seconds(model: Model, computing: float) -> float:
        found = attention_message_seconds(
            model, 4096.0, cut, H100, computing=computing, trains=False
        )
        return float(found)

    whole = seconds(gather, 0.0)
    assert seconds(ring, 0.0) == pytest.approx(whole) and whole > 0
    assert seconds(gather, whole) == pytest.approx(whole)
    assert seconds(ring, whole / 2) == pytest.approx(whole / 2)
    assert seconds(ring, 2 * whole) == 0.0
