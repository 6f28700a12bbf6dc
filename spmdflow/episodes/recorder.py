"""What one episode has said and heard, as token ids.

A segment is a conversation that only grows. Its first prompt is the row's prompt; sampled tokens
and what came between them are the row's response. A request that does not extend a segment starts
another one (a subagent, an edited history), if the settings allow it; the row of the episode is the
segment with the most sampled tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from spmdflow.datasets.chat import ChatTemplate
from spmdflow.datasets.tokenizer import StopStrings, plain_ids, response_texts
from spmdflow.episodes.conversation import Message, NotAppendOnly, Template, for_template, reply_of
from spmdflow.episodes.fields import Ask, Refusal
from spmdflow.rollout.resumable import VersionedResponse
from spmdflow.rollout.vllm_tools import CallReader

Call = list[str]
"""Name and arguments, as JSON, of a tool."""


@dataclass
class Segment:
    """A conversation that grew: first the prompt, then what the mask tells apart."""

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    """True where the model sampled the token."""
    log_probs: list[float] = field(default_factory=list)
    """0 where the mask is False."""
    versions: list[int] = field(default_factory=list)
    """Of the weights that sampled the token; -1 where the mask is False."""
    messages: list[Message] = field(default_factory=list)
    """Of a chat, up to the model's last reply."""
    text: str = ""
    """Of a chat: the rendered messages before that reply. Of a completion: prompt and reply."""
    tools: list[Any] | None = None
    calls: list[list[Call]] = field(default_factory=list)
    """Of tools, in each reply."""

    @property
    def ids(self) -> list[int]:
        """All token ids."""
        return self.prompt + self.tokens

    @property
    def num_sampled(self) -> int:
        """Tokens that the model sampled."""
        return sum(self.mask)


class Turn(NamedTuple):
    """A request that is ready to be drawn."""

    segment: Segment | None
    """What it extends; None: it starts one."""
    fresh: list[int]
    """Ids behind the segment's, or of the prompt."""
    text: str
    number: int
    """Turns of the episode before it."""
    max_new_tokens: int

    @property
    def ids(self) -> list[int]:
        """What the model reads."""
        return (self.segment.ids if self.segment else []) + self.fresh


@dataclass(frozen=True)
class Limits:
    """Sizes of an episode."""

    max_turns: int
    max_prompt_tokens: int
    max_new_tokens: int
    """Tokens behind the first prompt, sampled or not."""
    may_fork: bool
    """Whether a request may start another segment."""
    vocab_size: int
    """Of the model: its token ids are below."""


class Recorder:
    """Segments of one episode."""

    def __init__(
        self,
        chat: ChatTemplate,
        end_tokens: tuple[int, ...],
        limits: Limits,
        read_calls: CallReader | None = None,
    ) -> None:
        """read_calls: finds tool calls in replies; none: see `reply_of`."""
        self._tokenizer = chat.tokenizer
        self._template = Template(chat)
        self._ends = end_tokens
        self._limits = limits
        self._read_calls = read_calls
        self.segments: list[Segment] = []
        self.num_turns = 0
        """Turns that were begun."""

    def begin(self, ask: Ask) -> Turn:
        """The ids that a request is drawn from. Refusal if it does not fit."""
        if self.num_turns >= self._limits.max_turns:
            raise Refusal(
                f"got request {self.num_turns + 1} of an episode, expected at most "
                f"actor.rollout.episode.max_turns={self._limits.max_turns}",
                status=429,
                code="max_turns",
            )
        segment, fresh, text = self._chat(ask) if ask.messages else self._completion(ask)
        if segment is None and self.segments and not self._limits.may_fork:
            raise Refusal(
                "got a conversation that does not extend the recorded one; expected the earlier "
                "messages as they were; set actor.rollout.episode.segments=longest to allow it",
                code="not_append_only",
            )
        self._refuse_unknown_tokens(fresh)
        room = self._limits.max_new_tokens
        if segment is not None:
            room -= len(segment.tokens) + len(fresh)
        elif len(fresh) > self._limits.max_prompt_tokens:
            room = self._limits.max_prompt_tokens - len(fresh)
        if room < 1 or not fresh and segment is None:
            raise Refusal(
                f"got a conversation of {len(fresh) + len(segment.ids if segment else [])} tokens, "
                f"expected room for a reply within data.max_prompt_tokens="
                f"{self._limits.max_prompt_tokens} and actor.rollout.max_new_tokens="
                f"{self._limits.max_new_tokens} behind the first prompt",
                code="context_length_exceeded",
            )
        self.num_turns += 1
        number = self.num_turns - 1
        return Turn(segment, fresh, text, number, min(ask.max_tokens or room, room))

    def _refuse_unknown_tokens(self, ids: list[int]) -> None:
        """Refusal unless the model has all these tokens."""
        known = range(self._limits.vocab_size)
        foreign = next((token for token in ids if token not in known), None)
        if foreign is not None:
            raise Refusal(
                f"got the token id {foreign}, expected ids from 0 to {known[-1]}, which the model "
                f"has; encode the prompt with the model's own tokenizer, or send it as text"
            )

    def finish(
        self, ask: Ask, turn: Turn, drawn: VersionedResponse
    ) -> tuple[Message, VersionedResponse, str]:
        """Record a reply: its message, what is kept of the drawn tokens, and why it ended."""
        tokens = drawn.tokens.tolist()
        reason = "length"
        if ask.stop:
            (end,) = StopStrings(self._tokenizer, ask.stop).first_ends([(turn.ids, tokens, 0)])
            tokens, reason = (tokens[:end], "stop") if end is not None else (tokens, reason)
        columns = (drawn.tokens, drawn.log_probs, drawn.versions)
        kept = VersionedResponse(drawn.id, *(values[: len(tokens)] for values in columns))
        (text,) = response_texts(self._tokenizer, [turn.ids], [tokens])
        if tokens[-1] in self._ends:
            reason = "stop"
        shown = _before_stop(text, ask.stop)
        said = tokens[:-1] if tokens[-1] in self._ends else tokens
        if self._read_calls:
            raw = _before_stop(self._tokenizer.decode(said), ask.stop)
        else:
            raw = ""
        message = reply_of(shown, ask.tools, self._tokenizer, raw=raw, read_calls=self._read_calls)
        if message.get("tool_calls"):
            reason = "tool_calls"
        old = turn.segment or Segment(turn.fresh, tools=ask.tools)
        fresh = turn.fresh if turn.segment else []
        called = []
        for each in message.get("tool_calls", ()):
            called.append(each["function"])
        new = Segment(
            old.prompt,
            old.tokens + fresh + tokens,
            old.mask + [False] * len(fresh) + [True] * len(tokens),
            old.log_probs + [0.0] * len(fresh) + kept.log_probs.tolist(),
            old.versions + [-1] * len(fresh) + kept.versions.tolist(),
            [*ask.messages, message] if ask.messages else [],
            turn.text if ask.messages else turn.text + text,
            old.tools,
            [*old.calls, [[each["name"], each["arguments"]] for each in called]],
        )
        # replaced, never changed: another thread reads it if the episode ends meanwhile
        segments = []
        for each in self.segments:
            segments.append(new if each is old else each)
        self.segments = segments if turn.segment else [*segments, new]
        return message, kept, reason

    def longest(self) -> Segment | None:
        """The segment with the most sampled tokens, the first of them; None: nothing was said."""
        return max(self.segments, key=lambda segment: segment.num_sampled, default=None)

    def _chat(self, ask: Ask) -> tuple[Segment | None, list[int], str]:
        """(the segment that a chat extends, its new ids, its text)."""
        if not self._tokenizer.chat_template:
            raise Refusal("got messages, but the tokenizer has no chat template; use completions")
        messages = for_template(ask.messages)
        text = self._template.text(messages, ask.tools)
        for segment in sorted(self.segments, key=lambda each: -len(each.messages)):
            place = len(segment.messages) - 1
            extends = place >= 0 and ask.tools == segment.tools
            if not extends or not _same(segment.messages, ask.messages[: place + 1]):
                continue
            if len(messages) == place + 1:
                break  # the model would go on with its own reply
            try:
                tail = self._template.tail(segment.text, messages, place, ask.tools)
            except NotAppendOnly as err:
                if self._limits.may_fork:
                    break
                raise Refusal(str(err), code="not_append_only") from err
            return segment, self._behind_end(segment, tail), text
        return None, self._template.ids(text), text

    def _completion(self, ask: Ask) -> tuple[Segment | None, list[int], str]:
        """(the segment that a prompt extends, its new ids, its text)."""
        for segment in sorted(self.segments, key=lambda each: -len(each.ids)):
            size = len(segment.ids)
            if isinstance(ask.prompt, list):
                if ask.prompt[:size] == segment.ids:
                    return segment, ask.prompt[size:], segment.text
            elif not segment.messages and ask.prompt.startswith(segment.text):
                more = ask.prompt[len(segment.text) :]
                return segment, self._template.ids(more) if more else [], ask.prompt
        if isinstance(ask.prompt, list):
            return None, ask.prompt, ""
        return None, plain_ids(self._tokenizer, [ask.prompt])[0], ask.prompt

    def _behind_end(self, segment: Segment, tail: str) -> list[int]:
        """Ids of what follows a reply, without the end token if the model sampled it."""
        last = segment.tokens[-1]
        if last in self._ends:
            end = self._tokenizer.decode([last])
            start = len(tail) - len(tail.lstrip())
            if tail[start:].startswith(end):
                tail = tail[start + len(end) :]
        if tail:
            return self._template.ids(tail)
        return []


def _same(recorded: list[Message], told: list[Message]) -> bool:
    """Whether an agent repeats what was recorded, up to white space at the ends of texts."""
    return len(recorded) == len(told) and all(map(_equal, recorded, told))


def _equal(recorded: Message, told: Message) -> bool:
    return _key(recorded) == _key(told)


def _key(message: Message) -> tuple[Any, ...]:
    """What decides whether two messages are the same."""
    (plain,) = for_template([message])
    calls = []
    for call in plain.get("tool_calls") or ():
        calls.append(call["function"])
    names = []
    for call in calls:
        names.append((call.get("name"), call.get("arguments")))
    return plain.get("role"), plain["content"].strip(), names


def _before_stop(text: str, stop: tuple[str, ...]) -> str:
    """The text up to the first stop string, which a client does not get to see."""
    places = []
    for string in stop:
        if string in text:
            places.append(text.index(string))
    if places:
        return text[: min(places)]
    return text
