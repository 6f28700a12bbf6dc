"""Rows that carry their answers: examples to imitate. `preference` builds its rows on them.

A row is cut into segments that are tokenised each by itself, as prompt and response are when the
model generates. What is learnt is marked: the answers, with the token that ends them. The columns
are `prompts`, the whole row, `loss_mask`, True at its learnt tokens, and `responses`, which is
empty: the tokens of a row count once, as prompt tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from spmdflow.data.ragged import ragged, ragged_from_rows
from spmdflow.datasets.encode import PromptEncoder, kind_of, messages_of
from spmdflow.datasets.tokenizer import eos_token_id, plain_ids, render_chat, template_ids
from spmdflow.errors import DataError

Segments = tuple[tuple[str, bool], ...]
"""(text, whether it is learnt), in order."""


class AnswerEncoder(PromptEncoder):
    """Segments of a prompt with an answer, or of a conversation, and their token ids."""

    def __init__(
        self, tokenizer: Any, *, column: str, answers: Sequence[str], chat_template: bool
    ) -> None:
        """answers: columns with answers. ConfigError if the tokenizer lacks what is needed."""
        super().__init__(tokenizer, column=column, chat_template=chat_template)
        self._answers, self._eos = tuple(answers), eos_token_id(tokenizer)

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
