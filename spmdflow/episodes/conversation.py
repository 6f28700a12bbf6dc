"""Messages -> token ids that extend the recorded ones, by the chat template.

The recorded ids already contain the model's replies. What follows a reply comes from the template:
the conversation is rendered with stand-ins for the recorded replies, and the text after the last
one is encoded. Replies are never compared. A template may write them in another way later, for
example without their thoughts; the recorded ids stay as the model wrote them.

Everything else must stay as it was: if the template changes the text before or between replies once
later messages follow, the recorded ids are not what it writes, and `NotAppendOnly` is raised.
`check_template` tests it before a run.

| a reply | recorded by its ids | follows from the template |
|---|---|---|
| ended by an end token | up to and with that token | the text behind that token |
| cut (max_tokens, stop) | all of it | the end of the turn, and the text behind it |

The end of a reply with tool calls is found by a second rendering, in which it is the last message.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Sequence
from os.path import commonprefix
from typing import Any, NamedTuple

from spmdflow.datasets.chat import ChatTemplate
from spmdflow.episodes.message_form import Message, MessageForm, form_of, to_template_messages
from spmdflow.errors import ConfigError, DataError

_STAND_IN = f"{secrets.randbelow(10**24):024d}"
"""Random digits, so that no message contains them."""
_SHOWN_LETTERS = 60


class NotAppendOnly(DataError):
    """Later messages change what the template writes before or between replies."""


class Continuation(NamedTuple):
    """What the template writes for messages that extend a conversation, or begin one."""

    text: str
    """The text after the last reply, with the generation prompt; without a reply, all of it."""
    written: str
    """The text around all replies, which later renderings must repeat (`_Written`)."""


class AppendOnlyTemplate:
    """Renders conversations that grow turn by turn with a `ChatTemplate`."""

    def __init__(self, chat: ChatTemplate, end_tokens: Sequence[int] = ()) -> None:
        """end_tokens: ids that end a reply, besides the tokenizer's eos token."""
        self.tokenizer = chat.tokenizer
        self.form = form_of(chat)
        self._template = chat
        ids = {*end_tokens, self.tokenizer.eos_token_id} - {None}
        self._ends = {number: str(self.tokenizer.decode([number])) for number in ids}

    def begin(self, messages: list[Message], tools: list[Any] | None) -> Continuation:
        """Returns the rendered messages, up to where the model's reply begins.

        messages: as the client sent them. DataError if the template fails.
        """
        plain = to_template_messages(messages, self.form)
        text = self._template.render(plain, tools=tools)
        return Continuation(text, self._without_prompt(text, plain, tools))

    def extend(
        self,
        written: str,
        messages: list[Message],
        replies: Sequence[int],
        tools: list[Any] | None,
    ) -> Continuation:
        """Returns what follows the last reply of a recorded conversation.

        written: that of the request whose reply was the last one. messages: as the client sent
        them. replies: indices of the recorded replies among them, in order. NotAppendOnly if the
        template writes other text before or between the replies than `written`. DataError if it
        fails.
        """
        plain = to_template_messages(messages, self.form)
        marked, pieces = self._pieces(plain, replies, tools)
        self._compare(written, pieces, replies)
        last = pieces[-1]
        if plain[replies[-1]].get("tool_calls"):
            last = last[self._end_of_calls(last, marked[: replies[-1] + 1], tools) :]
        around = self._without_prompt(pieces[-1], marked, tools)
        return Continuation(last, _STAND_IN.join([written, around]))

    def ids(self, text: str) -> list[int]:
        """Token ids of rendered text, which already contains the special tokens."""
        return list(self._template.ids([text])[0])

    def ids_after(self, last: int, text: str) -> list[int]:
        """Returns the ids of `text`, which follows a reply that ends with the token `last`.

        If that is an end token, the template's own end of the turn at the start of the text is
        dropped, because the turn has ended already: the same token, or the one that the template
        writes in its place if other messages follow (gpt-oss: <|return|>, then <|end|>).
        """
        end = self._ends.get(last)
        if end is not None:
            body = text.lstrip()
            if body.startswith(end):
                text = body.removeprefix(end)
            elif self.form.end_of_turn.strip() == end:
                text = body.removeprefix(self._template.leading_special(body))
        if text:
            return self.ids(text)
        return []

    def _pieces(
        self, messages: list[Message], replies: Sequence[int], tools: list[Any] | None
    ) -> tuple[list[Message], list[str]]:
        """Returns (messages with stand-ins for the replies, the text before, between and after).

        The stand-ins have what the replies had, text or calls or both, if the template writes that;
        otherwise text in addition, or only text. NotAppendOnly if it omits a reply that is only
        text; DataError if it fails for all of these.
        """
        failure: DataError | None = None
        for stand_in in (_like_the_reply, _with_text, _only_text):
            marked = list(messages)
            for number, index in enumerate(replies):
                marked[index] = stand_in(messages[index], _mark(number), self.form)
            try:
                text = self._template.render(marked, tools=tools)
                return marked, list(_split(text, replies))
            except DataError as err:
                if failure is None or isinstance(failure, NotAppendOnly):
                    failure = err
        assert failure is not None, "three attempts"
        raise failure

    def _compare(self, written: str, pieces: list[str], replies: Sequence[int]) -> None:
        """NotAppendOnly if a piece before or between replies does not begin with what was written.

        What the template writes further, up to the reply, opens the reply, and may change. Special
        tokens at the end of what was written may change too: they open a reply that is awaited
        (DeepSeek V3 writes the end of the tools' results only there).
        """
        before = written.split(_STAND_IN)
        assert len(before) == len(replies), (len(before), len(replies))
        for earlier, now, index in zip(before, pieces, replies, strict=False):
            if not now.startswith(self._template.strip_special(earlier)):
                same = len(commonprefix([earlier, now]))
                raise NotAppendOnly(
                    f"the chat template changes what stands before message {index + 1} "
                    f"(assistant) once later messages follow: {_shown(earlier[same:])} becomes "
                    f"{_shown(now[same:])}"
                )

    def _without_prompt(self, text: str, messages: list[Message], tools: list[Any] | None) -> str:
        """Returns `text`, the end of the rendered messages, without the generation prompt.

        If it is another one than after a user's turn, it is what differs if the messages are
        rendered without it.
        """
        prompt = self.form.prompt
        if prompt and text.endswith(prompt):
            return text.removesuffix(prompt)
        rendered = self._template.render(messages, answered=True, tools=tools)
        return commonprefix([text, _after_last_mark(rendered)])

    def _end_of_calls(self, text: str, messages: list[Message], tools: list[Any] | None) -> int:
        """Returns where the last message, a reply with calls, ends in the text after its stand-in.

        The closing marks of a call are part of the reply. They are what the text has in common with
        a rendering in which the reply is last, up to an end token or the end of the turn.
        """
        rendered = self._template.render(messages, answered=True, tools=tools)
        last = _after_last_mark(rendered)
        shared = len(commonprefix([text, last]))
        ends = []
        for end in self._ends.values():
            position = text.find(end)
            if 0 <= position <= shared:
                ends.append(position)
        if ends:
            return min(ends)
        closing = last.removesuffix(self.form.end_of_turn)
        return min(len(closing), shared)


def check_template(chat: ChatTemplate, end_tokens: Sequence[int] = ()) -> None:
    """Checks that the chat template is append-only; a tokenizer without a template passes.

    Tested with a conversation of three turns. ConfigError if the template writes earlier text
    differently once later messages follow (replies excepted), omits a reply, refuses turns of user
    and assistant, or if the text after a reply is encoded differently alone than within the
    conversation.
    """
    if not chat.tokenizer.chat_template:
        return  # without a template, only completions are supported
    key = "actor.rollout.episode.segments"
    do = "set it to all, or change the template"
    template = AppendOnlyTemplate(chat, end_tokens)
    messages: list[Message] = [{"role": "user", "content": "ok"}]
    replies: list[int] = []
    try:
        written = template.begin(messages, None).written
        for _ in range(2):
            replies.append(len(messages))
            messages += [{"role": "assistant", "content": "ok"}, {"role": "user", "content": "ok"}]
            after = template.extend(written, messages, replies, None)
            written = after.written
    except DataError as err:
        expected = "an append-only template, because segments is one"
        raise ConfigError.of(key, f"a tokenizer where {err}", expected, do) from err
    tail_ids = template.ids(after.text)
    all_ids = template.ids(template.begin(messages, None).text)
    if tail_ids != all_ids[len(all_ids) - len(tail_ids) :]:
        got = f"a tokenizer that encodes {after.text!r} differently within a conversation"
        raise ConfigError.of(key, got, "the same ids", do)


def _mark(number: int) -> str:
    """The stand-in for the text of the reply `number`; all have the same length."""
    return f"{_STAND_IN}{number:06d}"


def _after_last_mark(text: str) -> str:
    """Returns the text after the last stand-in, or all of it without one."""
    position = text.rfind(_STAND_IN)
    if position < 0:
        return text
    return text[position + len(_mark(0)) :]


def _split(text: str, replies: Sequence[int]) -> Iterator[str]:
    """Yields the text before the first stand-in, between them, and after the last one.

    NotAppendOnly if a stand-in is missing. A stand-in may appear several times (text, arguments of
    calls); the text between its first and last position belongs to the reply.
    """
    start = 0
    for number, index in enumerate(replies):
        mark = _mark(number)
        position = text.find(mark, start)
        if position < 0:
            raise NotAppendOnly(
                f"the chat template does not write the text of message {index + 1} (assistant) "
                f"where later messages follow"
            )
        yield text[start:position]
        start = text.rindex(mark) + len(mark)
    yield text[start:]


def _shown(text: str) -> str:
    return repr(text[:_SHOWN_LETTERS])


def _like_the_reply(reply: Message, mark: str, form: MessageForm) -> Message:
    """Returns a stand-in for a reply with calls and text, or one of them, as the reply had."""
    message = _with_text(reply, mark, form)
    if reply.get("tool_calls") and not reply["content"]:
        message["content"] = form.no_text
    return message


def _with_text(reply: Message, mark: str, form: MessageForm) -> Message:
    """Returns a stand-in with text, and with the calls of the reply if it has some.

    The calls keep their ids and names, which a template may repeat for the tools' results. Their
    arguments are the mark.
    """
    message = _only_text(reply, mark, form)
    if calls := reply.get("tool_calls"):
        arguments: Any = {"ok": mark}
        if form.text_arguments:
            arguments = json.dumps(arguments)
        message["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": arguments}} for call in calls
        ]
    return message


def _only_text(reply: Message, mark: str, form: MessageForm) -> Message:
    """Returns a stand-in without calls."""
    return {"role": "assistant", "content": mark}
