"""Every layout of up to 8 ranks, an architecture that fits it, and a plan run in one process."""

from __future__ import annotations

import torch

from spmdflow.hybrid_engine.reshard import ReshardPlan
from spmdflow.parallel.layout import Layout, divisors
from spmdflow.weights.architecture import Architecture
from spmdflow.weights.move import Blocks, blocks, fill
from spmdflow.weights.ranks import RankTables
from tests.unit.weight_shapes import reader_of, values_of

CONFIG = {"model_type": "qwen3", "hidden_size": 4, "num_hidden_layers": 8, "head_dim": 2}


def arch_for(tp_size, *, kv_heads=None, **changes):
    """Heads, mlp and a vocabulary that tp_size, 64 and every tp up to 8 divide, with padding."""
    return Architecture.from_config(
        {
            **CONFIG,
            "vocab_size": 6717,
            "intermediate_size": 2 * tp_size,
            "num_attention_heads": 2 * tp_size,
            "num_key_value_heads": kv_heads or tp_size,
            **changes,
        }
    )


def training_layouts(max_ranks=8):
    """(t, p, d) of every world of at most max_ranks."""
    return [
        (t, p, world // (t * p))
        for world in range(1, max_ranks + 1)
        for t in divisors(world)
        for p in divisors(world // t)
    ]


def nested_layouts(max_ranks=8):
    """Every (p, t, d) -> (p_g, t_g) in which generation nests, of at most max_ranks."""
    return [
        Layout(
            tuple(range(t * p * d)),
            tp_size=t,
            pp_size=p,
            dp_size=d,
            gen_tp_size=t_g,
            gen_pp_size=p_g,
        )
        for t, p, d in training_layouts(max_ranks)
        for t_g in divisors(t)
        for p_g in divisors(p)
    ]


def crossing_layouts(max_ranks=8):
    """Every layout in which a generation replica lies across training replicas."""
    return [
        layout
        for t, p, d in training_layouts(max_ranks)
        for t_g in divisors(t * p * d)
        for p_g in divisors(t * p * d // t_g)
        for layout in [Layout(tuple(range(t * p * d)), p, d, t, gen_tp_size=t_g, gen_pp_size=p_g)]
        if not layout.nests
    ]


def execute(arch: Architecture, plan: ReshardPlan, have: RankTables, need: RankTables):
    """Run a plan as its module says, on tensors of one process; bytes received by rank.

    Asserts that generation then holds what loading the whole model would have put there.
    """
    values = values_of(arch)
    readers = {}
    writers = {}
    local = {}
    for rank, table in have.items():
        held = _empty(table, float("nan"))
        fill(held, table, reader_of(values))
        readers[rank] = Blocks(blocks(held, table))
    for rank, table in need.items():
        local[rank] = _empty(table, 0.0)
        writers[rank] = Blocks(blocks(local[rank], table))
        for part in plan.local_parts(rank):
            writers[rank].write(part.name, part.box, readers[rank].read(part.name, part.box))
    arrived = dict.fromkeys(plan.ranks, 0)
    for bucket in plan.buckets:
        assert [m for m in bucket.messages if m.destinations] == list(bucket.messages)
        for message in bucket.messages:
            assert any(set(message.ranks) <= set(group) for group in plan.groups)
            for part in message.parts:
                sources = writers if message.relayed else readers
                packed = sources[message.source].read(part.name, part.box).clone()
                for rank in message.destinations:
                    writers[rank].write(part.name, part.box, packed)
                    arrived[rank] += packed.numel() * plan.element_bytes
    for rank, table in need.items():
        expected = _empty(table, 0.0)
        fill(expected, table, reader_of(values))
        assert all(torch.equal(local[rank][name], expected[name]) for name in table), rank
    return arrived


def _empty(table, value):
    return {name: torch.full(tensor.shape, value).double() for name, tensor in table.items()}
