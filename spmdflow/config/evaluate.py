"""Settings of an evaluation by itself: a policy that only generates, and how it is judged."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from spmdflow.config.schema import (
    DataConfig,
    EngineConfig,
    ModelConfig,
    RewardConfig,
    RolloutConfig,
    RunConfig,
    part,
    setting,
)


@dataclass
class HeldOutConfig(DataConfig):
    """Held-out prompts alone."""

    # No setting here: nothing is drawn for training.
    train_path: ClassVar[None] = None  # type: ignore[misc, assignment]
    prompts_per_step: ClassVar[int] = 1  # type: ignore[misc]
    samples_per_prompt: ClassVar[int] = 1  # type: ignore[misc]
    shuffle: ClassVar[bool] = False  # type: ignore[misc]

    eval_path: str = setting("File or data set of prompts.")  # type: ignore[assignment]


@dataclass
class EvaluatedRolloutConfig(RolloutConfig):
    """Generation without a trainer beside it."""

    # No setting here: there are no weights but the generator's own.
    weights: ClassVar[str] = "copy"  # type: ignore[misc]
    max_drift: ClassVar[None] = None  # type: ignore[misc]

    verify_every: int = setting(
        "Whether the generator's weights are compared with the files (0: no).", 1, at_least=0
    )


@dataclass
class EvaluatedConfig:
    """A policy that generates and is never trained: no gradients, no optimizer."""

    # No setting here: what has no engine is a part of another role's settings.
    engine: ClassVar[EngineConfig] = EngineConfig()

    model: ModelConfig = part(ModelConfig)
    rollout: EvaluatedRolloutConfig = part(EvaluatedRolloutConfig)


@dataclass
class EvaluateConfig:
    """Everything `algos/evaluate.py` reads; the generator takes the actor's settings."""

    more_roles: ClassVar[tuple[str, ...]] = ("generator",)
    total_steps: ClassVar[int] = 1

    run: RunConfig = field(default_factory=lambda: RunConfig(name="evaluate", sample_every=0))
    data: HeldOutConfig = part(HeldOutConfig)
    actor: EvaluatedConfig = part(EvaluatedConfig)
    reward: RewardConfig = part(RewardConfig)
    # Any: a preset's name or a map; config/placement.py reads it
    placement: Any = setting(
        "colocate, split, or a map pool -> {roles: [generator, reward], ranks: [...]}.", "colocate"
    )
