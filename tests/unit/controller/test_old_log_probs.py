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
from spmdflow.config.load import load
from spmdflow.config.objective import (
    AdvantageConfig,
    PolicyUpdateConfig,
    UpdateCorrectionConfig,
)
from spmdflow.config.schema import ActorConfig, ModelConfig, OptimizerConfig, RolloutConfig
from spmdflow.controller import old_log_probs
from spmdflow.controller.batch import Batch, concatenate
from spmdflow.controller.old_log_probs import OldLogProbs, readers_of
from spmdflow.data.ragged import pad, ragged_from_padded
from spmdflow.errors import ColumnError, ConfigError
from spmdflow.models.policy import ActorWorker
from spmdflow.objectives.advantage import compute_advantages
from spmdflow.objectives.kl import compute_rollout_weights
from spmdflow.worker_api.register import map_function
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
    readers: Mapping[str, bool] | None = None,
    **settings: Any,
) -> Ran:
    """Steps of generation, log-probs, advantages (in body) and update, in this process.

    readers: what reads old_log_probs before the update, by the settings of a script.
    """
    with rank_of_one(folder, prompts_per_step=ROWS) as rank:
        rank.flow.caller.old_log_probs = OldLogProbs(readers)
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
        labels.append([record.call.label for record in records])

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
    choices = "; ".join(f"{c.value}: {c.why}" for c in flow.caller.old_log_probs.choices.values())
    return Ran(labels, found, weights, choices)


CALL = "actor.compute_log_prob"
OWN_CHOICE = "own: a batch is one optimizer step and no setting reads them before it"
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
    assert chosen.choices == OWN_CHOICE
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

    readers = {"advantage.kl_coef": False}
    recomputed = run(tmp_path / "a", body=penalised, old_log_probs="recompute", **settings)
    chosen = run(tmp_path / "b", body=penalised, readers=readers, **settings)

    assert [labels.count(CALL) for labels in chosen.labels] == [1, 1]
    assert_same(recomputed, chosen)
    assert chosen.choices == "recompute: advantage.kl_coef reads them before the update"


def test_map_function_that_can_do_without_them_is_given_none_under_own(tmp_path: Path) -> None:
    seen = []

    def looking(actor: Any, batch: Batch) -> Any:
        seen.append(batch.map(look).mean("seen"))
        return update(actor, batch)

    run(tmp_path / "own", body=looking, steps=1)
    run(tmp_path / "recompute", body=looking, steps=1, old_log_probs="recompute")

    assert seen == [0.0, 1.0]


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
    readers = {"correction.kind": True}

    recomputed = run(tmp_path / "a", body=body, steps=3, old_log_probs="recompute", **settings)
    chosen = run(tmp_path / "b", body=body, steps=3, readers=readers, **settings)

    assert [labels.count(CALL) for labels in chosen.labels] == [1, 0, 0]
    assert [metrics["rollout/weight_mean"] for metrics in chosen.metrics[1:]] == [1.0, 1.0]
    assert_near(chosen, recomputed)


def test_weights_of_whole_responses_have_them_recomputed(tmp_path: Path) -> None:
    readers = {"correction.kind": False}

    ran = run(tmp_path, body=corrected("sequence"), readers=readers, mini_batch_size=4)

    assert [labels.count(CALL) for labels in ran.labels] == [1, 1]


def test_generators_log_probs_do_not_serve_beyond_the_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(old_log_probs, "MOST_MEAN", 1e-9)

    recomputed = run(tmp_path / "a", old_log_probs="recompute", mini_batch_size=4)
    chosen = run(tmp_path / "b", mini_batch_size=4)
    readers = {"correction.kind": True}
    weighted = run(tmp_path / "c", body=corrected("token"), readers=readers)

    assert [labels.count(CALL) for labels in chosen.labels + weighted.labels] == [1, 1, 1, 1]
    assert "generator and trainer differ by more than" in chosen.choices
    assert_same(recomputed, chosen)


def by_halves(actor: Any, batch: Batch) -> Any:
    update(actor, batch[: ROWS // 2])
    return update(actor, batch[ROWS // 2 :])


def twice(actor: Any, batch: Batch) -> Any:
    update(actor, batch)
    return update(actor, batch)


@pytest.mark.parametrize("body", [by_halves, twice])
def test_second_optimizer_step_on_rows_without_their_log_probs_is_refused_with_the_setting(
    tmp_path: Path, body: Body
) -> None:
    with pytest.raises(
        ColumnError, match=r"a second optimizer step .*; set actor\.update\.old_log_probs=recompute"
    ):
        run(tmp_path / "own", body=body)
    assert run(tmp_path / "recompute", body=body, old_log_probs="recompute").labels


def test_update_of_more_rows_than_a_mini_batch_is_refused_where_each_part_was_one_step(
    tmp_path: Path,
) -> None:
    def joined(actor: Any, batch: Batch) -> Any:
        halves = [batch[: ROWS // 2], batch[ROWS // 2 :]]
        return update(actor, concatenate([half | actor.compute_log_prob(half) for half in halves]))

    with pytest.raises(ColumnError, match="a second optimizer step"):
        run(tmp_path / "two steps", body=joined, mini_batch_size=ROWS // 2, old_log_probs="own")
    assert not any(CALL in labels for labels in run(tmp_path / "one", body=joined).labels)


def test_rows_that_are_learnt_a_step_later_need_no_log_probs_unless_the_policy_has_changed(
    tmp_path: Path,
) -> None:
    kept: list[Batch] = []

    def later(actor: Any, batch: Batch) -> Any:
        kept.append(batch)
        return update(actor, kept[0]) if len(kept) == 2 else None

    def too_late(actor: Any, batch: Batch) -> Any:
        kept.append(batch)
        return update(actor, kept[-2] if len(kept) > 1 else batch)

    assert not any(CALL in labels for labels in run(tmp_path / "later", body=later).labels)
    kept.clear()
    with pytest.raises(ColumnError, match=r"set actor\.update\.old_log_probs=recompute"):
        run(tmp_path / "too late", body=too_late)


@pytest.mark.parametrize("is_learnt", [False, True])
def test_reading_them_is_refused_with_the_setting_before_and_after_the_update(
    tmp_path: Path, is_learnt: bool
) -> None:
    def reading(actor: Any, batch: Batch) -> Any:
        if is_learnt:
            update(actor, batch)
        batch.fetch("old_log_probs")

    with pytest.raises(
        ColumnError,
        match=r"no column 'old_log_probs'.*; set actor\.update\.old_log_probs=recompute",
    ):
        run(tmp_path / "own", body=reading)
    assert run(tmp_path / "recompute", body=reading, old_log_probs="recompute").labels


def test_metric_that_only_the_update_reports_is_missed_with_the_setting(tmp_path: Path) -> None:
    def reading(actor: Any, batch: Batch) -> Any:
        return batch.metrics["actor/entropy"]

    with pytest.raises(KeyError, match=r"actor/entropy: .*set actor\.update\.old_log_probs=recomp"):
        run(tmp_path, body=reading)


def test_update_that_a_script_repeats_with_the_missing_column_is_the_first_step(
    tmp_path: Path,
) -> None:
    def repeated(actor: Any, batch: Batch) -> Any:
        with pytest.raises(ColumnError, match="advantages"):
            actor.update_actor(batch)
        return update(actor, batch)

    assert not any(CALL in labels for labels in run(tmp_path, body=repeated).labels)


def test_update_without_log_probs_of_any_kind_is_refused(tmp_path: Path) -> None:
    def bare(actor: Any, batch: Batch) -> Any:
        return update(actor, batch.drop("old_log_probs"))

    with pytest.raises(ColumnError, match="old_log_probs"):
        run(tmp_path, body=bare, old_log_probs="recompute")


def test_settings_without_the_choice_recompute() -> None:
    cfg = ActorConfig(model=ModelConfig(path="none"))
    bare = replace(cfg, update=type("Plain", (), {"mini_batch_size": 4})())

    assert old_log_probs._setting_of(type("T", (), {"settings": bare})()) == "recompute"  # type: ignore[arg-type]


def settings_of(script: str, *words: str) -> Any:
    return load(script, None, words).cfg


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], {}),
        (["advantage.kl_coef=0.1"], {"advantage.kl_coef": False}),
        (
            ["advantage.estimator=optimal_token_baseline"],
            {"advantage.estimator=optimal_token_baseline": False},
        ),
        (["actor.update.correction.kind=token"], {"actor.update.correction.kind": True}),
        (["actor.update.correction.kind=sequence"], {"actor.update.correction.kind": False}),
        (["run.guards=[actor/entropy < 0.1: skip]"], {"the guard of actor/entropy": False}),
        (["run.guards=[actor/entropy < 0.1: warn]"], {}),
    ],
)
def test_settings_that_read_them_before_the_update_are_known(
    words: list[str], expected: dict[str, bool]
) -> None:
    assert readers_of(settings_of("grpo", *words)) == expected


def test_script_that_reads_them_by_a_function_says_so_in_its_settings() -> None:
    assert readers_of(settings_of("distill")) == {"compute_teacher_rewards": True}
    assert readers_of(settings_of("grpo_async")) == {"correction.kind": True}
    assert readers_of(settings_of("grpo_async", "max_staleness=0")) == {}


def test_own_log_probs_are_refused_beside_a_setting_that_reads_them() -> None:
    cfg = settings_of("grpo", "actor.update.old_log_probs=own", "advantage.kl_coef=0.1")

    with pytest.raises(ConfigError, match=r"advantage\.kl_coef, which reads them .*=auto"):
        readers_of(cfg)


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
        run(
            tmp_path,
            body=weightless,
            readers={"actor.update.correction.kind": True},
            correction=UpdateCorrectionConfig("token"),
        )
