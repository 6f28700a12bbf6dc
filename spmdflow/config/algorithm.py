"""Settings of the algorithms other than PPO: PPO's parts and the settings that they add.

A script names its settings class in `main(flow: Flow, cfg: GRPOConfig)`; its YAML lies next to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from spmdflow.config.leaf import part, setting
from spmdflow.config.objective import AdvantageConfig, CorrectionConfig, PolicyLossConfig
from spmdflow.config.schema import (
    ALWAYS,
    PLACEMENT_TYPE,
    ActorConfig,
    CriticConfig,
    DataConfig,
    DrawnDataConfig,
    ModelConfig,
    PPOConfig,
    ReferenceConfig,
    RewardConfig,
    RunConfig,
    ScriptConfig,
)


@dataclass
class SurrogateLossConfig(PolicyLossConfig):
    """The policy loss of PPO, with a choice of the surrogate and of its clip ratios."""

    surrogate: str = setting(
        "Policy loss: ppo, gspo, gmpo, sapo, cispo, dppo_tv, dppo_kl, dro, kl_cov, clip_cov, "
        "plain, or one that the script adds.",
        "ppo",
    )
    clip_ratio_high: float | None = setting(
        "Upper epsilon (clip-higher); none: the same as clip_ratio.", None, above=0
    )
    dual_clip: float | None = setting(
        "Ratio at which the loss of a negative advantage stops growing; none: never. Of dppo: the "
        "largest ratio that counts; none: 20.",
        None,
        above=1,
    )
    sapo_temperatures: list[float] = setting(
        "Gate temperatures of sapo: of positive advantages, of the others.", [1.0, 1.05], above=0
    )
    covariance_share: float = setting(
        "Share of tokens that mark_covariant_tokens marks (kl_cov, clip_cov).",
        2e-4,
        above=0,
        at_most=1,
    )
    covariance_bounds: list[float] = setting(
        "clip_cov marks tokens whose covariance lies between these.", [1.0, 5.0]
    )
    covariance_kl_coef: float = setting(
        "Weight of |log ratio| at marked tokens (kl_cov).", 0.1, at_least=0
    )
    dro_beta: float | None = setting(
        "Weight of the squared log ratio in dro, which needs it.", None, above=0
    )


@dataclass
class SurrogateActorConfig(ActorConfig):
    """An actor whose settings choose the policy loss."""

    loss: SurrogateLossConfig = part(SurrogateLossConfig)


@dataclass
class GroupAdvantageConfig(AdvantageConfig):
    """Advantages from several samples of a prompt."""

    estimator: str = setting(
        "grpo, dr_grpo, rloo, opo, gpg, pass_at_k, pass_at_k_std, optimal_token_baseline, "
        "reinforce_pp, reinforce_pp_baseline, or one that the script adds.",
        "grpo",
    )
    best_of: int = setting(
        "The k of pass_at_k, pass_at_k_std; 0: all samples of a prompt.", 0, at_least=0
    )
    whiten: bool = setting("Normalise advantages over the global batch too.", False)


@dataclass
class RewardToGoConfig(AdvantageConfig):
    """Advantages of a script that has no critic and one estimator."""

    # Not a setting: without a critic there is no GAE, so lambda has no effect.
    lam: ClassVar[float] = 1.0  # type: ignore[misc]
    whiten: bool = setting("Normalise advantages over the global batch too.", False)


@dataclass
class ReinforcePPAdvantageConfig(RewardToGoConfig):
    """Rewards to go, with or without the mean of a prompt's samples as their baseline."""

    estimator: str = setting(
        "reinforce_pp, or its variant for several samples of a prompt.",
        "reinforce_pp",
        one_of=("reinforce_pp", "reinforce_pp_baseline"),
    )
    whiten: bool = setting("Normalise advantages over the global batch.", True)


@dataclass
class CriticFreeConfig(ScriptConfig):
    """What scripts without a critic share."""

    data: DataConfig = part(DataConfig)
    actor: SurrogateActorConfig = part(SurrogateActorConfig)
    reference: ReferenceConfig = part(ReferenceConfig)
    reward: RewardConfig = part(RewardConfig)
    advantage: AdvantageConfig = part(AdvantageConfig)


@dataclass
class GRPOConfig(CriticFreeConfig):
    """Everything `algos/grpo.py` reads."""

    run: RunConfig = part(RunConfig, name="grpo")
    data: DataConfig = part(DataConfig, samples_per_prompt=8)
    advantage: GroupAdvantageConfig = part(GroupAdvantageConfig)


@dataclass
class RemaxAdvantageConfig(RewardToGoConfig):
    """The greedy response's score as baseline."""

    estimator = "remax"


@dataclass
class RemaxConfig(CriticFreeConfig):
    """Everything `algos/remax.py` reads."""

    run: RunConfig = part(RunConfig, name="remax")
    advantage: RemaxAdvantageConfig = part(RemaxAdvantageConfig)


@dataclass
class DynamicSamplingConfig:
    """How long a step goes on drawing prompts whose samples differ in score."""

    max_rounds: int = setting("Draws of data.prompts_per_step prompts in one step.", 10, at_least=1)


@dataclass
class OverlongConfig:
    """The penalty of responses that come near actor.rollout.max_new_tokens."""

    buffer_tokens: int = setting(
        "Last tokens before the limit, over which the penalty grows to its weight.", 16, at_least=0
    )
    weight: float = setting("Largest penalty, in units of the score.", 1.0, at_least=0)


@dataclass
class ClipHigherActorConfig(SurrogateActorConfig):
    """An actor whose policy loss has a wider upper clip."""

    loss: SurrogateLossConfig = part(SurrogateLossConfig, clip_ratio_high=0.28)


@dataclass
class DAPOConfig(GRPOConfig):
    """Everything `algos/dapo.py` reads."""

    # DAPO has no KL term, so it has no reference model.
    reference: ClassVar[None] = None  # type: ignore[assignment, misc]

    run: RunConfig = part(RunConfig, name="dapo")
    actor: ClipHigherActorConfig = part(ClipHigherActorConfig)
    sampling: DynamicSamplingConfig = part(DynamicSamplingConfig)
    overlong: OverlongConfig = part(OverlongConfig)


@dataclass
class TextConfig(DrawnDataConfig):
    """Pre-training text: one text for each sample of a step, none of them held out."""

    prompt_column: str = setting("Column that holds the text.", "text")
    max_prompt_tokens: int = setting("Longer texts are omitted and counted.", 512, at_least=1)
    prompts_per_step: int = setting("Texts of one step: one for each sample.", 64, at_least=1)


@dataclass
class PretrainLossConfig(PolicyLossConfig):
    """The policy loss of PPO, with the loss of pre-training text added (PPO-ptx)."""

    pretrain_coef: float = setting(
        "Weight of the cross-entropy of pre-training text (PPO-ptx).", 0.1, at_least=0
    )


@dataclass
class PretrainActorConfig(ActorConfig):
    """An actor with the loss of PPO-ptx."""

    loss: PretrainLossConfig = part(PretrainLossConfig)


@dataclass
class CostCriticConfig(CriticConfig):
    """The critic of the cost. It starts from the cost model, or from the actor if there is none."""

    model: ModelConfig = part(ModelConfig, path="${first_of:cost.model.path,actor.model.path}")


@dataclass
class LagrangeConfig:
    """The Lagrange multiplier of the cost."""

    limit: float = setting("Mean cost that is allowed.", 0.0)
    initial: float = setting("Multiplier before the first step.", 1.0, above=0)
    lr: float = setting("Step size of its logarithm.", 0.1, above=0)
    largest: float = setting("Multiplier beyond which it does not grow.", 10.0, above=0)


@dataclass
class SafeRLHFConfig(PPOConfig):
    """Everything `algos/safe_rlhf.py` reads."""

    run: RunConfig = part(RunConfig, name="safe_rlhf")
    actor: PretrainActorConfig = part(PretrainActorConfig)
    pretrain: TextConfig = part(TextConfig)
    cost: RewardConfig = part(RewardConfig)  # costs have the settings of rewards
    cost_critic: CostCriticConfig = part(CostCriticConfig)
    lagrange: LagrangeConfig = part(LagrangeConfig)


@dataclass
class RLOOAdvantageConfig(RewardToGoConfig):
    """The mean of a prompt's other samples as baseline."""

    estimator = "rloo"


@dataclass
class RLOOConfig(CriticFreeConfig):
    """Everything `algos/rloo.py` reads."""

    run: RunConfig = part(RunConfig, name="rloo")
    data: DataConfig = part(DataConfig, samples_per_prompt=4)
    advantage: RLOOAdvantageConfig = part(RLOOAdvantageConfig)


@dataclass
class ReinforcePPConfig(CriticFreeConfig):
    """Everything `algos/reinforce_pp.py` reads."""

    run: RunConfig = part(RunConfig, name="reinforce_pp")
    advantage: ReinforcePPAdvantageConfig = part(ReinforcePPAdvantageConfig)


@dataclass
class TeacherConfig(ReferenceConfig):
    """The frozen policy that is imitated; it reads the actor's tokens."""

    # Not a setting: the script reads its log-probs in every step.
    compute: ClassVar[str] = ALWAYS  # type: ignore[misc]
    model: ModelConfig = part(ModelConfig)


@dataclass
class DistillAdvantageConfig(RewardToGoConfig):
    """Each token's own reward, and with gamma above 0 those of the tokens behind it."""

    estimator = "reinforce_pp"
    # Not settings: the KL to the teacher is the reward.
    kl_coef: ClassVar[float] = 0.0  # type: ignore[misc]
    kl_estimator: ClassVar[str] = "k1"  # type: ignore[misc]
    gamma: float = setting("Discount of later tokens' rewards.", 0.0, at_least=0, at_most=1)


@dataclass
class DistillConfig(CriticFreeConfig):
    """Everything `algos/distill.py` reads."""

    reader_of_old_log_probs: ClassVar[str | None] = "compute_teacher_rewards"

    # The teacher is the only model that the student is compared with.
    reference: ClassVar[None] = None  # type: ignore[assignment, misc]

    run: RunConfig = part(RunConfig, name="distill")
    teacher: TeacherConfig = part(TeacherConfig)
    advantage: DistillAdvantageConfig = part(DistillAdvantageConfig)


@dataclass
class GRPOAsyncConfig(GRPOConfig):
    """Everything `algos/grpo_async.py` reads; the generator takes the actor's settings."""

    more_roles: ClassVar[tuple[str, ...]] = ("generator",)

    correction: CorrectionConfig = part(CorrectionConfig)
    max_staleness: int = setting(
        "Updates that a policy may have seen since it drew a token that is learnt; 0: none.",
        1,
        at_least=0,
    )
    placement: Any = setting(
        "split: the generator on half of the ranks; standalone, or a map of pools.",
        "split",
        type_words=PLACEMENT_TYPE,
    )
