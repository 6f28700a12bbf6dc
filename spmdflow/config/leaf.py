"""The settings of a tree as a flat list: their keys, their errors, and what `--help` prints.

Knows dataclasses; no files, no omegaconf.
"""

from __future__ import annotations

import difflib
import json
import operator
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from functools import partial
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from spmdflow.errors import ConfigError

REQUIRED: Any = "???"  # omegaconf's mark for "no default", written out: only load.py imports it
T = TypeVar("T")

_FOLLOWS = "follows"  # in the metadata of a field that is no setting (`follows`)


@dataclass(frozen=True)
class Bounds:
    """Values a setting may take; for a list, each of its items."""

    choices: tuple[str, ...] | Callable[[], tuple[str, ...]] = ()
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None

    @property
    def one_of(self) -> tuple[str, ...]:
        """The choices at this moment: a script may have registered more."""
        if callable(self.choices):
            return self.choices()
        return self.choices

    @property
    def limits(self) -> list[tuple[str, Callable[[Any, Any], bool], float]]:
        """Return (words, comparison, limit) of each limit that is set, lower limits first.

        A value fits if comparison(value, limit) is true. The words are "at least", "more than", "at
        most" or "less than".
        """
        table = (
            ("at least", operator.ge, self.at_least),
            ("more than", operator.gt, self.above),
            ("at most", operator.le, self.at_most),
            ("less than", operator.lt, self.below),
        )
        result = []
        for words, fits, limit in table:
            if limit is not None:
                result.append((words, fits, limit))
        return result


def setting(
    doc: str,
    default: Any = REQUIRED,
    *,
    one_of: tuple[str, ...] | Callable[[], tuple[str, ...]] = (),
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    resets: str = "",
    type_words: str = "",
) -> Any:
    """Return a dataclass field for one setting, with its sentence for `--help` and its bounds.

    Without a default the setting is required. A default that is a list or dict is copied for each
    object.
    resets: a setting of the same section that wins over this one. It becomes null where a later
    source gives only this one.
    type_words: the type for `--help`, where the annotation says too little, such as Any.
    The result is a `dataclasses.Field`; Any, as the field takes its declared type.
    """
    bounds = Bounds(one_of, at_least, above, at_most, below)
    metadata = {"doc": doc, "bounds": bounds, "resets": resets, "type_words": type_words}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def follows(key: str, default: Any) -> Any:
    """A dataclass field that is no setting: `load` and `complete` give it the value at `key`.

    A role thus finds in its own section what it shares with another one. A subclass may declare
    the field with `setting`, to set it separately, or with another `follows`, to take it from
    another key. default: the value if the settings have no such key.
    """
    return field(default=default, metadata={_FOLLOWS: key})


def part(cls: type, **defaults: Any) -> Any:
    """A dataclass field that is itself a group of settings.

    defaults: replace defaults of the class; Any, as each has the type of its setting.
    """
    return field(default_factory=partial(cls, **defaults))


PARTS = ("parameters", "gradients", "optimizer")
"""What a model in training keeps on its device, and may move to the host."""


@dataclass(frozen=True)
class Leaf:
    """One setting of a tree: where it is, what it may be, what it is."""

    key: str
    """Dotted, such as "actor.optimizer.lr"."""
    hint: Any  # a type expression
    value: Any  # of that type
    doc: str
    bounds: Bounds
    resets: str = ""
    """Key of a setting that becomes null where a source gives this one and not that."""
    type_words: str = ""
    """The type in words, where `hint` says too little."""

    @property
    def type_text(self) -> str:
        """The type for `--help`: "one of auto, copy", "int or none", "map of name -> str", ..."""
        if self.type_words:
            return self.type_words
        choices = self.bounds.one_of
        if not choices or _is_list(self.hint):
            return type_name(self.hint)
        text = choices[0] if len(choices) == 1 else f"one of {', '.join(choices)}"
        if type(None) in get_args(self.hint):
            return f"{text} or none"
        return text

    @property
    def default_text(self) -> str:
        """The value on one line as YAML writes it; "required" if there is none."""
        text = value_text(self.value)
        return "required" if text == REQUIRED else text

    @property
    def limits_text(self) -> str:
        """The bounds in words: "at least 0, less than 1"; for a list also the choices: "a | b"."""
        limits = []
        for words, _, limit in self.bounds.limits:
            limits.append(f"{words} {limit:g}")
        if self.bounds.one_of and _is_list(self.hint):
            limits.append(" | ".join(self.bounds.one_of))
        return ", ".join(limits)


def leaves(tree: Any, prefix: str = "") -> Iterator[Leaf]:
    """Yield every setting of a dataclass object, depth first, in the order of the fields.

    A group of settings that is None is one leaf with the value None. `follows` fields are omitted.
    """
    hints = get_type_hints(type(tree))
    for each in fields(tree):
        if _FOLLOWS in each.metadata:
            continue
        key = prefix + each.name
        value = getattr(tree, each.name)
        if is_dataclass(value):
            yield from leaves(value, key + ".")
            continue
        doc = each.metadata.get("doc", "")
        bounds = each.metadata.get("bounds", Bounds())
        resets = each.metadata.get("resets", "")
        yield Leaf(
            key=key,
            hint=hints[each.name],
            value=value,
            doc=doc,
            bounds=bounds,
            resets=resets and prefix + resets,
            type_words=each.metadata.get("type_words", ""),
        )


def check_bounds(leaf: Leaf) -> None:
    """Raise ConfigError if a setting, or an item of its list, is out of its bounds.

    None is always allowed. The error for a wrong choice suggests the most similar one.
    """
    choices = leaf.bounds.one_of
    limits = leaf.bounds.limits
    is_list = isinstance(leaf.value, list)
    for value in leaf.value if is_list else [leaf.value]:
        if value is None:
            continue
        if choices and value not in choices:
            (near,) = difflib.get_close_matches(str(value), choices, 1) or choices[:1]
            do = f"set {leaf.key}={f'[{near}]' if is_list else near}"
            raise ConfigError.of(leaf.key, repr(value), " or ".join(choices), do)
        for words, fits, limit in limits:
            if not fits(value, limit):
                do = f"change it ({leaf.doc.rstrip('.')})"
                raise ConfigError.of(leaf.key, value, f"{words} {limit:g}", do)


def follow(tree: Any) -> None:
    """Set every `follows` field of the tree in place to the value at the key that it follows.

    A field that no longer has its default, as a program set it, is left as it is; so is one whose
    key does not exist or has the value None.
    """
    for _, part in parts_of(tree, object):
        for each in fields(part):  # type: ignore[arg-type]
            if _FOLLOWS not in each.metadata:
                continue
            value = tree
            for name in each.metadata[_FOLLOWS].split("."):
                value = getattr(value, name, None)
            if value is not None and getattr(part, each.name) == each.default:
                setattr(part, each.name, value)


def plain_tree(tree: Any) -> dict[str, Any]:
    """Return the settings of a dataclass object as nested dicts, without its `follows` fields."""
    settings = {}
    for setting_field in fields(tree):
        if _FOLLOWS not in setting_field.metadata:
            value = getattr(tree, setting_field.name)
            settings[setting_field.name] = plain_tree(value) if is_dataclass(value) else value
    return settings


def defaults(cls: type) -> Any:
    """Return an object of a settings class with all defaults, and `REQUIRED` where there is none.

    Optional groups of settings, whose default is None, are filled in with their own defaults.
    """
    required = {}
    for each in fields(cls):
        if each.default is MISSING and each.default_factory is MISSING:
            required[each.name] = REQUIRED
    return _complete(cls(**required))


def _complete(tree: Any) -> Any:
    """Return a copy of a settings object whose groups that are None have their defaults.

    It does so at every depth.
    """
    changes = {}
    hints = get_type_hints(type(tree))
    for name in [each.name for each in fields(tree)]:
        value = getattr(tree, name)
        hint = hints[name]
        groups = []
        for cls in (hint, *get_args(hint)):
            if is_dataclass(cls):
                groups.append(cls)
        if is_dataclass(value):
            changes[name] = _complete(value)
        elif groups and isinstance(groups[0], type):
            changes[name] = defaults(groups[0])
    return replace(tree, **changes)


def parts_of(tree: Any, cls: type[T], prefix: str = "") -> Iterator[tuple[str, T]]:
    """Yield (dotted key, part) of every group of settings below `tree` that is a `cls`.

    Depth first, a group before the groups in it. The tree itself is not included.
    """
    for each in fields(tree):
        value = getattr(tree, each.name)
        if is_dataclass(value) and isinstance(value, cls):
            yield prefix + each.name, value
        if is_dataclass(value):
            yield from parts_of(value, cls, f"{prefix}{each.name}.")


def type_name(hint: Any) -> str:
    """Return a type in words: "float", "int or none", "list of str", "a group of settings"."""
    if get_origin(hint) in (types.UnionType, Union):
        return " or ".join(type_name(choice) for choice in get_args(hint))
    if get_origin(hint) is list:
        return f"list of {type_name(get_args(hint)[0])}"
    if get_origin(hint) is dict:
        return f"map of name -> {type_name(get_args(hint)[1])}"
    if hint is Any:
        return "value"
    if hint is type(None):
        return "none"
    if is_dataclass(hint):
        return "a group of settings"
    return getattr(hint, "__name__", str(hint)).lower()


def _is_list(hint: Any) -> bool:
    """Return whether a type is a list, or a list or none."""
    return list in (get_origin(choice) for choice in (hint, *get_args(hint)))


NOT_GIVEN = "(not given)"
"""Value of a required setting while the others are checked."""


class SettingErrors(ConfigError):
    """Several errors of settings as one numbered list."""

    def __init__(self, errors: Sequence[ConfigError], partial: Any = None) -> None:
        """partial: the settings that could be read, for more checks (Any: the user's class)."""
        self.errors = tuple(errors)
        self.partial = partial
        lines = []
        for number, error in enumerate(self.errors, 1):
            text = str(error).replace("\n", "\n     ")
            lines.append(f"{number:3}. {text}")
        if len(lines) == 1:
            super().__init__(str(self.errors[0]))
        else:
            super().__init__("\n".join([f"{len(lines)} errors in the settings:", *lines]))


class Errors:
    """Collects errors until `raise_all`."""

    def __init__(self) -> None:
        self._errors: list[ConfigError] = []

    def add(self, error: ConfigError) -> None:
        """Record an error, unless one with the same message is there; each one of SettingErrors."""
        if isinstance(error, SettingErrors):
            for each in error.errors:
                self.add(each)
            return
        if str(error) not in map(str, self._errors):
            self._errors.append(error)

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Record a ConfigError that is raised inside and go on after the block."""
        try:
            yield
        except ConfigError as err:
            self.add(err)

    def raise_all(self, partial: Any = None) -> None:
        """Raise all recorded errors as one, if there are any. partial: see `SettingErrors`."""
        if self._errors:
            raise SettingErrors(self._errors, partial)


def schema_help(schema: type, changed: Mapping[str, tuple[Any, str]] | None = None) -> str:
    """One entry per setting: key, type, default or "required", then its sentence and bounds.

    changed: value and source of settings that do not have their default.
    """
    changed = changed or {}
    return "\n".join(_entry(leaf, changed.get(leaf.key)) for leaf in leaves(defaults(schema)))


def _entry(leaf: Leaf, change: tuple[Any, str] | None) -> str:
    """Return the two lines of a setting in the help: key, type and default, then its sentence.

    Its limits follow the sentence in parentheses. change: the setting's value and its source if it
    is not the default; it is added to the first line.
    """
    default = leaf.default_text
    if default != "required":
        default = f"default {default}"
    if change is not None:
        here, source = change
        default += f"; here {value_text(here)} by {source}"
    limits = f" ({leaf.limits_text})" if leaf.limits_text else ""
    return f"{leaf.key} ({leaf.type_text}, {default})\n    {leaf.doc}{limits}"


def value_text(value: Any) -> str:
    """Return a setting's value on one line, as YAML writes it: null, true, false, text, ...

    A text with unprintable characters gets JSON's double quotes. Any: a setting may hold anything.
    """
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str) and not value.isprintable():
        return json.dumps(value)  # as YAML's double quotes write it
    return str(value)


def flat(
    tree: dict[Any, Any], groups: Collection[str] | None = None, prefix: str = ""
) -> dict[str, Any]:
    """Return nested maps as one map with dotted keys: {"a": {"b": x}} -> {"a.b": x}.

    An empty map stays a value. groups: open only the maps that have one of these dotted keys;
    others stay values. Any: what a file holds.
    """
    settings: dict[str, Any] = {}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        is_open = isinstance(value, dict) and bool(value) and (groups is None or key in groups)
        settings |= flat(value, groups, f"{key}.") if is_open else {key: value}
    return settings
