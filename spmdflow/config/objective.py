"""Settings of losses, advantages and updates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from spmdflow.config.leaf import follows, part, parts_of, setting

KL_ESTIMATES = ("k1", "k2", "k3", "abs")
TOKEN_MEAN = "token-mean"
SEQUENCE_MEAN = "sequence-mean-token-mean"
MEANS = (TOKEN_MEAN, SEQUENCE_MEAN, "sequence-mean-token-sum", "token-sum")
SEQUENCE_SURROGATES = ("gspo", "gmpo", "sapo")
"""Policy losses whose papers average over the tokens of a sequence, then over sequences."""


class PolicyLossSettings:
    """What the policy loss reads besides PPO's settings; subclasses make these settings."""

    surrogate: str = "ppo"
    pretrain_coef: float = 0.0
    clip_ratio_high: float | None = None
    dual_clip: float | None = None
    sapo_temperatures: Sequence[float] = (1.0, 1.05)
    covariance_share: float = 2e-4
    covariance_bounds: Sequence[float] = (1.0, 5.0)
    covariance_kl_coef: float = 0.1
    dro_beta: float | None = None


@dataclass
class PolicyLossConfig(PolicyLossSettings):
    """Clipped surrogate, entropy bonus and KL penalty of the actor."""

    clip_ratio: float = setting("PPO's epsilon.", 0.2, above=0, below=1)
    entropy_coef: float = setting("Weight of the entropy bonus.", 0.0, at_least=0)
    kl_coef: float = setting(
        "Weight of the KL penalty in the loss (needs ref_log_probs).", 0.0, at_least=0
    )
    kl_estimator: str = setting(
        "Estimator of that KL; k1+, k3+, abs+: with the gradient of k2, which is the KL's.",
        "k3",
        one_of=(*KL_ESTIMATES, "k1+", "k3+", "abs+"),
    )
    aggregation: str = setting(
        "How token losses become one number; auto: as the paper of the policy loss has it, "
        f"{SEQUENCE_MEAN} for {', '.join(SEQUENCE_SURROGATES)}, {TOKEN_MEAN} for the others.",
        "auto",
        one_of=("auto", *MEANS, "sequence-mean-token-sum-by-budget"),
    )

    @property
    def chosen_aggregation(self) -> str:
        """The aggregation; for `auto` the mean that the surrogate's paper uses.

        It is sequence-mean-token-mean for gspo, gmpo and sapo, and token-mean for the others.
        """
        if self.aggregation != "auto":
            return self.aggregation
        if self.surrogate in SEQUENCE_SURROGATES:
            return SEQUENCE_MEAN
        return TOKEN_MEAN


@dataclass
class ValueLossConfig:
    """Clipped squared error of the critic."""

    clip_range: float | None = setting(
        "Values may move this far from the old ones; none: no clipping.", 0.2, above=0
    )
    aggregation: str = setting("How token losses become one number.", "token-mean", one_of=MEANS)


class AdvantageSettings:
    """What advantages depend on besides PPO's settings; subclasses make these settings."""

    estimator: str = "gae"
    best_of: int = 0


@dataclass
class AdvantageConfig(AdvantageSettings):
    """Advantages and the KL in the reward."""

    gamma: float = setting("Discount.", 1.0, at_least=0, at_most=1)
    lam: float = setting("GAE's lambda.", 0.95, at_least=0, at_most=1)
    whiten: bool = setting("Normalise advantages over the global batch.", True)
    kl_coef: float = setting("Weight of the KL to the reference in the reward.", 0.0, at_least=0)
    kl_estimator: str = setting("Estimator of that KL.", "k1", one_of=KL_ESTIMATES)


@dataclass
class UpdateConfig:
    """How one batch becomes optimizer steps."""

    mini_batch_size: int = setting("Samples of one optimizer step, over all ranks.", 64, at_least=1)
    num_epochs: int = setting("Passes over the batch.", 1, at_least=1)
    shuffle: bool = setting(
        "Permute samples before cutting mini-batches, derived from run.seed.", True
    )
    balance_tokens: bool = setting(
        "Even out ranks whose tokens, counted with the cost of attention, differ by over 5%.", True
    )
    router_balance_coef: float = setting(
        "Weight of the auxiliary loss that spreads tokens evenly over the experts of a mixture. "
        "Above 0, a forward of its own counts the tokens first.",
        0.0,
        at_least=0,
    )
    # With it the length of a learning-rate schedule is computed; 0: one optimizer step per step.
    samples_per_step: int = follows("data.samples_per_step", 0)


@dataclass
class CorrectionConfig:
    """Importance weights for samples that a slightly different policy generated."""

    kind: str = setting(
        "token or sequence: truncated importance weights; mask: omit far tokens.",
        "token",
        one_of=("token", "sequence", "mask"),
    )
    cap: float = setting("Largest weight; for mask the range is [1/cap, cap].", 2.0, above=1)
    normalise: bool = setting("Divide the weights by their mean over the batch.", False)


@dataclass
class UpdateCorrectionConfig(CorrectionConfig):
    """The same weights for the rows of every update, without a line in the script."""

    kind: str = setting(
        "Weigh each token's policy loss by trainer over generator (TIS). none: not at all; token "
        "or sequence: truncated importance weights; mask: omit far tokens.",
        "none",
        one_of=("none", "token", "sequence", "mask"),
    )


@dataclass
class PolicyUpdateConfig(UpdateConfig):
    """The updates of a policy that learns from its own samples."""

    old_log_probs: str = setting(
        "Where the log-probs of before the update come from. recompute: a forward of their own; "
        "rollout: the generator; own: the update's forward, so nothing else can read them; auto: "
        "own if a batch is one optimizer step and no setting reads them, otherwise the generator's "
        "while they hardly differ.",
        "auto",
        one_of=("auto", "own", "recompute", "rollout"),
    )
    correction: UpdateCorrectionConfig = part(UpdateCorrectionConfig)
    router: str = setting(
        "Experts in the policy's forwards, for a mixture of experts. own: its routers select them; "
        "replay: those that the generator used, which it returns with the tokens.",
        "own",
        one_of=("own", "replay"),
    )


def readers_of_old_log_probs(cfg: Any) -> dict[str, bool]:
    """Return what makes a script read old_log_probs before its update, as far as settings say it.

    The keys are settings (or what the script's class declares as its reader), in order. The value
    says whether the generator's log-probs may serve instead while they hardly differ: yes for
    weights of single tokens, no for a KL or a product over a response.
    """
    readers: dict[str, bool] = {}
    for key, advantage in parts_of(cfg, AdvantageConfig):
        if advantage.kl_coef > 0:
            readers[f"{key}.kl_coef"] = False
    weighs_rows = getattr(cfg, "max_staleness", 1) > 0  # grpo_async weighs no fresh rows
    for key, correction in parts_of(cfg, CorrectionConfig):
        is_of_update = isinstance(correction, UpdateCorrectionConfig)
        if correction.kind != "none" and (is_of_update or weighs_rows):
            readers[f"{key}.kind"] = correction.kind != "sequence"
    by_script = getattr(cfg, "reader_of_old_log_probs", None)
    if by_script is not None:
        readers[by_script] = True
    return readers
