"""Rows that carry their answers: examples to imitate, and pairs of a better and a worse answer.

A row is cut into segments that are tokenised each by itself, as prompt and response are when the
model generates. What is learnt is marked: the answers, with the token that ends them.

| rows | columns |
|---|---|
| examples | `prompts`: the whole row; `loss_mask`: True at its learnt tokens |
| pairs | `prompts`: prompt + chosen, then prompt + rejected; `chosen_tokens`: where it is cut |

Both have empty `responses`: their tokens count once, as prompt tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from spmdflow.data.ragged import ragged, ragged_from_rows
from spmdflow.datasets.encode import PromptEncoder, RowEncoder, kind_of, messages_of
from spmdflow.datasets.tokenizer import eos_token_id, plain_ids, render_chat, template_ids
from spmdflow.errors import DataError

Segments = tuple[tuple[str, bool], ...]
"""(text, whether it is learnt), in order."""


def encoder_of(
    tokenizer: Any, *, rows: str, column: str, answers: Sequence[str], chat_template: bool
) -> RowEncoder:
    """The encoder of a kind of rows: prompts, examples or pairs. Any: a transformers tokenizer."""
    if rows == "prompts":
        return PromptEncoder(tokenizer, column=column, chat_template=chat_template)
    kinds = {"examples": ExampleEncoder, "pairs": PairEncoder}
    return kinds[rows](tokenizer, column=column, answers=answers, chat_template=chat_template)


class _AnswerEncoder(PromptEncoder):
    """Segments of a prompt with an answer, or of a conversation, and their token ids."""

    def __init__(
        self, tokenizer: Any, *, column: str, answers: Sequence[str], chat_template: bool
    ) -> None:
        """answers: columns with answers. ConfigError if the tokenizer lacks what is needed."""
        super().__init__(tokenizer, column=column, chat_template=chat_template)
        self._answers, self._eos = tuple(answers), eos_token_id(tokenizer)

    def answered(self, row: dict[str, Any], answer: str) -> Segments:
        """The prompt and the answer in that column."""
        if not isinstance(row.get(answer), str):
            got = f"{answer!r} = {kind_of(row[answer])}" if answer in row else f"no {answer!r}"
            raise DataError(f"has {got}, expected text (the answer)")
        if not row[answer]:
            raise DataError(f"has an empty {answer!r}, expected text (the answer)")
        prompt = self.prompt(row)
        if not self._chat:
            return ((prompt, False), (self._sound(row[answer], answer), True))
        asked = messages_of(row[self._column], self._column)
        return self.turns([*asked, {"role": "assistant", "content": row[answer]}])

    def conversation(self, row: dict[str, Any]) -> Segments:
        """A conversation in the prompt column; its assistant turns are learnt."""
        self.prompt(row)
        return self.turns(messages_of(row[self._column], self._column))

    def turns(self, messages: list[dict[str, Any]]) -> Segments:
        """Segments of messages: what an assistant turn is generated after, and the turn."""
        segments: list[tuple[str, bool]] = []
        done = ""
        for number, message in enumerate(messages):
            if message["role"] != "assistant" or not number:
                continue
            before = render_chat(self._tokenizer, messages[:number])
            after = render_chat(self._tokenizer, messages[: number + 1], answered=True)
            if not (before.startswith(done) and after.startswith(before)):
                raise DataError(
                    f"has message {number + 1} of {self._column!r}, before which the chat template "
                    f"writes earlier messages differently, expected them to stay; cut the "
                    f"conversation into one row for each answer"
                )
            segments += [(before[len(done) :], False), (after[len(before) :], True)]
            done = after
        if not any(learnt for _, learnt in segments):
            raise DataError(f"has no answer in {self._column!r}, expected a turn of an assistant")
        return tuple((self._sound(text, self._column), learnt) for text, learnt in segments)

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


class ExampleEncoder(_AnswerEncoder):
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
        return _whole([ids for ids, _ in made]) | {"loss_mask": mask}


class PairEncoder(_AnswerEncoder):
    """Pairs: a prompt with a better and a worse answer."""

    def text(self, row: dict[str, Any]) -> tuple[Segments, Segments]:
        """Segments with the chosen answer and with the rejected one."""
        chosen, rejected = (self.answered(row, answer) for answer in self._answers)
        if chosen == rejected:
            names = " and ".join(map(repr, self._answers))
            raise DataError(f"has the same answer in {names}, expected two that differ")
        return chosen, rejected

    def ids(self, texts: list[tuple[Segments, Segments]]) -> list[list[int]]:
        """Token ids of both sequences of each pair, one after the other."""
        chosen, rejected = self._sequences(texts)
        return [a + b for a, b in zip(chosen, rejected, strict=True)]

    def columns(self, texts: list[tuple[Segments, Segments]]) -> dict[str, Tensor | list[str]]:
        """prompts, responses (empty) and chosen_tokens (B,) int64."""
        chosen, rejected = self._sequences(texts)
        both = [a + b for a, b in zip(chosen, rejected, strict=True)]
        lengths = torch.tensor([len(ids) for ids in chosen], dtype=torch.int64)
        return _whole(both) | {"chosen_tokens": lengths}

    def _sequences(
        self, texts: list[tuple[Segments, Segments]]
    ) -> tuple[list[list[int]], list[list[int]]]:
        made = [ids for ids, _ in self.tokens([segments for pair in texts for segments in pair])]
        return made[::2], made[1::2]


def _whole(rows: list[list[int]]) -> dict[str, Tensor | list[str]]:
    """Rows as prompts without responses."""
    prompts = [torch.tensor(ids, dtype=torch.int64) for ids in rows]
    empty = ragged(torch.zeros(0, dtype=torch.int64), torch.zeros(len(rows), dtype=torch.int64))
    return {"prompts": ragged_from_rows(prompts, dtype=torch.int64), "responses": empty}
