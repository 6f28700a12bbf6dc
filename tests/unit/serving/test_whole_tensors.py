"""Whole tensors out of training shards, over sockets between two programs (here: threads)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace

import pytest
import torch
import torch.distributed as dist
from bench._amount import staging_bytes
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from spmdflow.errors import ConfigError, WeightSyncError
from spmdflow.hybrid_engine.bucket import Message
from spmdflow.hybrid_engine.reshard import ReshardPlan, boxes_of, training_tables
from spmdflow.hybrid_engine.stream import WholeTensors
from spmdflow.parallel.layout import Layout
from spmdflow.serving.connection import (
    Connection,
    address_towards,
    check_model,
    pack_hashes,
    unpack_hashes,
)
from spmdflow.weights.architecture import Architecture, RopeScaling
from spmdflow.weights.move import Block, blocks, fill
from spmdflow.weights.table import parameters

ARCH = Architecture.from_config(
    {
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 100,
        "max_position_embeddings": 64,
    }
)
WEIGHTS = {
    each.name: torch.randn(each.shape, generator=torch.Generator().manual_seed(number))
    for number, each in enumerate(parameters(ARCH))
}
LAYOUTS = {
    "fsdp on 2": ("fsdp", Layout.data_parallel((0, 1))),
    "zero1 on 2": ("zero1", Layout.data_parallel((3, 4))),
    "megatron t2": ("megatron", Layout((0, 1), tp_size=2)),
    "megatron t2p2 on some ranks": ("megatron", Layout((1, 2, 5, 6), tp_size=2, pp_size=2)),
    "megatron t2d2": ("megatron", Layout((0, 1, 2, 3), tp_size=2, dp_size=2)),
    "one rank": ("fsdp", Layout((0,))),
}


def held(kind: str, layout: Layout, rank: int) -> list[Block]:
    """What a training rank has."""
    table = training_tables(ARCH, layout, kind=kind)[rank]
    local = {name: torch.empty(tensor.shape) for name, tensor in table.items()}
    fill(local, table, lambda name, box: WEIGHTS[name][box.slices()])
    return list(blocks(local, table))


def connected(name: str, num_workers: int) -> tuple[Connection, dist.TCPStore]:
    """A connection, and where its first rank listens."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    kind, layout = LAYOUTS[name]
    connection = Connection(
        host="127.0.0.1",
        port=store.port,
        num_workers=num_workers,
        kind=kind,
        layout=asdict(layout),
        architecture=asdict(ARCH),
        seconds=60.0,
    )
    return Connection(**json.loads(json.dumps(connection.to_facts()))), store


@dataclass
class Seen:
    """What one rank received, and how much it held at a time."""

    tensors: dict[str, Tensor]
    num_bytes: int
    planned: int


def one_rank(connection: Connection, store: dist.TCPStore, rank: int, dtype: torch.dtype) -> Seen:
    """A training rank sends, a worker takes."""
    is_first = rank == connection.training.ranks[0]
    wire = connection.join(rank, store if is_first else None)
    way = connection.tensors(rank, wire, dtype)
    source = (
        held(connection.kind, connection.training, rank)
        if rank in connection.training.ranks
        else []
    )
    made = {name: tensor.clone() for name, tensor in way.run(source)}
    num_bytes = sum(tensor.nbytes for tensor in made.values())
    return Seen(made, num_bytes, way.received_bytes_of(rank))


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize(("num_workers", "dtype"), [(1, torch.float32), (2, torch.bfloat16)])
def test_every_worker_gets_every_tensor_whole_and_trainers_get_nothing(
    name: str, num_workers: int, dtype: torch.dtype
) -> None:
    connection, store = connected(name, num_workers)
    everyone = [*connection.training.ranks, *connection.workers]

    with ThreadPoolExecutor(len(everyone)) as pool:
        jobs = [pool.submit(one_rank, connection, store, rank, dtype) for rank in everyone]
        seen = dict(zip(everyone, [job.result(200) for job in jobs], strict=True))

    for worker in connection.workers:
        found = seen[worker]
        assert list(found.tensors) == list(WEIGHTS)
        assert all(torch.equal(found.tensors[each], WEIGHTS[each].to(dtype)) for each in WEIGHTS)
        assert found.planned == found.num_bytes  # a worker has nothing, and gets nothing twice
    for rank in connection.training.ranks:
        assert seen[rank].planned == seen[rank].num_bytes == 0


class NoWire:
    """For plans that are looked at and not run."""

    def start(self, transfers: Sequence[tuple[Message, Tensor]]) -> list[dist.Work]:
        raise AssertionError


@settings(deadline=None, max_examples=30)
@given(chunk=st.integers(1, 40_000), name=st.sampled_from(sorted(LAYOUTS)))
def test_chunks_are_neighbours_within_the_limit_or_single_tensors(chunk: int, name: str) -> None:
    kind, layout = LAYOUTS[name]
    plans: list[ReshardPlan] = []

    def wire_of(plan: ReshardPlan) -> NoWire:
        plans.append(plan)
        return NoWire()

    WholeTensors(
        boxes_of(training_tables(ARCH, layout, kind=kind)),
        {99: parameters(ARCH)},
        wire_of,
        rank=99,
        dtype=torch.float32,
        device=torch.device("cpu"),
        seconds=1.0,
        chunk_bytes=chunk,
    )

    orders = []
    for plan in plans:
        parts = [part for bucket in plan.buckets for m in bucket.messages for part in m.parts]
        names = list(dict.fromkeys(each for each in WEIGHTS if each in {p.name for p in parts}))
        size = sum(WEIGHTS[each].nbytes for each in names)
        assert size <= chunk or len(names) == 1
        assert plan.received_bytes(99) == size
        widest = max(WEIGHTS[each][0].nbytes for each in names)
        assert staging_bytes(plan, 99) <= max(chunk, widest)  # at least one row
        orders += names
    assert orders == list(WEIGHTS)


def test_other_model_is_refused_with_the_fact_that_differs() -> None:
    connection, _ = connected("one rank", 1)

    check_model(connection, ARCH)
    with pytest.raises(ConfigError, match=r"num_layers 4, expected the trainer's 3 \(1 facts"):
        check_model(connection, replace(ARCH, num_layers=4))


def test_meeting_survives_json_with_scaled_positions_and_hashes_survive_int64() -> None:
    connection, _ = connected("megatron t2", 3)
    scaled = replace(ARCH, rope_scaling=RopeScaling("llama3", 8.0))
    facts = json.loads(json.dumps(replace(connection, architecture=asdict(scaled)).to_facts()))
    hashes = {name: (1 << 64) - 1 - number for number, name in enumerate(connection.names)}

    assert Connection(**facts).model == scaled
    assert Connection(**facts).training == LAYOUTS["megatron t2"][1]
    assert connection.workers == (2, 3, 4)
    assert unpack_hashes(connection, pack_hashes(connection, hashes)) == hashes


def test_program_that_does_not_come_is_an_error_within_the_limit() -> None:
    connection, store = connected("one rank", 1)

    with pytest.raises(WeightSyncError, match=r"got no workers \[1\] .* within 1 s at"):
        replace(connection, seconds=1.0).join(0, store)


def test_refusal_of_the_other_program_ends_the_wait_for_it() -> None:
    connection, store = connected("one rank", 1)

    def refused() -> None:
        raise ConfigError("another model")

    with pytest.raises(ConfigError, match="another model"):
        connection.join(0, store, meanwhile=refused)


def test_program_that_leaves_is_an_error_and_not_a_wait() -> None:
    connection, store = connected("one rank", 1)

    with ThreadPoolExecutor(2) as pool:
        trainer = pool.submit(connection.join, 0, store)
        worker = pool.submit(connection.join, 1)
        wire = trainer.result(100)
        worker.result(100)
        del worker  # with it its end of the wire

        with pytest.raises(WeightSyncError, match="nothing from rank 1 on rank 0"):
            wire.share(torch.zeros(1), 1, meanwhile=lambda: None)


def test_address_towards_this_host_is_loopback() -> None:
    assert address_towards("127.0.0.1", 1) == "127.0.0.1"
