"""Policy losses whose papers average over sequences do so unless loss.aggregation is set."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from spmdflow.config.algorithm import SurrogateLossConfig
from spmdflow.config.load import load
from spmdflow.config.resolve import choices_text, choose_device_defaults
from spmdflow.objectives.policy import PolicyLoss
from tests.unit.objectives.test_objectives import Rows

REPOSITORY = Path(__file__).resolve().parents[3]
LENGTHS = (5, 1, 3)
ADVANTAGES = (0.7, -1.3, -0.2)
CLIP = 0.1


def response_loss(surrogate: str, gaps: Sequence[float], a: float) -> float:
    """The printed objective of one response, from log r_t of its tokens: its mean over tokens."""
    if surrogate == "sapo":
        tau = 1.0 if a > 0 else 1.05
        gates = [4 / tau / (1 + math.exp(-tau * (math.exp(gap) - 1))) for gap in gaps]
        return -a * sum(gates) / len(gates)
    if surrogate == "gmpo":
        sign = 1.0 if a > 0 else -1.0
        kept = [sign * min(sign * gap, sign * min(max(gap, -CLIP), CLIP)) for gap in gaps]
        return -a * math.exp(sum(kept) / len(kept))
    ratio = math.exp(sum(gaps) / len(gaps))
    return -min(ratio * a, min(max(ratio, 1 - CLIP), 1 + CLIP) * a)


def drawn_rows() -> tuple[Rows, Tensor, list[list[float]]]:
    """Responses of unequal length, their logits, and log r_t of each response's tokens."""
    torch.manual_seed(11)
    logits = torch.randn(3, 5, 7, dtype=torch.float64)
    targets = torch.randint(0, 7, (3, 5))
    mask = torch.arange(5)[None] < torch.tensor(LENGTHS)[:, None]
    log_probs = logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    gaps = 0.3 * torch.randn(3, 5, dtype=torch.float64)
    columns = {
        "old_log_probs": log_probs - gaps,
        "advantages": torch.tensor(ADVANTAGES, dtype=torch.float64)[:, None].expand(3, 5),
    }
    kept = [gaps[row, :length].tolist() for row, length in enumerate(LENGTHS)]
    return Rows(targets, mask, columns), logits, kept


@pytest.mark.parametrize("surrogate", ["gspo", "gmpo", "sapo"])
def test_default_loss_is_the_papers_mean_over_sequences(surrogate: str) -> None:
    rows, logits, gaps = drawn_rows()
    totals = {"tokens": float(sum(LENGTHS)), "sequences": float(len(LENGTHS))}

    loss = PolicyLoss(SurrogateLossConfig(surrogate=surrogate, clip_ratio=CLIP), 1.0)
    found, _ = loss(rows.read(logits), rows, totals)

    expected = [response_loss(surrogate, gaps[i], ADVANTAGES[i]) for i in range(len(LENGTHS))]
    assert float(found) == pytest.approx(
        sum(expected) / len(expected), rel=1e-6
    )  # weights 1 / tokens are float32


@pytest.mark.parametrize("surrogate", ["gspo", "gmpo", "sapo"])
def test_aggregation_that_is_set_is_used_as_it_is(surrogate: str) -> None:
    rows, logits, gaps = drawn_rows()
    totals = {"tokens": float(sum(LENGTHS)), "sequences": float(len(LENGTHS))}
    cfg = SurrogateLossConfig(surrogate=surrogate, clip_ratio=CLIP, aggregation="token-mean")

    found, _ = PolicyLoss(cfg, 1.0)(rows.read(logits), rows, totals)

    weighted = [
        LENGTHS[i] * response_loss(surrogate, gaps[i], ADVANTAGES[i]) for i in range(len(LENGTHS))
    ]
    assert float(found) == pytest.approx(
        sum(weighted) / sum(LENGTHS), rel=1e-6
    )  # weights 1 / tokens are float32


def test_run_says_and_records_the_aggregation_that_follows_the_policy_loss() -> None:
    script = REPOSITORY / "algos" / "remax.py"
    words = ["actor.loss.surrogate=sapo"]
    cfg = load(script, None, words).cfg
    plain = load(script, None, []).cfg
    fixed = load(script, None, [*words, "actor.loss.aggregation=token-sum"]).cfg

    texts = []
    for each in (cfg, plain, fixed):
        choices = choose_device_defaults(each, "cpu")
        for choice in choices:
            choice.set_in(each)
        texts.append(choices_text(choices))
    said, said_plain, said_fixed = texts

    assert cfg.actor.loss.aggregation == "sequence-mean-token-mean"
    line = "aggregation: sequence-mean-token-mean (actor.loss), because the surrogate is sapo"
    assert f"auto   {line}" in said
    assert plain.actor.loss.aggregation == "token-mean"
    assert "auto   aggregation: token-mean (actor.loss), because the surrogate is ppo" in said_plain
    assert fixed.actor.loss.aggregation == "token-sum" and "aggregation" not in said_fixed
