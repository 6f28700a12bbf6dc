"""Settings of losses and advantages."""

from __future__ import annotations

from dataclasses import dataclass

from spmdflow.config.leaf import setting


class PolicyLossSettings:
    """What the policy loss reads besides PPO's settings; `algorithm` makes it settings."""

    surrogate: str = "ppo"
    pretrain_coef: float = 0.0
    clip_ratio_high: float | None = None
    dual_clip: float | None = None


@dataclass
class PolicyLossConfig(PolicyLossSettings):
    """Clipped surrogate, entropy bonus and KL penalty of the actor."""

    clip_ratio: float = setting("PPO's epsilon.", 0.2, above=0, below=1)
    entropy_coef: float = setting("Weight of the entropy bonus.", 0.0, at_least=0)
    kl_coef: float = setting(
        "Weight of the KL penalty in the loss (needs ref_log_probs).", 0.0, at_least=0
    )
    kl_estimator: str = setting("Estimator of that KL.", "k3", one_of=("k1", "k2", "k3", "abs"))
    aggregation: str = setting(
        "How token losses become one number.",
        "token-mean",
        one_of=(
            "token-mean",
            "sequence-mean-token-mean",
            "sequence-mean-token-sum",
            "sequence-mean-token-sum-by-budget",
        ),
    )


@dataclass
class ValueLossConfig:
    """Clipped squared error of the critic."""

    clip_range: float | None = setting(
        "Values may move this far from the old ones; none: no clipping.", 0.2, above=0
    )


class AdvantageSettings:
    """What advantages are computed with besides PPO's settings; `algorithm` makes it settings."""

    estimator: str = "gae"
    best_of: int = 0


@dataclass
class AdvantageConfig(AdvantageSettings):
    """Advantages and the KL in the reward."""

    gamma: float = setting("Discount.", 1.0, at_least=0, at_most=1)
    lam: float = setting("GAE's lambda.", 0.95, at_least=0, at_most=1)
    whiten: bool = setting("Normalise advantages over the global batch.", True)
    kl_coef: float = setting("Weight of the KL to the reference in the reward.", 0.0, at_least=0)
    kl_estimator: str = setting("Estimator of that KL.", "k1", one_of=("k1", "k2", "k3", "abs"))
