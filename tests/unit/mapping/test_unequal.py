"""Seconds of rows of unequal lengths: equal rows cost what the formulas say, the longest decide."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from bench._dataflows import NOMINAL

from spmdflow.mapping.dataflow import Engine, Model, Rollout, Strategy, Workload
from spmdflow.mapping.hardware import load_hardware
from spmdflow.mapping.seconds import decode_parts, generation_parts, pass_parts, total
from spmdflow.mapping.unequal import (
    Rows,
    SharedRows,
    busiest_tokens,
    estimate_generation,
    pass_parts_by_row,
    starts_of,
)

H100 = load_hardware("h100")
SHAPE = NOMINAL["7B"]
ONE = Strategy(1, 1, 1, 1, 1)


def model_of(kind: str = "fsdp", **engine: object) -> Model:
    values = {"micro_batch_tokens": 4096} | engine
    return Model("actor", SHAPE, trained=True, engine=Engine(kind, **values), rollout=Rollout())


def rows_of(*responses: int, prompts: int = 100) -> Rows:
    return Rows(np.full(len(responses), prompts), np.array(responses))


def test_rows_start_when_earlier_ones_end() -> None:
    assert starts_of(np.array([5, 2, 3, 1]), 2).tolist() == [0, 0, 2, 5]
    assert starts_of(np.array([5, 2, 3, 1]), 9).tolist() == [0, 0, 0, 0]


def test_generation_of_equal_rows_is_that_of_the_formula() -> None:
    found = estimate_generation(
        model_of(), SharedRows((rows_of(*[400] * 32),)), ONE, H100, slots=32
    )

    expected = generation_parts(model_of(), Workload(32, 100, 400), ONE, H100, kv_bytes=1e12)
    for name, seconds in expected.items():
        assert found.parts[name] == pytest.approx(float(seconds)), name
    assert found.tail_seconds == 0


def test_generation_takes_as_many_steps_as_its_longest_row() -> None:
    short = estimate_generation(
        model_of(), SharedRows((rows_of(*[100] * 32),)), ONE, H100, slots=32
    )
    long = estimate_generation(
        model_of(), SharedRows((rows_of(*[100] * 31, 2100),)), ONE, H100, slots=32
    )

    alone = decode_parts(model_of(), ONE, H100, batch=1, context=100 + (100 + 2100) / 2)
    tail = 2000 * float(total(alone))
    assert long.tail_seconds == pytest.approx(tail)
    assert total(long.parts) - total(short.parts) == pytest.approx(tail)
    assert long.longest == 2100


def test_generation_waits_for_its_slowest_replica() -> None:
    replicas = (rows_of(10, 10), rows_of(10, 500), rows_of(20, 20))

    found = estimate_generation(model_of(), SharedRows(replicas), ONE, H100, slots=8)

    alone = estimate_generation(model_of(), SharedRows((replicas[1],)), ONE, H100, slots=8)
    assert found.parts == alone.parts and found.longest == 500


def test_fewer_slots_take_longer() -> None:
    rows = SharedRows((rows_of(*range(50, 90)),))
    seconds = []
    for slots in (40, 20, 10, 1):
        seconds.append(total(estimate_generation(model_of(), rows, ONE, H100, slots=slots).parts))

    assert seconds == sorted(seconds) and seconds[-1] > 10 * seconds[0]


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("kind", ["fsdp", "zero2", "megatron"])
def test_pass_of_equal_rows_is_that_of_the_formula(kind: str, trains: bool) -> None:
    model = model_of(kind)
    share = rows_of(*[412] * 32)  # 512 tokens a row, eight rows a micro-batch
    steps = [SharedRows((share, share), 4)] * (2 if trains else 1)
    strategy = Strategy(1, 1, 2, 1, 1)

    found = pass_parts_by_row(model, steps, strategy, H100, trains=trains)

    num_rows = 64 * len(steps)
    work = Workload(num_rows, 100, 412, num_updates=len(steps))
    expected = pass_parts(model, work, strategy, H100, trains=trains)
    for name, seconds in expected.items():
        assert found[name] == pytest.approx(float(seconds)), name


def test_pass_waits_for_the_rank_with_most_tokens() -> None:
    shares = (rows_of(100, 100, 100, 100), rows_of(700, 100, 100, 100))

    busiest = busiest_tokens(model_of("megatron"), SharedRows(shares, 2))

    assert busiest.tokens == (800 + 3 * 200) / 2
    assert busiest.answered == 1000 / 2
    assert busiest.context == pytest.approx((800**2 + 3 * 200**2) / 1400 / 2)


def test_ranks_that_meet_in_every_micro_batch_wait_in_every_one() -> None:
    shares = (rows_of(900, 100, prompts=0), rows_of(100, 900, prompts=0))
    apart = model_of("megatron", micro_batch_tokens=None)
    meeting = model_of("fsdp", micro_batch_tokens=None)

    assert busiest_tokens(apart, SharedRows(shares, 2)).tokens == 500
    assert busiest_tokens(meeting, SharedRows(shares, 2)).tokens == 900


def test_padded_rows_are_as_long_as_the_longest_of_their_micro_batch() -> None:
    padded = model_of("fsdp", options=("padded",), micro_batch_tokens=None)

    found = busiest_tokens(padded, SharedRows((rows_of(300, 900),), 1))

    assert found.tokens == 2 * 1000 and found.context == 500
    assert found.answered == 1200


def test_forwards_before_an_update_are_those_of_a_forward_call_with_the_same_rows() -> None:
    step = SharedRows((rows_of(300, 200), rows_of(100, 50)), num_micro=2)
    cut = Strategy(2, 1, 1, 1, 1)

    def seconds(**words: object) -> float:
        return float(total(pass_parts_by_row(model_of(), [step], cut, H100, **words)))

    plain = seconds(trains=True)
    scored = seconds(trains=True, num_forwards=1)
    forward = seconds(trains=False)

    assert scored - plain == pytest.approx(forward - H100.call_seconds)
    work = Workload(4, 100, 100, num_updates=2)
    without = float(total(pass_parts(model_of(), work, cut, H100, trains=True)))
    double = replace(work, num_forwards=1)
    more = float(total(pass_parts(model_of(), double, cut, H100, trains=True))) - without
    one = float(total(pass_parts(model_of(), Workload(2, 100, 100), cut, H100, trains=False)))
    assert more == pytest.approx(2 * (one - H100.call_seconds))
