"""A line of a file -> the prompt's text and the other fields; texts -> token ids.

Errors are `DataError`s that say what is wrong with one row; the caller adds file and line.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from spmdflow.config.data_source import SOURCE_COLUMN
from spmdflow.config.schema import DataSettings
from spmdflow.data.ragged import ragged_from_rows
from spmdflow.datasets.tokenizer import check_chat_template, plain_ids, render_chat, template_ids
from spmdflow.errors import DataError


def fields_of(line: bytes) -> dict[str, Any]:
    """The JSON object of a line."""
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as err:
        raise DataError(f"is not UTF-8 (byte {err.start + 1} of the line)") from err
    except json.JSONDecodeError as err:
        raise DataError(f"is not valid JSON ({err.msg} at column {err.colno})") from err
    except (ValueError, RecursionError) as err:  # a number too long, brackets too deep
        raise DataError(f"is not JSON that can be read ({err})") from err
    if not isinstance(row, dict):
        raise DataError(f"is a JSON {kind_of(row)}, expected an object")
    return row


def rename_fields(
    row: dict[str, Any], columns: Sequence[tuple[str, str]], source: str
) -> dict[str, Any]:
    """The row with columns under other names, and the name of its source if it has one.

    columns: (name, name in the row). The order of the fields stays.
    """
    names: dict[str, list[str]] = {}
    for name, column in columns:
        names.setdefault(column, []).append(name)
        if column not in row:
            has = ", ".join(map(repr, row)) or "no columns"
            raise DataError(f"has no column {column!r} (it has {has})")
    found = [(new, value) for old, value in row.items() for new in names.get(old, [old])]
    found += [(SOURCE_COLUMN, source)] if source else []
    renamed = dict(found)
    if len(renamed) < len(found):
        twice = next(name for name in renamed if [new for new, _ in found].count(name) > 1)
        raise DataError(
            f"has {twice!r} besides the column that gets this name; expected one; rename its own "
            f"too, as in (own_{twice}={twice})"
        )
    return renamed


class RowEncoder(Protocol):
    """What a row of a file becomes; its text is whatever the encoder makes of it."""

    def __init__(self, tokenizer: Any, data: DataSettings) -> None: ...

    def text(self, row: dict[str, Any]) -> Any:
        """What the model is to read; DataError if the row is not of this kind."""

    def ids(self, texts: list[Any]) -> list[list[int]]:
        """Token ids of each text; none: the row cannot be used."""

    def columns(self, texts: list[Any]) -> dict[str, Tensor | list[str]]:
        """`prompts`, the ids as a ragged column, and this kind's other columns."""

    def other_fields(self, row: dict[str, Any]) -> str:
        """All fields but the prompt, as JSON."""


class PromptEncoder:
    """Turns the prompt column of rows into text and token ids."""

    def __init__(self, tokenizer: Any, data: DataSettings) -> None:
        """Any: a transformers tokenizer. ConfigError if it lacks what the settings ask for."""
        if data.chat_template:
            check_chat_template(tokenizer)
        self._tokenizer, self._chat = tokenizer, data.chat_template
        self._column = data.prompt_column or ""

    def text(self, row: dict[str, Any]) -> Any:
        """What the model is to read: the column itself, or the rendered chat."""
        return self.prompt(row)

    def prompt(self, row: dict[str, Any]) -> str:
        """The prompt column as text, rendered if it is a chat."""
        column = self._column
        if column not in row:
            has = ", ".join(map(repr, row)) or "no columns"
            raise DataError(f"has no column {column!r} (it has {has})")
        value = row[column]
        if not self._chat and not isinstance(value, str):
            hint = "; chat messages need data.chat_template=true" if _is_list(value) else ""
            raise DataError(f"has {column!r} = {kind_of(value)}, expected text{hint}")
        text = self._rendered(value) if self._chat else value
        return self._sound(text, column)

    def ids(self, texts: list[Any]) -> list[list[int]]:
        """Token ids of each text."""
        encode = template_ids if self._chat else plain_ids
        return encode(self._tokenizer, texts)

    def columns(self, texts: list[Any]) -> dict[str, Tensor | list[str]]:
        """prompts (ragged int64) and prompt_text."""
        prompts = [torch.tensor(ids, dtype=torch.int64) for ids in self.ids(texts)]
        return {"prompts": ragged_from_rows(prompts, dtype=torch.int64), "prompt_text": texts}

    def other_fields(self, row: dict[str, Any]) -> str:
        """All fields but the prompt, as JSON."""
        return json.dumps({key: value for key, value in row.items() if key != self._column})

    def _sound(self, text: str, column: str) -> str:
        if any("\ud800" <= letter <= "\udfff" for letter in text):
            raise DataError(f"has half a character (a lone surrogate) in {column!r}")
        return text

    def _rendered(self, value: object) -> str:
        return render_chat(self._tokenizer, messages_of(value, self._column))


def messages_of(value: object, column: str) -> list[dict[str, Any]]:
    """The messages that a column holds; a text is what the user says."""
    messages = [{"role": "user", "content": value}] if isinstance(value, str) else value
    if not isinstance(messages, list) or not messages:
        raise DataError(f"has {column!r} = {kind_of(value)}, expected text or messages")
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise DataError(
                f"has {column!r} with message {number} = {kind_of(message)}, "
                f'expected {{"role": ..., "content": ...}}'
            )
        content = message["content"]  # a template would write null as "None"
        if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            raise DataError(
                f"has {column!r} with message {number}, whose content = {kind_of(content)}, "
                f"expected text"
            )
    return messages


def _is_list(value: object) -> bool:
    return isinstance(value, list)


def kind_of(value: object) -> str:
    """A JSON value's kind, and the value if it is short."""
    names = {dict: "object", list: "list", str: "text", bool: "boolean", type(None): "null"}
    kind = names.get(type(value), "number")
    if isinstance(value, dict):
        return f"{kind} with {', '.join(map(repr, value)) or 'nothing'}"
    return kind
