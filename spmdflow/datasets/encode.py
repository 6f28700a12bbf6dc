"""A line of a file -> the prompt's text and the other fields; texts -> token ids.

Errors are `DataError`s that say what is wrong with one row; the caller adds file and line.
"""

from __future__ import annotations

import json
from typing import Any

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
        raise DataError(f"is a JSON {_kind(row)}, expected an object")
    return row


class PromptEncoder:
    """Turns the prompt column of rows into text and token ids."""

    def __init__(self, tokenizer: Any, *, column: str, chat_template: bool) -> None:
        """Any: a transformers tokenizer. ConfigError if it lacks the template asked for."""
        if chat_template:
            check_chat_template(tokenizer)
        self._tokenizer, self._column, self._chat = tokenizer, column, chat_template

    def text(self, row: dict[str, Any]) -> str:
        """What the model is to read: the column itself, or the rendered chat."""
        column = self._column
        if column not in row:
            has = ", ".join(map(repr, row)) or "no columns"
            raise DataError(f"has no column {column!r} (it has {has})")
        value = row[column]
        if not self._chat and not isinstance(value, str):
            hint = "; chat messages need data.chat_template=true" if _is_list(value) else ""
            raise DataError(f"has {column!r} = {_kind(value)}, expected text{hint}")
        text = self._rendered(value) if self._chat else value
        if any("\ud800" <= letter <= "\udfff" for letter in text):
            raise DataError(f"has half a character (a lone surrogate) in {column!r}")
        return text

    def ids(self, texts: list[str]) -> list[list[int]]:
        """Token ids of each text."""
        encode = template_ids if self._chat else plain_ids
        return encode(self._tokenizer, texts)

    def other_fields(self, row: dict[str, Any]) -> str:
        """All fields but the prompt, as JSON."""
        return json.dumps({key: value for key, value in row.items() if key != self._column})

    def _rendered(self, value: object) -> str:
        messages = [{"role": "user", "content": value}] if isinstance(value, str) else value
        if not isinstance(messages, list) or not messages:
            raise DataError(f"has {self._column!r} = {_kind(value)}, expected text or messages")
        for number, message in enumerate(messages, start=1):
            if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
                raise DataError(
                    f"has {self._column!r} with message {number} = {_kind(message)}, "
                    f'expected {{"role": ..., "content": ...}}'
                )
        return render_chat(self._tokenizer, messages)


def _is_list(value: object) -> bool:
    return isinstance(value, list)


def _kind(value: object) -> str:
    """A JSON value's kind, and the value if it is short."""
    names = {dict: "object", list: "list", str: "text", bool: "boolean", type(None): "null"}
    kind = names.get(type(value), "number")
    if isinstance(value, dict):
        return f"{kind} with {', '.join(map(repr, value)) or 'nothing'}"
    return kind
