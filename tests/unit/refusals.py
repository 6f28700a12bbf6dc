"""What a refusal must say, whatever its words: where, with which values, and what to change."""

from __future__ import annotations

import re

Parts = tuple[str, ...]
"""How the message begins (a setting, a file, a call); the values and names that it shows; at last
what its remedy names: a setting, a command, a value. "": a remedy, in any words."""


def missing_parts(message: str, parts: Parts) -> list[str]:
    """Those that a message lacks. The remedy follows the first semicolon of its first line."""
    where, *values, remedy = parts
    first, *details = message.splitlines()
    told = "\n".join([first.rpartition("; ")[0], *details])
    missing = [] if first.startswith(where) else [where]
    missing += [value for value in values if not _names(told, value)]
    advice = first.partition("; ")[2]
    if not advice or not _names(advice, remedy):
        missing.append(f"remedy {remedy}")
    return missing


def _names(text: str, value: str) -> bool:
    """Whether the text holds the value, and not as a part of a longer word or number."""
    before = r"(?<![\w])" if value[:1].isalnum() else ""
    after = r"(?![\w])" if value[-1:].isalnum() else ""
    return re.search(before + re.escape(value) + after, text) is not None
