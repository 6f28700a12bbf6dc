"""Row-maths marks, the positional hash and the learning-rate schedule: the engines' small parts."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torch import nn

from spmdflow.blocks.box import Box
from spmdflow.blocks.hash import MODULUS, box_hash, positional_hash, to_signed
from spmdflow.config.schema import OptimizerConfig
from spmdflow.errors import ConfigError, ProtocolError
from spmdflow.worker_api.register import map_function, map_spec
from spmdflow.workers.optimizer import Scheduled, ShardedOptimizer
from spmdflow.workers.schedule import RunProgress, learning_rate
from spmdflow.workers.sharding import UNIT_BYTES, Shard, merged_adapter_blocks, unit_layers


@given(
    rows=st.lists(st.integers(1, 300_000), min_size=1, max_size=12),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_neighbours_of_small_layers_are_one_unit_and_large_layers_are_alone(
    rows: list[int], dtype: torch.dtype
) -> None:
    layers = [nn.Linear(16, n, bias=False, device="meta") for n in rows]

    units = unit_layers(layers, dtype)

    sizes = [[layer.weight.numel() * dtype.itemsize for layer in unit] for unit in units]
    assert [layer for unit in units for layer in unit] == layers
    assert all(sum(unit[:-1]) < UNIT_BYTES for unit in sizes)
    assert all(sum(unit) >= UNIT_BYTES for unit in sizes[:-1])


@map_function(reads=["a"], optional=["b"], writes=["c"])
def _marked(batch: TensorDict) -> TensorDict:
    return batch


def test_map_function_mark_stores_facts_and_wraps_nothing() -> None:
    spec = map_spec(_marked)

    assert (spec.reads, spec.optional, spec.writes) == (("a",), ("b",), ("c",))
    assert _marked.__name__ == "_marked"


def test_lambda_and_local_function_are_refused_because_other_ranks_cannot_import_them() -> None:
    def local(batch: TensorDict) -> TensorDict:
        return batch

    for fn in (local, lambda batch: batch):
        with pytest.raises(ProtocolError, match="import by name; move it to the top level"):
            map_function(reads=(), writes=())(fn)
        with pytest.raises(ProtocolError, match="import by name"):
            map_spec(fn)


def test_map_function_that_writes_nothing_is_refused_where_it_is_marked() -> None:
    with pytest.raises(ProtocolError, match=r"positional_hash writes no column; .* writes=\("):
        map_function(reads=("a",), writes=())(positional_hash)


def test_unmarked_function_is_refused_with_what_to_add() -> None:
    with pytest.raises(ProtocolError, match="declares no columns; .* @map_function"):
        map_spec(positional_hash)


@settings(deadline=None)  # a loaded machine is no failure
@given(st.lists(st.integers(0, 12), min_size=1, max_size=6), st.integers(0, 3))
def test_hashes_of_pieces_add_up_to_the_hash_of_the_whole(sizes: list[int], kind: int) -> None:
    dtype = (torch.float32, torch.bfloat16, torch.float64, torch.int64)[kind]
    whole = torch.arange(sum(sizes)).to(dtype)

    total = 0
    start = 0
    for size in sizes:
        box = Box(((start, start + size),))
        total += box_hash(whole[box.slices()], box)
        start += size

    assert total % MODULUS == positional_hash(whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8])
def test_hash_sees_bits_swaps_shifts_repeats_signs_and_losses(dtype: torch.dtype) -> None:
    x = (torch.randn(60, 50) * 40 + 128).to(dtype)
    x[7, 8] = 1
    x[7, 9] = 2
    x[8, 8] = 3
    rows, columns, repeated, bit, two_bits = (x.clone() for _ in range(5))
    rows[[7, 8]] = x[[8, 7]]
    columns[:, [8, 9]] = x[:, [9, 8]]
    repeated[7, 8] = repeated[7, 9]
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    bit.view(bits)[3, 4] ^= 1
    two_bits.view(bits)[3, 4] ^= 1
    two_bits.view(bits)[5, 6] ^= 1
    faults = [rows, columns, repeated, bit, two_bits, x.roll(1, 0), x.roll(1, 1), x[:-1], x[:, :-1]]
    if dtype.is_floating_point:
        signs = x.clone()
        signs[[3, 5], [4, 6]] *= -1  # the highest bit of two elements
        faults += [signs, -x]

    hashes = [positional_hash(y) for y in (x, *faults)]

    assert len(set(hashes)) == len(hashes)
    assert all(0 <= value < MODULUS for value in hashes)


def test_hash_sees_every_single_bit_and_the_same_bit_of_any_two_elements() -> None:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    places = range(x.numel())
    found = {positional_hash(x)}

    for bit in [*(1 << number for number in range(31)), -(1 << 31)]:
        for first, second in itertools.combinations_with_replacement(places, 2):
            y = x.clone().view(torch.int32)
            y.view(-1)[[first, second]] ^= bit
            found.add(positional_hash(y))

    assert len(found) == 1 + 32 * (24 + 24 * 23 // 2)


def test_hash_knows_zero_signs_and_lost_zeros_and_no_strides() -> None:
    x = torch.randn(4, 6)

    assert positional_hash(torch.zeros(3)) != positional_hash(-torch.zeros(3))
    assert positional_hash(torch.zeros(3)) != positional_hash(torch.zeros(2))
    assert positional_hash(x.t()) == positional_hash(x.t().contiguous())
    assert positional_hash(x.t()) != positional_hash(x)
    assert positional_hash(torch.zeros(0, 4)) == 0


def test_hash_of_several_chunks_is_the_definition() -> None:
    """Python's integers, element by element."""
    x = torch.randn(500, 300)
    weights = [_splitmix(dim, size) for dim, size in enumerate(x.shape)]
    expected = 0
    for row, values in zip(weights[0], x.view(torch.int32).tolist(), strict=True):
        terms = ((v + (v >> 16) + 1) * w for v, w in zip(values, weights[1], strict=True))
        expected += row * sum(terms)

    assert positional_hash(x) == expected % MODULUS


def _splitmix(dim: int, size: int) -> list[int]:
    found = []
    for index in range(1, size + 1):
        word = (index * 0x9E3779B97F4A7C15 + dim) % MODULUS
        word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 % MODULUS
        word = (word ^ word >> 27) * 0x94D049BB133111EB % MODULUS
        found.append((word ^ word >> 31) | 1)
    return found


@settings(deadline=None)
@given(st.integers(0, MODULUS - 1))
def test_signed_hash_has_the_same_value_modulo_2_to_the_64(value: int) -> None:
    signed = to_signed(value)

    assert -(2**63) <= signed < 2**63 and signed % MODULUS == value


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]),
        ("cosine", [0.5, 1.0, 1.0, (2 + 2**0.5) / 4, 0.5, (2 - 2**0.5) / 4]),
    ],
)
def test_schedule_warms_up_and_then_follows_its_shape(schedule: str, rates: list[float]) -> None:
    cfg = OptimizerConfig(lr=1.0, schedule=schedule, warmup_steps=2)

    assert [learning_rate(cfg, step, 6) for step in range(6)] == pytest.approx(rates)
    assert learning_rate(cfg, 9, 6) == (1.0 if schedule == "constant" else pytest.approx(0))


@given(
    steps=st.integers(1, 6),
    in_step=st.integers(1, 4),
    warmup=st.integers(0, 9),
    schedule=st.sampled_from(["linear", "cosine"]),
)
def test_rate_of_a_run_as_planned_has_the_bits_of_the_schedule_over_its_optimizer_steps(
    steps: int, in_step: int, warmup: int, schedule: str
) -> None:
    total = steps * in_step
    cfg = OptimizerConfig(lr=0.3, schedule=schedule, warmup_steps=warmup)
    scheduled = Scheduled(cfg, total)
    found = []

    for step in range(1, steps + 1):
        scheduled.progress.begin_update(
            step=step, num_steps=steps, planned_in_step=in_step, steps_done=scheduled.steps_done
        )
        for _ in range(in_step):
            found.append(scheduled.next_lr)
            scheduled.steps_done += 1

    assert found == [learning_rate(cfg, number, total) for number in range(total)]


@given(
    counts=st.lists(st.integers(0, 5), min_size=1, max_size=8),
    planned=st.integers(1, 5),
    cut=st.integers(0, 8),
)
def test_rate_of_any_run_falls_and_is_never_behind_or_ahead_of_its_step(
    counts: list[int], planned: int, cut: int
) -> None:
    """counts: optimizer steps of each step. cut: the run goes on from a checkpoint of this step."""
    num_steps = len(counts)
    scheduled = Scheduled(OptimizerConfig(lr=1.0, schedule="linear"), 1)
    again = Scheduled(OptimizerConfig(lr=1.0, schedule="linear"), 1)
    rates: list[float] = []

    for step, count in enumerate(counts, start=1):
        resumed = step > cut
        for _ in range(count):
            for each in (scheduled, again) if resumed else (scheduled,):
                each.progress.begin_update(
                    step=step,
                    num_steps=num_steps,
                    planned_in_step=planned,
                    steps_done=each.steps_done,
                )
            rates.append(scheduled.next_lr)
            assert 1 - step / num_steps - 1e-9 <= rates[-1] <= 1 - (step - 1) / num_steps + 1e-9
            assert not resumed or again.next_lr == rates[-1]
            scheduled.steps_done += 1
            again.steps_done += resumed
        if step == cut:
            again.load_schedule(scheduled.schedule_state())
            again.mark_restored(scheduled.steps_done)

    assert rates == sorted(rates, reverse=True)


def test_progress_outside_of_a_scripts_steps_is_unknown() -> None:
    progress = RunProgress()

    progress.begin_update(step=0, num_steps=0, planned_in_step=2, steps_done=3)

    assert progress.num_steps == 0 and progress.state(3) == {"most_in_step": 0}


def test_schedule_without_enough_steps_is_refused() -> None:
    shards = {"w": torch.zeros(2)}
    with pytest.raises(ConfigError, match="got 0 optimizer steps in total"):
        ShardedOptimizer(shards, OptimizerConfig(schedule="cosine", warmup_steps=5), 0)


def test_sharded_adamw_steps_like_torch_and_skips_empty_shards() -> None:
    cfg = OptimizerConfig(lr=0.1, weight_decay=0.1)
    shards = {"w": torch.randn(5), "none_here": torch.zeros(0, 3)}
    plain = torch.nn.Parameter(shards["w"].clone())
    reference = torch.optim.AdamW([plain], lr=0.1, betas=(0.9, 0.95), weight_decay=0.1)
    ours = ShardedOptimizer(shards, cfg, 0)
    for _ in range(3):
        plain.grad = torch.randn(5)
        reference.step()
        ours.step({"w": plain.grad.clone(), "none_here": torch.zeros(0, 3)})

    torch.testing.assert_close(shards["w"], plain.detach(), rtol=0, atol=1e-6)
    assert ours.steps_done == 3


def test_adamw_of_a_rank_with_only_empty_shards_still_counts_its_steps() -> None:
    ours = ShardedOptimizer({"w": torch.zeros(0, 3)}, OptimizerConfig(), 0)

    ours.step({"w": torch.zeros(0, 3)})

    assert ours.steps_done == 1


def test_merged_weight_has_alpha_over_rank_times_b_a_added() -> None:
    torch.manual_seed(0)
    held = {
        "layers.0.q_proj.weight": Shard(nn.Parameter(torch.randn(4, 3))),
        "layers.0.q_proj.lora_A.weight": Shard(nn.Parameter(torch.randn(2, 3))),
        "layers.0.q_proj.lora_B.weight": Shard(nn.Parameter(torch.randn(4, 2))),
        "norm.weight": Shard(nn.Parameter(torch.randn(3))),
    }
    alpha = 16.0
    rank = 2

    blocks = merged_adapter_blocks(
        held, scale=alpha / rank, dtype=torch.float32, count=lambda num_bytes: None
    )
    found = {name: tensor for name, tensor, _ in blocks}

    weight, a, b, norm = (shard.local for shard in held.values())
    assert list(found) == ["layers.0.q_proj.weight", "norm.weight"]
    torch.testing.assert_close(found["layers.0.q_proj.weight"], weight + 8.0 * b @ a)
    assert torch.equal(found["norm.weight"], norm)
