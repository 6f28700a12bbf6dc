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
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from spmdflow.config.foreign_names import setting_for
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
    COMMAND_LINE,
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
    weights: bool = True,
) -> Loaded:
    """Import the script and build its settings; one ConfigError lists everything that is wrong.

    Later sources win: the defaults, then the script's own YAML (its name with `.yaml`, if that file
    exists), then `yaml_path`, then overrides. An override is `dotted.key=value`, with the value in
    YAML. Script and YAML may be bundled ones, by name. Paths of models and data become local
    folders.
    download: whether models that are named and not in the hub's cache may be downloaded.
    weights: whether these models need their weights, or only config.json and the tokenizer.
    """
    script_path = find_file(script_path, ".py")
    script = load_script(script_path)
    schema = schema_of(script)
    sources = _read(_files(script_path, yaml_path), overrides)
    assume = _examples(schema, sources)
    known = _known(schema)
    tree = copy.deepcopy(_default_tree(schema))
    errors = Errors()
    sources, warnings = _translate_old_forms(sources, known, errors)
    assignments = _collect_assignments(schema, sources, known)
    for assignment in assignments:
        with errors.collecting():
            _set(tree, assignment.key, assignment.value, assignment.source, known)
    cfg = _resolve(tree, known, errors)
    given = {assignment.key for assignment in assignments}
    resolve_paths(cfg, download=download, weights=weights, given=given)
    follow(cfg)
    return Loaded(cfg, script, assume, _changed_settings(assignments, known, tree), warnings)


def help_text(
    script_path: str | Path, yaml_path: str | Path | None, overrides: Sequence[str]
) -> str:
    """Return one entry per setting of a script: type, default, and the value that these words set.

    A value other than the default is followed by its source. ConfigError for words that cannot be
    read or name no setting; a required setting without a value is no error.
    """
    script_path = find_file(script_path, ".py")
    schema = schema_of(load_script(script_path))
    sources = _read(_files(script_path, yaml_path), overrides)
    _examples(schema, sources)
    known = _known(schema)
    tree = copy.deepcopy(_default_tree(schema))
    errors = Errors()
    sources, _ = _translate_old_forms(sources, known, errors)
    assignments = _collect_assignments(schema, sources, known)
    for assignment in assignments:
        with errors.collecting():
            _set(tree, assignment.key, assignment.value, assignment.source, known)
    errors.raise_all()
    return schema_help(schema, _changed_settings(assignments, known, tree))


def settings_text(loaded: Loaded) -> str:
    """Return the settings that differ from their defaults as wrapped lines, one block per section.

    The first line names the files and words that changed them, what overrides the others last.
    Without a change: "settings  all have their defaults".
    """
    own = str(Path(str(loaded.script.__file__)).with_suffix(".yaml"))
    names = sorted(
        dict.fromkeys(source for _, source in loaded.changed.values()),
        key=lambda name: (name == COMMAND_LINE, name != own),
    )
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
    """Return the sources with flat keys and all settings in the current form, and the warnings.

    There is one warning for each setting in an old form (see old_forms), without repeats. A setting
    in an old form that cannot be read is added to `errors` and omitted.
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
    """Return what all sources assign, in the order in which a later one wins.

    Where a source sets a setting with `Leaf.resets` to a value and not the setting named there,
    that one is set to null first, as it would win otherwise. If the schema's `take_over` recognises
    a file of a training run, which an evaluation uses, the assignments of earlier sources are
    dropped.
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
    """Return key -> (value, source's name) of each setting whose last value is not its default.

    A map that several sources extend has its merged value, from `tree`, with the name of the last.
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
    """Return the YAML files of a run: the script's own one, if it exists, then `config`.

    The script's own file has its name with `.yaml`. It is listed once if `config` is the same file.
    """
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
    """Read the YAML files, then each word of the command line, as one Source each.

    One ConfigError lists every file and word that cannot be read.
    """
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


@lru_cache(maxsize=8)
def _default_tree(schema: type) -> Any:
    """Return the omegaconf tree of a settings class with its defaults. Callers change a copy of it.

    It is kept, because building it takes half of the time of `load`, and all scripts without a
    class of their own share one.
    """
    return OmegaConf.structured(schema)


def _known(schema: type) -> _Known:
    """Return the settings and groups of a settings class, by dotted key.

    Also registers the resolver of `${first_of:...}` with omegaconf, for the whole process.
    """
    OmegaConf.register_resolver("first_of", _first_of, replace=True)
    settings = {}
    for leaf in leaves(defaults(schema)):
        settings[leaf.key] = leaf
    return _Known(settings, sorted({group for key in settings for group in _groups_of(key)}))


def _groups_of(key: str) -> list[str]:
    """Return the dotted keys of all groups that a key is in: "a.b.c" -> ["a", "a.b"]."""
    groups = []
    for index, letter in enumerate(key):
        if letter == ".":
            groups.append(key[:index])
    return groups


def _set(tree: DictConfig, key: str, value: Any, source: Source, known: _Known) -> None:
    """Set one key of the tree in place; create optional groups on its way that are null.

    ConfigError if no setting has this name, or the value has another type, or a missing value (???)
    in it. A map that is one setting (such as the terms of a reward) is replaced as a whole by a
    file; a word of the command line changes only the entry that it names, so ConfigError if the
    value so far is a text.
    """
    name = source.name
    if key not in known.settings and key not in known.groups:
        full_key = _first_key_below(key, value)
        translation = setting_for(full_key, known.settings)
        if translation is not None:
            key = full_key
            hint = f", which is {translation} here"
        else:
            hint = _nearest(key, [*known.settings, ASSUME, *known.groups])
        raise ConfigError(f"{name}: unknown key {key}{hint}; --help lists every key")
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


def _first_key_below(key: str, value: Any) -> str:
    """Return the dotted key of the first setting in an unknown section, or `key` if it is none."""
    while isinstance(value, dict) and value:
        name, value = next(iter(value.items()))
        key = f"{key}.{name}"
    return key


def _missing_value_error(where: str, value: Any) -> ConfigError | None:
    """Return an error if a list or map contains ???, the mark of a missing value; otherwise None.

    A value that is ??? itself gives None: `_resolve` reports it as a missing setting.
    """
    if value == REQUIRED or not _holds_required(value):
        return None
    return ConfigError.of(where, value, f"a value instead of {REQUIRED}", "write it")


def _holds_required(value: Any) -> bool:
    """Return whether a value, or one nested in its lists and maps, is ??? (missing)."""
    if isinstance(value, dict):
        return any(_holds_required(each) for each in value.values())
    if isinstance(value, list):
        return any(_holds_required(each) for each in value)
    return bool(value == REQUIRED)


def complete(cfg: Any, *, download: bool = True) -> Any:
    """Return a copy of settings made in Python, completed as `load` does it.

    References (`${...}`) are filled in, old forms translated with a warning, and paths of models
    and data replaced by local folders. cfg: an object of a script's settings class, left as it is.
    ConfigError if it is none, or for what is missing or of a wrong type.
    download: as in `load`.
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
    """Return a deep copy of settings made in Python, with old forms translated into current ones.

    An old form is an attribute of an old name that a program set on a section, or a text where
    today a number or list is expected. Logs one warning for each.
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
    """Return the typed settings object of an omegaconf tree, with every `${...}` filled in.

    Adds a ConfigError to `errors` for all missing values together and for each broken reference,
    then raises everything in `errors`, also what was in it before. Missing values are replaced in
    `tree`; the settings that could be built go along as the error's `partial`, for further checks.
    """
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
    """Return the error of the ${reference} that was written for a key; None if it resolves."""
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
    """Resolve `${first_of:a,b}`: the value of the first named setting that is not null.

    REQUIRED ("???") if all are null or unknown.
    """
    for key in keys:
        value = OmegaConf.select(_root_, key, default=None)
        if value is not None:
            return value
    return REQUIRED


def _nearest(key: str, candidates: Sequence[str]) -> str:
    """Return ", nearest is KEY" for the key most similar to an unknown one; "" if none is similar.

    Prefers a key with the same last name in the same section, then a similar spelling, then the
    same last name anywhere.
    """
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
    """Return the ConfigError for a value that does not have the type of its setting.

    It gives the expected type and an example: the default, otherwise one of the type. If `key` is a
    group of settings, the error says so and shows one of its keys.
    """
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
