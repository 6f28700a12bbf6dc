"""Settings of scripts that do not train on generated text: SFT, DPO, reward models, evaluation.

The rows of the first three hold their answers; `prompts_per_step` counts rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from spmdflow.config.leaf import defaults, leaves, part, setting
from spmdflow.config.model import PolicyModelConfig
from spmdflow.config.schema import (
    AUTO,
    CHAT_ARGUMENTS_DOC,
    CHAT_DATE_DOC,
    EVAL_PROMPTS_DOC,
    EVAL_SAMPLES_DOC,
    PLACEMENT_TYPE,
    TOOLS_DOC,
    TRUSTED_ROLES,
    TRUSTED_ROLES_DOC,
    AnswerDataConfig,
    DataSettings,
    EngineConfig,
    ModelConfig,
    OptimizerConfig,
    ReferenceConfig,
    RewardConfig,
    RolloutConfig,
    RunConfig,
    ScriptConfig,
    UpdateConfig,
)
from spmdflow.errors import ConfigError


@dataclass
class ExampleDataConfig(AnswerDataConfig):
    """Examples to imitate: prompt and response, or conversations."""

    kind: ClassVar[str] = "examples"
    answers: ClassVar[tuple[str, ...]] = ("response_column",)

    prompt_column: str = setting("Column that holds the prompt (text, or chat messages).", "prompt")
    response_column: str | None = setting(
        "Column that holds the response; none: prompt_column holds a conversation, whose "
        "assistant turns are learnt.",
        "response",
    )
    rows_per_conversation: str = setting(
        "one: a conversation is one row that learns every answer of the assistant; answers: each "
        "answer is a row of its own, with what came before it as the prompt (needed for templates "
        "that later write an answer differently, such as Qwen3's).",
        "one",
        one_of=("one", "answers"),
    )
    max_prompt_tokens: int = setting(
        "Rows with more tokens, answers included, are omitted and counted.", 512, at_least=1
    )


@dataclass
class PairDataConfig(AnswerDataConfig):
    """Preferences: a prompt with a better and a worse answer."""

    kind: ClassVar[str] = "pairs"
    answers: ClassVar[tuple[str, ...]] = ("chosen_column", "rejected_column")

    prompt_column: str | None = setting(
        "Column that holds the prompt (text, or chat messages); none: both answers begin with it.",
        "prompt",
    )
    prompt_end: str = setting(
        "Without a prompt column: the last of these in an answer's text ends the prompt; of chat "
        "messages the last one is the answer.",
        "\n\nAssistant:",
    )
    tokenizer_path: str = setting("Folder of the tokenizer.", "${reward_model.model.path}")
    chosen_column: str = setting("Column that holds the better answer.", "chosen")
    rejected_column: str = setting("Column that holds the worse answer.", "rejected")
    max_prompt_tokens: int = setting(
        "Rows with more tokens, both sequences of a pair together, are omitted and counted.",
        1024,
        at_least=1,
    )


@dataclass
class PreferenceDataConfig(PairDataConfig):
    """Preferences for a policy: pairs of answers, or single answers with a label."""

    tokenizer_path: str = setting("Folder of the tokenizer.", "${actor.model.path}")
    completion_column: str = setting(
        "Column that holds the answer where rows have a label.", "completion"
    )
    label_column: str | None = setting(
        "Column that says whether the answer is good (true or false, for kto); none: pairs.", None
    )


@dataclass
class SupervisedConfig:
    """A policy that learns from the responses of a data set (SFT): it trains, never generates."""

    model: ModelConfig = part(PolicyModelConfig)
    engine: EngineConfig = part(EngineConfig)
    optimizer: OptimizerConfig = part(OptimizerConfig)
    update: UpdateConfig = part(UpdateConfig)


@dataclass
class RewardModelConfig(SupervisedConfig):
    """A model with one label; a causal LM's folder gets a zero head."""

    model: ModelConfig = part(ModelConfig)


@dataclass
class PreferenceLossConfig:
    """Which loss of preferences, and how close to the reference it keeps the policy."""

    name: str = setting(
        "dpo, ipo, slic, hinge (pairs), kto (labels), or one of pairs that the script adds.", "dpo"
    )
    beta: float = setting(
        "Weight of the distance from the reference (ipo: its tau); slic: 1 / its margin.",
        0.1,
        above=0,
    )
    label_smoothing: float = setting(
        "Share of pairs whose order is taken to be wrong (dpo).", 0.0, at_least=0, below=0.5
    )
    per_token: bool = setting(
        "Divide an answer's log-probability by its tokens (pairs; as IPO's authors ran it).", False
    )
    desirable_weight: float = setting("Weight of good answers (kto).", 1.0, above=0)
    undesirable_weight: float = setting("Weight of bad answers (kto).", 1.0, above=0)


@dataclass
class PreferenceActorConfig(SupervisedConfig):
    """A policy that learns from preferences."""

    loss: PreferenceLossConfig = part(PreferenceLossConfig)


@dataclass
class SFTConfig(ScriptConfig):
    """Everything `algos/sft.py` reads."""

    run: RunConfig = part(RunConfig, name="sft")
    data: ExampleDataConfig = part(ExampleDataConfig)
    actor: SupervisedConfig = part(SupervisedConfig)


@dataclass
class RewardModelRunConfig(ScriptConfig):
    """Everything `algos/reward_model.py` reads."""

    run: RunConfig = part(RunConfig, name="reward_model")
    data: PairDataConfig = part(PairDataConfig)
    reward_model: RewardModelConfig = part(RewardModelConfig)


@dataclass
class DPOConfig(ScriptConfig):
    """Everything `algos/dpo.py` reads."""

    run: RunConfig = part(RunConfig, name="dpo")
    data: PreferenceDataConfig = part(PreferenceDataConfig)
    actor: PreferenceActorConfig = part(PreferenceActorConfig)
    reference: ReferenceConfig = part(ReferenceConfig)


def check_preferences(key: str, loss: PreferenceLossConfig, data: PreferenceDataConfig) -> None:
    """Raise ConfigError if a preference loss cannot use the rows, or has a setting in vain.

    kto needs rows with labels (data.label_column) and at least two rows per step; other losses need
    pairs. ipo, slic, hinge and kto have no label_smoothing, kto no per_token.
    key: of the loss, such as "actor.loss".
    """
    if (loss.name == "kto") != (data.label_column is not None):
        if data.label_column is None:
            rows = "pairs (data.label_column none)"
        else:
            rows = "labelled rows"
        if loss.name == "kto":
            other = "data.label_column=label"
        else:
            other = "data.label_column=null"
        expected = "kto for labelled rows and another loss for pairs"
        do = f"set {other} or change {key}.name"
        raise ConfigError.of(f"{key}.name", f"{loss.name} with {rows}", expected, do)
    if data.label_column is not None and data.prompts_per_step < 2:
        raise ConfigError(
            f"data.prompts_per_step: got {data.prompts_per_step} with {key}.name=kto, expected at "
            f"least 2, as the KL is measured on a prompt with another row's answer; raise it"
        )
    if loss.label_smoothing and loss.name in ("ipo", "slic", "hinge", "kto"):
        got = f"{loss.label_smoothing:g} with {key}.name={loss.name}"
        expected = "0, as only dpo knows it"
        do = f"set {key}.label_smoothing=0"
        raise ConfigError.of(f"{key}.label_smoothing", got, expected, do)
    if loss.per_token and loss.name == "kto":
        where = f"{key}.per_token"
        got = f"true with {key}.name=kto"
        expected = "false, as KTO compares whole answers"
        raise ConfigError.of(where, got, expected, f"set {key}.per_token=false")


@dataclass
class HeldOutConfig(DataSettings):
    """Held-out prompts only, none for training."""

    eval_path: str = setting("File or data set of prompts.")
    prompt_column: str = setting("Column that holds the prompt (text, or chat messages).", "prompt")
    chat_template: bool = setting("Render prompts with the tokenizer's chat template.", False)
    chat_template_arguments: dict[str, Any] = setting(CHAT_ARGUMENTS_DOC, {})
    chat_template_date: str = setting(CHAT_DATE_DOC, AUTO)
    trusted_roles: list[str] = setting(TRUSTED_ROLES_DOC, list(TRUSTED_ROLES))
    tools_column: str | None = setting(TOOLS_DOC, None)
    tokenizer_path: str = setting("Folder of the tokenizer.", "${actor.model.path}")
    max_prompt_tokens: int = setting("Longer prompts are omitted and counted.", 512, at_least=1)
    max_bad_rows: int = setting("Unreadable rows that do not end the run.", 0, at_least=0)
    eval_prompts: int | None = setting(EVAL_PROMPTS_DOC, None, at_least=1)
    eval_samples: int = setting(EVAL_SAMPLES_DOC, 0, at_least=0)


@dataclass
class EvaluatedRolloutConfig(RolloutConfig):
    """Generation without a trainer on the same ranks."""

    # Not settings: nothing is trained, so no weights are synchronised or compared.
    weights: ClassVar[str] = "copy"  # type: ignore[misc]

    verify_every: int = setting(
        "Whether the generator's weights are compared with the files (0: no).", 1, at_least=0
    )


@dataclass
class EvaluatedConfig:
    """A policy that generates and is never trained: no gradients, no optimizer."""

    # Not a setting: a section with an engine would be a role (placement.has_engine).
    engine: ClassVar[EngineConfig] = EngineConfig()

    model: ModelConfig = part(ModelConfig)
    rollout: EvaluatedRolloutConfig = part(EvaluatedRolloutConfig)


@dataclass
class EvaluateConfig:
    """Everything `algos/evaluate.py` reads; the generator takes the actor's settings."""

    more_roles: ClassVar[tuple[str, ...]] = ("generator",)
    total_steps: ClassVar[int] = 1

    run: RunConfig = part(RunConfig, name="evaluate", sample_every=0)
    data: HeldOutConfig = part(HeldOutConfig)
    actor: EvaluatedConfig = part(EvaluatedConfig)
    reward: RewardConfig = part(RewardConfig)
    # Any: a preset's name or a map; config/placement.py reads it
    placement: Any = setting(
        "colocate, split, or a map pool -> {roles: [generator, reward], ranks: [...]}.",
        "colocate",
        type_words=PLACEMENT_TYPE,
    )

    @classmethod
    def take_over(cls, settings: dict[str, Any], file: Path) -> dict[str, Any]:
        """Return the settings that an evaluation takes from a file's settings (by dotted key).

        A file that sets data.train_path is a training run's: of it only run.seed is taken, and
        those of data, actor and reward that an evaluation has. If the file's folder has
        checkpoints/ or metrics.jsonl, it is a RUN_DIR: actor.model.path becomes that folder, so
        that its newest checkpoint is evaluated; a run that saved none is refused. Of any other file
        all settings are taken: the same dict is returned.
        """
        if not settings.get("data.train_path"):
            return settings
        keys = {leaf.key for leaf in leaves(defaults(cls))}
        keys = {key for key in keys if key.startswith(("data.", "actor.", "reward."))}
        used = {}
        for k, value in settings.items():
            if k in keys or k == "run.seed":
                used[k] = value
        if any((file.parent / name).exists() for name in ("checkpoints", "metrics.jsonl")):
            used["actor.model.path"] = str(file.parent)
        return used
