"""The part of a reply's text that can be shown while the reply is still being generated.

What was shown never changes: half a character waits for its other half, and what may become a stop
string, a tool call or the mark of a thought waits until it is clear that it does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from spmdflow.datasets.tokenizer import response_texts
from spmdflow.episodes.ask import Ask
from spmdflow.episodes.message_form import ThoughtMarks

_CALL_BEGIN = "<tool_call>"
_HALF_CHARACTER = "\ufffd"


class VisibleReply(NamedTuple):
    """What a client may see of a reply."""

    thought: str = ""
    text: str = ""


class PartialText:
    """The visible thought and text of one reply, from its tokens so far."""

    def __init__(
        self,
        tokenizer: Any,
        ask: Ask,
        prompt_ids: list[int],
        *,
        shows_calls: bool,
        marks: ThoughtMarks | None = None,
        is_open: bool = False,
    ) -> None:
        """shows_calls: whether calls have the form <tool_call>...; otherwise nothing is visible of
        a reply that may have calls. marks: those of thoughts, if the chat template knows them.
        Nothing is visible if they are special tokens, which have no text. is_open: the prompt has
        opened the thought."""
        self._tokenizer = tokenizer
        self._prompt_ids = prompt_ids
        self._stop = ask.stop
        self._has_tools = bool(ask.tools)
        self._marks = marks if ask.messages else None
        self._is_open = is_open
        self._is_visible = shows_calls or not ask.tools
        if self._marks is not None:
            written = self._marks.start + self._marks.end
            names = tokenizer.all_special_tokens
            self._is_visible &= not any(name in written for name in names)

    def of(self, tokens: Sequence[int]) -> VisibleReply:
        """What is visible of a reply that begins with these tokens."""
        if not self._is_visible or not tokens:
            return VisibleReply()
        text = self._text_of(tokens).rstrip(_HALF_CHARACTER)
        for string in self._stop:
            text = _before(text, string)
        return self._split(text)

    def whole_text(self, tokens: Sequence[int]) -> str:
        """The text before a stop string or a call of a complete reply, thoughts included."""
        text = self._text_of(tokens)
        ends = (*self._stop, _CALL_BEGIN) if self._has_tools else self._stop
        for string in ends:
            text = text.partition(string)[0]
        return text

    def _text_of(self, tokens: Sequence[int]) -> str:
        (text,) = response_texts(self._tokenizer, [self._prompt_ids], [list(tokens)])
        return text

    def _split(self, text: str) -> VisibleReply:
        """The visible thought and answer of a text that goes on. As ThoughtMarks.split, but a
        closing mark without an opening one is not expected."""
        marks = self._marks
        if marks is None:
            return VisibleReply("", self._answer(text))
        body = text.lstrip()
        is_thought = self._is_open
        if body.startswith(marks.start):
            body = body.removeprefix(marks.start)
            is_thought = True
        elif any(mark.startswith(body) for mark in (marks.start, marks.answer_start)):
            return VisibleReply()  # it may become a mark
        if not is_thought:
            if marks.answer_start and body.startswith(marks.answer_start):
                return VisibleReply("", self._answer(body.removeprefix(marks.answer_start)))
            return VisibleReply("", self._answer(text))
        thought = _before(_before(body, marks.end), marks.end_token)
        _, is_closed, answer = body.partition(marks.end)
        if not is_closed:
            return VisibleReply(thought.strip())
        return VisibleReply(thought.strip(), self._answer(answer.lstrip()).rstrip())

    def _answer(self, text: str) -> str:
        """The visible part of a text that calls may follow."""
        if not self._has_tools:
            return text
        text = _before(text, _CALL_BEGIN)
        # white space around calls is dropped
        return "" if text != text.lstrip() else text.rstrip()


def _before(text: str, mark: str) -> str:
    """The text before a mark, or before what may be the beginning of the mark at its end."""
    position = text.find(mark)
    if position >= 0:
        return text[:position]
    for size in range(min(len(text), len(mark) - 1), 0, -1):
        if text.endswith(mark[:size]):
            return text[: len(text) - size]
    return text
