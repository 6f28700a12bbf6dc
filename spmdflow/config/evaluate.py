"""Settings of an evaluation by itself: a policy that only generates, and how it is judged."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from spmdflow.config.leaf import defaults, leaves
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

    @classmethod
    def take_over(cls, tree: dict[str, Any], file: Path) -> dict[str, Any]:
        """What an evaluation takes of the settings in a file; all, unless they are of training.

        Those of training have data.train_path. Taken are data, actor, reward and run.seed, as far
        as there are such settings here. The model of RUN_DIR/config.yaml is RUN_DIR's newest one.
        """
        data, run = tree.get("data"), tree.get("run")
        if not (isinstance(data, dict) and data.get("train_path")):
            return tree
        sections = {name: tree[name] for name in ("data", "actor", "reward") if name in tree}
        seed = {name: run[name] for name in ("seed",) if isinstance(run, dict) and name in run}
        found = _known(sections | {"run": seed}, {leaf.key for leaf in leaves(defaults(cls))})
        if (file.parent / "checkpoints").is_dir():
            actor = found.setdefault("actor", {})
            actor["model"] = {**actor.get("model", {}), "path": str(file.parent)}
        return found


def _known(tree: dict[str, Any], keys: Collection[str], prefix: str = "") -> dict[str, Any]:
    """The part of a tree whose keys there are."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        is_group = any(each.startswith(f"{key}.") for each in keys)
        if is_group and isinstance(value, dict):
            found[name] = _known(value, keys, f"{key}.")
        elif key in keys or is_group:
            found[name] = value
    return found
