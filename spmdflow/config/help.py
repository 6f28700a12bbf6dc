"""The schema as text: what `--help` prints."""

from __future__ import annotations

import json

from spmdflow.config.leaf import Leaf, defaults, is_required, leaves, type_name
from spmdflow.config.schema import Bounds


def schema_help(schema: type) -> str:
    """One entry per setting: key, type, default or "required", then its sentence and bounds."""
    return "\n".join(_entry(leaf) for leaf in leaves(defaults(schema)))


def _entry(leaf: Leaf) -> str:
    default = "required" if is_required(leaf) else f"default {_as_yaml(leaf.value)}"
    return f"{leaf.key} ({type_name(leaf.hint)}, {default})\n    {leaf.doc}{_limits(leaf.bounds)}"


def _as_yaml(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str) and not value.isprintable():
        return json.dumps(value)  # as YAML's double quotes write it
    return str(value)


def _limits(bounds: Bounds) -> str:
    words = {
        "at least": bounds.at_least,
        "more than": bounds.above,
        "at most": bounds.at_most,
        "less than": bounds.below,
    }
    limits = [f"{word} {limit:g}" for word, limit in words.items() if limit is not None]
    limits += [" | ".join(bounds.one_of)] if bounds.one_of else []
    return f" ({', '.join(limits)})" if limits else ""
