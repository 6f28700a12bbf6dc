"""The replies to a request, up to its answer: they are generated, recorded, and written.

The generator belongs to another thread. A GenerationRequest goes there, and its functions bring the
tokens back into the event loop, all at once or, for a stream, as they are drawn.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from spmdflow.datasets.chat import ChatTemplate
from spmdflow.episodes.ask import Ask, Message, Reply, warn_of_ignored
from spmdflow.episodes.dialect import NO_EVENT, ApiDialect, EventStream
from spmdflow.episodes.guided import GuidedReplies, after_thought
from spmdflow.episodes.http import ClientLeft, HttpConnection
from spmdflow.episodes.partial import PartialText
from spmdflow.episodes.recorder import Recorder, Turn
from spmdflow.rollout.resumable import VersionedResponse
from spmdflow.rollout.sampling import Grammar

_SILENCE_SECONDS = 10.0
"""Longest silence of a stream."""
_TOKENS_OF_MARK = 16
"""Tokens at the end of a prompt that may open a thought: at most one for each byte, and a space."""
EFFORT = "reasoning_effort"
"""The variable with which chat templates set how long the model thinks."""


class GenerationRequest(NamedTuple):
    """A request of an episode's client for which a reply must be generated."""

    number: int
    """Number of the episode."""
    name: str
    """Id of the episode."""
    ids: list[int]
    turn: int
    speaker: str
    """Name in the URL. Empty: none."""
    turn_of_speaker: int
    """Number of earlier turns of the episode with this name."""
    max_new_tokens: int
    done: Callable[[VersionedResponse | None], None]
    """Call it, from any thread, with the generated response, or None if it was aborted."""
    fail: Callable[[Exception], None]
    """Call it instead, from any thread, if the request cannot be added."""
    stop: tuple[str, ...] = ()
    grammar: Grammar | None = None
    top_log_probs: int = 0
    progress: Callable[[list[int]], None] | None = None
    """Call it, from any thread, with the tokens so far. None: nobody wants to know."""


class AbandonedRequest(NamedTuple):
    """A GenerationRequest whose client has left."""

    number: int
    name: str
    turn: int


class RequestNotAdded(Exception):
    """The generator rejects a request that the recorder accepted."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(f"the generator rejects it ({type(cause).__name__}: {cause})")


class PendingReply:
    """A reply that is being generated, as the event loop sees it."""

    def __init__(self, changed: asyncio.Event) -> None:
        """changed: set when there are new tokens, or the reply is done."""
        self._loop = asyncio.get_running_loop()
        self.future: asyncio.Future[VersionedResponse | None] = self._loop.create_future()
        self.tokens: list[int] = []
        """Those so far, if they are asked for."""
        self.is_new = False
        """Whether the tokens have changed since a reader has set this to False."""
        self._changed = changed

    def done(self, drawn: VersionedResponse | None) -> None:
        """See GenerationRequest.done."""
        self._loop.call_soon_threadsafe(self.finish, drawn)

    def fail(self, err: Exception) -> None:
        """See GenerationRequest.fail."""
        self._loop.call_soon_threadsafe(self._fail, err)

    def progress(self, tokens: list[int]) -> None:
        """See GenerationRequest.progress."""
        self._loop.call_soon_threadsafe(self._show, tokens)

    def finish(self, drawn: VersionedResponse | None) -> None:
        """Ends the reply, unless it has ended; None: it was aborted. Called in the event loop."""
        if not self.future.done():
            self.future.set_result(drawn)
            self._changed.set()

    def _fail(self, err: Exception) -> None:
        if not self.future.done():
            self.future.set_exception(RequestNotAdded(err))
            self.future.exception()  # of several choices only one failure is awaited
            self._changed.set()

    def _show(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self.is_new = True
        self._changed.set()


class PendingChoices:
    """The replies to one request that are being generated."""

    def __init__(self, count: int) -> None:
        self._changed = asyncio.Event()
        self.replies: list[PendingReply] = []
        for _ in range(count):
            self.replies.append(PendingReply(self._changed))

    def have_ended(self) -> bool:
        """Whether all replies have ended."""
        return all(reply.future.done() for reply in self.replies)

    def leave(self) -> None:
        """The client has left: the replies are not waited for. Called in the event loop."""
        for reply in self.replies:
            reply.finish(None)

    async def drawn(self) -> list[VersionedResponse]:
        """Waits for all responses. ClientLeft if one was aborted, RequestNotAdded if one cannot
        be generated."""
        result = []
        for reply in self.replies:
            response = await reply.future
            if response is None:
                raise ClientLeft
            result.append(response)
        return result

    async def change(self, seconds: float) -> bool:
        """Waits until there are new tokens or a reply is done; False after this time."""
        try:
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        except TimeoutError:
            return False
        self._changed.clear()
        return True


class RunningEpisode:
    """The endpoint's state of an episode: its key, its recorder and its numbers of requests."""

    def __init__(self, number: int, name: str, recorder: Recorder) -> None:
        """name: id of the episode. The key is drawn at random."""
        self.number = number
        self.name = name
        self.recorder = recorder
        self.key = secrets.token_urlsafe(24)
        self.under_way = 0
        self.refused = 0
        self.past: dict[str, list[Message]] = {}
        """Id of a reply -> the messages up to it, where later requests may refer to it."""


class ReplyGenerator:
    """Has replies generated. Used only in the endpoint's thread."""

    def __init__(
        self,
        tokenizer: Any,
        guided: GuidedReplies,
        post: Callable[[GenerationRequest | AbandonedRequest], None],
    ) -> None:
        """tokenizer: from transformers. post: hands a request to the generator's thread."""
        self._tokenizer = tokenizer
        self._guided = guided
        self._post = post
        self._warned_fields: set[str] = set()

    def read(self, dialect: ApiDialect, body: bytes, episode: RunningEpisode) -> Ask:
        """The request in its internal form. Refusal if it cannot be met."""
        warned = self._warned_fields
        ask = dialect.parse(json.loads(body), past=episode.past, warned_fields=warned)
        return self._with_template_arguments(ask, episode.recorder.chat)

    def _with_template_arguments(self, ask: Ask, chat: ChatTemplate) -> Ask:
        """The request with reasoning_effort as a variable of the chat template that reads it.

        Logs a warning, once for each name, for variables that the template does not read.
        """
        if ask.template_arguments is None and ask.reasoning_effort is None:
            return ask
        arguments = dict(ask.template_arguments or {})
        if ask.reasoning_effort is not None:
            if chat.reads(EFFORT):
                arguments.setdefault(EFFORT, ask.reasoning_effort)
            else:
                warn_of_ignored({EFFORT: ask.reasoning_effort}, set(), self._warned_fields)
        for name in arguments:
            if not chat.reads(name):
                warn_of_ignored({f"chat_template_kwargs.{name}": 0}, set(), self._warned_fields)
        return replace(ask, template_arguments=arguments or None)

    async def reply(
        self,
        episode: RunningEpisode,
        speaker: str,
        dialect: ApiDialect,
        body: bytes,
        http: HttpConnection,
    ) -> None:
        """Has the replies to a request generated and recorded, and writes the answer.

        A GenerationRequest for each choice goes to the inbox, and all replies are awaited.
        ClientLeft, without recording, if the request was aborted or the client has disconnected
        meanwhile. Refusal if the request is invalid or does not fit the episode. RequestNotAdded if
        the generator rejects it.
        """
        http.check_client()
        recorder = episode.recorder
        ask = self._guided.with_grammar(self.read(dialect, body, episode))
        if speaker:
            ask = replace(ask, name=speaker)
        turns = recorder.begin_choices(ask)
        names = recorder.name_choices(turns)
        choices = PendingChoices(ask.num_choices)
        streams: list[EventStream] = []
        if ask.stream:
            num_tokens = len(turns[0].ids)
            streams = dialect.stream_choices(ask, name=names[0], num_prompt_tokens=num_tokens)
        grammar = ask.grammar
        if grammar is not None:
            end_of_prompt = self._tokenizer.decode(turns[0].ids[-_TOKENS_OF_MARK:])
            grammar = after_thought(grammar, end_of_prompt)
        for turn, pending in zip(turns, choices.replies, strict=True):
            self._post(_request_of(episode, ask, turn, pending, grammar))
        http.on_leave = choices.leave
        try:
            if streams:
                await self._write_progress(streams, choices, ask, turns[0].ids, http)
            drawn = await choices.drawn()
        finally:
            http.on_leave = None
            for turn, pending in zip(turns, choices.replies, strict=True):
                if http.has_left or not pending.future.done():
                    self._post(AbandonedRequest(episode.number, episode.name, turn.number))
        http.check_client()
        replies = []
        for name, turn, response in zip(names, turns, drawn, strict=True):
            replies.append(self._record(recorder, ask, turn, response, name))
        past = dialect.past_of(ask, replies[0])
        if past is not None:
            episode.past[past[0]] = past[1]
        if not streams:
            http.reply(json.dumps(dialect.answer_choices(ask, replies)).encode())
            return
        self._begin_stream(streams[0], http)
        for stream, reply in zip(streams, replies, strict=True):
            http.write_part(stream.end(reply))
        http.write_part(streams[0].close(replies))
        http.end_stream()

    def _record(
        self, recorder: Recorder, ask: Ask, turn: Turn, drawn: VersionedResponse, name: str
    ) -> Reply:
        """Records a response, and returns it as a reply with this name."""
        message, response, reason = recorder.finish(ask, turn, drawn)
        pieces: list[str] = []
        top_pieces: list[tuple[str, ...]] = []
        decode = self._tokenizer.decode
        if ask.log_probs:
            pieces = [decode([token]) for token in response.tokens.tolist()]
        if ask.top_log_probs and response.notes is not None:
            for entries in response.notes.likeliest:
                top_pieces.append(tuple(decode([token]) for token, _ in entries))
        return Reply(
            name,
            message,
            reason,
            turn.ids,
            response,
            pieces,
            recorder.stop_of(ask, turn, response),
            tuple(top_pieces),
        )

    async def _write_progress(
        self,
        streams: list[EventStream],
        choices: PendingChoices,
        ask: Ask,
        ids: list[int],
        http: HttpConnection,
    ) -> None:
        """Writes the text of replies while they are generated; returns when all are complete.

        A comment is written after 10 s without text. ids: those of the prompt.
        """
        shows_calls = self._guided.style == "qwen_3"
        visible = []
        for _ in streams:
            visible.append(PartialText(self._tokenizer, ask, ids, shows_calls=shows_calls))
        while not choices.have_ended():
            has_news = await choices.change(_SILENCE_SECONDS)
            if choices.have_ended():
                return
            self._begin_stream(streams[0], http)
            if not has_news:
                http.write_part(NO_EVENT)
            for stream, pending, text_of in zip(streams, choices.replies, visible, strict=True):
                if not pending.is_new:
                    continue
                pending.is_new = False
                text = text_of.of(pending.tokens)
                if text.startswith(stream.sent):
                    http.write_part(stream.add_text(text[len(stream.sent) :]))
            await http.drain()

    def _begin_stream(self, stream: EventStream, http: HttpConnection) -> None:
        """Writes the head of a streamed answer and its first events, unless they were written."""
        if http.may_reply:
            http.begin_stream("text/event-stream")
            http.write_part(stream.begin())


def _request_of(
    episode: RunningEpisode,
    ask: Ask,
    turn: Turn,
    pending: PendingReply,
    grammar: Grammar | None,
) -> GenerationRequest:
    """The request for the reply of a turn."""
    return GenerationRequest(
        number=episode.number,
        name=episode.name,
        ids=turn.ids,
        turn=turn.number,
        speaker=turn.name,
        turn_of_speaker=turn.number_of_name,
        max_new_tokens=turn.max_new_tokens,
        done=pending.done,
        fail=pending.fail,
        stop=ask.ends,
        grammar=grammar,
        top_log_probs=ask.top_log_probs,
        progress=pending.progress if ask.stream else None,
    )
