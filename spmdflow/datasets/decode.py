"""The text of responses, as it continues the text of their prompts, and stop strings in it.

A tokenizer decodes tokens by what stands before them: many drop the space that a text begins with.
So a response's text is the text of prompt and response without that of the prompt, and both join
to the text as it was. Special tokens (the end of a sequence, marks of a chat) have no text. A
character whose bytes are spread over several tokens is shown once it is complete; one that is cut
by the end of the response is shown as U+FFFD. Where the prompt's tokens end inside a character,
the whole character belongs to the response.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# Any stands for a transformers tokenizer (datasets/tokenizer.py).
_CONTEXT = 16
"""Tokens of a prompt that are decoded: what stands further back changes no text."""
_CUT = "\ufffd"
"""A character that is not complete."""


def response_texts(
    tokenizer: Any, prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]
) -> list[str]:
    """The text of each response behind its prompt (token ids)."""
    pairs = zip(prompts, responses, strict=True)
    return [_text_after(tokenizer, prompt, response) for prompt, response in pairs]


class StopStrings:
    """Whether a response ends, as its text now has one of some strings."""

    def __init__(self, tokenizer: Any, strings: Sequence[str]) -> None:
        self._tokenizer, self._strings = tokenizer, strings
        self._special = frozenset(tokenizer.all_special_ids)
        self._window = max(len(text.encode()) for text in strings) + 1
        """Tokens that a string can be spread over: each has a byte of it at least."""

    def ends(self, prompt: Sequence[int], response: Sequence[int]) -> bool:
        """Whether the last token of response completed a string; the tokens before did not.

        To be asked after each token.
        """
        if response[-1] in self._special:
            return False
        start, shown = len(response), 0
        while start and shown < self._window:
            start -= 1
            shown += response[start] not in self._special
        context = [*prompt[-_CONTEXT:], *response[max(0, start - _CONTEXT) : start]]
        text = _text_after(self._tokenizer, context, response[start:])
        return any(string in text for string in self._strings)


def _text_after(tokenizer: Any, before: Sequence[int], after: Sequence[int]) -> str:
    """The text that the tokens `after` add to that of the tokens `before`."""
    for context in (list(before[-_CONTEXT:]), list(before)):
        head, whole = (_text(tokenizer, ids) for ids in (context, [*context, *after]))
        for shown in (head, head.rstrip(_CUT)):
            if shown and whole.startswith(shown):
                return whole[len(shown) :]
    return _text(tokenizer, after)


def _text(tokenizer: Any, ids: Sequence[int]) -> str:
    text: str = tokenizer.decode(
        list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    return text
