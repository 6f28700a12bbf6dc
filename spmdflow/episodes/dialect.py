"""What a dialect is: one way to write requests, answers, streams of events and errors.

A dialect translates to and from the internal form (`ask`). It knows no sockets and no episodes.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from spmdflow.config.episode_models import POLICY
from spmdflow.episodes.ask import Ask, EarlierReply, Refusal, Reply

MODEL = POLICY
"""Name of the model that is trained. It also answers names that are not set up."""
NO_EVENT = b": the reply is being generated\n\n"
"""A comment of an event stream, which parsers skip."""


class EventStream(ABC):
    """The events of one streamed reply, as the bytes that are sent.

    First `begin`, then `add_thought` for each new piece of the reply's thought, `add_text` for each
    new piece of its text, then `end`, and `close` once for a request. A request with several
    choices has a stream for each.
    """

    def __init__(self) -> None:
        self.sent_thought = ""
        """What `add_thought` got so far."""
        self.sent = ""
        """Text that `add_text` got so far."""

    @abstractmethod
    def begin(self) -> bytes:
        """The events before the first text."""

    @abstractmethod
    def write_thought(self, more: str) -> bytes:
        """The events for more of the thought, which is not empty and comes before all text."""

    @abstractmethod
    def write_text(self, more: str) -> bytes:
        """The events for more text, which is not empty."""

    @abstractmethod
    def finish(self, reply: Reply) -> bytes:
        """The events after all of the reply's thought and text: its calls, why it ended, and its
        size."""

    def close(self, replies: Sequence[Reply]) -> bytes:
        """The events after the last of all replies of the request; none in most dialects."""
        return b""

    @abstractmethod
    def fail(self, refusal: Refusal) -> bytes:
        """The event for a failure after the stream has begun."""

    def add_thought(self, more: str) -> bytes:
        """The events for more of the thought; none for nothing, or if text was sent."""
        if not more or self.sent:
            return b""
        self.sent_thought += more
        return self.write_thought(more)

    def add_text(self, more: str) -> bytes:
        """The events for more text; none for no text."""
        self.sent += more
        return self.write_text(more) if more else b""

    def end(self, reply: Reply, text: str) -> bytes:
        """The events for what remains of a reply, and its end. text: all of its text."""
        rest = b""
        thought = reply.message.get("reasoning_content") or ""
        if thought.startswith(self.sent_thought):
            rest += self.add_thought(thought[len(self.sent_thought) :])
        if text.startswith(self.sent):
            rest += self.add_text(text[len(self.sent) :])
        return rest + self.finish(reply)


class ApiDialect(ABC):
    """One API whose requests are answered."""

    @abstractmethod
    def parse(
        self, body: object, *, past: Mapping[str, EarlierReply], warned_fields: set[str]
    ) -> Ask:
        """The Ask for the JSON body of a request; Refusal if it cannot be met as it stands.

        past: id of an earlier reply -> what can be continued. warned_fields: names of ignored
        fields that were logged; names are added.
        """

    @abstractmethod
    def answer(self, ask: Ask, reply: Reply) -> dict[str, Any]:
        """The answer that is not streamed, as JSON."""

    def answer_choices(self, ask: Ask, replies: Sequence[Reply]) -> dict[str, Any]:
        """The answer with all choices of a request; most dialects have one."""
        (reply,) = replies
        return self.answer(ask, reply)

    @abstractmethod
    def stream(self, ask: Ask, *, name: str, num_prompt_tokens: int) -> EventStream:
        """A stream for a reply with this name (`Reply.name`)."""

    def stream_choices(self, ask: Ask, *, name: str, num_prompt_tokens: int) -> list[EventStream]:
        """A stream for each choice of a request; most dialects have one. name: of the first."""
        return [self.stream(ask, name=name, num_prompt_tokens=num_prompt_tokens)]

    def error(self, refusal: Refusal) -> dict[str, Any]:
        """The answer to a request that is refused, as JSON; in OpenAI's form."""
        kind = "server_error" if refusal.status >= 500 else "invalid_request_error"
        fields = {"message": str(refusal), "type": kind, "code": refusal.code, "param": None}
        return {"error": fields}

    def past_of(self, ask: Ask, reply: Reply) -> tuple[str, EarlierReply] | None:
        """(id, what a later request may continue by that id); None: it cannot."""
        return None


def write_event(fields: Mapping[str, Any], *, name: str = "") -> bytes:
    """One server-sent event. name: its type; empty: it has none."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(fields)}\n\n".encode()


def check_log_probs(field: str, count: object) -> int:
    """How many of the likeliest tokens are asked for. Refusal for anything but 0 to 20."""
    if count is None:
        return 0
    if type(count) is not int or not 0 <= count <= MOST_TOP_LOG_PROBS:
        raise Refusal(f"{field}: got {count!r}, expected a number from 0 to {MOST_TOP_LOG_PROBS}")
    return count


MOST_TOP_LOG_PROBS = 20
