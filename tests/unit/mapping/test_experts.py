"""Plans of mixtures whose experts are divided: memory, traffic, and the size that is chosen."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import numpy as np
import pytest

from spmdflow.mapping.dataflow import Engine, Model, Strategy, Workload, strategies_on
from spmdflow.mapping.hardware import load_hardware
from spmdflow.mapping.memory import call_bytes, state_bytes
from spmdflow.mapping.seconds import pass_parts, total
from spmdflow.mapping.share import local_parameters, stepped_parameters
from spmdflow.parallel.layout import Layout
from spmdflow.weights.architecture import Architecture
from spmdflow.weights.ranks import megatron_tables, row_tables
from tests.unit.weights.test_mixture_sizes import QWEN3_30B

SMALL = QWEN3_30B | {
    **{"num_hidden_layers": 4, "num_experts": 16, "hidden_size": 256, "vocab_size": 2048},
    **{"moe_intermediate_size": 128, "num_attention_heads": 8, "num_key_value_heads": 4},
}
H100 = load_hardware("h100")


def model_of(config: dict[str, object], **engine: object) -> Model:
    """A trained actor with this config.json."""
    settings = Engine(kind="megatron", layout=(1, 1), **engine)
    return Model("actor", Architecture.from_config(config), trained=True, engine=settings)


@pytest.mark.parametrize(
    ("tp", "pp", "dp", "ep"), [(1, 1, 8, 1), (1, 1, 8, 8), (2, 1, 4, 2), (2, 2, 4, 4), (1, 4, 2, 2)]
)
def test_weights_of_the_fullest_rank_are_those_of_the_tables(
    tp: int, pp: int, dp: int, ep: int
) -> None:
    """Within 1 %: norms of heads are not counted."""
    model = model_of(SMALL)
    layout = Layout(tuple(range(tp * pp * dp)), pp_size=pp, dp_size=dp, tp_size=tp, expert_size=ep)
    tables = megatron_tables(model.shape, layout).values()

    found = local_parameters(model, Strategy(tp, pp, dp, ep=ep))

    most = max(sum(prod(tensor.shape) for tensor in table.values()) for table in tables)
    assert float(found) == pytest.approx(most, rel=1e-2)


@pytest.mark.parametrize("ep", [1, 2, 8])
def test_all_ranks_together_step_every_weight_once(ep: int) -> None:
    model = model_of(SMALL)

    each = stepped_parameters(model, Strategy(1, 1, 8, ep=ep))

    assert float(each) * 8 == pytest.approx(model.shape.num_parameters, rel=1e-6)


def test_divided_experts_take_less_memory_and_need_exchanges() -> None:
    model = model_of(QWEN3_30B)
    work = Workload(num_sequences=64, prompt_tokens=1024, response_tokens=1024)
    whole = Strategy(1, 1, 8)
    divided = replace(whole, ep=8)

    weights = [float(state_bytes(model, cut)["parameters"]) for cut in (whole, divided)]
    parts = pass_parts(model, work, divided, H100, trains=True)

    assert weights[0] == pytest.approx(61e9, rel=0.01)  # 30.5 billion in bfloat16
    assert weights[1] == pytest.approx(10.3e9, rel=0.01)  # 1.5 billion, and an eighth of 29
    assert parts["experts"] > 0
    assert pass_parts(model, work, whole, H100, trains=True)["experts"] == 0
    assert total(parts) < 3600


def test_sizes_that_divide_the_experts_and_the_ranks_are_searched() -> None:
    free = model_of(QWEN3_30B, expert_size=0)
    dense = model_of({**QWEN3_30B, "model_type": "qwen3", "num_experts": 0}, expert_size=0)

    _, found = strategies_on(free, [6, 8], H100)
    _, plain = strategies_on(dense, [6, 8], H100)

    assert set(zip(found.dp.tolist(), found.ep.tolist(), strict=True)) == {
        *((6, 1), (6, 2), (8, 1), (8, 2), (8, 4), (8, 8))
    }
    assert np.all(plain.ep == 1)


def sharded(**engine: object) -> Model:
    """The small mixture under FSDP."""
    shape = Architecture.from_config(SMALL)
    return Model("actor", shape, trained=True, engine=Engine(kind="fsdp", **engine))


@pytest.mark.parametrize(("dp", "ep"), [(8, 1), (8, 2), (8, 8), (4, 2)])
def test_shards_of_divided_experts_are_those_of_the_tables(dp: int, ep: int) -> None:
    """Within 1 %, as above; the parts are float32."""
    model = sharded()
    layout = Layout(tuple(range(dp)), dp_size=dp, expert_size=ep)
    tables = row_tables(model.shape, layout).values()

    found = state_bytes(model, Strategy(1, 1, dp, ep=ep))["parameters"]

    most = max(sum(prod(tensor.shape) for tensor in table.values()) for table in tables)
    assert float(found) == pytest.approx(4 * most, rel=1e-2)


def test_a_rank_gathers_only_its_own_experts() -> None:
    model = sharded()
    work = Workload(num_sequences=8, prompt_tokens=16, response_tokens=16)
    whole = Strategy(1, 1, 8)
    divided = replace(whole, ep=8)

    gathered = [float(call_bytes(model, "train", work, cut)["gather"]) for cut in (whole, divided)]
    seconds = [pass_parts(model, work, cut, H100, trains=True) for cut in (whole, divided)]

    assert gathered[1] < 0.5 * gathered[0]
    assert seconds[1]["weight_gather"] < 0.7 * seconds[0]["weight_gather"]  # latencies stay
    assert seconds[1]["experts"] > seconds[0]["experts"] == 0


def test_every_e_is_searched_under_fsdp_unless_shards_are_on_a_part_of_the_ranks() -> None:
    _, found = strategies_on(sharded(expert_size=0), [8], H100)
    _, part = strategies_on(sharded(expert_size=0, shard_size=4), [8], H100)

    assert sorted(found.ep.tolist()) == [1, 2, 4, 8]
    assert part.ep.tolist() == [1]


def test_tensor_parallel_ranks_exchange_only_their_heads_where_ranks_divide_rows() -> None:
    """The same rows and c: half of the bytes with t2, so half of the seconds without latency."""
    hardware = replace(H100, link_hop_seconds=0.0, collective_base_seconds=0.0)
    work = Workload(num_sequences=64, prompt_tokens=1024, response_tokens=31744)
    model = model_of(QWEN3_30B)

    found = []
    for tp in (1, 2):
        parts = pass_parts(model, work, Strategy(tp, 1, 1, cp=2), hardware, trains=True)
        found.append(float(parts["context_parallel"]))

    assert found[1] == pytest.approx(found[0] / 2, rel=1e-6)
