"""Layouts and process groups that roles derive from their settings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from spmdflow.config.leaf import defaults
from spmdflow.config.schema import ActorConfig, RewardConfig
from spmdflow.models.critic import CriticWorker
from spmdflow.models.generator import GeneratorWorker
from spmdflow.models.policy import ActorWorker, PolicyWorker, ReferenceWorker
from spmdflow.models.reward import RewardWorker
from spmdflow.parallel.layout import Layout
from spmdflow.worker_api.worker import any_layout, loads_any_layout
from tests.unit.weight_shapes import TINY


def actor_config(layout: str, *, rollout: str = "auto", engine: str = "vllm") -> ActorConfig:
    cfg = defaults(ActorConfig)
    cfg.model.lora = cfg.rollout.lora = None
    cfg.engine.layout = layout
    cfg.rollout.layout = rollout
    cfg.rollout.engine = engine
    return cfg


def test_empty_layout_is_data_parallel_and_needs_the_pool_alone() -> None:
    cfg = actor_config("t1", engine="builtin")
    layout = ActorWorker.layout_of(cfg, (1, 2, 3))

    assert layout == Layout((1, 2, 3), dp_size=3)
    assert ActorWorker.needed_groups(cfg, layout) == [(1, 2, 3)]


def test_vllm_generates_with_the_trainers_tensor_size_unless_told_otherwise() -> None:
    ranks = tuple(range(8))

    assert ActorWorker.layout_of(actor_config("t4"), ranks) == Layout(
        ranks, tp_size=4, dp_size=2, gen_tp_size=4
    )
    told = ActorWorker.layout_of(actor_config("t4", rollout="t2"), ranks)
    assert (told.gen_tp_size, told.generation_dp_size) == (2, 4)


def test_data_parallel_trainer_may_generate_in_replicas_of_several_ranks() -> None:
    cfg = actor_config("t1", rollout="t2")
    layout = ActorWorker.layout_of(cfg, (0, 1, 2, 3))

    assert not layout.nests
    assert layout.axis_groups("gen_tp") == [(0, 1), (2, 3)]
    assert {(0, 1), (2, 3), (0, 1, 2, 3)} <= set(ActorWorker.needed_groups(cfg, layout))


def test_policy_whose_samples_others_make_is_not_cut_by_their_layout() -> None:
    cfg = actor_config("t1", rollout="t2")

    assert PolicyWorker.layout_of(cfg, (0,)) == Layout((0,))
    assert GeneratorWorker.layout_of(cfg, (1, 2)) == Layout((1, 2), tp_size=2)


@pytest.mark.parametrize("tied", [False, True])
def test_groups_of_a_3d_layout_have_several_ranks_and_are_used(tmp_path: Path, tied: bool) -> None:
    cfg = actor_config("t2p4", rollout="t1")
    cfg.model.path = str(tmp_path)
    config = {**TINY, "model_type": "llama", "tie_word_embeddings": tied}
    (tmp_path / "config.json").write_text(json.dumps(config))
    layout = ActorWorker.layout_of(cfg, tuple(range(16)))
    groups = ActorWorker.needed_groups(cfg, layout)

    assert len(groups) == len(set(groups))
    assert all(list(ranks) == sorted(ranks) and len(ranks) > 1 for ranks in groups)
    ends = {*layout.axis_groups("embedding")}
    wanted = {layout.ranks, *(ends if tied else ())}
    for axis in ("tp", "pp", "dp", "replica", "gen_replica", "micro_dp"):
        wanted |= {ranks for ranks in layout.axis_groups(axis) if len(ranks) > 1}
    assert set(groups) == wanted and (not ends & wanted or tied)
    hosts = ActorWorker.host_groups(cfg, layout)
    told = {layout.ranks, *layout.axis_groups("replica"), *layout.axis_groups("dp")}
    assert set(hosts) == told < wanted and len(hosts) == len(told)


@pytest.mark.parametrize(("world", "needed", "hosts"), [(128, 85, 53), (1024, 449, 193)])
def test_groups_of_a_70b_actor_are_counted(world: int, needed: int, hosts: int) -> None:
    cfg = actor_config("t8p4", rollout="t8")
    cfg.model.path = str(Path(__file__).parents[3] / "algos" / "arithmetic" / "model")
    layout = ActorWorker.layout_of(cfg, tuple(range(world)))

    assert len(ActorWorker.needed_groups(cfg, layout)) == needed
    assert len(ActorWorker.host_groups(cfg, layout)) == hosts


def test_reward_function_is_data_parallel_whatever_its_engine_says() -> None:
    cfg = defaults(RewardConfig)
    cfg.engine.layout = "t2"
    cfg.model = None

    assert RewardWorker.layout_of(cfg, (0, 1)) == Layout((0, 1), dp_size=2)


class Own(PolicyWorker):
    """A role that loads something of its own."""

    def load_state(self, folder: Path) -> None:
        """What its ranks saved."""
        super().load_state(folder)


class Moving(Own):
    """A role whose own state any rank can read."""

    @any_layout
    def load_state(self, folder: Path) -> None:
        """What any ranks saved."""
        super().load_state(folder)


def test_roles_resume_on_any_layout_and_a_load_state_of_ones_own_only_if_it_is_marked() -> None:
    roles = (ActorWorker, CriticWorker, ReferenceWorker, RewardWorker, GeneratorWorker)

    assert [each for each in roles if not loads_any_layout(each)] == []
    assert not loads_any_layout(Own) and loads_any_layout(Moving)
