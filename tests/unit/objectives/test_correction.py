"""Importance weights of rollouts: formulas in loops, truncation, metrics, ranks, in the loss."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torch import Tensor

from spmdflow.config.algorithm import CorrectionConfig, SurrogateLossConfig
from spmdflow.config.objective import UpdateCorrectionConfig
from spmdflow.config.schema import PolicyLossConfig
from spmdflow.data.ragged import pad, ragged
from spmdflow.errors import ConfigError
from spmdflow.objectives.kl import compute_rollout_weights
from spmdflow.objectives.policy import PolicyLoss
from spmdflow.tracking.metric import merge
from tests.unit.objectives.test_objectives import Rows
from tests.unit.threaded_ranks import run_ranks, take


def weight(kind: str, gaps: list[float], t: int, cap: float) -> float:
    """The printed formula for token t of a row with these log-ratios."""
    ratio = math.exp(gaps[t])
    if kind == "token":
        return min(ratio, cap)
    if kind == "sequence":
        return min(math.prod(math.exp(gap) for gap in gaps), cap)
    return ratio if 1 / cap <= ratio <= cap else 0.0


@pytest.mark.parametrize("kind", ["token", "sequence", "mask"])
@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10_000), st.floats(1.1, 4.0))
def test_weights_equal_their_definition(kind: str, seed: int, cap: float) -> None:
    batch = make(seed)

    answer, metrics = run(batch, CorrectionConfig(kind, cap))

    found = pad(answer["rollout_weights"])
    mask = pad(batch["response_mask"])
    gaps = pad(batch["old_log_probs"]).double() - pad(batch["rollout_log_probs"]).double()
    chosen = []
    kls = []
    for row in range(len(mask)):
        places = mask[row].nonzero()[:, 0].tolist()
        own = [float(gaps[row, t]) for t in places]
        for number, t in enumerate(places):
            expected = weight(kind, own, number, cap)
            assert float(found[row, t]) == pytest.approx(expected, rel=1e-5)
            chosen.append(expected)
            kls.append(math.exp(own[number]) - 1 - own[number])
    assert (found[~mask] == 0).all()
    squares = sum(w * w for w in chosen)
    assert metrics["rollout/weight_mean"] == pytest.approx(sum(chosen) / len(chosen))
    if squares:
        share = sum(chosen) ** 2 / (len(chosen) * squares)
        assert metrics["rollout/weight_ess"] == pytest.approx(share)
    assert metrics["rollout/trainer_kl"] == pytest.approx(sum(kls) / len(kls))


def test_equal_log_probs_give_weight_1_and_nothing_is_clipped() -> None:
    batch = make(1)
    batch["rollout_log_probs"] = batch["old_log_probs"]

    for kind in ("token", "sequence", "mask"):
        answer, metrics = run(batch, CorrectionConfig(kind))
        mask = pad(batch["response_mask"])
        assert (pad(answer["rollout_weights"])[mask] == 1).all()
        ones = ("weight_mean", "weight_max", "weight_ess", "ppl_ratio")
        zeros = ("weight_std", "weight_clipped", "trainer_kl", "kl", "chi2_token", "chi2_seq")
        assert [metrics[f"rollout/{name}"] for name in ones] == [1.0] * 4
        assert [metrics[f"rollout/{name}"] for name in zeros] == [0.0] * 6
        assert metrics["rollout/ppl"] == metrics["rollout/trainer_ppl"] > 1


def test_share_of_clipped_weights_counts_chosen_tokens_only() -> None:
    lengths = torch.tensor([4])
    gaps = torch.tensor([1.0, 0.0, 9.0, -9.0])
    batch = TensorDict(
        {
            "old_log_probs": ragged(gaps, lengths),
            "rollout_log_probs": ragged(torch.zeros(4), lengths),
            "response_mask": ragged(torch.tensor([True, True, False, True]), lengths),
        },
        batch_size=[1],
    )

    shares = {
        kind: run(batch, CorrectionConfig(kind))[1]["rollout/weight_clipped"]
        for kind in ("token", "mask", "sequence")
    }

    assert shares == pytest.approx({"token": 1 / 3, "mask": 2 / 3, "sequence": 0})


@pytest.mark.parametrize("kind", ["token", "sequence", "mask"])
@settings(deadline=None, max_examples=20)
@given(st.integers(0, 10_000))
def test_normalised_weights_have_a_mean_of_1_on_any_ranks(kind: str, seed: int) -> None:
    batch = make(seed)
    mask = pad(make(seed)["response_mask"])
    plain, own = run(batch, CorrectionConfig(kind, 1.5))
    cfg = CorrectionConfig(kind, 1.5, normalise=True)

    found, metrics = run(batch, cfg)
    rows = [[0, 2], [1, 3], []]
    parts = run_ranks(lambda rank, reduce: run(take(batch, rows[rank]), cfg, reduce)[0], 3)

    weights = pad(found["rollout_weights"]).double()
    if kind == "sequence":  # one weight a response
        each = [float(weights[i][mask[i]][0]) for i in range(len(mask)) if mask[i].any()]
    else:
        each = weights[mask].tolist()
    if any(each):
        assert sum(each) / len(each) == pytest.approx(1, rel=1e-6)
        before = pad(plain["rollout_weights"]).double()
        kept = mask & (before > 0)
        ratios = weights[kept] / before[kept]
        assert float(ratios.max() - ratios.min()) < 1e-5
    assert metrics == own  # of the weights before
    for rank, part in enumerate(parts):
        for place, row in enumerate(rows[rank]):
            mine = part["rollout_weights"].unbind()[place]
            torch.testing.assert_close(mine, found["rollout_weights"].unbind()[row])


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 10_000))
def test_metrics_of_the_mismatch_equal_loops_over_tokens_and_responses(seed: int) -> None:
    batch = make(seed)

    metrics = run(batch, CorrectionConfig("token", 1.5))[1]

    mask = pad(batch["response_mask"])
    old, mu = (pad(batch[name]).double() for name in ("old_log_probs", "rollout_log_probs"))
    tokens = [(float(old[i, t]), float(mu[i, t])) for i, t in mask.nonzero().tolist()]
    rows = [
        [(float(old[i, t]), float(mu[i, t])) for t in mask[i].nonzero()[:, 0].tolist()]
        for i in range(len(mask))
        if mask[i].any()
    ]

    def mean(numbers: list[float]) -> float:
        return math.fsum(numbers) / len(numbers)

    trainer = [-mean([a for a, _ in row]) for row in rows]
    rollout = [-mean([b for _, b in row]) for row in rows]
    gaps = [a - b for a, b in zip(trainer, rollout, strict=True)]
    weights = [min(math.exp(a - b), 1.5) for a, b in tokens]
    spread = mean([w * w for w in weights]) - mean(weights) ** 2
    expected = {
        "kl": mean([b - a for a, b in tokens]),
        "trainer_kl": mean([math.exp(a - b) - (a - b) - 1 for a, b in tokens]),
        "chi2_token": mean([math.exp(a - b) ** 2 for a, b in tokens]) - 1,
        "chi2_seq": mean([math.prod(math.exp(a - b) for a, b in row) ** 2 for row in rows]) - 1,
        "ppl": mean([math.exp(x) for x in rollout]),
        "log_ppl": mean(rollout),
        "trainer_ppl": mean([math.exp(x) for x in trainer]),
        "trainer_log_ppl": mean(trainer),
        "log_ppl_diff": mean(gaps),
        "log_ppl_diff_max": max(gaps),
        "log_ppl_diff_min": min(gaps),
        "log_ppl_abs_diff": mean([abs(x) for x in gaps]),
        "log_ppl_abs_diff_max": max(abs(x) for x in gaps),
        "ppl_ratio": mean([math.exp(x) for x in gaps]),
        "weight_max": max(weights),
        "weight_std": math.sqrt(max(spread, 0.0)),
    }
    found = {name: metrics[f"rollout/{name}"] for name in expected}
    assert found == pytest.approx(expected, rel=1e-6, abs=1e-7)


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 10_000))
def test_weights_and_metrics_do_not_depend_on_the_ranks(seed: int) -> None:
    batch = make(seed)
    cfg = CorrectionConfig("sequence", 1.5)
    whole, metrics = run(batch, cfg)
    rows = [[0, 2], [1, 3], []]

    reports: list[dict[str, Any]] = [{}, {}, {}]

    def on_rank(rank: int, reduce: Callable[[Tensor], Tensor]) -> TensorDict:
        report = reports[rank].update
        return compute_rollout_weights(
            take(batch, rows[rank]), cfg=cfg, reduce=reduce, report=report
        )

    parts = run_ranks(on_rank, 3)

    assert merge(reports) == pytest.approx(metrics)
    for rank, answer in enumerate(parts):
        for place, row in enumerate(rows[rank]):
            mine = answer["rollout_weights"].unbind()[place]
            assert torch.equal(mine, whole["rollout_weights"].unbind()[row])


def test_extreme_ratios_are_finite() -> None:
    batch = make(3)
    batch["rollout_log_probs"] = ragged(
        batch["rollout_log_probs"].values() - 1e4, batch["rollout_log_probs"].offsets().diff()
    )

    for kind in ("token", "sequence", "mask"):
        answer, metrics = run(batch, CorrectionConfig(kind))
        assert torch.isfinite(answer["rollout_weights"].values()).all()
        assert all(math.isfinite(value) for value in metrics.values())


def test_policy_loss_multiplies_each_token_by_its_weight() -> None:
    torch.manual_seed(0)
    logits = torch.randn(2, 3, 5).double()
    ids = torch.randint(0, 5, (2, 3))
    mask = torch.tensor([[True, False, True], [True, True, False]])
    old = logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0] + 0.05
    columns = {"old_log_probs": old, "advantages": torch.randn(2, 3).double()}
    weights = torch.rand(2, 3).double() + 0.5
    loss = PolicyLoss(PolicyLossConfig(), 1.0)
    totals = {"tokens": 4.0, "sequences": 2.0}

    rows = Rows(ids, mask, columns | {"rollout_weights": weights})
    weighted, _ = loss(rows.read(logits), rows, totals)

    log_probs = logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    terms = loss.terms(log_probs, old, columns["advantages"], mask).loss
    assert float(weighted) == pytest.approx(float((terms * weights)[mask].sum() / 4))


@pytest.mark.parametrize("kind", ["token", "sequence", "mask"])
def test_corrected_loss_is_ppos_clipped_ratio_times_the_weight_of_trainer_over_generator(
    kind: str,
) -> None:
    """Decoupled truncated importance sampling: the ratio is to pi_old, the weight to mu."""
    cap = 1.3
    clip = 0.2
    lengths = (3, 2)
    torch.manual_seed(5)
    logits = torch.randn(2, 3, 5).double()
    ids = torch.randint(0, 5, (2, 3))
    mask = torch.arange(3)[None] < torch.tensor(lengths)[:, None]
    log_probs = logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    old = log_probs + 0.4 * torch.randn(2, 3).double()
    rollout = old + 0.4 * torch.randn(2, 3).double()
    advantages = torch.randn(2, 3).double()
    batch = TensorDict(
        {
            name: ragged(torch.cat([x[0], x[1, :2]]), torch.tensor(lengths))
            for name, x in (
                ("old_log_probs", old),
                ("rollout_log_probs", rollout),
                ("response_mask", mask),
            )
        },
        batch_size=[2],
    )
    answer, _ = run(batch, UpdateCorrectionConfig(kind, cap))
    columns = {
        "old_log_probs": old,
        "advantages": advantages,
        "rollout_weights": pad(answer["rollout_weights"]).double(),
    }

    rows = Rows(ids, mask, columns)
    totals = {"tokens": 5.0, "sequences": 2.0}
    found, _ = PolicyLoss(PolicyLossConfig(clip_ratio=clip), 1.0)(rows.read(logits), rows, totals)

    total = 0.0
    for row, length in enumerate(lengths):
        gaps = [float(old[row, t] - rollout[row, t]) for t in range(length)]
        for t in range(length):
            ratio = math.exp(log_probs[row, t] - old[row, t])
            a = float(advantages[row, t])
            held = min(max(ratio, 1 - clip), 1 + clip)
            total -= weight(kind, gaps, t, cap) * min(ratio * a, held * a)
    assert float(found) == pytest.approx(total / 5, rel=1e-6)  # weights are float32


@pytest.mark.parametrize(
    ("surrogate", "advantage", "value", "slope"),
    [
        ("ppo", -1.0, 2.0, 2.0),  # as r = 2: -r A
        ("ppo", 1.0, -1.2, 0.0),  # clipped at 1.2 in any case
        ("gspo", -1.0, 2.0, 2.0),
        ("cispo", -1.0, 1.2 * math.log(0.5), 1.2),  # -clip(r) A log pi: r counts up to 1.2
        ("plain", -1.0, math.log(0.5), 1.0),  # -A log pi: no ratio in it
    ],
)
def test_token_five_times_likelier_than_the_generator_says_counts_twice(
    surrogate: str, advantage: float, value: float, slope: float
) -> None:
    logits = torch.zeros(1, 1, 2, dtype=torch.float64, requires_grad=True)  # pi = 1/2
    mask = torch.ones(1, 1, dtype=torch.bool)
    columns = {
        "old_log_probs": torch.full((1, 1), math.log(0.1), dtype=torch.float64),
        "advantages": torch.full((1, 1), advantage, dtype=torch.float64),
    }
    rows = Rows(torch.zeros(1, 1, dtype=torch.int64), mask, columns)
    loss = PolicyLoss(SurrogateLossConfig(surrogate=surrogate), 1.0)
    loss.truncates = True

    found, metrics = loss(rows.read(logits), rows, {"tokens": 1.0, "sequences": 1.0})
    (gradient,) = torch.autograd.grad(found, logits)

    assert float(found.detach()) == pytest.approx(value)
    # d log pi(0) / d logits = (1/2, -1/2), and -A is the sign
    assert gradient.flatten().tolist() == pytest.approx([slope / 2, -slope / 2])
    assert float(metrics["rollout/weight_clipped"]) == 1.0


def test_unknown_correction_is_refused_with_the_choices() -> None:
    with pytest.raises(ConfigError, match="got 'both', expected one of mask, sequence"):
        run(make(0), CorrectionConfig("both"))


def make(seed: int) -> TensorDict:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([4, 1, 3, 5])
    old = torch.randn(13, generator=generator) - 2
    mask = torch.rand(13, generator=generator) < 0.8
    mask[0] = True
    columns: dict[str, Tensor] = {
        "old_log_probs": ragged(old, lengths),
        "rollout_log_probs": ragged(old + 0.5 * torch.randn(13, generator=generator), lengths),
        "response_mask": ragged(mask, lengths),
    }
    return TensorDict(columns, batch_size=[4])


def run(
    batch: TensorDict, cfg: CorrectionConfig, reduce: Callable[[Tensor], Tensor] = lambda x: x
) -> tuple[TensorDict, dict[str, Any]]:
    metrics: dict[str, Any] = {}
    answer = compute_rollout_weights(batch, cfg=cfg, reduce=reduce, report=metrics.update)
    return answer, merge([metrics])
