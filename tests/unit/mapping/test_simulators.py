"""The simulators' terms against counts made here, and directions that must hold everywhere."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest
from bench._cells import scaled
from bench._cost import Case, cost_of, paper
from bench._dataflows import NOMINAL, Nominal
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from spmdflow.errors import ConfigError
from spmdflow.mapping.dataflow import (
    Engine,
    Model,
    ModelCall,
    Rollout,
    Strategy,
    Workload,
    pipeline_sizes,
)
from spmdflow.mapping.hardware import COEFFICIENTS, Hardware, load_hardware
from spmdflow.mapping.memory import call_bytes, resident_bytes
from spmdflow.mapping.placed import CallSeconds, call_seconds
from spmdflow.mapping.seconds import (
    CHECKSUM_BYTES,
    checksum_seconds,
    total,
    transition_bytes,
    transition_seconds,
)
from spmdflow.parallel.layout import Layout
from tests.unit.mapping_reference import printed_algorithm_2, strategies
from tests.unit.weight_shapes import architecture

A100 = load_hardware("a100_80gb")
SHAPE = NOMINAL["13B"]
ACTOR = Model("actor", SHAPE, trained=True, rollout=Rollout())
WORK = Workload(1024, 1024, 1024, num_updates=8)

RATES = [n for n in COEFFICIENTS if n.startswith(("peak_", "link_b", "network_b", "host_b"))]
RATES += [n for n in COEFFICIENTS if n.endswith("_efficiency") or n == "memory_bandwidth"]
DELAYS = [name for name in COEFFICIENTS if name.endswith("_seconds")]


def train_seconds(model: Model, work: Workload, strategy: Strategy, hw: Hardware) -> CallSeconds:
    """A training call with all its updates."""
    return call_seconds(ModelCall(model.name, "train", "learning", work), model, strategy, hw)


def infer_seconds(model: Model, work: Workload, strategy: Strategy, hw: Hardware) -> CallSeconds:
    """A forward call over all rows."""
    return call_seconds(ModelCall(model.name, "infer", "preparation", work), model, strategy, hw)


def generate_seconds(
    model: Model, work: Workload, strategy: Strategy, hw: Hardware, *, kv_bytes: float
) -> CallSeconds:
    """A generation with so much cache on each rank."""
    call = ModelCall(model.name, "generate", "generation", work)
    return call_seconds(call, model, strategy, hw, kv_bytes=kv_bytes)


def _model(kind: str = "megatron", *, dtype: str = "bfloat16", options: tuple = ()) -> Model:
    return replace(ACTOR, engine=Engine(kind, dtype=dtype, options=options))


def test_training_computes_six_flops_a_weight_and_token_eight_in_the_head() -> None:
    strategy = Strategy(1, 1, 1, 1, 1)
    tokens = WORK.num_sequences * WORK.tokens

    found = train_seconds(ACTOR, WORK, strategy, A100)

    answered = WORK.num_sequences * WORK.response_tokens  # where the head runs, twice forward
    attention = 4 * WORK.tokens / 2 * SHAPE.q_size * SHAPE.num_layers
    flops = (6 * SHAPE.num_layers * SHAPE.layer_parameters + 3 * attention) * tokens
    flops += 8 * SHAPE.vocab_size * SHAPE.hidden_size * answered
    head_bytes = answered * (SHAPE.hidden_size + SHAPE.vocab_size) * 2
    head_bytes += WORK.num_sequences * SHAPE.hidden_size * SHAPE.vocab_size * 2
    expected = flops / A100.flops("bfloat16") + 4 * head_bytes / A100.memory_rate
    assert found.parts["compute"] == pytest.approx(expected, rel=1e-9)
    assert found.parts["gradient_sync"] == found.parts["tensor_parallel"] == 0
    assert found.parts["bubble"] == 0 and found.limit == "compute"


def test_recomputation_adds_one_forward_of_the_layers() -> None:
    plain = train_seconds(ACTOR, WORK, Strategy(8, 1, 2, 8, 1), A100)
    again = train_seconds(ACTOR, WORK, Strategy(8, 1, 2, 8, 1, recompute=True), A100)

    assert again.parts["memory"] == pytest.approx(plain.parts["memory"] * 4 / 3)
    assert again.parts["tensor_parallel"] == pytest.approx(plain.parts["tensor_parallel"] * 1.5)
    assert again.parts["gradient_sync"] == plain.parts["gradient_sync"]


def test_selective_recomputation_adds_attentions_core_alone() -> None:
    strategy = Strategy(8, 1, 2, 8, 1)
    model = _model(options=("selective_recompute",))
    plain, again = (train_seconds(m, WORK, strategy, A100) for m in (_model(), model))
    core = 4 * WORK.tokens / 2 * SHAPE.q_size * SHAPE.num_layers
    more = core * WORK.num_sequences * WORK.tokens / 16 / A100.flops("bfloat16")
    assert again.parts["compute"] - plain.parts["compute"] == pytest.approx(more)


def test_overlap_leaves_what_does_not_fit_beside_the_passes_of_a_micro_batch() -> None:
    strategy = Strategy(8, 1, 4, 8, 1)
    work = replace(WORK, num_updates=4)
    for rows, hides in ((64, True), (1, False)):
        plain, over = (
            train_seconds(replace(model, engine=engine), work, strategy, A100)
            for model in (_model(), _model(options=("overlap",)))
            for engine in [replace(model.engine, micro_batch_rows=rows)]
        )

        assert over.parts["gradient_sync"] < plain.parts["gradient_sync"]
        assert (over.parts["gradient_sync"] == 0) == hides
        assert over.parts["compute"] == plain.parts["compute"]


def test_groups_of_shards_gather_inside_and_reduce_between_once_an_update() -> None:
    strategy = Strategy(1, 1, 32, 1, 1)
    work = replace(WORK, num_updates=1)
    whole = _model("fsdp")
    groups = replace(whole, engine=replace(whole.engine, shard_size=8))

    everywhere, grouped = (train_seconds(m, work, strategy, A100) for m in (whole, groups))

    for name in ("weight_gather", "gradient_sync"):
        assert grouped.parts[name] < everywhere.parts[name] / 4, name
    held = [float(total(resident_bytes(m, strategy))) for m in (groups, whole)]
    assert held[0] == pytest.approx(4 * held[1])
    assert transition_bytes(groups, strategy) == pytest.approx(SHAPE.num_parameters * 2 * 7 / 8)


def test_bubble_is_p_minus_one_of_m_micro_batches() -> None:
    found = train_seconds(ACTOR, WORK, Strategy(8, 4, 2, 8, 4), A100)

    in_micro = ("compute", "memory", "launch", "tensor_parallel", "pipeline")
    work = sum(found.parts[name] for name in in_micro)
    assert found.parts["bubble"] == pytest.approx(work * 3 / 64)


def test_parts_of_a_stage_divide_the_bubble_and_hold_more_activations() -> None:
    plain = replace(ACTOR, engine=Engine(layout=(8, 4)))
    strategy = Strategy(8, 4, 2, 8, 4)
    parts = replace(plain, engine=replace(plain.engine, virtual_size=2))

    one, two = (train_seconds(model, WORK, strategy, A100).parts for model in (plain, parts))
    held = [call_bytes(m, "train", WORK, strategy)["activations"] for m in (plain, parts)]

    assert two["pipeline"] == pytest.approx(2 * one["pipeline"])
    work = sum(two[name] for name in ("compute", "memory", "launch", "tensor_parallel", "pipeline"))
    assert two["bubble"] == pytest.approx(work * 3 / 64 / 2)
    assert 1 < held[1] / held[0] <= (2 * 3 + 4 + 1) / 2 / 4


def test_gradients_cross_the_network_once_an_update() -> None:
    """Each machine sends 6 bytes of each of its 13e9 / p parameters (d - 1) / d times."""
    found = train_seconds(ACTOR, WORK, Strategy(8, 1, 2, 8, 1), A100)

    moved = 13e9 * 6 / 2 / A100.network_rate * WORK.num_updates
    both = found.parts["gradient_sync"] + found.parts["weight_gather"]
    assert both == pytest.approx(moved, rel=1e-3)
    assert found.parts["gradient_sync"] == pytest.approx(moved * 4 / 6, rel=1e-3)


def test_rows_that_do_not_divide_wait_for_the_busiest_rank() -> None:
    work = Workload(96, 512, 512, num_updates=1)
    three, four = (infer_seconds(ACTOR, work, Strategy(1, 1, d, 1, 1), A100) for d in (64, 96))

    assert three.parts["compute"] == pytest.approx(2 * four.parts["compute"])


def test_a_scalar_head_costs_no_vocabulary() -> None:
    critic = Model("critic", replace(SHAPE, head="scalar"), trained=True)

    policy = infer_seconds(ACTOR, WORK, Strategy(1, 1, 8, 1, 1), A100)
    value = infer_seconds(critic, WORK, Strategy(1, 1, 8), A100)

    tokens = WORK.num_sequences * WORK.response_tokens / 8
    flops = 2 * tokens * SHAPE.hidden_size * SHAPE.vocab_size
    missing = policy.parts["compute"] - value.parts["compute"]
    assert missing > flops / A100.flops("bfloat16")


def test_half_of_the_cache_takes_twice_the_waves() -> None:
    strategy = Strategy(8, 1, 2, 2, 1)
    sequence = SHAPE.kv_bytes_per_token() / 2 * WORK.tokens

    whole = generate_seconds(ACTOR, WORK, strategy, A100, kv_bytes=128 * sequence)
    half = generate_seconds(ACTOR, WORK, strategy, A100, kv_bytes=64 * sequence)

    assert whole.notes == ("128 sequences a replica in 1 waves",)
    assert half.notes == ("128 sequences a replica in 2 waves",)
    assert half.parts["kv_read"] == pytest.approx(whole.parts["kv_read"])
    assert half.parts["weights"] > 1.5 * whole.parts["weights"]
    assert half.parts["prefill"] == whole.parts["prefill"]


def test_no_room_for_one_sequence_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"got 0.00 GB of KV cache .* expected room for one"):
        generate_seconds(ACTOR, WORK, Strategy(8, 1, 2, 2, 1), A100, kv_bytes=1e6)


def test_decoding_reads_weights_and_cache_once_a_step() -> None:
    work = Workload(1, 1024, 1024)
    found = generate_seconds(ACTOR, work, Strategy(1, 1, 1, 1, 1), A100, kv_bytes=5e9)

    layers = SHAPE.num_layers * SHAPE.layer_parameters * 2
    cache = SHAPE.kv_bytes_per_token() * (1024 + 512)
    assert found.parts["weights"] >= 1024 * layers / A100.memory_rate
    assert found.parts["weights"] == pytest.approx(1024 * layers / A100.memory_rate, rel=0.03)
    assert found.parts["kv_read"] == pytest.approx(1024 * cache / A100.kv_rate)
    assert found.limit == "weights"


@pytest.mark.parametrize(
    ("name", "megabytes"), [("13B", 0.82), ("34B", 0.20), ("70B", 0.33), ("7B", 0.52)]
)
def test_kv_cache_counts_kv_heads(name: str, megabytes: float) -> None:
    assert NOMINAL[name].kv_bytes_per_token() / 1e6 == pytest.approx(megabytes, abs=0.006)


@pytest.mark.parametrize(
    ("kind", "dtype", "options", "expected"),
    [
        ("megatron", "bfloat16", (), 6 + 12 / 4),
        ("megatron", "bfloat16", ("plain_optimizer",), 18),
        ("megatron", "float32", (), 8 + 8 / 4),
        ("fsdp", "bfloat16", (), 12 / 4),
        ("zero1", "float32", (), 4 + 8 / 4),
        ("zero2", "float32", (), 12 / 4),
        ("zero3", "float32", (), 12 / 4),
    ],
)
def test_resident_bytes_of_a_trained_parameter(
    kind: str, dtype: str, options: tuple, expected: float
) -> None:
    model = _model(kind, dtype=dtype, options=options)

    parts = resident_bytes(model, Strategy(1, 1, 4, 1, 1))

    total = sum(float(size) for size in parts.values())
    assert total / SHAPE.num_parameters == pytest.approx(expected)


@pytest.mark.parametrize(
    ("kind", "expected"), [("megatron", 0), ("fsdp", 4 / 4), ("zero1", 4), ("zero3", 4 / 4)]
)
def test_gradients_that_are_freed_after_a_step_count_while_it_trains(
    kind: str, expected: float
) -> None:
    parts = call_bytes(_model(kind), "train", WORK, Strategy(1, 1, 4, 1, 1))

    found = float(parts.get("gradients", 0.0))
    # beside them those that no rank has reduced yet: of a layer, embedding and head
    fresh = 4 * (SHAPE.layer_parameters + 2 * SHAPE.vocab_size * SHAPE.hidden_size)
    assert found == pytest.approx(expected * SHAPE.num_parameters, abs=fresh * (expected > 0))


def test_recomputation_and_tensor_parallelism_need_less_activation_memory() -> None:
    def activations(strategy: Strategy) -> float:
        return float(call_bytes(ACTOR, "train", WORK, strategy)["activations"])

    assert activations(Strategy(8, 1, 2)) < activations(Strategy(4, 1, 4))
    assert activations(Strategy(8, 1, 2, recompute=True)) < activations(Strategy(8, 1, 2)) / 3


sizes = st.tuples(
    st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4])
)


@settings(max_examples=60, deadline=None)
@given(sizes, st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]))
def test_transition_bytes_are_table_2(
    grid: tuple[int, int, int], tensor_ratio: int, stage_ratio: int
) -> None:
    tp, pp, dp = grid
    assume(tp % tensor_ratio == 0 and pp % stage_ratio == 0)
    strategy = Strategy(tp, pp, dp, tp // tensor_ratio, pp // stage_ratio)
    layout = Layout(
        tuple(range(tp * pp * dp)),
        pp_size=pp,
        dp_size=dp,
        tp_size=tp,
        gen_tp_size=strategy.gen_tp,
        gen_pp_size=strategy.gen_pp,
    )

    received = float(transition_bytes(ACTOR, strategy))

    formula = paper("hybridflow", layout).received
    assert received == pytest.approx(float(formula) * 2 * SHAPE.num_parameters)


@pytest.mark.parametrize("sizes", [(4, 1, 2), (2, 2, 1), (4, 2, 2), (2, 1, 1)])
def test_transition_bytes_are_what_the_planner_moves(sizes: tuple[int, int, int]) -> None:
    tp, pp, gen_tp = sizes
    arch = architecture()
    layout = Layout(
        tuple(range(tp * pp)), tp_size=tp, pp_size=pp, gen_tp_size=gen_tp, gen_pp_size=1
    )
    cost = cost_of("hybridflow", Case(arch, layout), mode="blocks")
    sharded = float(cost.mean("generation")) * gen_tp
    sizes = {**asdict(arch), "rope_scaling": arch.rope_scaling}
    shape = Nominal(**sizes, nominal_parameters=round(sharded / 2))
    model = Model("actor", shape, True)
    model = replace(model, rollout=Rollout())

    received = float(transition_bytes(model, Strategy(tp, pp, 1, gen_tp, 1)))

    assert received == pytest.approx(float(cost.mean("received")), rel=1e-6)


def test_transition_across_machines_shares_their_network() -> None:
    seconds = transition_seconds(ACTOR, Strategy(8, 2, 1, 8, 1), A100)

    assert seconds == pytest.approx(13e9 * 2 / 2 / A100.network_rate, rel=1e-3)


def _estimates(strategy: Strategy, kind: str, hardware: Hardware) -> list[CallSeconds]:
    model = _model(kind)
    return [
        train_seconds(model, WORK, strategy, hardware),
        infer_seconds(model, WORK, strategy, hardware),
        generate_seconds(model, WORK, strategy, hardware, kv_bytes=20e9),
        CallSeconds({"transition": float(transition_seconds(model, strategy, hardware))}),
    ]


grids = st.builds(
    lambda tp, pp, dp, r: Strategy(tp, pp, dp, max(tp // r, 1), 1),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 2, 5, 8]),
    st.integers(1, 12),
    st.sampled_from([1, 2, 4]),
)


@settings(max_examples=80, deadline=None)
@given(grids, st.sampled_from(["megatron", "fsdp", "zero1", "zero2"]), st.sampled_from(RATES))
def test_a_faster_machine_is_never_slower(strategy: Strategy, kind: str, rate: str) -> None:
    if kind != "megatron":
        strategy = Strategy(1, 1, strategy.num_ranks, strategy.gen_tp, 1)
    faster = scaled(A100, rate, 1.1)

    for now, then in zip(_estimates(strategy, kind, A100), _estimates(strategy, kind, faster)):
        assert then.seconds <= now.seconds * (1 + 1e-12)
        assert min(now.parts.values()) >= 0


@settings(max_examples=80, deadline=None)
@given(grids, st.sampled_from(DELAYS))
def test_longer_delays_are_never_faster(strategy: Strategy, delay: str) -> None:
    slower = scaled(A100, delay, 2.0)

    pairs = zip(_estimates(strategy, "megatron", A100), _estimates(strategy, "megatron", slower))
    for now, then in pairs:
        assert then.seconds >= now.seconds * (1 - 1e-12)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 64), st.sampled_from(["7B", "13B", "34B", "70B"]))
def test_strategies_multiply_to_the_pool_and_divide_what_they_must(size: int, name: str) -> None:
    model = replace(ACTOR, shape=NOMINAL[name])

    found = strategies(model, size, A100)

    assert len(set(found)) == len(found)
    for one in found:
        assert one.num_ranks == size and one.tp <= 8
        assert model.shape.num_heads % one.tp == 0
        assert one.pp <= max(size // 8, 1)
        assert one.tp % one.gen_tp == 0 and one.pp % one.gen_pp == 0
    assert Strategy(1, 1, size, 1, 1) in found


@pytest.mark.parametrize("size", [4, 8, 16, 24, 48])
def test_sizes_that_the_printed_algorithm_2_tries_and_that_do_not_divide_are_not_tried(
    size: int,
) -> None:
    printed = printed_algorithm_2(size, 8)
    uneven = {(t, p) for t, p, d in printed if d != int(d)}

    ours = {(one.tp, one.pp) for one in strategies(ACTOR, size, A100)}

    assert ours and not ours & uneven
    assert uneven if size >= 8 else not printed
    dividing = {(t, p) for t, p, d in printed if d == int(d) and SHAPE.num_heads % t == 0}
    assert dividing <= ours


def test_pipeline_sizes_each_relieve_the_busiest_stage() -> None:
    assert pipeline_sizes(40) == [1, 2, 3, 4, 5, 6, 7, 8, 10, 14, 20, 40]
    assert pipeline_sizes(1) == [1]


def test_sizes_can_be_limited_to_some() -> None:
    model = replace(ACTOR, engine=Engine(layouts=((8, 1), (8, 2))))

    assert {(one.tp, one.pp) for one in strategies(model, 64, A100)} == {(8, 1), (8, 2)}


def test_fixed_layouts_are_taken_as_they_are() -> None:
    model = replace(ACTOR, engine=Engine(layout=(2, 3)), rollout=Rollout(layout=(1, 1)))

    assert strategies(model, 12, A100) == [Strategy(2, 3, 2, 1, 1)]
    assert strategies(model, 8, A100) == []


def test_checksums_read_the_shards_of_the_trainer_and_all_weights_of_the_generator() -> None:
    strategy = Strategy(4, 2, 2, 1, 2)
    weights = SHAPE.num_parameters
    one = CHECKSUM_BYTES / A100.memory_rate

    here = checksum_seconds(ACTOR, strategy, A100)
    apart = checksum_seconds(replace(ACTOR, weights_from="actor"), strategy, A100)
    seldom = replace(ACTOR, rollout=Rollout(checks_per_sync=0.25))

    generated = weights / (strategy.gen_tp * strategy.gen_pp)
    trained = weights / (strategy.tp * strategy.pp)
    assert here == pytest.approx((generated + trained) * one)
    assert apart == pytest.approx(generated * one)
    assert checksum_seconds(seldom, strategy, A100) == pytest.approx(here / 4)
