"""Script + YAML + overrides -> one typed object. With `source`, the only user of omegaconf.

Every error names the key, its source and the nearest key; all errors are raised together.
"""

from __future__ import annotations

import copy
import difflib
import logging
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from spmdflow.config.leaf import (
    NOT_GIVEN,
    REQUIRED,
    Errors,
    Leaf,
    defaults,
    flat,
    follow,
    leaves,
    parts_of,
    schema_help,
    type_name,
    value_text,
)
from spmdflow.config.location import resolve_paths
from spmdflow.config.old_forms import translate_setting, warning_text
from spmdflow.config.script import load_script, schema_of
from spmdflow.config.source import (
    ASSUME,
    Source,
    find_file,
    read_override,
    read_yaml,
    take_examples,
)
from spmdflow.errors import ConfigError

logger = logging.getLogger(__name__)

_EXAMPLES = {"int": "8", "float": "0.5", "bool": "true", "str": "text"}


@dataclass(frozen=True)
class Loaded:
    """What a run starts from."""

    cfg: Any  # an object of the script's settings class
    script: ModuleType
    assume: Mapping[str, Any] = field(default_factory=dict)
    """Examples by name, from the section `assume`: used by a plan, ignored by a run."""
    changed: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    """Value and source of each setting that a file or a word gave another value than its default.
    """
    warnings: tuple[str, ...] = ()
    """Sentences for the user: settings in an old form, with the new one."""


def load(
    script_path: str | Path,
    yaml_path: str | Path | None,
    overrides: Sequence[str],
    *,
    download: bool = True,
) -> Loaded:
    """Import the script and build its settings; one ConfigError for all that does not fit.

    Settings lie over each other: the defaults, then the script's own YAML (its name with `.yaml`,
    if that is there), then `yaml_path`, then overrides. An override is `dotted.key=value`, the
    value in YAML. Script and YAML may be bundled ones, by name.
    download: whether models that are named and not in the hub's cache may be downloaded.
    """
    script_path = find_file(script_path, ".py")
    script = load_script(script_path)
    schema = schema_of(script)
    sources = _read(_files(script_path, yaml_path), overrides)
    assume = _examples(schema, sources)
    known = _known(schema)
    tree = OmegaConf.structured(schema)
    errors = Errors()
    sources, warnings = _translate_old_forms(sources, known, errors)
    assignments = _collect_assignments(schema, sources, known)
    for assignment in assignments:
        with errors.collecting():
            _set(tree, assignment.key, assignment.value, assignment.source, known)
    cfg = _resolve(tree, known, errors)
    resolve_paths(cfg, download=download)
    follow(cfg)
    return Loaded(cfg, script, assume, _changed_settings(assignments, known, tree), warnings)


def help_text(
    script_path: str | Path, yaml_path: str | Path | None, overrides: Sequence[str]
) -> str:
    """Every setting of a script, with the value that it has with these words, and where from.

    ConfigError for words that cannot be read or name no setting; what is missing is no error here.
    """
    script_path = find_file(script_path, ".py")
    schema = schema_of(load_script(script_path))
    sources = _read(_files(script_path, yaml_path), overrides)
    _examples(schema, sources)
    known = _known(schema)
    tree = OmegaConf.structured(schema)
    errors = Errors()
    sources, _ = _translate_old_forms(sources, known, errors)
    assignments = _collect_assignments(schema, sources, known)
    for assignment in assignments:
        with errors.collecting():
            _set(tree, assignment.key, assignment.value, assignment.source, known)
    errors.raise_all()
    return schema_help(schema, _changed_settings(assignments, known, tree))


def settings_text(loaded: Loaded) -> str:
    """The settings that files and words gave other values than their defaults, by section."""
    names = dict.fromkeys(source for _, source in loaded.changed.values())
    if not names:
        return "settings  all have their defaults"
    sections: dict[str, list[str]] = {}
    for key, (value, _) in loaded.changed.items():
        section, _, name = key.partition(".")
        text = value_text(value)
        sections.setdefault(section, []).append(f"{name}={text}" if name else text)
    lines = [f"settings  other than their defaults, by {', then '.join(names)}:"]
    for section, words in sections.items():
        lines += textwrap.wrap(
            " ".join(words),
            width=100,
            initial_indent=f"  {section:<12}",
            subsequent_indent=" " * 14,
            break_long_words=False,
            break_on_hyphens=False,
        )
    return "\n".join(lines)


def _examples(schema: type, sources: Sequence[Source]) -> dict[str, Any]:
    """Take the section `assume` out of the sources, unless it is one of the script's settings."""
    if ASSUME in {part.name for part in fields(schema)}:
        return {}
    return take_examples(sources)


class _Assignment(NamedTuple):
    """What a source says of one setting."""

    key: str
    value: Any
    source: Source


def _translate_old_forms(
    sources: Sequence[Source], known: _Known, errors: Errors
) -> tuple[list[Source], tuple[str, ...]]:
    """The sources with all settings in the form of today, and a warning for each old one.

    Old settings that cannot be read become errors and are omitted.
    """
    translated = []
    warnings: dict[str, None] = {}
    for source in sources:
        settings: dict[str, Any] = {}
        for key, value in flat(source.tree, known.groups).items():
            replacement: dict[str, Any] | None = {}
            with errors.collecting():
                replacement = translate_setting(key, value, known.settings)
                if replacement is not None:
                    warnings[warning_text(source.name, key, value, replacement)] = None
            settings |= {key: value} if replacement is None else replacement
        translated.append(replace(source, tree=settings))
    return translated, tuple(warnings)


def _collect_assignments(
    schema: type, sources: Sequence[Source], known: _Known
) -> list[_Assignment]:
    """What all sources say, in the order in which they lie over each other.

    A setting that another one wins over (`Leaf.resets`) counts if it is set last: the other one
    becomes null.
    """
    assignments: list[_Assignment] = []
    for source in sources:
        settings = flat(source.tree, known.groups)
        if source.file is not None and hasattr(schema, "take_over"):
            of_training = schema.take_over(settings, source.file)
            if of_training is not settings:  # of a training run, which is evaluated as it is
                assignments.clear()
            settings = of_training
        for key, value in settings.items():
            leaf = known.settings.get(key)
            if leaf is not None and leaf.resets and value is not None:
                if leaf.resets not in settings:
                    assignments.append(_Assignment(leaf.resets, None, source))
            assignments.append(_Assignment(key, value, source))
    return assignments


def _changed_settings(
    assignments: Sequence[_Assignment], known: _Known, tree: DictConfig
) -> dict[str, tuple[Any, str]]:
    """Value and source of each setting that has another value than its default.

    A map has what all sources say of it, and the name of the last.
    """
    plain: Any = OmegaConf.to_container(tree, resolve=False)
    maps = {}
    for key, value in flat(plain, known.groups).items():
        if type(value) is dict:
            maps[key] = value
    last = {assignment.key: assignment for assignment in assignments}
    result = {}
    for key, assignment in last.items():
        if key in known.settings and assignment.value != known.settings[key].value:
            result[key] = (maps.get(key, assignment.value), assignment.source.name)
    return result


def _files(script: Path, config: str | Path | None) -> list[Path]:
    """The YAML files of a run, the script's own one first: a later one wins."""
    files: list[Path] = []
    own = script.with_suffix(".yaml")
    if own.is_file():
        files.append(own)
    if config is not None:
        file = find_file(config, ".yaml")
        if not files or file.resolve() != own.resolve():
            files.append(file)
    return files


def _read(files: Sequence[Path], overrides: Sequence[str]) -> list[Source]:
    """The files, then each word of the command line; ConfigError for all that cannot be read."""
    errors = Errors()
    sources = []
    for file in files:
        with errors.collecting():
            sources.append(read_yaml(file))
    for text in overrides:
        with errors.collecting():
            sources.append(read_override(text))
    errors.raise_all()
    return sources


class _Known(NamedTuple):
    """The keys of a settings class."""

    settings: dict[str, Leaf]
    groups: list[str]
    """Dotted keys of the groups of settings, such as actor.model."""


def _known(schema: type) -> _Known:
    """The keys of a settings class; also registers the resolver of `${first_of:...}`."""
    OmegaConf.register_resolver("first_of", _first_of, replace=True)
    settings = {}
    for leaf in leaves(defaults(schema)):
        settings[leaf.key] = leaf
    return _Known(settings, sorted({group for key in settings for group in _groups_of(key)}))


def _groups_of(key: str) -> list[str]:
    """ "a.b.c" -> ["a", "a.b"]."""
    groups = []
    for index, letter in enumerate(key):
        if letter == ".":
            groups.append(key[:index])
    return groups


def _set(tree: DictConfig, key: str, value: Any, source: Source, known: _Known) -> None:
    """Set one key; ConfigError if there is none of that name, or it is of another type.

    A map that is one setting, such as the terms of a reward: in a file it replaces the one of the
    file before; a word of the command line changes what it names in it, and nothing else: what is
    no map has nothing of that name.
    """
    name = source.name
    if key not in known.settings and key not in known.groups:
        near = _nearest(key, [*known.settings, ASSUME, *known.groups])
        raise ConfigError(f"{name}: unknown key {key}{near}; --help lists every key")
    if key in known.groups and not isinstance(value, dict | None):  # also a ${reference}
        raise _wrong_type(name, key, value, known)
    if error := _missing_value_error(f"{name}: {key}", value):
        raise error
    before = OmegaConf.select(tree, key, throw_on_resolution_failure=False)
    if source.key.startswith(f"{key}.") and isinstance(before, str):
        entry = source.key.removeprefix(f"{key}.")
        raise ConfigError(
            f"{name}: {source.key} is an entry of a map, but {key} is {before!r}; write the whole "
            f"map, as in {key}={{NAME: {before}, {entry}: ...}}"
        )
    try:
        for group in _groups_of(key):
            if OmegaConf.select(tree, group) is None:  # an optional one
                OmegaConf.update(tree, group, {}, merge=True)
        is_replaced = source.file is not None and key in known.settings
        OmegaConf.update(tree, key, value, merge=not is_replaced)
    except OmegaConfBaseException as err:
        raise _wrong_type(name, key, value, known) from err


def _missing_value_error(where: str, value: Any) -> ConfigError | None:
    """The error of a list or map that has the mark of a missing value in it; None without."""
    if value == REQUIRED or not _holds_required(value):
        return None
    return ConfigError.of(where, value, f"a value instead of {REQUIRED}", "write it")


def _holds_required(value: Any) -> bool:
    """Whether a value, or one inside of it, is the mark of a missing value."""
    if isinstance(value, dict):
        return any(_holds_required(each) for each in value.values())
    if isinstance(value, list):
        return any(_holds_required(each) for each in value)
    return bool(value == REQUIRED)


def complete(cfg: Any, *, download: bool = True) -> Any:
    """A copy of settings made in Python: references filled in, paths located, as `load` does it.

    cfg: of a script's settings class. ConfigError names what is missing or of a wrong type.
    """
    if not is_dataclass(cfg) or isinstance(cfg, type):
        expected = "an object of the script's settings class"
        do = "make one with spmdflow.load_settings or as PPOConfig()"
        raise ConfigError.of("settings", repr(cfg), expected, do)
    known = _known(type(cfg))
    cfg = _with_old_attributes(cfg, known)
    try:
        tree = OmegaConf.structured(cfg)
    except OmegaConfBaseException as err:
        key = str(err.full_key or "").partition("[")[0]
        key = next((each for each in known.settings if f"{key}.".startswith(f"{each}.")), key)
        raise _wrong_type("settings", key, flat(asdict(cfg), known.groups).get(key), known) from err
    completed = _resolve(tree, known, Errors())
    resolve_paths(completed, download=download)
    follow(completed)
    return completed


def _with_old_attributes(cfg: Any, known: _Known) -> Any:
    """A copy of settings made in Python, with what has an old form in that of today.

    Such a setting is an attribute that was set on a section, or has a text for a value. A warning
    is logged for each.
    """
    cfg = copy.deepcopy(cfg)
    for section, part in [("", cfg), *parts_of(cfg, object)]:
        prefix = f"{section}." if section else ""
        for name, value in list(vars(part).items()):
            replacement = translate_setting(f"{prefix}{name}", value, known.settings)
            if replacement is None or (value is None and name in known.settings):
                continue
            logger.warning("%s", warning_text("settings", f"{prefix}{name}", value, replacement))
            for key, new in replacement.items():
                setattr(part, key.rpartition(".")[2], new)
    return cfg


def _resolve(tree: Any, known: _Known, errors: Errors) -> Any:
    """The typed object of a tree: nothing missing, every `${...}` filled in."""
    assert isinstance(tree, DictConfig), tree
    plain: Any = OmegaConf.to_container(tree, resolve=False)
    written = flat(plain, known.groups)
    missing = []
    for key, value in written.items():
        if value == REQUIRED:
            missing.append(key)
    for key in missing:  # for the checks that follow: anything of its type
        default = known.settings[key].value
        OmegaConf.update(tree, key, NOT_GIVEN if default == REQUIRED else default)
    if missing:
        sentences = "".join(f"\n  {key}: {known.settings[key].doc}" for key in missing)
        errors.add(
            ConfigError(
                f"missing {', '.join(missing)}, expected a value for each; set them in the YAML or "
                f"as {missing[0]}=VALUE{sentences}"
            )
        )
    references = {}
    for key, value in written.items():
        if "${" in str(value):
            references[key] = value
    broken = []
    for key, value in references.items():
        broken.append(_reference_error(tree, key, value))
    unfilled = []
    for key, value in written.items():
        unfilled.append(_missing_value_error(key, value))
    for error in filter(None, [*broken, *unfilled]):
        errors.add(error)
    if any(broken) or any(unfilled):
        errors.raise_all()
    try:
        cfg = OmegaConf.to_object(tree)
    except OmegaConfBaseException as err:  # \${...}, a text instead of a list or map
        texts = {}
        for key, value in references.items():
            if "\\${" in str(value):
                texts[key] = value
        got = ", ".join(f"{key}={value}" for key, value in texts.items())
        do = f"change it ({str(err).splitlines()[0]})"
        errors.add(ConfigError.of("settings", got, "a value of the setting's type", do))
        errors.raise_all()
    errors.raise_all(cfg)
    return cfg


def _reference_error(tree: DictConfig, key: str, written: Any) -> ConfigError | None:
    """The error of a ${reference} that was written for a key; None if it resolves."""
    group, _, name = key.rpartition(".")
    try:
        part = OmegaConf.select(tree, group) if group else tree
        value = part[name]
        if OmegaConf.is_config(value):
            OmegaConf.resolve(value)
        return None
    except (OmegaConfBaseException, KeyError) as err:
        expected = "${key} of a setting with a fitting value or ${oc.env:NAME} of a "
        expected += "variable that is set"
        do = f"change it ({str(err).splitlines()[0]})"
        return ConfigError.of(key, written, expected, do)


def _first_of(*keys: str, _root_: DictConfig) -> Any:
    """`${first_of:a,b}`: the first of the named settings that has a value."""
    for key in keys:
        value = OmegaConf.select(_root_, key, default=None)
        if value is not None:
            return value
    return REQUIRED


def _nearest(key: str, candidates: Sequence[str]) -> str:
    """The end of an error that names the most similar key; empty if there is none."""
    root = key.split(".")[0]
    name = key.split(".")[-1]
    same_name = []
    for leaf in candidates:
        if leaf.split(".")[-1] == name:
            same_name.append(leaf)
    same_group = []
    for leaf in same_name:
        if leaf.startswith(root + "."):
            same_group.append(leaf)
    near = same_group or difflib.get_close_matches(key, candidates, 1) or same_name
    if near:
        return f", nearest is {near[0]}"
    return ""


def _wrong_type(source: str, key: str, value: Any, known: _Known) -> ConfigError:
    """The error for a value that does not have the type of its setting, or for a group."""
    got = f"{source}: {key} got {value!r}"
    leaf = known.settings.get(key)
    if leaf is not None:
        if isinstance(leaf.value, bool):
            example = str(leaf.value).lower()
        else:
            example = str(leaf.value)
        if leaf.value in (None, REQUIRED) or "${" in example:
            example = _EXAMPLES.get(type_name(leaf.hint).split(" ")[0], "value")
        return ConfigError(
            f"{got} ({type(value).__name__}), expected {type_name(leaf.hint)}; give one, "
            f"such as {key}={example}"
        )
    if value is None:
        return ConfigError(f"{got}, expected a group of settings; remove it to use its defaults")
    example = next((name for name in known.settings if name.startswith(f"{key}.")), key)
    return ConfigError(
        f"{got} ({type(value).__name__}), expected a group of settings; set its keys, such as "
        f"{example}"
    )
