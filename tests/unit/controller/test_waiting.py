"""actor.update.old_log_probs: whose they are, that nothing else changes, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tensordict import TensorDict

from spmdflow.config.algorithm import CorrectionConfig
from spmdflow.config.objective import (
    AdvantageConfig,
    PolicyUpdateConfig,
    UpdateCorrectionConfig,
)
from spmdflow.config.schema import ActorConfig, ModelConfig, OptimizerConfig, RolloutConfig
from spmdflow.controller import waiting
from spmdflow.controller.batch import Batch, concatenate
from spmdflow.data.ragged import pad, ragged_from_padded
from spmdflow.errors import ColumnError
from spmdflow.models.policy import ActorWorker
from spmdflow.objectives.advantage import compute_advantages
from spmdflow.objectives.kl import compute_rollout_weights
from spmdflow.transfer.register import map_function
from tests.unit.toy_flow import TASK, Rank, rank_of_one

ROWS = 8
LR = 2e-6


@map_function(reads=("response_mask",), writes=("token_level_rewards", "ref_log_probs"))
def judge(batch: TensorDict, *, reduce: Any, report: Any) -> TensorDict:
    """Rewards that differ by row and token, and log-probs of a reference."""
    mask = pad(batch["response_mask"])
    made = mask * (torch.arange(mask.numel()).view(mask.shape) % 5 - 2.0)
    rewards = ragged_from_padded(made, mask.sum(-1))
    reference = ragged_from_padded(-0.5 * mask, mask.sum(-1))
    columns = {"token_level_rewards": rewards, "ref_log_probs": reference}
    return TensorDict(columns, batch_size=batch.batch_size)


@map_function(reads=("response_mask",), optional=("old_log_probs",), writes=("seen",))
def look(batch: TensorDict, *, reduce: Any, report: Any) -> TensorDict:
    """Whether the log-probs are there."""
    seen = torch.full(batch.batch_size, float("old_log_probs" in batch.keys()))
    return TensorDict({"seen": seen}, batch_size=batch.batch_size)


class Ran(NamedTuple):
    """What some steps did."""

    labels: list[list[str]]
    metrics: list[Mapping[str, float]]
    weights: dict[str, torch.Tensor]
    choices: str


Body = Callable[[Any, Batch], object]


def update(actor: Any, batch: Batch, *, kl_coef: float = 0.0) -> Any:
    cfg = AdvantageConfig(kl_coef=kl_coef, lam=1.0, whiten=False)
    batch |= batch.map(compute_advantages, estimator="reinforce_pp", cfg=cfg)
    return actor.update_actor(batch)


def run(
    folder: Path,
    *,
    body: Body = update,
    steps: int = 2,
    **settings: Any,
) -> Ran:
    """Steps of generation, log-probs, advantages (in body) and update, in this process."""
    with rank_of_one(folder, prompts_per_step=ROWS) as rank:
        return _ran(rank, body, steps, settings)


def _ran(rank: Rank, body: Body, steps: int, settings: dict[str, Any]) -> Ran:
    sizes = {"mini_batch_size": ROWS, **settings}
    cfg = ActorConfig(
        model=ModelConfig(path=str(TASK / "model")),
        optimizer=OptimizerConfig(lr=LR),
        update=PolicyUpdateConfig(**sizes),
        rollout=RolloutConfig(tokenizer_path=str(TASK / "model"), max_new_tokens=6),
    )
    flow = rank.flow
    labels = []
    actor = flow.spawn(ActorWorker, cfg, pool=flow.pool("all"))
    prompts = flow.prompts(rank.config.data)
    found = []
    shown = flow._show.step
    flow._show.step = lambda number, metrics: (found.append(metrics), shown(number, metrics))  # type: ignore[method-assign]
    finish = flow._finish

    def finish_and_note(step: Any) -> None:
        records = flow.caller.records
        finish(step)
        labels.append([record.label for record in records])

    flow._finish = finish_and_note  # type: ignore[method-assign]
    for step in flow.steps(steps):
        batch = actor.generate_sequences(next(prompts))
        batch |= actor.compute_log_prob(batch)
        batch |= batch.map(judge)
        result = body(actor, batch)
        if result is not None:
            step.log(result)  # type: ignore[arg-type]
    engine = rank.state._workers["actor"].engine  # type: ignore[attr-defined]
    weights = {name: live.detach().clone() for name, live, _ in engine.blocks()}
    choices = "; ".join(f"{c.value}: {c.why}" for c in flow.caller.waiting.choices.values())
    return Ran(labels, found, weights, choices)


CALL = "actor.compute_log_prob"
NO_NUMBERS = ("time/", "perf/", "transfer/", "rollout/sync")


def assert_same(one: Ran, other: Ran) -> None:
    """Bit for bit: weights, and metrics but seconds and bytes; sums in another order: to 1e-6."""
    assert all(torch.equal(one.weights[name], other.weights[name]) for name in one.weights)
    for mine, theirs in zip(one.metrics, other.metrics, strict=True):
        for name in {n for n in mine.keys() | theirs.keys() if not n.startswith(NO_NUMBERS)}:
            summed = name.startswith(("actor/entropy", "actor/reference_kl", "rollout/drift"))
            expected = pytest.approx(theirs[name], rel=1e-6) if summed else theirs[name]
            assert mine[name] == expected, name


def assert_near(one: Ran, other: Ran) -> None:
    """Weights whose mean difference is below a fiftieth of a step of AdamW.

    float32 log-probs of two implementations; gradients near 0 may have another sign.
    """
    for name, weight in one.weights.items():
        assert (weight - other.weights[name]).abs().mean() < LR / 50, name


def test_update_of_one_step_learns_the_same_without_a_forward_before(tmp_path: Path) -> None:
    recomputed = run(tmp_path / "recompute", old_log_probs="recompute")
    chosen = run(tmp_path / "auto")

    assert all(CALL in labels for labels in recomputed.labels)
    assert not any(CALL in labels for labels in chosen.labels)
    assert chosen.choices.startswith("of the update's own forward: a batch is one optimizer step")
    for name in ("actor/entropy", "actor/reference_kl", "rollout/drift", "rollout/drift_max"):
        assert name in chosen.metrics[0]
    names = recomputed.metrics[0].keys() - chosen.metrics[0].keys()
    assert names == {"time/compute_log_prob_seconds"}
    assert_same(recomputed, chosen)


@pytest.mark.parametrize("settings", [{}, {"mini_batch_size": 4}, {"num_epochs": 2}])
def test_kl_in_the_reward_reads_them_so_they_are_recomputed(
    tmp_path: Path, settings: dict[str, int]
) -> None:
    def penalised(actor: Any, batch: Batch) -> Any:
        return update(actor, batch, kl_coef=0.1)

    recomputed = run(tmp_path / "a", body=penalised, old_log_probs="recompute", **settings)
    chosen = run(tmp_path / "b", body=penalised, **settings)

    assert [labels.count(CALL) for labels in chosen.labels] == [1, 1]
    assert_same(recomputed, chosen)
    if not settings:
        assert chosen.choices == ("recompute: map.compute_advantages reads them before the update")


def test_map_function_that_uses_them_if_there_is_given_them(tmp_path: Path) -> None:
    seen = []

    def looking(actor: Any, batch: Batch) -> Any:
        seen.append(batch.map(look).mean("seen"))
        return update(actor, batch)

    ran = run(tmp_path, body=looking)

    assert seen == [1.0, 1.0]
    assert [labels.count(CALL) for labels in ran.labels] == [1, 1]


@pytest.mark.parametrize("settings", [{"mini_batch_size": 4}, {"num_epochs": 2}])
def test_generators_log_probs_serve_several_steps_once_the_mismatch_is_known(
    tmp_path: Path, settings: dict[str, int]
) -> None:
    recomputed = run(tmp_path / "a", steps=3, old_log_probs="recompute", **settings)
    chosen = run(tmp_path / "b", steps=3, **settings)
    always = run(tmp_path / "c", steps=3, old_log_probs="rollout", **settings)

    assert [labels.count(CALL) for labels in chosen.labels] == [1, 0, 0]
    assert not any(CALL in labels for labels in always.labels)
    assert chosen.choices.startswith("rollout: generator and trainer differ by at most 0.002")
    assert all(metrics["rollout/weight_clipped"] == 0 for metrics in always.metrics)
    for ran in (chosen, always):
        for name in ("actor/entropy", "actor/reference_kl", "rollout/drift", "rollout/drift_max"):
            assert all(name in metrics for metrics in ran.metrics)
        assert_near(ran, recomputed)
        for mine, theirs in zip(ran.metrics, recomputed.metrics, strict=True):
            for name in ("actor/loss", "actor/grad_norm", "actor/approx_kl"):
                assert mine[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-5)


def corrected(kind: str) -> Body:
    """An update whose tokens are weighted by trainer over generator, as in grpo_async."""

    def body(actor: Any, batch: Batch) -> Any:
        batch |= batch.map(compute_rollout_weights, cfg=CorrectionConfig(kind=kind))
        return update(actor, batch)

    return body


@pytest.mark.parametrize("settings", [{}, {"mini_batch_size": 4}])
def test_weights_of_tokens_do_without_a_forward_once_the_mismatch_is_known(
    tmp_path: Path, settings: dict[str, int]
) -> None:
    body = corrected("token")

    recomputed = run(tmp_path / "a", body=body, steps=3, old_log_probs="recompute", **settings)
    chosen = run(tmp_path / "b", body=body, steps=3, **settings)

    assert [labels.count(CALL) for labels in chosen.labels] == [1, 0, 0]
    assert [metrics["rollout/weight_mean"] for metrics in chosen.metrics[1:]] == [1.0, 1.0]
    assert_near(chosen, recomputed)


def test_weights_of_whole_responses_have_them_recomputed(tmp_path: Path) -> None:
    ran = run(tmp_path, body=corrected("sequence"), mini_batch_size=4)

    assert [labels.count(CALL) for labels in ran.labels] == [1, 1]


def test_generators_log_probs_do_not_serve_beyond_the_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "MOST_MEAN", 1e-9)

    recomputed = run(tmp_path / "a", old_log_probs="recompute", mini_batch_size=4)
    chosen = run(tmp_path / "b", mini_batch_size=4)
    weighted = run(tmp_path / "c", body=corrected("token"))

    assert [labels.count(CALL) for labels in chosen.labels + weighted.labels] == [1, 1, 1, 1]
    assert "generator and trainer differ by more than" in chosen.choices
    assert_same(recomputed, chosen)


def test_log_probs_that_no_update_takes_are_made_when_the_step_ends(tmp_path: Path) -> None:
    ran = run(tmp_path, body=lambda actor, batch: None)

    assert [labels.count(CALL) for labels in ran.labels] == [1, 1]
    assert "actor/entropy" in ran.metrics[0]


def test_update_of_some_of_the_rows_has_them_made(tmp_path: Path) -> None:
    def halves(actor: Any, batch: Batch) -> Any:
        update(actor, batch[: ROWS // 2])
        return update(actor, batch[ROWS // 2 :])

    recomputed = run(tmp_path / "a", body=halves, old_log_probs="recompute")
    chosen = run(tmp_path / "b", body=halves)

    assert [labels.count(CALL) for labels in chosen.labels] == [1, 0]  # then it is several steps
    assert chosen.choices.startswith("rollout:")
    assert_near(chosen, recomputed)


def test_joined_rows_have_them_made(tmp_path: Path) -> None:
    def joined(actor: Any, batch: Batch) -> Any:
        bare = batch.drop("old_log_probs")
        halves = [bare[: ROWS // 2], bare[ROWS // 2 :]]
        return update(actor, concatenate([half | actor.compute_log_prob(half) for half in halves]))

    recomputed = run(tmp_path / "a", body=joined, old_log_probs="recompute")
    chosen = run(tmp_path / "b", body=joined)

    assert [labels.count(CALL) for labels in chosen.labels] == [3, 3]
    assert_same(recomputed, chosen)


def test_call_that_may_change_the_model_has_them_made_first(tmp_path: Path) -> None:
    def again(actor: Any, batch: Batch) -> Any:
        actor.generate_sequences(batch.only("prompts"))
        return update(actor, batch)

    ran = run(tmp_path, body=again)

    for labels in ran.labels:
        assert (
            labels.index(CALL)
            < [place for place, label in enumerate(labels) if label == "actor.generate_sequences"][
                1
            ]
        )


def test_metrics_of_the_call_have_it_made(tmp_path: Path) -> None:
    found = []

    def reading(actor: Any, batch: Batch) -> Any:
        found.append(batch.only("old_log_probs").metrics["actor/entropy"])
        return update(actor, batch)

    ran = run(tmp_path, body=reading)

    assert found == [metrics["actor/entropy"] for metrics in ran.metrics]


def test_metrics_of_a_call_that_was_not_needed_are_those_of_the_update(tmp_path: Path) -> None:
    found = []

    def reading(actor: Any, batch: Batch) -> Any:
        result = update(actor, batch)
        found.append(batch.metrics["actor/entropy"])
        return result

    ran = run(tmp_path, body=reading)

    assert not any(CALL in labels for labels in ran.labels)
    assert found == [metrics["actor/entropy"] for metrics in ran.metrics]


def test_reading_them_after_the_update_is_refused_with_the_setting(tmp_path: Path) -> None:
    def late(actor: Any, batch: Batch) -> Any:
        result = update(actor, batch)
        batch.fetch("old_log_probs")
        return result

    with pytest.raises(
        ColumnError,
        match=r"got old_log_probs of rows that an update has learnt from since, .*; "
        r"set actor\.update\.old_log_probs=recompute",
    ):
        run(tmp_path / "a", body=late)
    assert run(tmp_path / "b", body=late, old_log_probs="recompute").labels


def test_update_that_lacks_a_column_leaves_the_call_waiting(tmp_path: Path) -> None:
    def corrected(actor: Any, batch: Batch) -> Any:
        with pytest.raises(ColumnError, match="advantages"):
            actor.update_actor(batch)
        return update(actor, batch)

    assert not any(CALL in labels for labels in run(tmp_path, body=corrected).labels)


def test_settings_without_the_choice_recompute(tmp_path: Path) -> None:
    cfg = ActorConfig(model=ModelConfig(path="none"))
    bare = replace(cfg, update=type("Plain", (), {"mini_batch_size": 4})())

    assert waiting._mode_of(type("T", (), {"settings": bare})()) == "recompute"  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["token", "sequence", "mask"])
def test_correction_of_the_update_weighs_as_a_line_in_the_script_does(
    tmp_path: Path, kind: str
) -> None:
    """At a cap that the rounding of generator and trainer passes."""
    written = CorrectionConfig(kind, 1 + 1e-9, normalise=kind == "token")
    setting = UpdateCorrectionConfig(kind, 1 + 1e-9, normalise=kind == "token")

    def by_script(actor: Any, batch: Batch) -> Any:
        batch |= batch.map(compute_rollout_weights, cfg=written)
        return update(actor, batch)

    common = {"mini_batch_size": 4, "old_log_probs": "recompute"}
    script = run(tmp_path / "script", body=by_script, **common)
    found = run(tmp_path / "setting", correction=setting, **common)

    assert_same(found, script)
    assert found.metrics[0]["rollout/weight_clipped"] > 0
    labels = found.labels[0]
    assert labels.index("map.compute_rollout_weights") > labels.index(CALL)
    if kind == "mask":  # tokens are left out
        without = run(tmp_path / "without", **common)
        assert any(not torch.equal(found.weights[n], without.weights[n]) for n in found.weights)


def test_without_a_correction_no_weights_are_made(tmp_path: Path) -> None:
    ran = run(tmp_path, old_log_probs="recompute")

    assert not any("map.compute_rollout_weights" in labels for labels in ran.labels)
    assert not any(name.startswith("rollout/weight_m") for name in ran.metrics[0])


def test_update_refuses_rows_without_the_weights_that_its_settings_ask_for(tmp_path: Path) -> None:
    def weightless(actor: Any, batch: Batch) -> Any:
        return update(actor, batch.drop("rollout_weights"))

    with pytest.raises(Exception, match="no column rollout_weights, with correction.kind=token"):
        run(tmp_path, body=weightless, correction=UpdateCorrectionConfig("token"))
