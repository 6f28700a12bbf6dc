"""Presets and maps become pools of ranks; prompts become mini-batches. Integers only."""

from __future__ import annotations

import pytest

from spmdflow.config.parallel import batch_algebra_of
from spmdflow.config.placement import Pool, resolve_placement, roles_of
from spmdflow.config.schema import DataConfig, EngineConfig, PPOConfig, UpdateConfig
from spmdflow.errors import ConfigError

ROLES = ("actor", "critic", "reference", "reward")


def test_roles_of_ppo_are_its_parts_with_an_engine() -> None:
    assert roles_of(PPOConfig()) == ROLES


def test_colocate_puts_every_role_on_all_ranks() -> None:
    assert resolve_placement("colocate", ROLES, 3) == {"all": Pool(ROLES, (0, 1, 2))}


def test_split_gives_actor_and_reference_the_first_half() -> None:
    assert resolve_placement("split", ROLES, 5) == {
        "actor+reference": Pool(("actor", "reference"), (0, 1, 2)),
        "critic+reward": Pool(("critic", "reward"), (3, 4)),
    }


def test_standalone_on_6_ranks_gives_the_first_two_roles_two_each() -> None:
    pools = resolve_placement("standalone", ROLES, 6)

    assert {name: pool.ranks for name, pool in pools.items()} == {
        "actor": (0, 1),
        "critic": (2, 3),
        "reference": (4,),
        "reward": (5,),
    }


@pytest.mark.parametrize("preset", ["colocate", "split", "standalone"])
@pytest.mark.parametrize("world_size", range(4, 33))
def test_preset_covers_every_rank_and_role_once_and_evenly(preset: str, world_size: int) -> None:
    pools = list(resolve_placement(preset, ROLES, world_size).values())

    assert [rank for pool in pools for rank in pool.ranks] == list(range(world_size))
    assert sorted(role for pool in pools for role in pool.roles) == sorted(ROLES)
    sizes = [len(pool.ranks) for pool in pools]
    assert max(sizes) - min(sizes) <= 1


def test_map_keeps_its_names_and_may_leave_ranks_idle() -> None:
    placement = {
        "train": {"roles": ["actor", "critic"], "ranks": [1, 3]},
        "score": {"roles": ["reward", "reference"], "ranks": [0]},
    }

    assert resolve_placement(placement, ROLES, 4) == {
        "train": Pool(("actor", "critic"), (1, 3)),
        "score": Pool(("reward", "reference"), (0,)),
    }


def test_split_without_a_role_on_one_side_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"split got only the roles actor, expected roles on both"
    ):
        resolve_placement("split", ("actor",), 2)


@pytest.mark.parametrize("num_ranks", range(1, 9))
@pytest.mark.parametrize("mini_batch_size", [4, 12, 60])
def test_rows_per_rank_and_micro_batches_cover_the_mini_batch(
    num_ranks: int, mini_batch_size: int
) -> None:
    data = DataConfig(train_path="", prompts_per_step=15, samples_per_prompt=4)
    update = UpdateConfig(mini_batch_size=mini_batch_size, num_epochs=2)
    engine = EngineConfig(micro_batch_rows=5)

    algebra = batch_algebra_of("actor", data, update, engine, num_ranks=num_ranks)

    fewest, most = algebra.rows_per_rank
    assert fewest * num_ranks <= mini_batch_size <= most * num_ranks
    assert most - fewest <= 1
    assert (algebra.micro_batches - 1) * 5 < most <= algebra.micro_batches * 5
    assert algebra.mini_batches * mini_batch_size == algebra.samples == 60
    assert algebra.optimizer_steps == algebra.mini_batches * 2
