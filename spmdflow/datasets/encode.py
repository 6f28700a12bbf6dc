"""A line of a file -> a row's texts and its other fields; texts -> token ids and columns.

A row with answers is cut into segments that are tokenised separately, as prompt and response are
when the model generates. The answers, with the token that ends them, are marked as learnt.

| rows | columns |
|---|---|
| prompts | `prompts`, `prompt_text` |
| examples | `prompts`: the whole row |
| pairs | `prompts`: prompt + chosen, then prompt + rejected; `chosen_tokens`: where it is cut |
| labels | `prompts`: prompt + answer; `desirable`: the label; `answers`: its tokens alone |

Examples may be conversations, in which every assistant turn is learnt; with
`data.rows_per_conversation=answers` each of these turns is a row of its own.

The last three have `loss_mask`, True at the learnt tokens, and empty `responses`: the tokens of a
row count once, as prompt tokens. In pairs and labels the answer of a conversation is its last turn
alone: earlier assistant turns are part of the prompt, written as the template writes them there.

Errors are `DataError`s that say what is wrong with one row; the caller adds file and line.
"""

from __future__ import annotations

import json
import re
from typing import Any

import torch
from torch import Tensor

from spmdflow.config.data_source import SOURCE_COLUMN, DataSource
from spmdflow.config.schema import MAX_TEXTS_PER_LINE, DataSettings
from spmdflow.data.ragged import ragged, ragged_from_rows
from spmdflow.datasets.chat import ChatTemplate
from spmdflow.datasets.tokenizer import eos_token_id, plain_ids, template_ids
from spmdflow.errors import ConfigError, DataError

Row = dict[str, Any]
"""The JSON object of a line."""
Messages = list[dict[str, Any]]
_SURROGATE = re.compile("[\ud800-\udfff]")

Segments = tuple[tuple[str, bool], ...]
"""(text, whether it is learnt), in order."""
Marked = tuple[list[int], list[bool]]
"""Token ids of a sequence, and which of them are learnt."""


def row_of(line: bytes, source: DataSource) -> Row:
    """The JSON object of a line, with the columns renamed that its source renames.

    Rows of a mixture also get the source's name. The order of the fields is kept.
    """
    row = _json_of(line)
    names: dict[str, list[str]] = {}
    for name, column in source.columns:
        names.setdefault(column, []).append(name)
        _check_column(row, column)
    found = []
    for old, value in row.items():
        for new in names.get(old, [old]):
            found.append((new, value))
    found += [(SOURCE_COLUMN, source.name)] if source.name else []
    renamed = dict(found)
    if len(renamed) < len(found):
        twice = next(name for name in renamed if [new for new, _ in found].count(name) > 1)
        raise DataError(
            f"has {twice!r} besides the column that gets this name; expected one; rename its own "
            f"too, as in (own_{twice}={twice})"
        )
    return renamed


def _json_of(line: bytes) -> Row:
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as err:
        raise DataError(f"is not UTF-8 (byte {err.start + 1} of the line)") from err
    except json.JSONDecodeError as err:
        raise DataError(f"is not valid JSON ({err.msg} at column {err.colno})") from err
    except (ValueError, RecursionError) as err:  # a number too long, brackets too deep
        raise DataError(f"is not JSON that can be read ({err})") from err
    if not isinstance(row, dict):
        raise DataError(f"is a JSON {_kind_of(row)}, expected an object")
    return row


def _check_column(row: Row, column: str) -> None:
    if column not in row:
        has = ", ".join(map(repr, row)) or "no columns"
        raise DataError(f"has no column {column!r} (it has {has})")


class PromptEncoder:
    """Turns the prompt column of rows into text and token ids."""

    def __init__(self, tokenizer: Any, data: DataSettings) -> None:
        """Any: a transformers tokenizer. ConfigError if it lacks what the settings ask for."""
        if data.chat_template and not tokenizer.chat_template:
            raise ConfigError(
                f"data.chat_template: got true, but the tokenizer {tokenizer.name_or_path!r} has "
                f"no chat template; expected one in its folder; set data.chat_template=false, or "
                f"use the tokenizer of a chat model"
            )
        self._tokenizer = tokenizer
        self._chat = data.chat_template
        self._template = ChatTemplate(
            tokenizer, data.chat_template_arguments, trusted_roles=data.trusted_roles
        )
        self._column = data.prompt_column or ""
        self._tools_column = data.tools_column

    def num_texts(self, row: Row) -> int:
        """How many rows of a batch the row becomes."""
        return 1

    def text(self, row: Row, number: int = 0) -> Any:
        """The text to tokenise; DataError if the row is not of this kind.

        number: which of the row's texts, counted from 0.
        """
        return self.prompt(row)

    def prompt(self, row: Row) -> str:
        """The prompt column as text, rendered if it is a chat."""
        column = self._column
        _check_column(row, column)
        value = row[column]
        if self._chat:
            value = self._template.render(_messages_of(value, column), tools=self.tools(row))
        elif not isinstance(value, str):
            hint = "; chat messages need data.chat_template=true"
            raise _wrong(row, column, "text" + (hint if isinstance(value, list) else ""))
        return _sound(value, column)

    def tools(self, row: Row) -> list[Any] | None:
        """The tools that the chat template shows; None without a column of tools, or if empty."""
        column = self._tools_column
        if column is None:
            return None
        value = row.get(column)
        if isinstance(value, str) and value:
            try:
                value = json.loads(value)
            except (ValueError, RecursionError) as err:
                raise DataError(
                    f"has {column!r} that is no JSON ({err}), expected a list of tools"
                ) from err
        if value and not isinstance(value, list):
            raise _wrong(row, column, "a list of tools, or its JSON as text")
        return value or None

    def num_characters(self, text: Any) -> int:
        """How many characters of a text are tokenised."""
        return len(self._template.plain(text))

    def ids(self, texts: list[Any]) -> list[list[int]]:
        """Token ids of each text; a row with an empty list cannot be used."""
        if self._chat:
            return self._template.ids(texts)
        return plain_ids(self._tokenizer, texts)

    def columns(self, texts: list[Any]) -> dict[str, Tensor | list[str]]:
        """`prompts`, the ids as a ragged column, and this kind's other columns."""
        return {
            "prompts": _ragged(self.ids(texts), torch.int64),
            "prompt_text": [self._template.plain(text) for text in texts],
        }

    def other_fields(self, row: Row) -> str:
        """All fields but the prompt, as JSON."""
        return json.dumps({key: value for key, value in row.items() if key != self._column})


class AnswerEncoder(PromptEncoder):
    """Rows that hold their answers. A row's text: (segments of its one or two sequences, label).

    Rows without a label column have the label True.
    """

    def __init__(self, tokenizer: Any, data: DataSettings) -> None:
        super().__init__(tokenizer, data)
        self._kind = data.rows
        self._answers = tuple(data.answer_columns)
        self._one_answer = data.rows == "examples" and data.rows_per_conversation == "answers"
        self._prompt_end = data.prompt_end
        self._eos = eos_token_id(tokenizer)
        kinds = {"examples": self._example, "pairs": self._pair, "labels": self._label}
        self._read = kinds[data.rows]

    def num_texts(self, row: Row) -> int:
        """One; or, with data.rows_per_conversation=answers, the number of the assistant's turns."""
        if not (self._one_answer and self._chat):
            return 1
        messages, column = self._conversation(row)
        count = len(_answers_in(messages))
        if count > MAX_TEXTS_PER_LINE:
            raise DataError(
                f"has {count} answers in {column!r}, expected at most {MAX_TEXTS_PER_LINE}"
            )
        return max(1, count)

    def text(self, row: Row, number: int = 0) -> tuple[tuple[Segments, ...], bool]:
        """Segments of each sequence, and whether the answer is good."""
        if self._one_answer and self._chat:
            return (self._answer_in(row, number),), True
        return self._read(row)

    def num_characters(self, text: tuple[tuple[Segments, ...], bool]) -> int:
        """How many characters of a row's sequences are tokenised."""
        sequences, _ = text
        parts = [part for segments in sequences for part, _ in segments]
        return sum(len(self._template.plain(part)) for part in parts)

    def ids(self, texts: list[Any]) -> list[list[int]]:
        """Token ids of each row; those of a pair are both sequences, joined."""
        return [ids for ids, _ in self._tokens(texts)[0]]

    def columns(self, texts: list[Any]) -> dict[str, Tensor | list[str]]:
        """The columns of this kind of rows (module docstring)."""
        rows, first = self._tokens(texts)
        columns: dict[str, Tensor | list[str]] = {
            "prompts": _ragged([ids for ids, _ in rows], torch.int64),
            "responses": ragged(torch.zeros(0, dtype=torch.int64), torch.zeros(len(rows)).long()),
            "loss_mask": _ragged([mask for _, mask in rows], torch.bool),
        }
        if self._kind == "pairs":
            lengths = [len(ids) for ids, _ in first]
            columns["chosen_tokens"] = torch.tensor(lengths, dtype=torch.int64)
        if self._kind == "labels":
            answers = []
            for row in rows:
                answers.append([token for token, own in zip(*row) if own])
            columns["desirable"] = torch.tensor([good for _, good in texts], dtype=torch.bool)
            columns["answers"] = _ragged(answers, torch.int64)
        return columns

    def _tokens(self, texts: list[Any]) -> tuple[list[Marked], list[Marked]]:
        """(each row's sequences joined, each row's first sequence alone)."""
        made = self._encoded([segments for sequences, _ in texts for segments in sequences])
        if self._kind != "pairs":
            return made, made
        chosen = made[::2]
        rejected = made[1::2]
        both = []
        for (a, m), (b, n) in zip(chosen, rejected, strict=True):
            both.append((a + b, m + n))
        return both, chosen

    def _encoded(self, sequences: list[Segments]) -> list[Marked]:
        """Token ids of each sequence and which of them are learnt."""
        first_texts = [head for (head, _), *_ in sequences]
        other_texts = [text for _, *following in sequences for text, _ in following]
        if self._chat:
            heads = self._template.ids(first_texts)
            following = iter(self._template.ids(other_texts))
        else:
            heads = plain_ids(self._tokenizer, first_texts)
            following = iter(template_ids(self._tokenizer, other_texts))
        made = []
        for segments, head in zip(sequences, heads, strict=True):
            tokens = list(head)
            mask = [False] * len(head)
            for _, learnt in segments[1:]:
                more = next(following) + ([] if self._chat else [self._eos])
                tokens = tokens + more
                mask = mask + [learnt] * len(more)
            made.append((tokens, mask) if head else ([], []))  # no prompt to predict from
        return made

    def _example(self, row: Row) -> tuple[tuple[Segments, ...], bool]:
        """Prompt and response; or a conversation, whose assistant turns are learnt."""
        if not self._chat:
            return (self._answered(row, self._answers[0]),), True
        messages, column = self._conversation(row)
        return (self._turns(messages, column, self.tools(row)),), True

    def _conversation(self, row: Row) -> tuple[Messages, str]:
        """The messages of a chat with its answers, and the column that holds them.

        They are the prompt column's; a column of answers, if there is one, adds the last.
        """
        column = self._column
        _check_column(row, column)
        messages = _messages_of(row[column], column)
        if not self._answers:
            return messages, column
        said = _answer_of(row, self._answers[0])
        return [*messages, {"role": "assistant", "content": said}], column

    def _answer_in(self, row: Row, number: int) -> Segments:
        """The answer of that number in a conversation, after all that comes before it."""
        messages, column = self._conversation(row)
        places = _answers_in(messages)
        if not places:
            raise _no_answer(column)
        return self._last_turn(messages[: places[number] + 1], column, self.tools(row))

    def _pair(self, row: Row) -> tuple[tuple[Segments, ...], bool]:
        """A prompt with the better and with the worse answer."""
        chosen, rejected = (self._judged(row, answer) for answer in self._answers)
        names = " and ".join(map(repr, self._answers))
        if chosen == rejected:
            raise DataError(f"has the same answer in {names}, expected two that differ")
        if chosen[:-1] != rejected[:-1]:
            raise DataError(f"has {names} after prompts that differ, expected the same prompt")
        return (chosen, rejected), True

    def _label(self, row: Row) -> tuple[tuple[Segments, ...], bool]:
        """A single answer with a label."""
        answer, label = self._answers
        if row.get(label) not in (True, False):  # 1 and 0 are allowed; a missing label is None
            raise _wrong(row, label, "true or false (whether the answer is good)")
        return (self._judged(row, answer),), bool(row[label])

    def _answered(self, row: Row, answer: str) -> Segments:
        """The prompt column, and the answer in that column."""
        said = _answer_of(row, answer)
        if not self._chat:
            return ((self.prompt(row), False), (_sound(said, answer), True))
        _check_column(row, self._column)
        asked = _messages_of(row[self._column], self._column)
        messages = [*asked, {"role": "assistant", "content": said}]
        return self._last_turn(messages, self._column, self.tools(row))

    def _judged(self, row: Row, answer: str) -> Segments:
        """The prompt, and the answer in that column as the only learnt segment, at the end.

        Without a prompt column, answers begin with the prompt, up to the last data.prompt_end.
        """
        if self._chat and (not self._column or isinstance(row.get(answer), list)):
            return self._last_turn(self._dialogue(row, answer), answer, self.tools(row))
        if self._column:
            return self._answered(row, answer)
        return self._divided(row, answer)

    def _dialogue(self, row: Row, answer: str) -> Messages:
        """The messages of the prompt and of the answer, which the assistant gives."""
        if not isinstance(row.get(answer), list):
            raise _wrong(row, answer, "messages (the prompt and the answer)")
        messages = _messages_of(row[answer], answer)
        if self._column:
            if len(messages) != 1:
                raise DataError(
                    f"has {answer!r} with {len(messages)} messages beside {self._column!r}, "
                    f"expected one (the answer); set data.prompt_column=null for whole "
                    f"conversations"
                )
            _check_column(row, self._column)
            messages = [*_messages_of(row[self._column], self._column), *messages]
        if messages[-1]["role"] != "assistant" or len(messages) < 2:
            raise DataError(
                f"has {answer!r} that ends with role {messages[-1]['role']!r}, expected a turn of "
                f"the assistant after the prompt"
            )
        return messages

    def _divided(self, row: Row, answer: str) -> Segments:
        """The text in a column, cut where the prompt ends."""
        text = _sound(_answer_of(row, answer), answer)
        place = text.rfind(self._prompt_end)
        if place < 0:
            raise DataError(
                f"has no {self._prompt_end!r} in {answer!r}, expected one before the answer; set "
                f"data.prompt_end, or data.prompt_column for prompts of their own"
            )
        end = place + len(self._prompt_end)
        if not text[end:].strip():
            raise DataError(f"has an empty answer in {answer!r}, expected text behind the prompt")
        return ((text[:end], False), (text[end:], True))

    def _turns(self, messages: Messages, column: str, tools: list[Any] | None) -> Segments:
        """Segments of messages: each assistant turn (learnt), and the text before it (not)."""
        segments: list[tuple[str, bool]] = []
        done = ""
        for place in _answers_in(messages):
            before, answer = self._answer_at(messages, place, column, tools)
            if not before.startswith(done):
                raise DataError(
                    f"has message {place + 1} of {column!r}, before which the chat template "
                    f"writes earlier messages differently, expected them to stay; set "
                    f"data.rows_per_conversation=answers, which makes each answer a row of its own"
                )
            segments += [(before[len(done) :], False), (answer, True)]
            done = before + answer
        if not segments:
            raise _no_answer(column)
        return tuple((_sound(text, column), learnt) for text, learnt in segments)

    def _last_turn(self, messages: Messages, column: str, tools: list[Any] | None) -> Segments:
        """The last message as the only learnt segment, after all messages before it."""
        before, answer = self._answer_at(messages, len(messages) - 1, column, tools)
        return ((_sound(before, column), False), (_sound(answer, column), True))

    def _answer_at(
        self, messages: Messages, place: int, column: str, tools: list[Any] | None
    ) -> tuple[str, str]:
        """Text of the messages before messages[place], and what that one adds to it."""
        before = self._template.render(messages[:place], tools=tools)
        after = self._template.render(messages[: place + 1], answered=True, tools=tools)
        if not after.startswith(before):
            raise DataError(
                f"has message {place + 1} of {column!r}, which the chat template does not write "
                f"behind its own generation prompt, expected the prompt to stay; set "
                f"data.chat_template_arguments so that the two fit, or change the template"
            )
        return before, after[len(before) :]


def _answers_in(messages: Messages) -> list[int]:
    """Places of the messages that the assistant gives as answers, so not of a first message."""
    result = []
    for place, message in enumerate(messages):
        if place and message["role"] == "assistant":
            result.append(place)
    return result


def _no_answer(column: str) -> DataError:
    return DataError(f"has no answer in {column!r}, expected a turn of an assistant")


def encoder_of(tokenizer: Any, data: DataSettings) -> PromptEncoder:
    """The encoder of the rows of a data section. Any: a transformers tokenizer."""
    return (PromptEncoder if data.rows == "prompts" else AnswerEncoder)(tokenizer, data)


def _answer_of(row: Row, column: str) -> str:
    """The text in a column; DataError unless there is one."""
    value = row.get(column)
    if not isinstance(value, str):
        raise _wrong(row, column, "text (the answer)")
    if not value:
        raise DataError(f"has an empty {column!r}, expected text (the answer)")
    return value


def _messages_of(value: object, column: str) -> Messages:
    """The messages that a column holds; a text is one message of the user."""
    messages = [{"role": "user", "content": value}] if isinstance(value, str) else value
    if not isinstance(messages, list) or not messages:
        raise _wrong({column: value}, column, "text or messages")
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise DataError(
                f"has {column!r} with message {number} = {_kind_of(message)}, "
                f'expected {{"role": ..., "content": ...}}'
            )
        if not isinstance(message["role"], str):
            raise DataError(
                f"has {column!r} with message {number}, whose role = {_kind_of(message['role'])}, "
                f"expected text"
            )
        content = message["content"]  # a template would write null as "None"
        if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            raise DataError(
                f"has {column!r} with message {number}, whose content = {_kind_of(content)}, "
                f"expected text"
            )
    return messages


def _sound(text: str, column: str) -> str:
    if _SURROGATE.search(text):
        raise DataError(f"has half a character (a lone surrogate) in {column!r}")
    return text


def _wrong(row: Row, column: str, expected: str) -> DataError:
    if column in row:
        got = f"{column!r} = {_kind_of(row[column])}"
    else:
        got = f"no {column!r}"
    return DataError(f"has {got}, expected {expected}")


def _kind_of(value: object) -> str:
    """The type of a JSON value in words, and the keys of an object."""
    if isinstance(value, dict):
        return f"object with {', '.join(map(repr, value)) or 'nothing'}"
    names = {list: "list", str: "text", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")


def _ragged(rows: list[Any], dtype: torch.dtype) -> Tensor:
    return ragged_from_rows([torch.tensor(row, dtype=dtype) for row in rows], dtype=dtype)
