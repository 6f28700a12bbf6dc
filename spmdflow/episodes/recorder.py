"""Records one episode's conversations as token ids.

A segment is a conversation that only grows. Its first prompt is the row's prompt; sampled tokens
and the tokens between them are the row's response. A request that does not extend a segment starts
another one, if the settings allow it: a subagent, a compacted or edited history. If it continues an
earlier reply of a segment (a second try, a branch), the prompt of the new segment has the recorded
tokens up to that reply. So every sampled token is learnt in exactly one segment.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

from spmdflow.config.episode_models import POLICY
from spmdflow.datasets.chat import ChatTemplate
from spmdflow.datasets.tokenizer import StopStrings, plain_ids, response_texts, text_with_special
from spmdflow.episodes.ask import Ask, Refusal
from spmdflow.episodes.conversation import AppendOnlyTemplate, NotAppendOnly
from spmdflow.episodes.ids import call_id, reply_name
from spmdflow.episodes.message_form import Message
from spmdflow.episodes.reply import ReplyReader, Sampled, calls_of, cut_at_stop
from spmdflow.rollout.resumable import VersionedResponse
from spmdflow.rollout.vllm_tools import CallReader

Call = list[str]
"""A tool call: name and arguments as JSON."""


class RecordedReply(NamedTuple):
    """A reply of a segment."""

    turn: int
    """Number of the turn in the episode."""
    start: int
    stop: int
    """Its tokens are tokens[start:stop] of the segment."""
    positions: tuple[int, ...]
    """For a chat, the indices among its messages of all recorded replies up to this one. Empty for
    a completion."""
    text: str
    """For a chat, what the template wrote around the replies before it (`Continuation.written`)."""


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
    """For a chat, what the template wrote around the replies (`Continuation.written`). For a
    completion, prompt and reply."""
    tools: list[Any] | None = None
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template in which its requests differ from the run."""
    calls: list[list[Call]] = field(default_factory=list)
    """Tool calls of each reply."""
    routes: np.ndarray | None = None
    """The experts of all tokens, as the last turn used them (`Finished.routes`)."""
    name: str = ""
    """Of the requests' URL: a player or a subagent. Empty: they have none."""
    replies: list[RecordedReply] = field(default_factory=list)

    @property
    def ids(self) -> list[int]:
        """All token ids."""
        return self.prompt + self.tokens

    @property
    def num_sampled(self) -> int:
        """Tokens that the model sampled."""
        return sum(self.mask)


class Match(NamedTuple):
    """What a request continues, and its new ids."""

    segment: Segment | None
    """None: it starts a new one."""
    new_ids: list[int]
    text: str
    """For a chat, what the template wrote around the recorded replies. For a completion, its
    text."""
    positions: tuple[int, ...] = ()
    """Indices of the recorded replies among the chat's messages."""


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
    positions: tuple[int, ...] = ()
    """Indices of the recorded replies among the chat's messages."""
    name: str = ""
    """Of the request."""
    number_of_name: int = 0
    """Number of earlier turns of the episode with this name."""

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
    long_prompts: bool = False
    """Whether a first prompt may take the room of prompt and response together, as others may."""


class _ChatForm(NamedTuple):
    """How the chats of some requests are rendered, and their replies read."""

    chat: ChatTemplate
    template: AppendOnlyTemplate
    reader: ReplyReader


@lru_cache(maxsize=16)
def _chat_form(
    chat: ChatTemplate, end_tokens: tuple[int, ...], read_calls: CallReader | None
) -> _ChatForm:
    """The form of a chat template, which the episodes of a run share."""
    return _ChatForm(chat, AppendOnlyTemplate(chat, end_tokens), ReplyReader(chat, read_calls))


class Recorder:
    """The segments of one episode."""

    def __init__(
        self,
        chat: ChatTemplate,
        end_tokens: tuple[int, ...],
        limits: Limits,
        read_calls: CallReader | None = None,
    ) -> None:
        """read_calls: parses tool calls in replies. None: see `ReplyReader`."""
        self.chat = chat
        self._tokenizer = chat.tokenizer
        self._read_calls = read_calls
        self._ends = end_tokens
        self._limits = limits
        self.segments: list[Segment] = []
        self.num_turns = 0
        """Number of turns that have started."""
        self.id_seed = 0
        """Seed of the ids of replies and calls; see `episodes.ids`."""
        self.turn_of_reply: dict[str, int] = {}
        """Name of a reply (see `name_choices`) -> number of the turn."""
        self._turns_of_name: Counter[str] = Counter()

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer, from transformers."""
        return self._tokenizer

    def begin(self, ask: Ask) -> Turn:
        """Returns the turn of a request, which extends a segment or starts a new one.

        Refusal after max_turns turns, for a new segment unless may_fork is set or there is none
        yet, for unknown token ids, or without room for a reply: the first prompt may have
        max_prompt_tokens, and all tokens after it max_new_tokens. The turn's max_new_tokens is the
        room, or ask.max_tokens if that is less. Counts the turn; nothing else is recorded before
        `finish`. See `begin_choices` for a request with several choices.
        """
        self._refuse_excess_turns(ask.num_choices, ask.model)
        match = self._match_chat(ask) if ask.messages else self._match_completion(ask)
        segment = match.segment
        new_ids = match.new_ids
        is_first = not any(each.name == ask.name for each in self.segments)
        is_first = is_first and not self._limits.long_prompts
        if segment is None and self.segments and not self._limits.may_fork:
            raise Refusal(
                "got a conversation that does not extend the recorded one; expected the earlier "
                "messages as they were; set actor.rollout.episode.segments=all to allow it",
                code="not_append_only",
            )
        self._refuse_unknown_tokens(new_ids)
        room = self._limits.max_new_tokens
        most_tokens = room + self._limits.max_prompt_tokens
        if segment is not None:  # the prompt of a branch may be longer than a first prompt
            room = min(room, most_tokens - len(segment.prompt)) - len(segment.tokens) - len(new_ids)
        elif is_first and len(new_ids) > self._limits.max_prompt_tokens:
            room = self._limits.max_prompt_tokens - len(new_ids)
        else:  # a branch, or a compacted history: its prompt has tokens of earlier turns
            room = min(room, most_tokens - len(new_ids))
        if room < 1 or not new_ids and segment is None:
            raise Refusal(
                f"got a conversation of {len(new_ids) + len(segment.ids if segment else [])} "
                f"tokens, expected room for a reply within data.max_prompt_tokens="
                f"{self._limits.max_prompt_tokens} and actor.rollout.max_new_tokens="
                f"{self._limits.max_new_tokens} after the first prompt",
                code="context_length_exceeded",
            )
        number = self.num_turns
        number_of_name = self._turns_of_name[ask.name]
        self.num_turns += 1
        self._turns_of_name[ask.name] += 1
        max_new_tokens = min(ask.max_tokens or room, room)
        return Turn(
            segment,
            new_ids,
            match.text,
            number,
            max_new_tokens,
            match.positions,
            ask.name,
            number_of_name,
        )

    def begin_choices(self, ask: Ask) -> list[Turn]:
        """Returns the turns of a request's choices: replies to the same prompt.

        Each counts as a turn, with a number of its own. So n choices are the replies to n requests
        with the same messages. Refusal as in `begin`, and for several choices unless may_fork is
        set.
        """
        if ask.num_choices > 1 and not self._limits.may_fork:
            raise Refusal(
                f"n: got {ask.num_choices}, expected 1, because only one conversation of an "
                f"episode is recorded; set actor.rollout.episode.segments=all (or longest) to "
                f"record each choice as a segment",
                code="not_append_only",
            )
        first = self.begin(ask)
        turns = [first]
        for index in range(1, ask.num_choices):
            turns.append(
                first._replace(
                    number=first.number + index, number_of_name=first.number_of_name + index
                )
            )
        self.num_turns += ask.num_choices - 1
        self._turns_of_name[ask.name] += ask.num_choices - 1
        return turns

    def name_choices(self, turns: list[Turn]) -> list[str]:
        """Returns the name of each choice's reply (`ids.reply_name`), and remembers their turns.

        Choice k of several is also known by the name of the first one and ":k".
        """
        names = []
        for turn in turns:
            names.append(reply_name(self.id_seed, turn.number))
        for index, (name, turn) in enumerate(zip(names, turns, strict=True)):
            self.turn_of_reply[name] = turn.number
            if len(turns) > 1:
                self.turn_of_reply[f"{names[0]}:{index}"] = turn.number
        return names

    def reader_of(self, ask: Ask) -> ReplyReader:
        """What reads the replies to a request, whose template arguments may set their form."""
        return self._form_of(ask).reader

    def count_tokens(self, ask: Ask) -> int:
        """Number of tokens of a chat's prompt, encoded from scratch. Records nothing."""
        template = self._form_of(ask).template
        return len(template.ids(template.begin(ask.messages, ask.tools).text))

    def _form_of(self, ask: Ask) -> _ChatForm:
        """How a chat is rendered and read, with its own variables of the chat template."""
        chat = self.chat.with_arguments(ask.template_arguments)
        return _chat_form(chat, self._ends, self._read_calls)

    def stop_of(self, ask: Ask, turn: Turn, response: VersionedResponse) -> str | None:
        """The stop string that ended a response; None if none did."""
        if not ask.stop:
            return None
        (text,) = response_texts(self._tokenizer, [turn.ids], [response.tokens.tolist()])
        positions = []
        for string in ask.stop:
            if string in text:
                positions.append((text.index(string), string))
        return min(positions)[1] if positions else None

    def _refuse_excess_turns(self, num_choices: int, model: str) -> None:
        """Refusal if the episode has not as many turns with the model left."""
        if self.num_turns + num_choices > self._limits.max_turns:
            raise too_many_turns(self.num_turns, self._limits.max_turns, model, num_choices)

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
        (mask True). If another reply has extended the segment meanwhile, this one starts a segment
        whose prompt has the tokens that the model has read.
        """
        tokens = drawn.tokens.tolist()
        reason = "length"
        if ask.ends:
            (end,) = StopStrings(self._tokenizer, ask.ends).first_ends([(turn.ids, tokens, 0)])
            tokens, reason = (tokens[:end], "stop") if end is not None else (tokens, reason)
        size = len(tokens)
        response = drawn
        if size < len(drawn.tokens):
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
        spoken = tokens[:-1] if tokens[-1] in self._ends else tokens
        raw = cut_at_stop(text_with_special(self._tokenizer, spoken), ask.stop)
        said = Sampled(cut_at_stop(text, ask.stop), raw, tokens, turn.ids)
        form = self._form_of(ask)
        message = form.reader.read(said, ask.tools, partial(call_id, self.id_seed, turn.number))
        if message.get("tool_calls"):
            reason = "tool_calls"
        extends = any(each is turn.segment for each in self.segments)
        if extends and turn.segment is not None:
            old = turn.segment
            new_ids = turn.fresh
        else:
            own = form.chat.request_arguments
            old = Segment(turn.ids, tools=ask.tools, template_arguments=own, name=ask.name)
            new_ids = []
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
            old.template_arguments,
            [*old.calls, calls_of(message)],
            routes,
            old.name,
            [*old.replies, self._reply_record(ask, turn, len(old.tokens) + len(new_ids), size)],
        )
        # replaced, never modified: another thread reads it if the episode ends meanwhile
        segments = []
        for entry in self.segments:
            segments.append(new if entry is old else entry)
        self.segments = segments if extends else [*segments, new]
        return message, response, reason

    def _reply_record(self, ask: Ask, turn: Turn, start: int, size: int) -> RecordedReply:
        """The record of a reply whose `size` tokens begin at `start` behind the prompt."""
        stop = start + size
        if not ask.messages:
            return RecordedReply(turn.number, start, stop, (), "")
        positions = (*turn.positions, len(ask.messages))
        return RecordedReply(turn.number, start, stop, positions, turn.text)

    def longest(self) -> Segment | None:
        """The first segment with the most sampled tokens. None: the model has not replied."""
        return max(self.segments, key=lambda segment: segment.num_sampled, default=None)

    def _match_chat(self, ask: Ask) -> Match:
        """Returns the segment that a chat extends, or None, and its new ids.

        A recorded reply fits if its segment has the same name, tools and variables of the chat
        template, and its messages up to the reply are the first messages of the chat. Replies
        behind most messages come first, the newest of several. If it is the last of its segment,
        the chat extends the segment. If not, the chat is a branch: None, and the ids are the
        recorded ones up to the reply and the new ones. If none fits: None, and the ids are those of
        the complete chat. So too if no message follows the reply. Refusal if there is no chat
        template, or if the template changes earlier turns and may_fork is not set.
        """
        if not self._tokenizer.chat_template:
            raise Refusal("got messages, but the tokenizer has no chat template; use completions")
        chat, template, reader = self._form_of(ask)
        for segment, reply in self._replies_of_chats(ask.name):
            size = reply.positions[-1] + 1
            recorded = segment.messages[:size]
            if (segment.tools, segment.template_arguments) != (ask.tools, chat.request_arguments):
                continue
            if not reader.are_equal(recorded, ask.messages[:size]):
                continue
            if len(ask.messages) == size:
                break  # the model would continue its own reply
            try:
                after = template.extend(reply.text, ask.messages, reply.positions, ask.tools)
            except NotAppendOnly as err:
                if self._limits.may_fork:
                    break
                raise Refusal(str(err), code="not_append_only") from err
            new_ids = template.ids_after(segment.tokens[reply.stop - 1], after.text)
            if reply is segment.replies[-1]:
                return Match(segment, new_ids, after.written, reply.positions)
            recorded_ids = segment.prompt + segment.tokens[: reply.stop]
            return Match(None, recorded_ids + new_ids, after.written, reply.positions)
        first = template.begin(ask.messages, ask.tools)
        return Match(None, template.ids(first.text), first.written)

    def _replies_of_chats(self, name: str) -> list[tuple[Segment, RecordedReply]]:
        """All replies of chats with this name: those behind most messages first, of these the
        newest."""
        found = []
        for segment in self.segments:
            if segment.name == name:
                found += [(segment, reply) for reply in segment.replies if reply.positions]
        return sorted(found, key=lambda each: (-each[1].positions[-1], -each[1].turn))

    def _match_completion(self, ask: Ask) -> Match:
        """Returns the segment that a prompt extends, or None, and its new ids.

        A prompt of token ids must begin with the segment's ids. A prompt of text must begin with
        the text of a segment of completions. The longest segment that fits is chosen. None: the new
        ids are those of the complete prompt.
        """
        for segment in sorted(self.segments, key=lambda each: -len(each.ids)):
            if segment.name != ask.name:
                continue
            size = len(segment.ids)
            if isinstance(ask.prompt, list):
                if ask.prompt[:size] == segment.ids:
                    return Match(segment, ask.prompt[size:], segment.text)
            elif not segment.messages and ask.prompt.startswith(segment.text):
                more = ask.prompt[len(segment.text) :]
                return Match(segment, self.chat.ids([more])[0] if more else [], ask.prompt)
        if isinstance(ask.prompt, list):
            return Match(None, ask.prompt, "")
        return Match(None, plain_ids(self._tokenizer, [ask.prompt])[0], ask.prompt)


def too_many_turns(num_turns: int, most: int, model: str, num_choices: int = 1) -> Refusal:
    """The refusal of a request after `num_turns` others to the same model."""
    key = "actor.rollout.episode"
    if model != POLICY:
        key = f"{key}.models.{model}"
    got = f"request {num_turns + 1} of an episode"
    if num_choices > 1:
        got = f"n={num_choices}, which counts as {num_choices} requests, after {num_turns}"
    return Refusal(f"got {got}, expected at most {key}.max_turns={most}", code="max_turns")


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
    for position, is_forced in enumerate(response.notes.forced):
        sampled.append(not is_forced)
        if is_forced:
            log_probs[position] = 0.0
            versions[position] = -1
    return sampled, log_probs, versions
