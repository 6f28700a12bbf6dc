"""The five systems' bytes against the HybridFlow paper's Table 2, exactly, in every layout."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from math import prod
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from bench._cost import SYSTEMS, Case, cost_of, obstacle, paper, plan_shards

from spmdflow.errors import ConfigError
from spmdflow.parallel.layout import Layout
from spmdflow.weights.ranks import buffer_offsets
from spmdflow.weights.table import parameters
from tests.unit.resharding import arch_for, nested_layouts

WHOLE = ("norm.weight",)


def _case(layout, **changes):
    sizes = {"tp_size": layout.gen_tp_size, "pp_size": layout.gen_pp_size}
    ranks = tuple(range(layout.size, 2 * layout.size))
    replica = layout.gen_tp_size * layout.gen_pp_size
    rollout = Layout(ranks, dp_size=layout.size // replica, **sizes)
    arch = arch_for(layout.tp_size, vocab_size=6720, **changes)
    return Case(arch, layout), Case(arch, layout, rollout=rollout)


def _sharded_bytes(arch):
    return sum(4 * prod(part.shape) for part in parameters(arch) if not part.name.endswith(WHOLE))


@pytest.mark.drill
@pytest.mark.parametrize("system", SYSTEMS)
def test_mean_bytes_of_sharded_weights_are_the_papers_in_every_layout(system):
    name, _, mode = system.partition(" ")
    for layout in nested_layouts():
        same, apart = _case(layout)
        case = apart if name == "two_copies" else same
        if mode in ("flat", "blocks"):
            assert obstacle(case) is None

        cost = cost_of(name, case, mode=mode)
        formula = paper(name, layout)

        model = Fraction(_sharded_bytes(case.arch))
        assert cost.mean("received") == formula.received * model, layout
        assert cost.mean("peak") == formula.peak * model, layout
        if mode == "copy":
            own = Fraction(1, layout.tp_size * layout.pp_size)
            assert cost.mean("redundant") == own * model, layout
        else:
            assert cost.mean("redundant") == formula.redundant * model, layout


@pytest.mark.parametrize("mode", ["flat", "blocks"])
@pytest.mark.parametrize("tied", [pytest.param(False, marks=pytest.mark.drill), True])
def test_one_copy_holds_generation_weights_and_named_extras_only(mode, tied):
    for layout in nested_layouts():
        case, _ = _case(layout, tie_word_embeddings=tied)
        cost = cost_of("hybridflow", case, mode=mode)
        model = Fraction(_sharded_bytes(case.arch))
        replica = layout.tp_size * layout.pp_size

        training = sum(Fraction(amount.sharded) for amount in cost.training.values())
        generation = sum(Fraction(amount.sharded) for amount in cost.generation.values())

        shards = Fraction(layout.size, layout.gen_tp_size * layout.gen_pp_size)
        assert generation == model * shards
        assert training == (model * shards if mode == "flat" else model * layout.size / replica)
        assert not any(amount.total for amount in cost.redundant.values())
        for rank in layout.ranks:
            assert cost.received[rank].total == cost.plan.broadcast_bytes(rank)
            assert cost.peak[rank].padding >= 0
            if layout.pp_size == 1 or not tied:
                assert cost.peak[rank].tied_copy == 0


@pytest.mark.parametrize("mode", ["flat", "blocks"])
@pytest.mark.parametrize("tp_size", [2, 4])
def test_one_copy_keeps_the_papers_bytes_with_fewer_kv_heads_than_ranks(mode, tp_size):
    for gen_tp_size in (1, tp_size // 2, tp_size):
        layout = Layout(tuple(range(tp_size)), tp_size=tp_size, gen_tp_size=gen_tp_size)
        case = Case(arch_for(tp_size, kv_heads=1), layout)

        cost = cost_of("hybridflow", case, mode=mode)
        formula = paper("hybridflow", layout)

        model = Fraction(_sharded_bytes(case.arch))
        assert cost.mean("received") == formula.received * model
        assert cost.mean("peak") == formula.peak * model


def test_all_gather_of_flat_moves_rows_as_long_as_the_largest_stage():
    layout = Layout((0, 1), pp_size=2, gen_pp_size=1)
    case = Case(arch_for(1, num_hidden_layers=3), layout, gathers_rows=True)

    gathered = cost_of("hybridflow", case, mode="flat")
    sent = cost_of("hybridflow", replace(case, gathers_rows=False), mode="flat")

    assert {amount.total for amount in gathered.received.values()} == {
        4 * max(case.storage_numel.values())
    }
    assert [sent.received[rank].total for rank in (0, 1)] == [
        4 * case.storage_numel[rank] for rank in (1, 0)
    ]
    assert gathered.peak == sent.peak


def test_transition_of_the_first_measurement_is_predicted_to_the_byte():
    """t4 to t_g2, M 9,708,544 bytes: moved 2,434,048, held 4,868,096 and (blocks) 2,434,048."""
    arch = arch_for(
        4,
        model_type="llama",
        vocab_size=100,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        head_dim=32,
    )
    layout = Layout((0, 1, 2, 3), tp_size=4, gen_tp_size=2)
    case = Case(arch, layout, distributed_optimizer=False)

    flat, blocks = (cost_of("hybridflow", case, mode=mode) for mode in ("flat", "blocks"))

    assert {amount.total for amount in flat.received.values()} == {2_434_048}
    assert {amount.total for amount in flat.training.values()} == {4_868_096}
    assert {amount.total for amount in blocks.received.values()} == {2_434_048}
    assert {amount.total for amount in blocks.generation.values()} == {4_868_096}
    assert {amount.total for amount in blocks.training.values()} == {2_434_048}
    extra = flat.received[0]
    assert (extra.replicated, extra.tied_copy) == (9 * 256 * 4, 0)


def test_copy_never_sends_norms_inside_a_stage_and_only_missing_ones_across_stages():
    inside, _ = _case(Layout((0, 1, 2, 3), tp_size=4, gen_tp_size=2))
    across, _ = _case(Layout((0, 1, 2, 3), tp_size=2, pp_size=2, gen_tp_size=2, gen_pp_size=1))

    assert not any(
        a.replicated for a in cost_of("hybridflow", inside, mode="copy").received.values()
    )
    received = cost_of("hybridflow", across, mode="copy").received
    norms = sum(4 * p.shape[0] for p in parameters(across.arch) if p.name.endswith(WHOLE))
    assert received[0].replicated + received[2].replicated == norms


def test_staging_stays_below_two_buckets():
    layout = Layout((0, 1, 2, 3), tp_size=4, gen_tp_size=2)
    case, _ = _case(layout)
    small = Case(case.arch, layout, bucket_bytes=4096)

    cost = cost_of("hybridflow", small, mode="copy")

    assert 0 < max(cost.staging.values()) <= 2 * 4096
    assert cost.received == cost_of("hybridflow", case, mode="copy").received


@pytest.mark.parametrize(
    ("layout", "vocab_size", "reason"),
    [
        (Layout((0, 1), dp_size=2, gen_tp_size=2), 6720, "across training replicas"),
        (Layout((0, 1, 2), tp_size=3, gen_tp_size=1), 100, "padded to 192 .* and to 128 by vLLM"),
    ],
)
def test_modes_of_one_copy_are_refused_where_shards_do_not_fit(layout, vocab_size, reason):
    case = Case(arch_for(6, vocab_size=vocab_size), layout)

    for mode in ("flat", "blocks"):
        with pytest.raises(ConfigError, match=reason):
            cost_of("hybridflow", case, mode=mode)


def test_unknown_system_is_refused_with_the_choices():
    case, _ = _case(Layout((0,)))

    with pytest.raises(ConfigError, match="got system 'hybridflow', expected one of ds_chat"):
        cost_of("hybridflow", case)
    with pytest.raises(ConfigError, match="without a rollout pool of its own"):
        cost_of("two_copies", case)


@pytest.mark.parametrize("dp_size", [1, 2, 3])
@pytest.mark.parametrize("pp_rank", [0, 1])
def test_buffer_is_as_long_as_megatrons_own(dp_size, pp_rank):
    from spmdflow.weights.ranks import SHARED_EMBEDDING, megatron_shards

    arch = arch_for(2, tie_word_embeddings=True)
    table = megatron_shards(
        arch, tp_size=2, tp_rank=0, pp_size=2, pp_rank=pp_rank, vocab_multiple=64
    )
    module = torch.nn.ParameterList(torch.zeros(tensor.shape) for tensor in table.values())
    for name, parameter in zip(table, module, strict=True):
        parameter.shared_embedding = name in SHARED_EMBEDDING

    for distributed in (False, True):
        _, ours = buffer_offsets(
            table, aligned_over=dp_size if distributed else None, shared_embedding=True
        )

        assert ours == _megatron_numel(module, distributed=distributed, dp_size=dp_size)


def _megatron_numel(module, *, distributed, dp_size):
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        param_and_grad_buffer,
    )
    from megatron.core.transformer import TransformerConfig

    class Group:
        """A process group that is asked for its size alone."""

        def size(self):
            return dp_size

        def rank(self):
            return 0

    names = ("dp", "dp_cp", "expt_dp", "tp", "pp", "ep", "intra_dp_cp", "intra_expt_dp")
    with (
        mock.patch.object(torch.cuda, "current_device", lambda: "cpu"),
        mock.patch.object(param_and_grad_buffer, "log_on_each_pipeline_stage"),
    ):
        wrapped = DistributedDataParallel(
            TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1),
            DistributedDataParallelConfig(use_distributed_optimizer=distributed),
            module,
            pg_collection=SimpleNamespace(**dict.fromkeys(names, Group())),
        )
    (buffer,) = wrapped.buffers
    return buffer.numel


def test_shard_plan_counts_rows_of_the_largest_shard_for_flat_and_the_peers_for_blocks():
    layout = Layout((0, 1, 2, 3), tp_size=2, pp_size=2, gen_tp_size=1, gen_pp_size=1)

    plan = plan_shards(layout, {0: 10, 1: 10, 2: 12, 3: 12}, element_bytes=4)

    assert plan.group_of(1) == (0, 1, 2, 3)
    assert [plan.gather_bytes(rank) for rank in layout.ranks] == [4 * 3 * 12] * 4
    assert [plan.broadcast_bytes(rank) for rank in layout.ranks] == [136, 136, 128, 128]
