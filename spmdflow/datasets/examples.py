"""Rows that carry their answers: examples to imitate, preferences, and the encoder of each kind.

A row is cut into segments that are tokenised each by itself, as prompt and response are when the
model generates. What is learnt is marked: the answers, with the token that ends them.

| rows | columns |
|---|---|
| examples | `prompts`: the whole row |
| pairs | `prompts`: prompt + chosen, then prompt + rejected; `chosen_tokens`: where it is cut |
| labels | `prompts`: prompt + answer; `desirable`: the label; `answers`: its tokens alone |

All have `loss_mask`, True at the learnt tokens, and empty `responses`: the tokens of a row count
once, as prompt tokens. Of a conversation that is judged the answer is the last turn alone: what the
assistant said before is part of the prompt.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from spmdflow.config.schema import DataSettings
from spmdflow.data.ragged import ragged, ragged_from_rows
from spmdflow.datasets.encode import PromptEncoder, RowEncoder, kind_of, messages_of
from spmdflow.datasets.tokenizer import eos_token_id, plain_ids, render_chat, template_ids
from spmdflow.errors import DataError

Segments = tuple[tuple[str, bool], ...]
"""(text, whether it is learnt), in order."""


class AnswerEncoder(PromptEncoder):
    """Segments of a prompt with an answer, or of a conversation, and their token ids."""

    def __init__(self, tokenizer: Any, data: DataSettings) -> None:
        super().__init__(tokenizer, data)
        self._answers, self._eos = tuple(data.answer_columns), eos_token_id(tokenizer)
        self._prompt_end = data.prompt_end

    def answered(self, row: dict[str, Any], answer: str) -> Segments:
        """The prompt and the answer in that column."""
        said = answer_text(row, answer)
        prompt = self.prompt(row)
        if not self._chat:
            return ((prompt, False), (self._sound(said, answer), True))
        asked = messages_of(row[self._column], self._column)
        return self.turns([*asked, {"role": "assistant", "content": said}], self._column)

    def conversation(self, row: dict[str, Any]) -> Segments:
        """A conversation in the prompt column; its assistant turns are learnt."""
        self.prompt(row)
        return self.turns(messages_of(row[self._column], self._column), self._column)

    def turns(self, messages: list[dict[str, Any]], column: str) -> Segments:
        """Segments of a column's messages: what an assistant turn is generated after, the turn."""
        segments: list[tuple[str, bool]] = []
        done = ""
        for number, message in enumerate(messages):
            if message["role"] != "assistant" or not number:
                continue
            before = render_chat(self._tokenizer, messages[:number])
            after = render_chat(self._tokenizer, messages[: number + 1], answered=True)
            if not (before.startswith(done) and after.startswith(before)):
                raise DataError(
                    f"has message {number + 1} of {column!r}, before which the chat template "
                    f"writes earlier messages differently, expected them to stay; cut the "
                    f"conversation into one row for each answer"
                )
            segments += [(before[len(done) :], False), (after[len(before) :], True)]
            done = after
        if not any(learnt for _, learnt in segments):
            raise DataError(f"has no answer in {column!r}, expected a turn of an assistant")
        return tuple((self._sound(text, column), learnt) for text, learnt in segments)

    def tokens(self, rows: list[Segments]) -> list[tuple[list[int], list[bool]]]:
        """Token ids of each row and which of them are learnt."""
        heads = [row[0][0] for row in rows]
        encode = template_ids if self._chat else plain_ids
        rest = template_ids(self._tokenizer, [text for row in rows for text, _ in row[1:]])
        following = iter(rest)
        made = []
        for row, ids in zip(rows, encode(self._tokenizer, heads), strict=True):
            tokens, mask = list(ids), [False] * len(ids)
            for _, learnt in row[1:]:
                more = next(following) + ([] if self._chat else [self._eos])
                tokens, mask = tokens + more, mask + [learnt] * len(more)
            made.append((tokens, mask) if ids else ([], []))  # nothing predicts a first token
        return made


def answer_text(row: dict[str, Any], column: str) -> str:
    """The text in a column; DataError unless there is one."""
    value = row.get(column)
    if not isinstance(value, str):
        got = f"{column!r} = {kind_of(value)}" if column in row else f"no {column!r}"
        raise DataError(f"has {got}, expected text (the answer)")
    if not value:
        raise DataError(f"has an empty {column!r}, expected text (the answer)")
    return value


class ExampleEncoder(AnswerEncoder):
    """Examples to imitate: prompt and response, or a conversation."""

    def text(self, row: dict[str, Any]) -> Segments:
        """Segments of the row."""
        return self.answered(row, self._answers[0]) if self._answers else self.conversation(row)

    def ids(self, texts: list[Segments]) -> list[list[int]]:
        """Token ids of each whole row."""
        return [ids for ids, _ in self.tokens(texts)]

    def columns(self, texts: list[Segments]) -> dict[str, Tensor | list[str]]:
        """prompts, responses (empty) and loss_mask."""
        made = self.tokens(texts)
        masks = [torch.tensor(mask, dtype=torch.bool) for _, mask in made]
        mask = ragged_from_rows(masks, dtype=torch.bool)
        return whole_rows([ids for ids, _ in made]) | {"loss_mask": mask}


def whole_rows(rows: list[list[int]]) -> dict[str, Tensor | list[str]]:
    """Rows as prompts without responses."""
    prompts = [torch.tensor(ids, dtype=torch.int64) for ids in rows]
    empty = ragged(torch.zeros(0, dtype=torch.int64), torch.zeros(len(rows), dtype=torch.int64))
    return {"prompts": ragged_from_rows(prompts, dtype=torch.int64), "responses": empty}


Marked = tuple[list[int], list[bool]]
"""Token ids of a sequence, and which of them are the answer's."""


class PreferenceEncoder(AnswerEncoder):
    """Segments of an answer after a prompt of its own column, or after one that is part of it.

    Without a prompt column, answers begin with the prompt, up to the last data.prompt_end.
    """

    def judged(self, row: dict[str, Any], answer: str) -> Segments:
        """The prompt, and the answer in that column as the only learnt segment, at the end."""
        if self._column:
            found = self._from_columns(row, answer)
        else:
            found = self._with_prompt(row, answer)
        *before, (last, _) = found
        return (*((text, False) for text, _ in before), (last, True))

    def _from_columns(self, row: dict[str, Any], answer: str) -> Segments:
        value = row.get(answer)
        if not (self._chat and isinstance(value, list)):
            return self.answered(row, answer)
        messages = messages_of(value, answer)
        if len(messages) != 1:
            raise DataError(
                f"has {answer!r} with {len(messages)} messages beside {self._column!r}, expected "
                f"one (the answer); set data.prompt_column=null for whole conversations"
            )
        self.prompt(row)
        return self._turn([*messages_of(row[self._column], self._column), *messages], answer)

    def _with_prompt(self, row: dict[str, Any], answer: str) -> Segments:
        if self._chat:
            value = row.get(answer)
            if not isinstance(value, list):
                got = f"{answer!r} = {kind_of(value)}" if answer in row else f"no {answer!r}"
                raise DataError(f"has {got}, expected messages (the prompt and the answer)")
            return self._turn(messages_of(value, answer), answer)
        text = self._sound(answer_text(row, answer), answer)
        place = text.rfind(self._prompt_end)
        if place < 0:
            raise DataError(
                f"has no {self._prompt_end!r} in {answer!r}, expected one before the answer; set "
                f"data.prompt_end, or data.prompt_column for prompts of their own"
            )
        cut = place + len(self._prompt_end)
        if not text[cut:].strip():
            raise DataError(f"has an empty answer in {answer!r}, expected text behind the prompt")
        return ((text[:cut], False), (text[cut:], True))

    def _turn(self, messages: list[dict[str, Any]], answer: str) -> Segments:
        """Segments of a conversation that the assistant ends."""
        if messages[-1]["role"] != "assistant" or len(messages) < 2:
            raise DataError(
                f"has {answer!r} that ends with role {messages[-1]['role']!r}, expected a turn of "
                f"the assistant after the prompt"
            )
        return self.turns(messages, answer)


class PairEncoder(PreferenceEncoder):
    """Pairs: a prompt with a better and a worse answer."""

    def text(self, row: dict[str, Any]) -> tuple[Segments, Segments]:
        """Segments with the chosen answer and with the rejected one."""
        chosen, rejected = (self.judged(row, answer) for answer in self._answers)
        names = " and ".join(map(repr, self._answers))
        if chosen == rejected:
            raise DataError(f"has the same answer in {names}, expected two that differ")
        if chosen[:-1] != rejected[:-1]:
            raise DataError(f"has {names} after prompts that differ, expected the same prompt")
        return chosen, rejected

    def ids(self, texts: list[tuple[Segments, Segments]]) -> list[list[int]]:
        """Token ids of both sequences of each pair, one after the other."""
        chosen, rejected = self._sequences(texts)
        return [a + b for (a, _), (b, _) in zip(chosen, rejected, strict=True)]

    def columns(self, texts: list[tuple[Segments, Segments]]) -> dict[str, Tensor | list[str]]:
        """prompts, responses (empty), loss_mask and chosen_tokens (B,) int64."""
        chosen, rejected = self._sequences(texts)
        both = [(a + b, m + n) for (a, m), (b, n) in zip(chosen, rejected, strict=True)]
        lengths = torch.tensor([len(ids) for ids, _ in chosen], dtype=torch.int64)
        return _marked_rows(both) | {"chosen_tokens": lengths}

    def _sequences(
        self, texts: list[tuple[Segments, Segments]]
    ) -> tuple[list[Marked], list[Marked]]:
        made = self.tokens([segments for pair in texts for segments in pair])
        return made[::2], made[1::2]


class LabelEncoder(PreferenceEncoder):
    """Single answers, each with a label; the columns' names are those of answer and label."""

    def text(self, row: dict[str, Any]) -> tuple[Segments, bool]:
        """Segments of the row, and whether its answer is good."""
        answer, label = self._answers
        value = row.get(label)
        if value not in (True, False):  # 1 and 0 are as good; a missing one is None
            got = f"{label!r} = {kind_of(value)}" if label in row else f"no {label!r}"
            raise DataError(f"has {got}, expected true or false (whether the answer is good)")
        return self.judged(row, answer), bool(value)

    def ids(self, texts: list[tuple[Segments, bool]]) -> list[list[int]]:
        """Token ids of each whole row."""
        return [ids for ids, _ in self.tokens([segments for segments, _ in texts])]

    def columns(self, texts: list[tuple[Segments, bool]]) -> dict[str, Tensor | list[str]]:
        """prompts, responses (empty), loss_mask, desirable (B,) bool and answers (ragged)."""
        made = self.tokens([segments for segments, _ in texts])
        answers = [
            torch.tensor([i for i, own in zip(*row) if own], dtype=torch.int64) for row in made
        ]
        return _marked_rows(made) | {
            "desirable": torch.tensor([label for _, label in texts], dtype=torch.bool),
            "answers": ragged_from_rows(answers, dtype=torch.int64),
        }


def _marked_rows(rows: list[Marked]) -> dict[str, Tensor | list[str]]:
    """Rows as prompts without responses, and their marks."""
    masks = [torch.tensor(mask, dtype=torch.bool) for _, mask in rows]
    mask = ragged_from_rows(masks, dtype=torch.bool)
    return whole_rows([ids for ids, _ in rows]) | {"loss_mask": mask}


_ENCODERS: dict[str, type[RowEncoder]] = {
    "prompts": PromptEncoder,
    "examples": ExampleEncoder,
    "pairs": PairEncoder,
    "labels": LabelEncoder,
}


def encoder_of(tokenizer: Any, data: DataSettings) -> RowEncoder:
    """The encoder of the rows of a data section. Any: a transformers tokenizer."""
    return _ENCODERS[data.rows](tokenizer, data)
