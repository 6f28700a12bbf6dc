"""Settings as they were written before 0.2.0, translated into those of today. Goes with 0.3.0.

Some settings were texts, each with its own grammar. A file or a word of the command line may still
have one: it is translated, and a warning prints the new form. So are attributes that a program sets
on an object of settings.

| before | now |
|---|---|
| engine.micro_batch: 16 rows, 8192 tokens | micro_batch_rows: 16, micro_batch_tokens: 8192 |
| engine.residency: keep, auto, optimizer | offload: [], null, [optimizer] |
| rollout.kv_cache: 20 GiB, 0.6 of free | kv_cache_gib: 20, kv_cache_fraction: 0.6 |
| data.eval_prompts: 512 x 8 samples | eval_prompts: 512, eval_samples: 8 |
| data.eval_prompts: all | eval_prompts: null |
| run.profile_steps: 3-4 on 0, 2 | profile_steps: [3, 4], profile_ranks: [0, 2] |
| run.call_seconds: auto | call_seconds: null |
| on_error: drop 25% | on_error: drop, max_failed_fraction: 0.25 |
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from spmdflow.config.leaf import PARTS, value_text
from spmdflow.errors import ConfigError

Translation = dict[str, Any]
"""Names and values of the settings of today, in the section of the old one."""


def translate_setting(key: str, value: Any, known: Collection[str]) -> Translation | None:
    """Return the current settings for one in a form from before 0.2.0, by dotted key.

    None if the setting already has the current form: its name was never changed, its value is no
    text, or the settings class lacks the new names. A text with ${...} is translated only for a
    setting that was renamed, by renaming it in the reference too.
    known: keys of the settings class. ConfigError for an old setting that cannot be read.
    """
    section, dot, name = key.rpartition(".")
    if name not in _OLD_FORMS:
        return None
    translate, new_names = _OLD_FORMS[name]
    keys = [f"{section}{dot}{new_name}" for new_name in new_names]
    is_renamed = name not in new_names
    if not set(keys) <= set(known) or (is_renamed and key in known):
        return None
    if is_renamed and type(value) in (int, float):
        value = str(value)  # a size in bytes
    if not isinstance(value, str | None):
        return None
    if isinstance(value, str) and "${" in value:
        if not is_renamed:
            return None
        return {new_key: value.replace(name, new) for new_key, new in zip(keys, new_names)}
    translation = translate(key, value)
    if translation is None:
        return None
    return {f"{section}{dot}{new_name}": new for new_name, new in translation.items()}


def warning_text(where: str, key: str, value: Any, translation: Mapping[str, Any]) -> str:
    """The sentence that prints the new form of an old setting. where: its source."""
    new = " ".join(f"{new_key}={_word(new)}" for new_key, new in translation.items())
    return (
        f"warning: {where}: {key}={value_text(value)} is the form of before 0.2.0 and goes with "
        f"0.3.0; write {new}"
    )


def _word(value: Any) -> str:
    """A value as a word of the command line has it, without spaces."""
    return value_text(value).replace(", ", ",").replace("'", "")


def _translate_micro_batch(key: str, text: str | None) -> Translation | None:
    """Translate "16 rows" or "4096 tokens" to micro_batch_rows or micro_batch_tokens.

    ConfigError for any other text.
    """
    count, _, unit = (text or "").strip().partition(" ")
    if not count.isdigit() or int(count) < 1 or unit not in ("rows", "tokens"):
        section = key.rpartition(".")[0]
        do = f"set {section}.micro_batch_rows=16 or {section}.micro_batch_tokens=4096"
        raise ConfigError.of(key, repr(text), "a number and rows or tokens", do)
    return {f"micro_batch_{unit}": int(count)}


def _translate_residency(key: str, text: str | None) -> Translation | None:
    """Translate "auto", "keep", "offload" or "optimizer, gradients" to the list offload.

    auto (or None) becomes null, keep an empty list, offload all `PARTS`. Part names are put into
    the order of `PARTS`. ConfigError for any other text or a repeated part.
    """
    if text in ("auto", None):
        return {"offload": None}
    if text in ("keep", "offload"):
        return {"offload": list(PARTS) if text == "offload" else []}
    names = [name.strip() for name in str(text).split(",")]
    if set(names) - set(PARTS) or len(set(names)) != len(names):
        expected = f"auto, keep, offload or some of {', '.join(PARTS)}, each once"
        section = key.rpartition(".")[0]
        raise ConfigError.of(key, repr(text), expected, f"set {section}.offload=[optimizer]")
    return {"offload": [name for name in PARTS if name in names]}


_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "MB": 10**6, "GB": 10**9}
_CACHE = re.compile(r"(\d+(?:\.\d+)?) *(of free|[KMG]i?B|)")


def _translate_kv_cache(key: str, text: str | None) -> Translation | None:
    """Translate "auto", "20 GiB", bytes or "0.6 of free" to kv_cache_gib and kv_cache_fraction.

    The one that does not apply becomes null, for auto (or None) both. ConfigError for any other
    text, for a fraction outside (0, 1] and for less than one byte.
    """
    if text in ("auto", None):
        return {"kv_cache_gib": None, "kv_cache_fraction": None}
    match = _CACHE.fullmatch(str(text).strip())
    size = float(match[1]) if match else 0.0
    unit = match[2] if match else ""
    if unit == "of free" and 0 < size <= 1:
        return {"kv_cache_gib": None, "kv_cache_fraction": size}
    if unit in _UNITS and size * _UNITS[unit] >= 1:
        return {"kv_cache_gib": size * _UNITS[unit] / (1 << 30)}
    section = key.rpartition(".")[0]
    expected = "auto, a part of what is free (0.6 of free) or a size (20 GiB, or bytes)"
    do = f"set {section}.kv_cache_fraction=0.6 or {section}.kv_cache_gib=20"
    raise ConfigError.of(key, repr(text), expected, do)


_EVALUATION = re.compile(r"(?P<prompts>all|[1-9]\d*)(?: x (?P<samples>[1-9]\d*) samples?)?")


def _translate_eval_prompts(key: str, text: str | None) -> Translation | None:
    """Translate "all", "512" or "512 x 8 samples" to eval_prompts and eval_samples.

    all becomes null; without samples eval_samples is 0. None returns None, as null has the current
    form. ConfigError for any other text.
    """
    if text is None:
        return None
    match = _EVALUATION.fullmatch(text.strip())
    if match is None:
        do = f"set {key}=512, and eval_samples=8 for pass@k"
        raise ConfigError.of(key, repr(text), "a number of prompts, or null for all", do)
    prompts = None if match["prompts"] == "all" else int(match["prompts"])
    return {"eval_prompts": prompts, "eval_samples": int(match["samples"] or 0)}


_PROFILED = re.compile(r"(\d+)(?:-(\d+))?(?: on (\d+(?:, ?\d+)*))?")


def _translate_profile_steps(key: str, text: str | None) -> Translation | None:
    """Translate "3", "3-5" or "3-5 on 0, 2" to profile_steps and profile_ranks.

    Steps become a list, both ends included; without "on" profile_ranks is not set. None becomes no
    steps. ConfigError for any other text.
    """
    if text is None:
        return {"profile_steps": []}
    match = _PROFILED.fullmatch(text.strip())
    if match is None or not 0 < int(match[1]) <= int(match[2] or match[1]):
        do = f"set {key}=[3,4] and profile_ranks=[0,2]"
        raise ConfigError.of(key, repr(text), "a list of steps", do)
    translation: Translation = {
        "profile_steps": list(range(int(match[1]), int(match[2] or match[1]) + 1))
    }
    if match[3]:
        translation["profile_ranks"] = [int(rank) for rank in match[3].split(",")]
    return translation


def _translate_call_seconds(key: str, text: str | None) -> Translation | None:
    """Translate "auto" to null; None for any other text, which has the current form."""
    if text == "auto":
        return {"call_seconds": None}
    return None


_FAILED = re.compile(r"drop +(?P<percent>\d+(\.\d+)?) *%")


def _translate_on_error(key: str, text: str | None) -> Translation | None:
    """Translate "drop 25%" to on_error=drop and max_failed_fraction=0.25.

    None for any other text, which has the current form.
    """
    match = _FAILED.fullmatch((text or "").strip())
    if match is None:
        return None
    return {"on_error": "drop", "max_failed_fraction": float(match["percent"]) / 100}


Translate = Callable[[str, str | None], Translation | None]
_OLD_FORMS: dict[str, tuple[Translate, tuple[str, ...]]] = {
    "micro_batch": (_translate_micro_batch, ("micro_batch_tokens", "micro_batch_rows")),
    "residency": (_translate_residency, ("offload",)),
    "kv_cache": (_translate_kv_cache, ("kv_cache_gib", "kv_cache_fraction")),
    "eval_prompts": (_translate_eval_prompts, ("eval_prompts", "eval_samples")),
    "profile_steps": (_translate_profile_steps, ("profile_steps", "profile_ranks")),
    "call_seconds": (_translate_call_seconds, ("call_seconds",)),
    "on_error": (_translate_on_error, ("on_error", "max_failed_fraction")),
}
"""Old setting -> how its value is translated, and the settings of today that it becomes."""
