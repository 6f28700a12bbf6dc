"""Models that episodes may call besides the policy: `actor.rollout.episode.models`.

    reference: {}                             the weights with which the run started
    policy@step: {loaded: 2}                  policy@100: those of the checkpoint of step 100
    opponent: {path: /models/opponent}        the weights of a folder
    judge: {url: "https://host/v1", key_variable: JUDGE_KEY}     an OpenAI-compatible server

A name is what a request has as its model. null removes an entry. Opens no file but the environment.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from spmdflow.errors import ConfigError

POLICY = "policy"
REFERENCE = "reference"
AT_STEP = "policy@step"
"""Entry for the weights of any checkpoint of the run."""
STEP_PREFIX = "policy@"
_DO = "see docs/EPISODES.md"


@dataclass(frozen=True, kw_only=True)
class EpisodeModel:
    """A model that episodes may call, and the limits of each episode with it."""

    name: str
    max_turns: int | None = None
    """Requests of one episode to this model; None: the policy's max_turns."""
    max_prompt_tokens: int | None = None
    """Tokens of the first prompt; None: those of a whole conversation of the policy."""
    max_new_tokens: int | None = None
    """Tokens after the first prompt; None: the policy's."""
    temperature: float | None = None
    """Where a request has none. None: that of the run, or for a server nothing is sent."""
    top_p: float | None = None
    top_k: int | None = None


@dataclass(frozen=True, kw_only=True)
class FrozenModel(EpisodeModel):
    """A model whose weights the run loads, and never trains."""

    path: str | None = None
    """Its folder; None: that of the policy's model, or of a checkpoint."""
    loaded: int = 1
    """Of `policy@step`: how many checkpoints a rank holds at once."""
    max_batch_size: int | None = None
    """Rows decoded together; None: the policy's."""


@dataclass(frozen=True, kw_only=True)
class ServerModel(EpisodeModel):
    """A model behind an OpenAI-compatible server outside of the run."""

    url: str
    """Such as https://host/v1; requests go to URL/chat/completions."""
    model: str | None = None
    """What the server calls the model; None: the name of the entry."""
    key_variable: str | None = None
    """Environment variable with the server's key; None: no key is sent."""
    seconds: float = 60.0
    """Limit of one reply, with all attempts."""
    attempts: int = 3
    """Requests for one reply, while the server is not reached, is busy or fails."""
    concurrency: int = 32
    """Requests of one rank at once."""
    limit_field: str = "max_tokens"
    """Field with the largest number of tokens; OpenAI's newer models want max_completion_tokens."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of every request, such as {reasoning_effort: low}."""


def episode_models(key: str, setting: Mapping[str, Any]) -> dict[str, EpisodeModel]:
    """Return name -> model of the setting `models`, in its order; entries that are null are
    omitted.

    key: of the setting, for errors. ConfigError for a name that means something else, an entry that
    is neither weights nor a server, and an unknown or invalid value.
    """
    models = {}
    for name, entry in setting.items():
        if entry is not None:
            models[str(name)] = _model(f"{key}.{name}", str(name), entry)
    return models


def check_models(key: str, setting: Mapping[str, Any], *, here: bool) -> None:
    """ConfigError as in `episode_models`; with `here` also for a path that is no model's folder."""
    for name, model in episode_models(key, setting).items():
        if not here or not isinstance(model, FrozenModel) or model.path is None:
            continue
        if not (Path(model.path) / "config.json").is_file():
            got = f"no config.json in {model.path}"
            do = "give the folder of a model in the form of Hugging Face"
            raise ConfigError(f"{key}.{name}.path: {got}; {do}")


def server_key(where: str, model: ServerModel) -> str | None:
    """Return the key of a server, from the environment; None: it needs none.

    where: the entry, for the error. ConfigError if the variable is not set.
    """
    if model.key_variable is None:
        return None
    key = os.environ.get(model.key_variable, "").strip()
    if not key:
        got = f"the environment variable {model.key_variable}, which is not set on this rank"
        expected = "the server's key in it"
        do = f"export {model.key_variable} before the run starts, on every node"
        raise ConfigError.of(f"{where}.key_variable", got, expected, do)
    return key


def _model(key: str, name: str, entry: object) -> EpisodeModel:
    if not isinstance(entry, Mapping):
        got = f"{entry!r} ({type(entry).__name__})"
        expected = "a map with url of a server, or path of weights"
        raise ConfigError.of(key, got, expected, "write {path: FOLDER} or {url: http://host/v1}")
    if name == POLICY or name.startswith(STEP_PREFIX) and name != AT_STEP:
        do = f"write {AT_STEP}: {{}} for all checkpoints, or choose another name"
        raise ConfigError.of(key, f"the name {name!r}", "a name that is not the policy's", do)
    if not name.strip() or "/" in name:
        raise ConfigError.of(key, f"the name {name!r}", "letters, digits, - and _", "rename it")
    kind = ServerModel if "url" in entry else FrozenModel
    if kind is ServerModel and name in (REFERENCE, AT_STEP):
        do = "choose another name for the server"
        raise ConfigError.of(key, f"a url for {name!r}", "weights of the run", do)
    known = {each.name: each for each in fields(kind) if each.name != "name"}
    for option in entry:
        if option not in known:
            got = f"the option {option!r}"
            raise ConfigError.of(key, got, " or ".join(known), "correct its name")
    values: dict[str, Any] = {}
    for option, value in entry.items():
        values[str(option)] = _value(f"{key}.{option}", known[option], value)
    if kind is ServerModel:
        _check_url(f"{key}.url", values["url"])
        return ServerModel(name=name, **values)
    model = FrozenModel(name=name, **values)
    if model.path is None and name not in (REFERENCE, AT_STEP):
        do = "write path: FOLDER or url: http://host/v1"
        raise ConfigError.of(key, "neither path nor url", "one of them", do)
    if model.path is not None and name == AT_STEP:
        raise ConfigError.of(f"{key}.path", model.path, "none: they are the checkpoints'", _DO)
    return model


_LIMITS = {"temperature": 0.0, "top_p": 0.0, "top_k": 0.0, "seconds": 0.001}
"""Least value of an option that is a number; 1 for all others."""


def _value(key: str, option: Field[Any], value: object) -> object:
    """Return a checked value of an option. ConfigError if it has another type or is too small."""
    kind = str(option.type)
    may_be_none = option.default is None
    if value is None and may_be_none:
        return None
    if "Mapping" in kind:
        if isinstance(value, Mapping):
            return dict(value)
        raise ConfigError.of(key, repr(value), "a map of fields", "write {name: value}")
    if "str" in kind:
        if isinstance(value, str) and value.strip():
            return value
        raise ConfigError.of(key, repr(value), "a text", "correct it")
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    least = _LIMITS.get(option.name, 1.0)
    fits = is_number and isinstance(value, int | float) and value >= least
    if "float" not in kind and not isinstance(value, int):
        fits = False
    if option.name == "top_p" and isinstance(value, int | float) and value > 1:
        fits = False
    if not fits:
        expected = "a number" if "float" in kind else "a whole number"
        raise ConfigError.of(key, repr(value), f"{expected}, at least {least:g}", "correct it")
    return value


def _check_url(key: str, url: object) -> None:
    parts = urlsplit(str(url))
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError.of(key, repr(url), "http://host:port/v1 or https://host/v1", "correct it")
    if parts.username or parts.password or parts.query:
        got = "a URL with a user, a password or a query"
        do = "put the key into an environment variable, and name it in key_variable"
        raise ConfigError.of(key, got, "a URL without secrets, because it is logged", do)
