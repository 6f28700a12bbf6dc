"""Records one episode's conversations as token ids.

A segment is a conversation that only grows. Its first prompt is the row's prompt; sampled tokens
and the tokens between them are the row's response. A request that does not extend a segment starts
another one (a subagent, an edited history), if the settings allow it. The row of the episode is the
segment with the most sampled tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from spmdflow.datasets.chat import ChatTemplate
from spmdflow.datasets.tokenizer import StopStrings, plain_ids, response_texts
from spmdflow.episodes.ask import Ask, Refusal
from spmdflow.episodes.conversation import (
    AppendOnlyTemplate,
    Message,
    NotAppendOnly,
    reply_of,
    to_template_messages,
)
from spmdflow.episodes.ids import call_id
from spmdflow.rollout.resumable import VersionedResponse
from spmdflow.rollout.vllm_tools import CallReader

Call = list[str]
"""A tool call: name and arguments as JSON."""


@dataclass
class Segment:
    """A conversation that grew: the prompt, then sampled and other tokens."""

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    """True where the model sampled the token."""
    log_probs: list[float] = field(default_factory=list)
    """0 where the mask is False."""
    versions: list[int] = field(default_factory=list)
    """Version of the weights that sampled the token; -1 where the mask is False."""
    messages: list[Message] = field(default_factory=list)
    """Messages of a chat, up to the model's last reply."""
    text: str = ""
    """For a chat, the rendered messages before that reply. For a completion, prompt and reply."""
    tools: list[Any] | None = None
    calls: list[list[Call]] = field(default_factory=list)
    """Tool calls of each reply."""
    routes: np.ndarray | None = None
    """The experts of all tokens, as the last turn used them (`Finished.routes`)."""

    @property
    def ids(self) -> list[int]:
        """All token ids."""
        return self.prompt + self.tokens

    @property
    def num_sampled(self) -> int:
        """Tokens that the model sampled."""
        return sum(self.mask)


class Turn(NamedTuple):
    """A request for which a reply can be generated."""

    segment: Segment | None
    """The segment that it extends. None: it starts a new one."""
    fresh: list[int]
    """New ids: those after the segment's, or the prompt."""
    text: str
    number: int
    """Number of earlier turns of the episode."""
    max_new_tokens: int

    @property
    def ids(self) -> list[int]:
        """The ids that the model reads."""
        return (self.segment.ids if self.segment else []) + self.fresh


@dataclass(frozen=True)
class Limits:
    """Size limits of an episode."""

    max_turns: int
    max_prompt_tokens: int
    max_new_tokens: int
    """Maximum number of tokens after the first prompt, sampled or not."""
    may_fork: bool
    """Whether a request may start another segment."""
    vocab_size: int
    """Vocabulary size of the model. Token ids are smaller."""


class Recorder:
    """The segments of one episode."""

    def __init__(
        self,
        chat: ChatTemplate,
        end_tokens: tuple[int, ...],
        limits: Limits,
        read_calls: CallReader | None = None,
    ) -> None:
        """read_calls: parses tool calls in replies. None: see `reply_of`."""
        self._tokenizer = chat.tokenizer
        self._template = AppendOnlyTemplate(chat)
        self._ends = end_tokens
        self._limits = limits
        self._read_calls = read_calls
        self.segments: list[Segment] = []
        self.num_turns = 0
        """Number of turns that have started."""
        self.id_seed = 0
        """Seed of the ids of replies and calls; see `episodes.ids`."""

    def begin(self, ask: Ask) -> Turn:
        """Returns the turn of a request, which extends a segment or starts a new one.

        Refusal after max_turns turns, for a new segment unless may_fork is set or there is none
        yet, for unknown token ids, or without room for a reply: the first prompt may have
        max_prompt_tokens, and all tokens after it max_new_tokens. The turn's max_new_tokens is the
        room, or ask.max_tokens if that is less. Counts the turn; nothing else is recorded before
        `finish`.
        """
        if self.num_turns >= self._limits.max_turns:
            raise Refusal(
                f"got request {self.num_turns + 1} of an episode, expected at most "
                f"actor.rollout.episode.max_turns={self._limits.max_turns}",
                code="max_turns",
            )
        segment, new_ids, text = (
            self._match_chat(ask) if ask.messages else self._match_completion(ask)
        )
        if segment is None and self.segments and not self._limits.may_fork:
            raise Refusal(
                "got a conversation that does not extend the recorded one; expected the earlier "
                "messages as they were; set actor.rollout.episode.segments=longest to allow it",
                code="not_append_only",
            )
        self._refuse_unknown_tokens(new_ids)
        room = self._limits.max_new_tokens
        if segment is not None:
            room -= len(segment.tokens) + len(new_ids)
        elif len(new_ids) > self._limits.max_prompt_tokens:
            room = self._limits.max_prompt_tokens - len(new_ids)
        if room < 1 or not new_ids and segment is None:
            raise Refusal(
                f"got a conversation of {len(new_ids) + len(segment.ids if segment else [])} "
                f"tokens, expected room for a reply within data.max_prompt_tokens="
                f"{self._limits.max_prompt_tokens} and actor.rollout.max_new_tokens="
                f"{self._limits.max_new_tokens} after the first prompt",
                code="context_length_exceeded",
            )
        self.num_turns += 1
        number = self.num_turns - 1
        return Turn(segment, new_ids, text, number, min(ask.max_tokens or room, room))

    def count_tokens(self, ask: Ask) -> int:
        """Number of tokens of a chat's prompt, encoded from scratch. Records nothing."""
        text = self._template.text(to_template_messages(ask.messages), ask.tools)
        return len(self._template.ids(text))

    def stop_of(self, ask: Ask, turn: Turn, response: VersionedResponse) -> str | None:
        """The stop string that ended a response; None if none did."""
        if not ask.stop:
            return None
        (text,) = response_texts(self._tokenizer, [turn.ids], [response.tokens.tolist()])
        places = []
        for string in ask.stop:
            if string in text:
                places.append((text.index(string), string))
        return min(places)[1] if places else None

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
        """Records a reply. Returns (message, response, reason why it ended).

        drawn: all tokens that were generated. Tokens after the one that completes a stop string are
        dropped, and the message's text ends before the stop string. reason: "tool_calls" if the
        message has calls, "stop" after an end token or a stop string, otherwise "length". A segment
        that grows is replaced by a new object, which has the new ids (mask False) and the reply
        (mask True).
        """
        tokens = drawn.tokens.tolist()
        reason = "length"
        if ask.ends:
            (end,) = StopStrings(self._tokenizer, ask.ends).first_ends([(turn.ids, tokens, 0)])
            tokens, reason = (tokens[:end], "stop") if end is not None else (tokens, reason)
        size = len(tokens)
        response = VersionedResponse(
            drawn.id,
            drawn.tokens[:size],
            drawn.log_probs[:size],
            versions=drawn.versions[:size],
            notes=None if drawn.notes is None else drawn.notes.cut(size),
        )
        routes = None
        if drawn.routes is not None:
            routes = drawn.routes[: len(turn.ids) + size].cpu().numpy()
        (text,) = response_texts(self._tokenizer, [turn.ids], [tokens])
        if tokens[-1] in self._ends:
            reason = "stop"
        visible_text = _cut_at_stop(text, ask.stop)
        spoken_ids = tokens[:-1] if tokens[-1] in self._ends else tokens
        if self._read_calls:
            raw = _cut_at_stop(self._tokenizer.decode(spoken_ids), ask.stop)
        else:
            raw = ""
        message = reply_of(
            visible_text, ask.tools, self._tokenizer, raw=raw, read_calls=self._read_calls
        )
        for index, call in enumerate(message.get("tool_calls") or ()):
            call["id"] = call_id(self.id_seed, turn.number, index)
            reason = "tool_calls"
        old = turn.segment or Segment(turn.fresh, tools=ask.tools)
        new_ids = turn.fresh if turn.segment else []
        called = []
        for entry in message.get("tool_calls", ()):
            called.append(entry["function"])
        sampled, log_probs, versions = _sampled_columns(response)
        new = Segment(
            old.prompt,
            old.tokens + new_ids + tokens,
            old.mask + [False] * len(new_ids) + sampled,
            old.log_probs + [0.0] * len(new_ids) + log_probs,
            old.versions + [-1] * len(new_ids) + versions,
            [*ask.messages, message] if ask.messages else [],
            turn.text if ask.messages else turn.text + text,
            old.tools,
            [*old.calls, [[entry["name"], entry["arguments"]] for entry in called]],
            routes,
        )
        # replaced, never modified: another thread reads it if the episode ends meanwhile
        segments = []
        for entry in self.segments:
            segments.append(new if entry is old else entry)
        self.segments = segments if turn.segment else [*segments, new]
        return message, response, reason

    def longest(self) -> Segment | None:
        """The first segment with the most sampled tokens. None: the model has not replied."""
        return max(self.segments, key=lambda segment: segment.num_sampled, default=None)

    def _match_chat(self, ask: Ask) -> tuple[Segment | None, list[int], str]:
        """Returns (segment that a chat extends or None, its new ids, its rendered text).

        A segment fits if it has the same tools and its messages, with the last reply, are the first
        messages of the chat. Segments with most messages come first. Refusal if there is no chat
        template, or if the template changes earlier turns and may_fork is not set. None: the ids
        are those of the complete chat. None too if no message follows the reply.
        """
        if not self._tokenizer.chat_template:
            raise Refusal("got messages, but the tokenizer has no chat template; use completions")
        messages = to_template_messages(ask.messages)
        text = self._template.text(messages, ask.tools)
        for segment in sorted(self.segments, key=lambda each: -len(each.messages)):
            last = len(segment.messages) - 1
            extends = last >= 0 and ask.tools == segment.tools
            if not extends or not _are_equal(segment.messages, ask.messages[: last + 1]):
                continue
            if len(messages) == last + 1:
                break  # the model would continue its own reply
            try:
                tail = self._template.tail(segment.text, messages, last, ask.tools)
            except NotAppendOnly as err:
                if self._limits.may_fork:
                    break
                raise Refusal(str(err), code="not_append_only") from err
            return segment, self._ids_after_reply(segment, tail), text
        return None, self._template.ids(text), text

    def _match_completion(self, ask: Ask) -> tuple[Segment | None, list[int], str]:
        """Returns (segment that a prompt extends or None, its new ids, its text).

        A prompt of token ids must begin with the segment's ids. A prompt of text must begin with
        the text of a segment of completions. The longest segment that fits is chosen. None: the new
        ids are those of the complete prompt.
        """
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

    def _ids_after_reply(self, segment: Segment, tail: str) -> list[int]:
        """Returns the token ids of `tail`, the text after the segment's last reply; [] for no text.

        If the reply ends with an end token, that token's text at the start of tail is dropped,
        because the token is already recorded.
        """
        last = segment.tokens[-1]
        if last in self._ends:
            end = self._tokenizer.decode([last])
            start = len(tail) - len(tail.lstrip())
            if tail[start:].startswith(end):
                tail = tail[start + len(end) :]
        if tail:
            return self._template.ids(tail)
        return []


def _sampled_columns(response: VersionedResponse) -> tuple[list[bool], list[float], list[int]]:
    """(mask, log-probabilities, versions) of a response.

    A token that a grammar forced was not chosen by the model: it counts as one that the model did
    not sample.
    """
    log_probs = response.log_probs.tolist()
    versions = response.versions.tolist()
    if response.notes is None:
        return [True] * len(log_probs), log_probs, versions
    sampled = []
    for place, is_forced in enumerate(response.notes.forced):
        sampled.append(not is_forced)
        if is_forced:
            log_probs[place] = 0.0
            versions[place] = -1
    return sampled, log_probs, versions


def _are_equal(recorded: list[Message], repeated: list[Message]) -> bool:
    """Whether a client's messages equal the recorded ones, except for white space around texts."""
    return len(recorded) == len(repeated) and all(map(_is_equal, recorded, repeated))


def _is_equal(recorded: Message, repeated: Message) -> bool:
    return _comparison_key(recorded) == _comparison_key(repeated)


def _comparison_key(message: Message) -> tuple[Any, ...]:
    """Returns (role, stripped text, [(name, arguments)] of the tool calls) of a message.

    Two messages are equal if these are.
    """
    (plain,) = to_template_messages([message])
    calls = []
    for call in plain.get("tool_calls") or ():
        calls.append(call["function"])
    names = []
    for call in calls:
        names.append((call.get("name"), call.get("arguments")))
    return plain.get("role"), plain["content"].strip(), names


def _cut_at_stop(text: str, stop: tuple[str, ...]) -> str:
    """Returns the text before the first stop string in it, or the complete text without one.

    Clients do not see stop strings.
    """
    positions = []
    for string in stop:
        if string in text:
            positions.append(text.index(string))
    if positions:
        return text[: min(positions)]
    return text
