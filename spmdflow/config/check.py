"""Everything that is refused before a process group exists. Pure: reads files, changes nothing.

`check` works on any settings object made of the parts in `schema`: a rule applies where its parts
are there. Messages say got, expected, do; all errors are raised together (one of every rule).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from spmdflow.config.algorithm import TextConfig
from spmdflow.config.data_source import check_source, data_sources, eval_prompts_of
from spmdflow.config.leaf import (
    NOT_GIVEN,
    Errors,
    Leaf,
    SettingErrors,
    leaves,
    micro_batch_of,
    parts_of,
)
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
    EvaluatedConfig,
    PreferenceDataConfig,
    PreferenceLossConfig,
    RewardModelConfig,
    SupervisedConfig,
    check_preferences,
)
from spmdflow.config.parallel import (
    batch_algebra_of,
    check_generation_sizes,
    check_model_sizes,
    check_training_sizes,
    generation_sizes,
    training_sizes,
)
from spmdflow.config.placement import has_engine, pools_of, roles_of
from spmdflow.config.reward import check_rewards, knows_right, on_error_of, reward_terms
from spmdflow.config.schema import (
    ActorConfig,
    AdvantageConfig,
    CriticConfig,
    DataSettings,
    EngineConfig,
    ModelConfig,
    OptimizerConfig,
    PolicyLossConfig,
    ReferenceConfig,
    RewardConfig,
    RolloutConfig,
    RunConfig,
    UpdateConfig,
)
from spmdflow.errors import ConfigError
from spmdflow.kind.generator import generator_kind

T = TypeVar("T")
Rule = Callable[[], object]
"""Raises ConfigError."""

_TRACKERS = {"tensorboard", "wandb"}
"""Also the names of their packages, and of the extras that install them."""
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
    """Refuse settings that cannot work on `world_size` ranks: one ConfigError for all errors."""
    errors = Errors()
    for problem in problems(cfg, world_size):
        errors.add(problem)
    errors.raise_all()


def with_problems(err: ConfigError, world_size: int) -> ConfigError:
    """What could not be loaded, and what is wrong with the settings that could."""
    if not isinstance(err, SettingErrors) or err.partial is None:
        return err
    more = [each for each in problems(err.partial, world_size) if NOT_GIVEN not in str(each)]
    return SettingErrors([*err.errors, *more])


def problems(cfg: Any, world_size: int, *, here: bool = True) -> Iterator[ConfigError]:
    """The first problem of every rule, in order.

    Counts and names out of their bounds are told without what follows from them. here: whether
    packages, weights and data must be on this machine; a plan for another does without.
    """
    out_of_bounds = list(_failing(partial(check_bounds, leaf) for leaf in leaves(cfg)))
    counts = [leaf for leaf in leaves(cfg) if not isinstance(leaf.value, float)]
    unsound = any(_failing(partial(check_bounds, leaf) for leaf in counts))
    rules: list[Rule] = [partial(_check_run, cfg, here=here)]
    rules += [] if unsound else [partial(_check_placed, cfg, world_size)]
    rules += [partial(_check_optimizer, cfg, role) for role in roles_of(cfg)]
    rules += [partial(_check_kl, cfg, roles_of(cfg)), *_reward_rules(cfg)]
    rules += [partial(_check_model, cfg, *which, here=here) for which in _model_folders(cfg)]
    rules += [*_data_rules(cfg), partial(_check_vocabularies, cfg)] if here else []
    told: set[str] = set()
    for problem in [*out_of_bounds, *_failing(rules)]:
        key, _, text = str(problem).partition(": ")  # a folder that models share: once
        if not told & {key, text}:
            told |= {key, text}
            yield problem


def _failing(rules: Iterable[Rule]) -> Iterator[ConfigError]:
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


def check_bounds(leaf: Leaf) -> None:
    """ConfigError if a setting, or an item of its list, is out of its bounds."""
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
                raise ConfigError.of(
                    leaf.key, value, f"{words} {limit:g}", f"change it ({leaf.doc.rstrip('.')})"
                )


def _as_item(leaf: Leaf, value: str) -> str:
    return f"[{value}]" if isinstance(leaf.value, list) else value


def _check_run(cfg: Any, *, here: bool) -> None:
    for key, run in parts_of(cfg, RunConfig):
        if not run.name or Path(run.name).name != run.name:
            raise ConfigError.of(
                f"{key}.name", repr(run.name), "a plain folder name", f"set {key}.dir for a path"
            )
        for tracker in set(run.trackers) & _TRACKERS if here else ():
            _check_installed(f"{key}.trackers", tracker, extra=tracker)
    for key, rollout in parts_of(cfg, RolloutConfig):
        generator = generator_kind(rollout.engine, key=f"{key}.engine")
        if generator.package and here:
            _check_installed(f"{key}.engine", generator.package, extra=generator.extra)
    for key, optimizer in parts_of(cfg, OptimizerConfig):
        if len(optimizer.betas) != 2:
            raise ConfigError.of(
                f"{key}.betas", optimizer.betas, "two numbers", f"set {key}.betas=[0.9,0.95]"
            )


def _check_installed(key: str, package: str, *, extra: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise ConfigError(
            f"{key}: got {package}, expected an installed package; "
            f"pip install 'spmdflow[{extra}]' or choose another"
        )


def _check_optimizer(cfg: Any, role: str) -> None:
    """A model that is trained has an optimizer; a role without weights may do as it likes."""
    part = getattr(cfg, role, None)
    is_trained = hasattr(part, "model") and hasattr(part, "update")
    if is_trained and _only(part, OptimizerConfig) is None:
        raise ConfigError(
            f"{role}: got update without optimizer in {type(part).__name__}, expected both for a "
            f"model that is trained; add optimizer: OptimizerConfig, or take update away"
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
    data = _only(cfg, DataSettings)
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


def _reward_rules(cfg: Any) -> Iterator[Rule]:
    for key, reward in parts_of(cfg, RewardConfig):
        yield partial(_check_reward, key, reward)
        yield partial(on_error_of, reward.on_error, f"{key}.on_error")


def _check_reward(key: str, reward: RewardConfig) -> None:
    terms = reward_terms(f"{key}.function", reward.function)
    check_rewards(key, terms, has_model=reward.model is not None)


def _data_rules(cfg: Any) -> Iterator[Rule]:
    for key, loss in parts_of(cfg, PreferenceLossConfig):
        preferences = _only(cfg, PreferenceDataConfig)
        if preferences is not None:
            yield partial(check_preferences, key, loss, preferences)
    for key, data in parts_of(cfg, DataSettings):
        for name, path in (("train_path", data.train_path), ("eval_path", data.eval_path)):
            yield partial(_check_sources, f"{key}.{name}", path)
        yield partial(_check_data, cfg, key, data)
        folders = [path for _, path in _model_folders(cfg)]
        is_model = (Path(data.tokenizer_path) / "config.json").is_file()
        if is_model or data.tokenizer_path not in folders:  # else the model's rule says it
            yield partial(_check_tokenizer, key, data)


def _check_data(cfg: Any, key: str, data: DataSettings) -> None:
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


def _check_sources(key: str, path: Any) -> None:
    for source in data_sources(key, path):
        check_source(".".join(filter(None, (key, source.name))), source)


def _check_tokenizer(key: str, data: DataSettings) -> None:
    folder = Path(data.tokenizer_path)
    if not any(folder.glob("tokenizer*")):
        raise ConfigError(
            f"{key}.tokenizer_path: no tokenizer in {folder}, expected a folder with "
            f"tokenizer.json; give the folder of the model it belongs to"
        )


def _check_sampled(key: str, data: DataSettings, reward: RewardConfig | None) -> None:
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


def _check_texts(key: str, texts: TextConfig, data: DataSettings) -> None:
    samples = data.prompts_per_step * data.samples_per_prompt
    if texts.prompts_per_step != samples:
        raise ConfigError(
            f"{key}.prompts_per_step: got {texts.prompts_per_step}, expected {samples}, one text "
            f"for each sample of a step ({data.prompts_per_step} prompts x "
            f"{data.samples_per_prompt}); set {key}.prompts_per_step={samples}"
        )


def _model_folders(cfg: Any) -> list[tuple[str, str]]:
    """(key, path) of every model."""
    folders = [(f"{key}.path", part.path) for key, part in parts_of(cfg, ModelConfig)]
    return sorted(folders, key=lambda item: "critic." in item[0])  # it may repeat another's path


def _check_model(cfg: Any, key: str, path: str, *, here: bool = True) -> ModelFacts:
    model, role = read_model_folder(key, path, weights=here), key.split(".")[0]
    data, rollout = _only(cfg, DataSettings), _only(cfg, RolloutConfig)
    generator = rollout.engine if role == "actor" and rollout is not None else None
    bases = type(getattr(cfg, role)).__mro__
    check_kind(model, next((_KINDS[base] for base in bases if base in _KINDS), _EITHER))
    check_heads(model, generator=generator)
    _check_model_layouts(cfg, role, model)
    if data and rollout:
        check_positions(model, data.max_prompt_tokens, rollout.max_new_tokens)
    return model


def _check_model_layouts(cfg: Any, role: str, model: ModelFacts) -> None:
    part = getattr(cfg, role)
    if not hasattr(part, "engine"):
        return
    check_model_sizes(f"{role}.engine.layout", model, training_sizes(role, part.engine))
    if hasattr(part, "rollout"):
        check_model_sizes(f"{role}.rollout.layout", model, generation_sizes(role, part))


def _check_vocabularies(cfg: Any) -> None:
    facts = [_check_model(cfg, *which) for which in _model_folders(cfg)]
    for key, data in parts_of(cfg, DataSettings):
        tokenizer = Path(data.tokenizer_path)
        vocabulary = read_vocabulary(f"{key}.tokenizer_path", tokenizer)
        for model in facts if vocabulary else ():
            check_vocabulary(model, tokenizer, vocabulary or {})


def _only(tree: Any, cls: type[T]) -> T | None:
    """The one part of that class, if there is one."""
    return next((part for _, part in parts_of(tree, cls)), None)
