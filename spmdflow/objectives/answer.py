"""What a policy learns from preferences: losses of whole answers, by name.

`@preference_loss("name")` makes a loss of pairs known to a run. It is a function `(pair, cfg) ->
(n,)`, one loss for each pair, whose arguments are summed log-probabilities; a script adds its own
at module level. KTO, whose rows stand alone, is a loss object instead (`LabelLoss`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from tensordict import TensorDict
from torch import Tensor

from spmdflow.config.offline import PreferenceLossConfig
from spmdflow.errors import ConfigError
from spmdflow.objectives import preference
from spmdflow.objectives.loss import Micro
from spmdflow.objectives.supervised import row_losses


class AnswerPair(NamedTuple):
    """Log-probabilities of n pairs, each (n,), in nats; sums over tokens, or means (per_token)."""

    chosen: Tensor
    rejected: Tensor
    ref_chosen: Tensor
    ref_rejected: Tensor


PairTerms = Callable[[AnswerPair, PreferenceLossConfig], Tensor]

_REGISTRY: dict[str, PairTerms] = {}


def preference_loss(name: str) -> Callable[[PairTerms], PairTerms]:
    """Register a loss of pairs under a name; the last one of a module's own wins.

    ConfigError if the name is kto or belongs to a function of another module.
    """

    def add(terms: PairTerms) -> PairTerms:
        taken = _REGISTRY.get(name)
        owner = LabelLoss.__module__ if name == "kto" else getattr(taken, "__module__", None)
        if owner not in (None, terms.__module__) or name == "kto":
            raise ConfigError(
                f"preference loss {name!r}: got a definition in {terms.__module__}, expected a "
                f"name that is not taken by {owner}; choose another"
            )
        _REGISTRY[name] = terms
        return terms

    return add


def pair_terms_of(name: str) -> PairTerms:
    """The loss of pairs of that name; ConfigError naming the choices."""
    if name not in _REGISTRY:
        raise ConfigError(
            f"loss.name: got {name!r}; expected one of {sorted([*_REGISTRY, 'kto'])}; choose one "
            f"or add yours with @preference_loss({name!r})"
        )
    return _REGISTRY[name]


@preference_loss("dpo")
def dpo(pair: AnswerPair, cfg: PreferenceLossConfig) -> Tensor:
    """-log sigmoid(h_c - h_r); see `preference.dpo` (Rafailov et al. 2023, eq. 7)."""
    return preference.dpo(*pair, beta=cfg.beta, label_smoothing=cfg.label_smoothing)


@preference_loss("ipo")
def ipo(pair: AnswerPair, cfg: PreferenceLossConfig) -> Tensor:
    """(log-ratio of the answers - 1 / (2 beta))^2; see `preference.ipo` (Azar et al. 2024)."""
    return preference.ipo(*pair, beta=cfg.beta)


@preference_loss("slic")
def slic(pair: AnswerPair, cfg: PreferenceLossConfig) -> Tensor:
    """max(0, 1 - beta log pi(y_c) / pi(y_r)); see `preference.slic` (Zhao et al. 2023)."""
    return preference.slic(pair.chosen, pair.rejected, beta=cfg.beta)


@preference_loss("hinge")
def hinge(pair: AnswerPair, cfg: PreferenceLossConfig) -> Tensor:
    """max(0, 1 - (h_c - h_r)); see `preference.hinge` (Liu et al. 2024)."""
    return preference.hinge(*pair, beta=cfg.beta)


def answer_log_probs(output: Tensor, micro: Micro) -> Tensor:
    """(b,): log pi(answer | prompt) in nats, summed over response_mask; output: logits (b, T, V).

    0 for a row without a learnt token. At temperature 1, as in all of the papers.
    """
    return -row_losses(output, micro)


def implicit_rewards(log_probs: Tensor, ref_log_probs: Tensor, cfg: PreferenceLossConfig) -> Tensor:
    """beta (log pi - log pi_ref): what a policy is taken to score (Rafailov et al. 2023, eq. 5)."""
    return cfg.beta * (log_probs - ref_log_probs)


class LabelLoss:
    """KTO over a mini-batch: each answer is good or bad by itself (Ethayarajh et al. 2024, 4.1).

    L = 1/n sum_i w_i (1 - sigmoid(+-(h_i - beta z))),  z = max(0, 1/n sum_i kl_i)

    kl_i = log pi - log pi_ref of row i's prompt with another row's answer: z is the paper's
    estimate of KL(pi || pi_ref), here over the rows of the mini-batch on all ranks; no gradient.
    Reads ref_answer_log_probs (B, 2), of which the first is the row's own, kl_log_ratios (B,) in
    nats and desirable (B,).
    """

    def __init__(self, cfg: PreferenceLossConfig) -> None:
        self._cfg = cfg

    def denominators(self, batch: TensorDict) -> dict[str, float]:
        """Local "rows", how many of them are "desirable", and the sum of "kl" in nats."""
        desirable = float(batch["desirable"].sum())
        rows = float(batch.batch_size[0])
        return {
            "rows": rows,
            "desirable": desirable,
            "undesirable": rows - desirable,
            "kl": float(batch["kl_log_ratios"].double().sum()),
        }

    def __call__(
        self, output: Tensor, micro: Micro, totals: Mapping[str, float]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of one micro-batch; output: logits (b, T, V).

        Metrics: kl (nats, not below 0) and the mean implicit rewards of both kinds of answers.
        """
        cfg, good = self._cfg, micro.columns["desirable"].bool()
        log_probs = answer_log_probs(output, micro)
        ref = micro.columns["ref_answer_log_probs"][:, 0]
        kl = log_probs.new_tensor(totals["kl"] / max(totals["rows"], 1.0))
        losses = preference.kto(
            log_probs,
            ref,
            good,
            kl,
            beta=cfg.beta,
            desirable_weight=cfg.desirable_weight,
            undesirable_weight=cfg.undesirable_weight,
        )
        real = micro.row_weight / max(totals["rows"], 1.0)
        reward = implicit_rewards(log_probs.detach(), ref, cfg) * micro.row_weight
        return (losses * real).sum(), {
            "kl": (kl.clamp(min=0) * real).sum(),
            "desirable_reward": reward[good].sum() / max(totals["desirable"], 1.0),
            "undesirable_reward": reward[~good].sum() / max(totals["undesirable"], 1.0),
        }

    def finalize(self, metrics: dict[str, float]) -> dict[str, float]:
        """Nothing to finish."""
        return metrics


def pair_losses(
    log_probs: Tensor, ref_log_probs: Tensor, tokens: Tensor, cfg: PreferenceLossConfig
) -> tuple[Tensor, Tensor]:
    """Losses (n,) of pairs and their slopes (n, 2) at log_probs; all arguments (n, 2).

    Columns: chosen, rejected. tokens: learnt tokens of each answer, by which per_token divides.
    """
    if not len(log_probs):
        return log_probs.sum(-1), log_probs
    terms = pair_terms_of(cfg.name)
    lengths = tokens.clamp(min=1) if cfg.per_token else torch.ones_like(tokens)
    ref = ref_log_probs / lengths

    def loss(chosen: Tensor, rejected: Tensor) -> Tensor:
        pair = AnswerPair(chosen / lengths[:, 0], rejected / lengths[:, 1], ref[:, 0], ref[:, 1])
        return terms(pair, cfg)

    losses, slopes = preference.score_slopes(log_probs[:, 0], log_probs[:, 1], loss)
    return losses, slopes.view(2, len(losses)).T
