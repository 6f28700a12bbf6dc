"""Every check of settings before a process group exists. Reads files, changes nothing.

`check` works on any settings object made of the parts in `schema`; a rule applies if its parts are
there. Messages say got, expected, do; the first error of every rule is raised, all together.
"""

from __future__ import annotations

import importlib.util
import ipaddress
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from spmdflow.config import model_folder, parallel
from spmdflow.config.adapter import (
    check_adapted_model,
    check_adapter_sync,
    check_adapters,
    check_shares,
)
from spmdflow.config.algorithm import TextConfig
from spmdflow.config.data_check import check_form, check_tokenizer, preference_rules
from spmdflow.config.data_source import SOURCE_COLUMN, check_sources, data_sources
from spmdflow.config.episode import EpisodeConfig, check_episode
from spmdflow.config.guard import guard_of
from spmdflow.config.leaf import (
    NOT_GIVEN,
    Errors,
    SettingErrors,
    check_bounds,
    leaves,
    parts_of,
)
from spmdflow.config.model_folder import CAUSAL_LM, SCORER, ModelFacts
from spmdflow.config.objective import (
    AdvantageConfig,
    CorrectionConfig,
    PolicyLossConfig,
    PolicyUpdateConfig,
)
from spmdflow.config.offline import (
    EvaluatedConfig,
    RewardModelConfig,
    SupervisedConfig,
)
from spmdflow.config.placement import has_engine, pools_of, roles_of
from spmdflow.config.reward import check_rewards, check_tables, knows_right
from spmdflow.config.schema import (
    AUTO,
    ActorConfig,
    CriticConfig,
    DataSettings,
    EngineConfig,
    ModelConfig,
    OptimizerConfig,
    ReferenceConfig,
    RewardConfig,
    RolloutConfig,
    RunConfig,
    UpdateConfig,
)
from spmdflow.config.server import check_servers
from spmdflow.errors import ConfigError
from spmdflow.kind.engine import engine_kind
from spmdflow.kind.generator import generator_kind
from spmdflow.kind.registry import TRACKERS, home_of
from spmdflow.kind.table import optimizer_kind
from spmdflow.requirement import install_command

T = TypeVar("T")
Rule = Callable[[], object]
"""Raises ConfigError."""

_KINDS = {
    RewardModelConfig: CAUSAL_LM + SCORER,
    SupervisedConfig: CAUSAL_LM,
    ActorConfig: CAUSAL_LM,
    EvaluatedConfig: CAUSAL_LM,
    ReferenceConfig: CAUSAL_LM,
    CriticConfig: CAUSAL_LM + SCORER,
    RewardConfig: SCORER,
}
"""Settings class of a section -> how its model's architecture must end; others: either way."""


def check(cfg: Any, world_size: int) -> None:
    """Raise one ConfigError that lists every problem of these settings on `world_size` ranks.

    Returns silently if there is none. See `problems`.
    """
    errors = Errors()
    for problem in problems(cfg, world_size):
        errors.add(problem)
    errors.raise_all()


def check_open(cfg: Any, world_size: int) -> None:
    """Raise one ConfigError for all problems that do not depend on a value that is still `auto`.

    This early check runs before torch is imported, which is slow and tells which device there is.
    It skips what depends on `auto`: an engine of rollouts, or placement=auto. See `problems`.
    """
    errors = Errors()
    for problem in problems(cfg, world_size, is_open=True):
        errors.add(problem)
    errors.raise_all()


def with_problems(err: ConfigError, world_size: int) -> ConfigError:
    """Return the error of loading settings, extended by the problems of the part that loaded.

    These are the `problems` of err.partial with is_open=True, except those whose text contains
    "(not given)", the stand-in for a missing required value. An error without err.partial is
    returned unchanged.
    """
    if not isinstance(err, SettingErrors) or err.partial is None:
        return err
    more = []
    for each in problems(err.partial, world_size, is_open=True):
        if NOT_GIVEN not in str(each):
            more.append(each)
    return SettingErrors([*err.errors, *more])


def problems(
    cfg: Any, world_size: int, *, here: bool = True, is_open: bool = False
) -> Iterator[ConfigError]:
    """Yield the settings that are out of bounds, then the first error of every rule, in order.

    If a whole number or a name is out of its bounds, placements and sizes on ranks are not checked,
    because they depend on it. A problem that has the key or the text of an earlier one is omitted
    (one folder may be the value of several settings).
    here: whether packages, weights and data must be on this node; a plan does not need them.
    is_open: `auto` values are not known yet, so what depends on them is not checked.
    """
    out_of_bounds = []
    sound = True
    for leaf in leaves(cfg):
        for problem in _failing([partial(check_bounds, leaf)]):
            out_of_bounds.append(problem)
            sound = sound and isinstance(leaf.value, float)
    is_placed = sound and not (is_open and getattr(cfg, "placement", None) == AUTO)
    rules = _rules(cfg, world_size if is_placed else None, here=here, is_open=is_open)
    reported: set[str] = set()
    for problem in [*out_of_bounds, *_failing(rules)]:
        key, _, text = str(problem).partition(": ")  # a shared folder: once
        if not reported & {key, text}:
            reported |= {key, text}
            yield problem


def _failing(rules: Iterable[Rule]) -> Iterator[ConfigError]:
    """Call each rule and yield the ConfigError of each one that raises one, in their order."""
    for rule in rules:
        try:
            rule()
        except ConfigError as err:
            yield err


def _rules(cfg: Any, world_size: int | None, *, here: bool, is_open: bool) -> Iterator[Rule]:
    """Yield the rules that apply to these settings, in the order in which their errors are listed.

    The order is: run, placement, each role, losses, rewards, episodes, model folders; then, only
    with `here`, data, tokenizers and vocabularies. A rule is a function without arguments that
    raises ConfigError.
    world_size: None if placements cannot be checked. here, is_open: as in `problems`.
    """
    is_known = partial(_is_generator_known, is_open=is_open)
    roles = roles_of(cfg)
    folders = []
    for key, part in parts_of(cfg, ModelConfig):
        folders.append((f"{key}.path", part.path))
    folders.sort(key=lambda item: "critic." in item[0])  # it may repeat another's path
    yield partial(_check_run, cfg, here=here)
    if world_size is not None:
        yield partial(_check_placed, cfg, world_size, is_known)
    for role in roles:
        section = getattr(cfg, role, None)
        yield partial(_check_optimizer, cfg, role)
        if hasattr(section, "model"):
            yield partial(check_adapters, role, section)
        rollout = getattr(section, "rollout", None)
        if is_known(rollout):
            yield partial(check_adapter_sync, role, section)
            yield partial(check_servers, f"{role}.rollout", rollout, here=here)
    yield partial(_check_kl, cfg, roles)
    yield partial(_check_correction, cfg)
    for key, reward in parts_of(cfg, RewardConfig):
        yield partial(check_rewards, key, reward)
        yield partial(_check_reward_tables, cfg, key, reward)
    for key, episode in parts_of(cfg, EpisodeConfig):
        yield partial(check_episode, key, episode, here=here)
    for key, path in folders:
        yield partial(_check_model, cfg, key, path, is_known, here=here)
    if not here:
        return
    yield from preference_rules(cfg)
    for key, data in parts_of(cfg, DataSettings):
        yield partial(check_sources, f"{key}.train_path", data.train_path)
        yield partial(check_sources, f"{key}.eval_path", data.eval_path)
        yield partial(_check_data, cfg, key, data)
        yield partial(check_form, cfg, key, data)
        is_model = (Path(data.tokenizer_path) / "config.json").is_file()
        if is_model or data.tokenizer_path not in [path for _, path in folders]:
            yield partial(check_tokenizer, key, data)  # else the model's rule says it
    yield partial(_check_vocabularies, cfg, folders, is_known)


def _is_generator_known(rollout: Any, *, is_open: bool) -> bool:
    """Whether a section generates, with an engine that is not going to change.

    rollout: a RolloutConfig or None (Any: a role may have a custom class).
    """
    return rollout is not None and not (is_open and rollout.engine == AUTO)


def _check_run(cfg: Any, *, here: bool) -> None:
    """Check run names, guards, trackers, generators and optimizers; raise the first ConfigError.

    run.name is a plain folder name; guards parse; betas are two numbers; total_steps, unless 0,
    exceed the warm-up; weight decay needs an optimizer that has it. With `here`, packages of
    trackers, of the view, of the page for Prometheus and of generators must be installed.
    """
    for key, run in parts_of(cfg, RunConfig):
        if run.name in ("", "..") or Path(run.name).name != run.name:
            where = f"{key}.name"
            do = f"set {key}.dir for a path"
            raise ConfigError.of(where, repr(run.name), "a plain folder name", do)
        for guard in run.guards:
            guard_of(guard, f"{key}.guards")
        for tracker in run.trackers:
            if here and home_of(TRACKERS.find(tracker)).startswith("spmdflow."):
                _check_installed(f"{key}.trackers", tracker, extra=tracker)
        if run.view and here:
            _check_installed(f"{key}.view", "plotly", extra="view")
        _check_metrics_page(key, run, here=here)
    for key, rollout in parts_of(cfg, RolloutConfig):
        generator = generator_kind(rollout.generator, key=f"{key}.engine")
        is_elsewhere = generator.is_served and rollout.server.addresses
        if generator.package and here and not is_elsewhere:
            _check_installed(f"{key}.engine", generator.package, extra=generator.extra)
    for key, engine in parts_of(cfg, EngineConfig):
        kind_of_engine = engine_kind(engine.kind, key=f"{key}.kind")
        if kind_of_engine.package and here:
            _check_installed(f"{key}.kind", kind_of_engine.package, extra=kind_of_engine.extra)
    for key, optimizer in parts_of(cfg, OptimizerConfig):
        if len(optimizer.betas) != 2:
            do = f"set {key}.betas=[0.9,0.95]"
            raise ConfigError.of(f"{key}.betas", optimizer.betas, "two numbers", do)
        if 0 < optimizer.total_steps <= optimizer.warmup_steps:
            got = f"{optimizer.total_steps} with {optimizer.warmup_steps} steps of warm-up"
            do = f"set {key}.total_steps higher, or to 0: as many as the run takes"
            raise ConfigError.of(f"{key}.total_steps", got, "more than the warm-up", do)
        kind = optimizer_kind(optimizer.name, key=f"{key}.name")
        if optimizer.weight_decay > 0 and not kind.decays:
            got = f"{optimizer.weight_decay:g} for {optimizer.name}, which has none"
            do = f"set {key}.weight_decay=0 or {key}.name=AdamW"
            raise ConfigError.of(f"{key}.weight_decay", got, "0", do)


def _check_metrics_page(key: str, run: RunConfig, *, here: bool) -> None:
    """Raise ConfigError if metrics_address is no IP address, or its page cannot be written here.

    Whether the port is free is known on rank 0 alone (`tracking.scrape.check_address`).
    """
    try:
        ipaddress.ip_address(run.metrics_address)
    except ValueError as err:
        got = repr(run.metrics_address)
        do = f"set {key}.metrics_address=127.0.0.1, or 0.0.0.0 for all addresses of the node"
        raise ConfigError.of(f"{key}.metrics_address", got, "an IP address", do) from err
    if run.metrics_port is not None and here:
        otherwise = f"set {key}.metrics_port=null"
        package = "prometheus_client"
        _check_installed(f"{key}.metrics_port", package, extra="prometheus", otherwise=otherwise)


def _check_installed(
    key: str, package: str, *, extra: str, otherwise: str = "choose another"
) -> None:
    """Raise ConfigError if Python finds no package of this name; it is not imported.

    extra: our extras that install it, separated by commas, for the message. otherwise: what to do
    instead of an installation.
    """
    if importlib.util.find_spec(package) is None:
        commands = " or ".join(map(install_command, extra.split(",")))
        do = f"{commands}, or {otherwise}"
        raise ConfigError.of(key, package, "an installed package", do)


def _check_placed(cfg: Any, world_size: int, is_known: Callable[[Any], bool]) -> None:
    """Check pools, layouts and batch sizes of every role on `world_size` ranks; ConfigError if not.

    Also checks that run.profile_ranks exist and that reference.shares is possible. Generation sizes
    are checked on the ranks of the generator if it has a pool, otherwise on the actor's. The
    mini-batch size of each trained role is checked against its number of data-parallel replicas.
    is_known: whether the generator of a section is known.
    """
    pools = pools_of(cfg, range(world_size)).values()
    for key, run in parts_of(cfg, RunConfig):
        last = max(run.profile_ranks, default=0)
        if last >= world_size:
            expected = f"ranks 0 to {world_size - 1}"
            where = f"{key}.profile_ranks"
            raise ConfigError.of(where, f"rank {last}", expected, "name ranks of the run")
    for _, reference in parts_of(cfg, ReferenceConfig):
        if reference.shares is not None:
            check_shares(cfg, [pool.roles for pool in pools])
    num_ranks = {}
    for pool in pools:
        for role in pool.roles:
            num_ranks[role] = len(pool.ranks)
    generating = num_ranks.get("generator", num_ranks.get("actor", world_size))
    num_ranks = {r: n for r, n in num_ranks.items() if has_engine(getattr(cfg, r, None))}
    for role, ranks in num_ranks.items():
        part = getattr(cfg, role)
        parallel.check_training_sizes(role, part.engine, num_ranks=ranks)
        if is_known(getattr(part, "rollout", None)):
            parallel.check_generation_sizes(role, part, num_ranks=generating)
    actor = getattr(cfg, "actor", None)
    if "actor" not in num_ranks and is_known(getattr(actor, "rollout", None)):
        parallel.check_generation_sizes("actor", actor, num_ranks=generating)  # only generates
    data = _only(cfg, DataSettings)
    if data is None:
        return
    errors = Errors()
    for role, ranks in num_ranks.items():
        part = getattr(cfg, role)
        engine = getattr(cfg, role).engine
        update = _only(part, UpdateConfig)
        if update:
            replicas = ranks // parallel.training_sizes(role, engine).replica
            with errors.collecting():
                parallel.batch_algebra_of(role, data, update, engine, num_ranks=replicas)
    errors.raise_all()


def _check_optimizer(cfg: Any, role: str) -> None:
    """Raise ConfigError if a role has a model and an update, but no optimizer settings.

    A role whose section is missing, or has no `model` or no `update`, passes.
    """
    part = getattr(cfg, role, None)
    is_trained = hasattr(part, "model") and hasattr(part, "update")
    if is_trained and _only(part, OptimizerConfig) is None:
        got = f"update without optimizer in {type(part).__name__}"
        do = "add optimizer: OptimizerConfig, or remove update"
        raise ConfigError.of(role, got, "both for a model that is trained", do)


def _check_reward_tables(cfg: Any, key: str, reward: RewardConfig) -> None:
    """Raise ConfigError if a reward's tables do not fit the mixtures of the data settings.

    The rows of a mixture have the name of their source as a column; other files are not opened.
    """
    if reward.source_column != SOURCE_COLUMN:
        return
    mixtures: dict[str, list[str]] = {}
    all_known = True
    for section, data in parts_of(cfg, DataSettings):
        for name in ("train_path", "eval_path"):
            setting = f"{section}.{name}"
            names = [source.name for source in data_sources(setting, getattr(data, name))]
            if not names:
                continue
            if all(names):
                mixtures[setting] = names
            else:
                all_known = False
    check_tables(key, reward, mixtures, all_known=all_known)


def _check_kl(cfg: Any, roles: tuple[str, ...]) -> None:
    """Raise ConfigError if a policy loss or advantage has kl_coef > 0 without a reference model."""
    parts = dict(parts_of(cfg, PolicyLossConfig)) | dict(parts_of(cfg, AdvantageConfig))
    for key, part in parts.items():
        if part.kl_coef > 0 and "reference" not in roles:
            where = f"{key}.kl_coef"
            got = f"{part.kl_coef:g} without a reference model"
            do = f"set reference.model.path or {key}.kl_coef=0"
            raise ConfigError.of(where, got, "one to measure the KL against", do)


def _check_correction(cfg: Any) -> None:
    """Raise ConfigError if importance weights would correct the same rollouts twice.

    The update's own correction (its kind is not `none`) conflicts with old_log_probs=rollout, whose
    ratio is the weight already, and with a correction in a section of the script. The latter is no
    conflict if max_staleness is 0, as the script then weighs no rows.
    """
    by_script = []
    for key, _ in parts_of(cfg, CorrectionConfig):
        if not key.endswith("update.correction"):
            by_script.append(key)
    for key, update in parts_of(cfg, PolicyUpdateConfig):
        where = f"{key}.correction.kind"
        got = update.correction.kind
        if got == "none":
            continue
        if update.old_log_probs == "rollout":
            got = f"{got} with {key}.old_log_probs=rollout, whose ratio is the weight already"
            do = f"set {where}=none, or {key}.old_log_probs=recompute"
            raise ConfigError.of(where, got, "one correction", do)
        weighs = getattr(cfg, "max_staleness", 1) > 0  # grpo_async: not where all rows are fresh
        if by_script and weighs:
            got = f"{got} in a script that weighs its rows by {by_script[0]}"
            do = f"set {where}=none and use {by_script[0]}.kind"
            raise ConfigError.of(where, got, "one correction", do)


def _check_model(
    cfg: Any, key: str, path: str, is_known: Callable[[Any], bool], *, here: bool = True
) -> ModelFacts:
    """Check one model folder against its section's needs, layouts and lengths; return its facts.

    ConfigError if the folder or its architecture is unfit, the generator is wrong for its family,
    heads or layers do not divide by the training or generation layout, or prompt plus response
    exceed the context.
    key: the setting of the path, whose first word is the role. is_known: whether the generator of a
    section is known. here: whether the folder must have weights.
    """
    facts = model_folder.read_model_folder(key, path, weights=here)
    role = key.split(".")[0]
    part = getattr(cfg, role)
    data = _only(cfg, DataSettings)
    rollout = _only(cfg, RolloutConfig)
    kinds = (_KINDS[base] for base in type(part).__mro__ if base in _KINDS)
    model_folder.check_kind(facts, next(kinds, CAUSAL_LM + SCORER))
    generator = None
    if role == "actor" and rollout is not None and is_known(rollout):
        generator = rollout.generator
    model_folder.check_heads(facts, generator=generator)
    if rollout is not None and generator is not None:
        model_folder.check_family(facts, generator=generator)
        model_folder.check_weights_setting(facts, weights=rollout.weights)
    update = _only(part, UpdateConfig)
    if update is not None:
        model_folder.check_experts(facts, f"{role}.update", update, generator=generator)
    if hasattr(part, "engine"):
        sizes = parallel.training_sizes(role, part.engine)
        parallel.check_model_sizes(f"{role}.engine.layout", facts, sizes)
        parallel.check_context(role, part.engine, facts, sizes)
        check_adapted_model(role, part, facts.arch)
        if is_known(getattr(part, "rollout", None)):
            sizes = parallel.generation_sizes(role, part)
            parallel.check_model_sizes(f"{role}.rollout.layout", facts, sizes)
            parallel.check_shared_weights(role, part)
    if data and rollout:
        model_folder.check_positions(facts, data.max_prompt_tokens, rollout.max_new_tokens)
    return facts


def _check_data(cfg: Any, key: str, data: DataSettings) -> None:
    """Raise ConfigError if the evaluation or the texts of a data section do not fit the run.

    eval_samples needs prompts as rows and a reward function, as pass@k has to know what is right.
    eval_every > 0 needs an eval_path. A section of texts (pretraining) has as many texts per step
    as the step has samples.
    """
    where = f"{key}.eval_samples"
    samples = data.eval_samples
    if samples and data.rows != "prompts":
        got = f"{samples} for {data.rows}, which have their answers already"
        raise ConfigError.of(where, got, "0", f"set {where}=0")
    reward = _only(cfg, RewardConfig)
    if samples and (reward is None or not knows_right(reward)):
        got = f"{samples} with a reward model alone"
        expected = "a function that says what is right, for pass@k"
        raise ConfigError.of(where, got, expected, f"set {where}=0, or reward.function")
    if isinstance(data, TextConfig):
        if data.prompts_per_step != (samples := cfg.data.samples_per_step):
            raise ConfigError(
                f"{key}.prompts_per_step: got {data.prompts_per_step}, expected {samples}, one "
                f"text for each sample of a step ({cfg.data.prompts_per_step} prompts x "
                f"{cfg.data.samples_per_prompt}); set {key}.prompts_per_step={samples}"
            )
    elif data.eval_path is None and getattr(cfg, "eval_every", 0) > 0:
        got = f"none with eval_every {cfg.eval_every}"
        do = f"set {key}.eval_path or eval_every=0"
        raise ConfigError.of(f"{key}.eval_path", got, "a file of held-out prompts", do)


def _check_vocabularies(
    cfg: Any, folders: list[tuple[str, str]], is_known: Callable[[Any], bool]
) -> None:
    """Raise ConfigError if a model cannot read the token ids of a data section's tokenizer.

    Repeats the checks of every model first and so stops at a model that fails them. A reward model
    with another tokenizer is compared with its own one, as texts are encoded again for it; not for
    chats, which would keep the marks of the actor's template, and not if it scores the actor's
    tokens (per_token). A tokenizer without a readable tokenizer.json is not checked.
    """
    models = []
    for key, path in folders:
        models.append(_check_model(cfg, key, path, is_known))
    for key, data in parts_of(cfg, DataSettings):
        tokenizer = Path(data.tokenizer_path)
        vocabulary = model_folder.read_vocabulary(f"{key}.tokenizer_path", tokenizer)
        for facts in models if vocabulary else ():
            part = getattr(cfg, facts.key.split(".")[0])
            own = None
            if isinstance(part, RewardConfig) and not (data.chat_template or part.per_token):
                actor_tokenizer = Path(part.tokenizer_path)
                own = model_folder.own_vocabulary(facts.key, facts.path, actor_tokenizer)
            read = (facts.path, own) if own else (tokenizer, vocabulary or {})
            model_folder.check_vocabulary(facts, *read)


def _only(tree: Any, cls: type[T]) -> T | None:
    """Return the first part of the settings that is a `cls`; None if there is none."""
    return next((part for _, part in parts_of(tree, cls)), None)
