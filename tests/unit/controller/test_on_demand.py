"""A reference that nothing needs is neither built nor called; a reader of its columns has both."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from spmdflow.config.guard import DEFAULT_GUARDS
from spmdflow.config.load import load
from spmdflow.config.objective import AdvantageConfig, PolicyUpdateConfig
from spmdflow.config.schema import (
    ActorConfig,
    ModelConfig,
    OptimizerConfig,
    ReferenceConfig,
    RolloutConfig,
)
from spmdflow.controller.batch import Batch, concatenate
from spmdflow.controller.group import WorkerGroup
from spmdflow.controller.on_demand import readers_of_ref_log_probs
from spmdflow.controller.result import UnknownMetric
from spmdflow.data.ragged import lengths_of
from spmdflow.errors import ColumnError
from spmdflow.models.policy import ActorWorker, ReferenceWorker
from spmdflow.objectives.advantage import compute_advantages
from spmdflow.worker_api.register import map_function
from tests.unit.toy_flow import TASK, Rank, rank_of_one

ROWS = 8
CALL = "reference.compute_ref_log_prob"
BUILD = "reference.spawn"


@map_function(reads=("ref_log_probs",), writes=("mean_ref",))
def need(batch: TensorDict, *, reduce: Any, report: Any) -> TensorDict:
    """The mean log-probability of each response."""
    columns = batch["ref_log_probs"]
    means = torch.stack([row.mean() for row in columns.unbind()])
    return TensorDict({"mean_ref": means}, batch_size=batch.batch_size)


@map_function(reads=("responses",), optional=("ref_log_probs",), writes=("seen",))
def look(batch: TensorDict, *, reduce: Any, report: Any) -> TensorDict:
    """Whether the log-probs are there."""
    seen = torch.full(batch.batch_size, float("ref_log_probs" in batch.keys()))
    return TensorDict({"seen": seen}, batch_size=batch.batch_size)


@map_function(reads=("responses",), writes=("token_level_rewards",))
def judge(batch: TensorDict, *, reduce: Any, report: Any) -> TensorDict:
    """One for each token."""
    ones = torch.nested.nested_tensor(
        [torch.ones(int(size)) for size in lengths_of(batch["responses"])], layout=torch.jagged
    )
    return TensorDict({"token_level_rewards": ones}, batch_size=batch.batch_size)


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    """A flow whose settings have no reader of ref_log_probs."""
    with rank_of_one(tmp_path, prompts_per_step=ROWS) as rank:
        yield rank


def spawn(rank: Rank) -> tuple[WorkerGroup, WorkerGroup]:
    """A policy, and its reference."""
    model = ModelConfig(path=str(TASK / "model"))
    actor = ActorConfig(
        model=model,
        optimizer=OptimizerConfig(lr=1e-3),
        update=PolicyUpdateConfig(mini_batch_size=ROWS, old_log_probs="recompute"),
        rollout=RolloutConfig(tokenizer_path=str(TASK / "model"), max_new_tokens=6),
    )
    pool = rank.flow.pool("all")
    policy = rank.flow.spawn(ActorWorker, actor, pool=pool)
    return policy, rank.flow.spawn(ReferenceWorker, ReferenceConfig(model=model), pool=pool)


def labels(rank: Rank) -> list[str]:
    """The calls of the running step, and those before the first one."""
    return [record.call.label for record in rank.flow.caller.records]


def begin(rank: Rank) -> tuple[WorkerGroup, WorkerGroup, Batch, Iterator[Any]]:
    """Both models, the first step's rows with the reference's answer, and the steps."""
    policy, reference = spawn(rank)
    prompts = rank.flow.prompts(rank.config.data)
    steps = rank.flow.steps(2)
    next(steps)
    batch = policy.generate_sequences(next(prompts))
    return policy, reference, batch | reference.compute_ref_log_prob(batch), steps


def expected(rank: Rank, batch: Batch) -> Any:
    """What a reference that is built at once answers."""
    cfg = ReferenceConfig(model=ModelConfig(path=str(TASK / "model")), compute="always")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank.flow, "step", None)
        patch.setattr("spmdflow.controller.flow.can_wait", lambda *_: False)
        other = rank.flow.spawn(ReferenceWorker, cfg, pool=rank.flow.pool("all"), name="other")
    plain = batch.drop("ref_log_probs")
    return other.compute_ref_log_prob(plain).fetch("ref_log_probs")["ref_log_probs"]


def test_a_reference_that_nothing_needs_is_neither_built_nor_called(rank: Rank) -> None:
    policy, _, batch, steps = begin(rank)
    batch |= policy.compute_log_prob(batch)
    batch |= batch.map(judge)
    cfg = AdvantageConfig(whiten=False)
    batch |= batch.map(compute_advantages, estimator="reinforce_pp", cfg=cfg)
    policy.update_actor(batch).metrics()

    assert "ref_log_probs" in batch.columns, "as if it had been computed"
    assert not {CALL, BUILD} & {*labels(rank)}
    assert [*rank.flow.groups] == ["actor"]
    assert [*rank.state._workers] == ["actor"]
    next(steps)  # samples and metrics of the step do not need it either
    assert [*rank.flow.groups] == ["actor"]


def test_a_function_that_reads_the_column_has_the_model_built_and_called_once(rank: Rank) -> None:
    _, _, batch, _ = begin(rank)
    batch |= batch.map(need)
    batch.fetch("mean_ref")
    batch.fetch("ref_log_probs")

    ran = labels(rank)
    assert ran.count(BUILD) == ran.count(CALL) == 1
    assert ran.index(BUILD) < ran.index(CALL) < ran.index("map.need")
    assert [*rank.flow.groups] == ["actor", "reference"]


def test_later_steps_call_a_model_that_was_built_at_once(rank: Rank) -> None:
    _, reference, batch, steps = begin(rank)
    batch.fetch("ref_log_probs")
    next(steps)
    answer = reference.compute_ref_log_prob(batch.drop("ref_log_probs"))

    assert labels(rank) == [CALL]
    assert not answer.column("ref_log_probs").is_postponed


def test_values_are_those_of_a_reference_that_was_built_at_once(rank: Rank) -> None:
    _, _, batch, _ = begin(rank)
    fetched = batch.fetch("ref_log_probs")["ref_log_probs"]

    right = expected(rank, batch)
    for row, other in zip(fetched.unbind(), right.unbind(), strict=True):
        assert torch.equal(row, other)


def test_rows_can_be_selected_repeated_renamed_and_joined_before_anything_is_computed(
    rank: Rank,
) -> None:
    _, _, batch, _ = begin(rank)
    mixed = concatenate(
        [
            batch.select([5, 1]),
            batch[2:4].rename(mine="ref_log_probs")[:0].rename(ref_log_probs="mine"),
            batch[6:7],
        ]
    )
    renamed = mixed.rename(mine="ref_log_probs").only("mine")
    assert CALL not in labels(rank)

    fetched = renamed.fetch("mine")["mine"].unbind()
    whole = batch.fetch("ref_log_probs")["ref_log_probs"].unbind()
    assert labels(rank).count(CALL) == 1
    for row, at in zip(fetched, (5, 1, 6), strict=True):
        assert torch.equal(row, whole[at])


def test_lengths_of_the_column_are_a_reason_to_compute_it(rank: Rank) -> None:
    _, _, batch, _ = begin(rank)

    assert batch.lengths("ref_log_probs").tolist() == batch.lengths("responses").tolist()
    assert CALL in labels(rank)


def test_only_a_users_function_needs_what_it_reads_if_it_is_there(rank: Rank) -> None:
    _, _, batch, _ = begin(rank)

    assert batch.map(look).fetch("seen")["seen"].tolist() == [1.0] * ROWS
    assert CALL in labels(rank)


def test_a_penalty_that_the_script_sets_itself_is_a_reason_to_compute_it(rank: Rank) -> None:
    policy, _, batch, _ = begin(rank)
    batch |= policy.compute_log_prob(batch)
    batch |= batch.map(judge)
    cfg = AdvantageConfig(whiten=False, kl_coef=0.1)
    batch.map(compute_advantages, estimator="reinforce_pp", cfg=cfg).fetch("advantages")

    assert CALL in labels(rank)


def test_a_batch_without_what_the_method_reads_is_refused_at_the_call(rank: Rank) -> None:
    _, reference, batch, _ = begin(rank)

    with pytest.raises(ColumnError, match="expected .*responses"):
        reference.compute_ref_log_prob(batch.drop("responses"))


def test_reading_a_metric_that_is_missing_names_the_setting(rank: Rank) -> None:
    policy, _, batch, _ = begin(rank)
    batch |= policy.compute_log_prob(batch)

    with pytest.raises(UnknownMetric, match="set reference.compute=always"):
        batch.metrics["actor/reference_kl"]


READERS = [
    ("actor.loss.kl_coef=0.1", "actor.loss.kl_coef"),
    ("advantage.kl_coef=0.1", "advantage.kl_coef"),
    ("reference.compute=always", "reference.compute"),
    ("run.guards=['actor/reference_kl > 2: stop']", "run.guards"),
    ("run.keep_best=-actor/reference_kl", "run.keep_best"),
]


def readers(script: str, *settings: str) -> list[str]:
    """What needs ref_log_probs by these settings of a bundled script."""
    return readers_of_ref_log_probs(load(script, None, settings).cfg)


@pytest.mark.parametrize(("setting", "reader"), READERS)
def test_settings_that_need_the_log_probs(setting: str, reader: str) -> None:
    assert readers("grpo", "actor.loss.kl_coef=0", setting) == [reader]


def test_the_default_guard_of_the_kl_needs_no_log_probs() -> None:
    assert any("reference_kl" in guard for guard in DEFAULT_GUARDS)
    assert readers("grpo", "actor.loss.kl_coef=0") == []
    assert readers("grpo", "actor.loss.kl_coef=0", "run.guards=[]") == []


def test_distillation_needs_its_teacher() -> None:
    assert readers("distill") == ["teacher.compute"]
