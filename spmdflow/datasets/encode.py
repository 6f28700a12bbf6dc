"""A line of a file -> a row's texts and its other fields; texts -> token ids and columns.

A row with answers is cut into segments that are tokenised separately, like prompt and response when
the model generates. The answers, including the token that ends them, are marked as learnt.

| rows | columns |
|---|---|
| prompts | `prompts`, `prompt_text` |
| examples | `prompts`: the whole row |
| pairs | `prompts`: prompt + chosen, then prompt + rejected; `chosen_tokens`: where it is cut |
| labels | `prompts`: prompt + answer; `desirable`: the label; `answers`: the answer's tokens |

Examples may be conversations, in which every assistant turn is learnt. With
`data.rows_per_conversation=answers` each of these turns is a separate row.

The last three have `loss_mask`, True at the learnt tokens, and empty `responses`: the tokens of a
row count once, as prompt tokens. In pairs and labels only the last turn of a conversation is the
answer. Earlier assistant turns are part of the prompt, as the template writes them there.

Errors are `DataError`s about one row; the caller adds file and line.
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
    """Return the JSON object of a line, with columns renamed as its source says.

    Fields stay in order; a column with several new names becomes several fields. Rows of a mixture
    also get the source's name, in the column `source`. Raises DataError if the line is no JSON
    object, a column to rename is missing, or a new name is already taken.
    """
    row = _parse_json(line)
    names: dict[str, list[str]] = {}
    for name, column in source.columns:
        names.setdefault(column, []).append(name)
        _check_column(row, column)
    fields = []
    for old, value in row.items():
        for new in names.get(old, [old]):
            fields.append((new, value))
    fields += [(SOURCE_COLUMN, source.name)] if source.name else []
    renamed = dict(fields)
    if len(renamed) < len(fields):
        twice = next(name for name in renamed if [new for new, _ in fields].count(name) > 1)
        raise DataError(
            f"has {twice!r} in addition to the column that gets this name; expected one; rename "
            f"the existing one too, as in (own_{twice}={twice})"
        )
    return renamed


def _parse_json(line: bytes) -> Row:
    """Return the JSON object of a line; a byte order mark before it is skipped.

    DataError if it is not UTF-8, not JSON or not an object.
    """
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
        """Any: a transformers tokenizer. ConfigError if data.chat_template needs one it lacks."""
        if data.chat_template and not tokenizer.chat_template:
            raise ConfigError(
                f"data.chat_template: got true, but the tokenizer {tokenizer.name_or_path!r} has "
                f"no chat template; expected one in its folder; set data.chat_template=false, or "
                f"use the tokenizer of a chat model"
            )
        self._tokenizer = tokenizer
        self._chat = data.chat_template
        self._template = ChatTemplate(
            tokenizer,
            data.chat_template_arguments,
            date=data.chat_template_date,
            trusted_roles=data.trusted_roles,
        )
        self._column = data.prompt_column or ""
        self._tools_column = data.tools_column

    def num_texts(self, row: Row) -> int:
        """Number of batch rows that this row produces."""
        return 1

    def text(self, row: Row, number: int = 0) -> Any:
        """The text to tokenise; DataError if the row is not of this kind.

        number: which of the row's texts, counted from 0.
        """
        return self.prompt(row)

    def prompt(self, row: Row) -> str:
        """Return the prompt column as text, rendered with the chat template if there is one.

        DataError if the column is missing or holds neither text nor, with a template, valid
        messages.
        """
        column = self._column
        _check_column(row, column)
        value = row[column]
        if self._chat:
            value = self._template.render(_messages_of(value, column), tools=self.tools(row))
        elif not isinstance(value, str):
            hint = "; chat messages need data.chat_template=true"
            raise _column_error(row, column, "text" + (hint if isinstance(value, list) else ""))
        return _check_text(value, column)

    def tools(self, row: Row) -> list[Any] | None:
        """Return the list of tools that the chat template shows; None if there are none.

        The column may hold a list or its JSON as text, or be missing or empty. DataError otherwise.
        """
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
            raise _column_error(row, column, "a list of tools, or its JSON as text")
        return value or None

    def num_characters(self, text: Any) -> int:
        """Number of characters of a text that are tokenised."""
        return len(self._template.remove_placeholders(text))

    def ids(self, texts: list[Any]) -> list[list[int]]:
        """Token ids of each text. A text with no ids cannot be used."""
        if self._chat:
            return self._template.ids(texts)
        return plain_ids(self._tokenizer, texts)

    def lengths(self, texts: list[Any]) -> list[tuple[int, int]]:
        """Return (tokens of each text, tokens of its answers). A prompt has no answer."""
        return [(len(ids), 0) for ids in self.ids(texts)]

    def columns(self, texts: list[Any]) -> dict[str, Tensor | list[str]]:
        """`prompts` (ids as a ragged column) and the other columns of this kind of rows."""
        return {
            "prompts": _ragged_from_lists(self.ids(texts), torch.int64),
            "prompt_text": [self._template.remove_placeholders(text) for text in texts],
        }

    def other_fields(self, row: Row) -> str:
        """All fields but the prompt, as JSON."""
        return json.dumps({key: value for key, value in row.items() if key != self._column})


class AnswerEncoder(PromptEncoder):
    """Encodes rows that contain their answers.

    A row's text is (segments of its one or two sequences, label). The label is True for rows
    without a label column.
    """

    def __init__(self, tokenizer: Any, data: DataSettings) -> None:
        """Any: a transformers tokenizer. ConfigError if it has no end-of-sequence token."""
        super().__init__(tokenizer, data)
        self._kind = data.rows
        self._answers = tuple(data.answer_columns)
        self._one_answer = data.rows == "examples" and data.rows_per_conversation == "answers"
        self._prompt_end = data.prompt_end
        self._eos = eos_token_id(tokenizer)
        kinds = {"examples": self._example, "pairs": self._pair, "labels": self._label}
        self._read = kinds[data.rows]

    def num_texts(self, row: Row) -> int:
        """Return the number of batch rows that this row produces, at least 1.

        With data.rows_per_conversation=answers it is the number of assistant turns after the first
        message; DataError if there are more than MAX_TEXTS_PER_LINE. Otherwise it is 1.
        """
        if not (self._one_answer and self._chat):
            return 1
        messages, column = self._conversation(row)
        count = len(_answer_positions(messages))
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
        """Number of characters of a row's sequences that are tokenised."""
        sequences, _ = text
        parts = [part for segments in sequences for part, _ in segments]
        return sum(len(self._template.remove_placeholders(part)) for part in parts)

    def ids(self, texts: list[Any]) -> list[list[int]]:
        """Token ids of each row. A pair's ids are both sequences, concatenated."""
        return [ids for ids, _ in self._encode_rows(texts)[0]]

    def lengths(self, texts: list[Any]) -> list[tuple[int, int]]:
        """Return (tokens of each row, those of its answers), of both sequences of a pair.

        An answer is a sequence from its first learnt token on.
        """
        result = []
        for (ids, mask), (first, _) in zip(*self._encode_rows(texts), strict=True):
            masks = (mask[: len(first)], mask[len(first) :])
            answered = sum(len(each) - each.index(True) for each in masks if True in each)
            result.append((len(ids), answered))
        return result

    def columns(self, texts: list[Any]) -> dict[str, Tensor | list[str]]:
        """Return the batch columns of these rows: prompts, responses, loss_mask, and more by kind.

        `prompts` has the ids of the whole row, `loss_mask` is True at the learnt ones, `responses`
        is empty. Pairs have `chosen_tokens` (B,), the length of the chosen sequence; labels have
        `desirable` (B,) and `answers`, the learnt ids.
        """
        rows, first = self._encode_rows(texts)
        columns: dict[str, Tensor | list[str]] = {
            "prompts": _ragged_from_lists([ids for ids, _ in rows], torch.int64),
            "responses": ragged(torch.zeros(0, dtype=torch.int64), torch.zeros(len(rows)).long()),
            "loss_mask": _ragged_from_lists([mask for _, mask in rows], torch.bool),
        }
        if self._kind == "pairs":
            lengths = [len(ids) for ids, _ in first]
            columns["chosen_tokens"] = torch.tensor(lengths, dtype=torch.int64)
        if self._kind == "labels":
            answers = []
            for row in rows:
                answers.append([token for token, own in zip(*row) if own])
            columns["desirable"] = torch.tensor([good for _, good in texts], dtype=torch.bool)
            columns["answers"] = _ragged_from_lists(answers, torch.int64)
        return columns

    def _encode_rows(self, texts: list[Any]) -> tuple[list[Marked], list[Marked]]:
        """Return (ids and mask of each row, ids and mask of each row's first sequence).

        A pair's row is its two sequences (chosen, rejected) concatenated. For other rows, which
        have one sequence, both lists are the same.
        """
        encoded = self._encode_segments(
            [segments for sequences, _ in texts for segments in sequences]
        )
        if self._kind != "pairs":
            return encoded, encoded
        chosen = encoded[::2]
        rejected = encoded[1::2]
        both = []
        for (a, m), (b, n) in zip(chosen, rejected, strict=True):
            both.append((a + b, m + n))
        return both, chosen

    def _encode_segments(self, sequences: list[Segments]) -> list[Marked]:
        """Return the token ids of each sequence, and a mask that is True where they are learnt.

        The first segment (the prompt) is encoded as a prompt and never learnt. Each later segment
        is encoded separately; without a chat template the end-of-sequence id follows it. A sequence
        whose prompt has no ids gets ([], []).
        """
        first_texts = [head for (head, _), *_ in sequences]
        other_texts = [text for _, *following in sequences for text, _ in following]
        if self._chat:
            heads = self._template.ids(first_texts)
            following = iter(self._template.ids(other_texts))
        else:
            heads = plain_ids(self._tokenizer, first_texts)
            following = iter(template_ids(self._tokenizer, other_texts))
        marked_rows = []
        for segments, head in zip(sequences, heads, strict=True):
            tokens = list(head)
            mask = [False] * len(head)
            for _, learnt in segments[1:]:
                more = next(following) + ([] if self._chat else [self._eos])
                tokens = tokens + more
                mask = mask + [learnt] * len(more)
            marked_rows.append((tokens, mask) if head else ([], []))  # no prompt to predict from
        return marked_rows

    def _example(self, row: Row) -> tuple[tuple[Segments, ...], bool]:
        """Return the segments of an example row: prompt and answer, or a whole conversation.

        In a conversation (chat template) every assistant turn is learnt, otherwise the answer
        column. The second item is always True: examples have no label.
        """
        if not self._chat:
            return (self._answer_segments(row, self._answers[0]),), True
        messages, column = self._conversation(row)
        return (self._turn_segments(messages, column, self.tools(row)),), True

    def _conversation(self, row: Row) -> tuple[Messages, str]:
        """Return the messages of a chat including its answers, and the column of their prompt.

        They are the prompt column's. If there is a column of answers, its text is added as a last
        message of the assistant.
        """
        column = self._column
        _check_column(row, column)
        messages = _messages_of(row[column], column)
        if not self._answers:
            return messages, column
        answer = _answer_of(row, self._answers[0])
        return [*messages, {"role": "assistant", "content": answer}], column

    def _answer_in(self, row: Row, number: int) -> Segments:
        """Return the segments up to answer `number` (from 0) of a conversation.

        Only this answer is learnt; later messages are cut off. DataError if there is no answer.
        """
        messages, column = self._conversation(row)
        positions = _answer_positions(messages)
        if not positions:
            raise _no_answer_error(column)
        return self._last_turn_segments(messages[: positions[number] + 1], column, self.tools(row))

    def _pair(self, row: Row) -> tuple[tuple[Segments, ...], bool]:
        """Return the segments of the prompt with the better answer, then with the worse one.

        DataError if both answers are the same, or if the prompts before them differ. The second
        item is always True: pairs have no label.
        """
        chosen, rejected = (self._last_answer_segments(row, answer) for answer in self._answers)
        names = " and ".join(map(repr, self._answers))
        if chosen == rejected:
            raise DataError(f"has the same answer in {names}, expected two that differ")
        if chosen[:-1] != rejected[:-1]:
            raise DataError(f"has {names} after prompts that differ, expected the same prompt")
        return (chosen, rejected), True

    def _label(self, row: Row) -> tuple[tuple[Segments, ...], bool]:
        """Return the segments of a prompt with its answer, and the label as a bool.

        DataError unless the label is true, false, 1 or 0.
        """
        answer, label = self._answers
        if row.get(label) not in (True, False):  # 1 and 0 are allowed; a missing label is None
            raise _column_error(row, label, "true or false (whether the answer is good)")
        return (self._last_answer_segments(row, answer),), bool(row[label])

    def _answer_segments(self, row: Row, answer: str) -> Segments:
        """Return two segments: the prompt column (not learnt) and column `answer` (learnt).

        With a chat template both are texts that the template writes, the answer as the assistant's
        message. DataError if the answer is missing, empty or no text.
        """
        text = _answer_of(row, answer)
        if not self._chat:
            return ((self.prompt(row), False), (_check_text(text, answer), True))
        _check_column(row, self._column)
        prompt = _messages_of(row[self._column], self._column)
        messages = [*prompt, {"role": "assistant", "content": text}]
        return self._last_turn_segments(messages, self._column, self.tools(row))

    def _last_answer_segments(self, row: Row, answer: str) -> Segments:
        """Return two segments: the prompt and the answer in column `answer`, which alone is learnt.

        Column `answer` may hold messages, of which the last is the answer. Without a prompt column
        it also holds the prompt: the messages before the last, or the text up to the last
        data.prompt_end.
        """
        if self._chat and (not self._column or isinstance(row.get(answer), list)):
            return self._last_turn_segments(self._dialogue(row, answer), answer, self.tools(row))
        if self._column:
            return self._answer_segments(row, answer)
        return self._cut_text(row, answer)

    def _dialogue(self, row: Row, answer: str) -> Messages:
        """Return the messages of the prompt, followed by the assistant's answer.

        Column `answer` holds the answer alone (one message) if there is a prompt column, otherwise
        the whole conversation. DataError if it does not, or if the last message is not the
        assistant's answer to an earlier one.
        """
        if not isinstance(row.get(answer), list):
            raise _column_error(row, answer, "messages (the prompt and the answer)")
        messages = _messages_of(row[answer], answer)
        if self._column:
            if len(messages) != 1:
                raise DataError(
                    f"has {answer!r} with {len(messages)} messages next to {self._column!r}, "
                    f"expected one (the answer); set data.prompt_column=null for complete "
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

    def _cut_text(self, row: Row, answer: str) -> Segments:
        """Split the text in column `answer` behind the last data.prompt_end in it.

        Returns two segments: the prompt, including data.prompt_end (not learnt), and the answer
        (learnt). DataError if data.prompt_end is not in the text, or only white space follows it.
        """
        text = _check_text(_answer_of(row, answer), answer)
        cut = text.rfind(self._prompt_end)
        if cut < 0:
            raise DataError(
                f"has no {self._prompt_end!r} in {answer!r}, expected one before the answer; set "
                f"data.prompt_end, or data.prompt_column for separate prompts"
            )
        end = cut + len(self._prompt_end)
        if not text[end:].strip():
            raise DataError(f"has an empty answer in {answer!r}, expected text after the prompt")
        return ((text[:end], False), (text[end:], True))

    def _turn_segments(self, messages: Messages, column: str, tools: list[Any] | None) -> Segments:
        """Return the segments of a conversation: alternately the text before a turn and the turn.

        Turns are the assistant's messages, except a first one, and are learnt; the text before is
        not. What follows the last turn is omitted. DataError if there is no turn, or if the
        template writes earlier messages differently once later ones follow.
        """
        segments: list[tuple[str, bool]] = []
        done = ""
        for position in _answer_positions(messages):
            before, answer = self._answer_at(messages, position, column, tools)
            if not before.startswith(done):
                raise DataError(
                    f"has message {position + 1} of {column!r}, before which the chat template "
                    f"writes earlier messages differently, expected them to stay; set "
                    f"data.rows_per_conversation=answers, which makes each answer a separate row"
                )
            segments += [(before[len(done) :], False), (answer, True)]
            done = before + answer
        if not segments:
            raise _no_answer_error(column)
        return tuple((_check_text(text, column), learnt) for text, learnt in segments)

    def _last_turn_segments(
        self, messages: Messages, column: str, tools: list[Any] | None
    ) -> Segments:
        """Segments of the last message (learnt) and of all messages before it (not learnt)."""
        before, answer = self._answer_at(messages, len(messages) - 1, column, tools)
        return ((_check_text(before, column), False), (_check_text(answer, column), True))

    def _answer_at(
        self, messages: Messages, position: int, column: str, tools: list[Any] | None
    ) -> tuple[str, str]:
        """Return the text of the messages before messages[position], and the text that it adds.

        The text before ends with the generation prompt. DataError if the template writes it
        differently when the message follows.
        """
        before = self._template.render(messages[:position], tools=tools)
        after = self._template.render(messages[: position + 1], answered=True, tools=tools)
        if not after.startswith(before):
            raise DataError(
                f"has message {position + 1} of {column!r}, which the chat template does not write "
                f"after its own generation prompt, expected the prompt to stay; set "
                f"data.chat_template_arguments so that the two fit, or change the template"
            )
        return before, after[len(before) :]


def _answer_positions(messages: Messages) -> list[int]:
    """Return the indices of the assistant's messages, without that of a first message.

    A conversation's first message answers nothing.
    """
    result = []
    for position, message in enumerate(messages):
        if position and message["role"] == "assistant":
            result.append(position)
    return result


def _no_answer_error(column: str) -> DataError:
    return DataError(f"has no answer in {column!r}, expected a turn of an assistant")


def encoder_of(tokenizer: Any, data: DataSettings) -> PromptEncoder:
    """The encoder for the rows of a data section. Any: a transformers tokenizer."""
    return (PromptEncoder if data.rows == "prompts" else AnswerEncoder)(tokenizer, data)


def _answer_of(row: Row, column: str) -> str:
    """Return the text in a column; DataError if it is missing, empty or no text."""
    value = row.get(column)
    if not isinstance(value, str):
        raise _column_error(row, column, "text (the answer)")
    if not value:
        raise DataError(f"has an empty {column!r}, expected text (the answer)")
    return value


def _messages_of(value: object, column: str) -> Messages:
    """Return the messages in a column; a text becomes one message of the user.

    DataError if there is no message, or one without a text as role, or one whose content is neither
    text nor null with tool_calls.
    """
    messages = [{"role": "user", "content": value}] if isinstance(value, str) else value
    if not isinstance(messages, list) or not messages:
        raise _column_error({column: value}, column, "text or messages")
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


def _check_text(text: str, column: str) -> str:
    if _SURROGATE.search(text):
        raise DataError(f"has half a character (a lone surrogate) in {column!r}")
    return text


def _column_error(row: Row, column: str, expected: str) -> DataError:
    """Return the DataError for a column that is missing or holds a value of the wrong type."""
    if column in row:
        got = f"{column!r} = {_kind_of(row[column])}"
    else:
        got = f"no {column!r}"
    return DataError(f"has {got}, expected {expected}")


def _kind_of(value: object) -> str:
    """Return the type of a JSON value in words: "list", "text", "boolean", "null" or "number".

    For an object: "object with" and its keys, or "object with nothing".
    """
    if isinstance(value, dict):
        return f"object with {', '.join(map(repr, value)) or 'nothing'}"
    names = {list: "list", str: "text", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")


def _ragged_from_lists(rows: list[Any], dtype: torch.dtype) -> Tensor:
    return ragged_from_rows([torch.tensor(row, dtype=dtype) for row in rows], dtype=dtype)
