"""The part of a reply's text that can be shown while the reply is still being generated.

What was shown never changes: half a character waits for its other half, and what may become a stop
string or a tool call waits until it is clear that it does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spmdflow.datasets.tokenizer import response_texts
from spmdflow.episodes.ask import Ask

_CALL_BEGIN = "<tool_call>"
_HALF_CHARACTER = "\ufffd"
_THOUGHT_END = "</think>"


class PartialText:
    """The visible text of one reply, from its tokens so far."""

    def __init__(
        self, tokenizer: Any, ask: Ask, prompt_ids: list[int], *, shows_calls: bool
    ) -> None:
        """shows_calls: whether calls have the form <tool_call>...; otherwise nothing is visible of
        a reply that may have calls. Nothing is visible either if the template has thoughts, which
        are split off when the reply is complete."""
        self._tokenizer = tokenizer
        self._prompt_ids = prompt_ids
        self._stop = ask.stop
        self._marks = list(ask.stop)
        self._has_tools = bool(ask.tools)
        has_thoughts = _THOUGHT_END in str(tokenizer.chat_template) and bool(ask.messages)
        self._is_visible = not has_thoughts and (shows_calls or not ask.tools)
        if ask.tools:
            self._marks.append(_CALL_BEGIN)

    def of(self, tokens: Sequence[int]) -> str:
        """The visible text of a reply that begins with these tokens."""
        if not self._is_visible or not tokens:
            return ""
        (text,) = response_texts(self._tokenizer, [self._prompt_ids], [list(tokens)])
        text = text.rstrip(_HALF_CHARACTER)
        end = len(text)
        for mark in self._marks:
            place = text.find(mark)
            end = min(end, place if place >= 0 else len(text) - _overlap(text, mark))
        text = text[:end]
        if self._has_tools:
            # white space around calls is dropped
            text = "" if text != text.lstrip() else text.rstrip()
        return text


def _overlap(text: str, mark: str) -> int:
    """Length of the longest end of the text that the mark begins with, but the whole mark."""
    for size in range(min(len(text), len(mark) - 1), 0, -1):
        if text.endswith(mark[:size]):
            return size
    return 0
