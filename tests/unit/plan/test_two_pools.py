"""Rows that were judged on two pools are mapped on one of them: a group of both does not exist."""

from __future__ import annotations

from pathlib import Path

import pytest

from spmdflow.config.load import load
from spmdflow.plan.check import check_group_members
from spmdflow.plan.trace import trace
from tests.proofs.rows import check_rows
from tests.unit.planned import ALGORITHMS, settings_of

SCRIPT = """\
from spmdflow import ActorWorker, RewardWorker, compute_advantages, concatenate


def main(flow, cfg):
    actor = flow.spawn(ActorWorker, cfg.actor)
    first = flow.spawn(RewardWorker, cfg.reward, name="reward")
    second = flow.spawn(RewardWorker, cfg.reward, pool=flow.pool("POOL"), name="second")
    prompts = flow.prompts(cfg.data)
    for step in flow.steps(cfg.total_steps):
        batch = actor.generate_sequences(next(prompts))
        batch |= actor.compute_log_prob(batch)
        one = batch[:4]
        two = batch[4:]
        batch = concatenate([one | first.compute_reward(one), two | second.compute_reward(two)])
        batch |= batch.map(compute_advantages, estimator="reinforce_pp", cfg=cfg.advantage)
        step.log(actor.update_actor(batch))
"""


@pytest.mark.parametrize(
    ("placement", "pool"),
    [
        ("colocate", "all"),
        ("split", "actor+reference"),
        ("standalone", "critic"),
    ],
)
def test_rows_judged_on_two_pools_are_mapped_where_one_pool_has_most_columns(
    tmp_path: Path, placement: str, pool: str
) -> None:
    path = tmp_path / "own.py"
    path.write_text(SCRIPT.replace("POOL", pool))
    (tmp_path / "own.yaml").write_text((ALGORITHMS / "ppo.yaml").read_text())
    task = ALGORITHMS / "arithmetic"
    settings = [
        f"data.train_path={task}/train.jsonl",
        f"data.eval_path={task}/eval.jsonl",
        f"actor.model.path={task}/model",
        "data.prompts_per_step=8",
        "actor.update.mini_batch_size=8",
        "critic.update.mini_batch_size=8",
        "eval_every=0",
        f"placement={placement}",
    ]
    loaded = load(path, None, settings)

    found = trace(loaded.script, loaded.cfg, settings_of(4))

    (mapped,) = [call for call in found.in_step() if call.label == "map.compute_advantages"]
    (generated,) = [call for call in found.in_step() if call.label == "actor.generate_sequences"]
    assert set(mapped.commands) <= set(generated.commands)
    assert check_rows(found) + check_group_members(found) == []
