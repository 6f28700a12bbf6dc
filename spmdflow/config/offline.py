"""Settings of the stages before RL: supervised fine-tuning, and a reward model from preferences.

Rows bring their answers along, so nothing generates: `prompts_per_step` counts whole rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from spmdflow.config.schema import (
    DataConfig,
    EngineConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    UpdateConfig,
    part,
    setting,
)


@dataclass
class ExampleDataConfig(DataConfig):
    """Examples to imitate: prompt and response, or conversations."""

    rows: ClassVar[str] = "examples"
    # No setting here: an example is used as it is.
    samples_per_prompt: ClassVar[int] = 1  # type: ignore[misc]

    response_column: str | None = setting(
        "Column that holds the response; none: prompt_column holds a conversation, whose "
        "assistant turns are learnt.",
        "response",
    )
    max_prompt_tokens: int = setting(
        "Rows with more tokens, answers included, are left out and counted.", 512, at_least=1
    )

    @property
    def answer_columns(self) -> tuple[str, ...]:  # type: ignore[override]
        """Columns with answers."""
        return () if self.response_column is None else (self.response_column,)


@dataclass
class PairDataConfig(DataConfig):
    """Preferences: a prompt with a better and a worse answer."""

    rows: ClassVar[str] = "pairs"
    # No setting here: a pair is used as it is.
    samples_per_prompt: ClassVar[int] = 1  # type: ignore[misc]

    tokenizer_path: str = setting("Folder of the tokenizer.", "${reward_model.model.path}")
    chosen_column: str = setting("Column that holds the better answer.", "chosen")
    rejected_column: str = setting("Column that holds the worse answer.", "rejected")
    max_prompt_tokens: int = setting(
        "Pairs with more tokens, both sequences together, are left out and counted.",
        1024,
        at_least=1,
    )

    @property
    def answer_columns(self) -> tuple[str, ...]:  # type: ignore[override]
        """Columns with answers, the better one first."""
        return (self.chosen_column, self.rejected_column)


@dataclass
class SupervisedConfig:
    """A policy that imitates: it trains and does not generate."""

    model: ModelConfig = part(ModelConfig)
    engine: EngineConfig = part(EngineConfig)
    optimizer: OptimizerConfig = part(OptimizerConfig)
    update: UpdateConfig = part(UpdateConfig)


@dataclass
class RewardModelConfig(SupervisedConfig):
    """A model with one label; a causal LM's folder gets a zero head."""


@dataclass
class SFTConfig:
    """Everything `algos/sft.py` reads."""

    run: RunConfig = field(default_factory=lambda: RunConfig(name="sft"))
    data: ExampleDataConfig = part(ExampleDataConfig)
    actor: SupervisedConfig = part(SupervisedConfig)
    # Any: a preset's name or a map; config/placement.py reads it
    placement: Any = setting("colocate, or a map pool -> {roles: [...], ranks: [...]}.", "colocate")
    total_steps: int = setting("Steps of the run.", 100, at_least=1)
    eval_every: int = setting("Steps between evaluations (0: never).", 10, at_least=0)
    save_every: int = setting("Steps between checkpoints (0: only on SIGTERM).", 0, at_least=0)


@dataclass
class RewardModelRunConfig:
    """Everything `algos/reward_model.py` reads."""

    run: RunConfig = field(default_factory=lambda: RunConfig(name="reward_model"))
    data: PairDataConfig = part(PairDataConfig)
    reward_model: RewardModelConfig = part(RewardModelConfig)
    # Any: a preset's name or a map; config/placement.py reads it
    placement: Any = setting("colocate, or a map pool -> {roles: [...], ranks: [...]}.", "colocate")
    total_steps: int = setting("Steps of the run.", 100, at_least=1)
    eval_every: int = setting("Steps between evaluations (0: never).", 10, at_least=0)
    save_every: int = setting("Steps between checkpoints (0: only on SIGTERM).", 0, at_least=0)
