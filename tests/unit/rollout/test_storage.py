"""Memory that is freed and given back, and who may generate together."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from spmdflow.config.schema import RolloutConfig
from spmdflow.errors import ConfigError, ProtocolError
from spmdflow.parallel.layout import Layout
from spmdflow.rollout.generator import NEVER, Replica, generator_of
from spmdflow.rollout.sampling import Sampling
from spmdflow.weights.move import Storages
from tests.rollout_reference import load, make_prompts, put_weights, write_llama

CPU = torch.device("cpu")


def test_storages_count_what_tensors_share_once_and_keep_their_views() -> None:
    whole = torch.arange(6.0)
    storages = Storages([whole, whole[2:4], torch.ones(2)])
    view = whole[1:3]

    assert storages.num_bytes == 32
    storages.free()
    assert storages.num_bytes == 0
    storages.restore()

    assert storages.num_bytes == 32
    assert view.tolist() == [0.0, 0.0]
    whole[1] = 5.0
    assert view.tolist() == [5.0, 0.0]
    storages.restore()
    assert view.tolist() == [5.0, 0.0]  # what is there is left alone


def test_builtin_generator_frees_its_weights_and_takes_new_ones(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "model")
    generator = generator_of(RolloutConfig(), path, CPU)
    tensors = {name: p.detach() for name, p in load(path).named_parameters()}
    put_weights(generator, tensors.items(), version=4)
    prompts = make_prompts(4)
    sampling = Sampling(8)
    seeds = [1, 2, 3, 4]
    before = generator.generate(prompts, sampling, seeds)["responses"].values().tolist()
    hashes = generator.hashes()

    generator.sleep(weights=True)
    generator.sleep(weights=True)

    assert generator.weights_version == NEVER
    held = Storages(generator._forward.weights.values())  # type: ignore[attr-defined]
    assert held.num_bytes == 0
    generator.wake("kv_cache")
    assert held.num_bytes == 0
    put_weights(generator, tensors.items(), version=5)
    assert generator.hashes() == hashes
    assert generator.generate(prompts, sampling, seeds)["responses"].values().tolist() == before


def test_builtin_generator_refuses_replicas_of_several_ranks() -> None:
    layout = Layout((0, 1, 2, 3), tp_size=4, gen_tp_size=2)
    replica = Replica(2, *(layout.axis_group(2, a) for a in ("gen_replica", "gen_tp", "gen_pp")))

    with pytest.raises(ConfigError, match=r"got generation replicas of 2 ranks \(t2p1\), expected"):
        generator_of(RolloutConfig(), "nowhere", CPU, replica)


def test_replica_knows_its_places_and_needs_groups_only_for_several_ranks() -> None:
    layout = Layout((4, 5, 6, 7), tp_size=2, pp_size=2)
    replica = Replica(6, *(layout.axis_group(6, a) for a in ("gen_replica", "gen_tp", "gen_pp")))

    assert (replica.size, replica.tp_size, replica.pp_size) == (4, 2, 2)
    assert (replica.tp_rank, replica.pp_rank) == (0, 1)
    with pytest.raises(ProtocolError, match="build it with Replica.of"):
        replica.gather(torch.ones(1))
    assert Replica.alone().gather(torch.ones(1))[0].tolist() == [1.0]
