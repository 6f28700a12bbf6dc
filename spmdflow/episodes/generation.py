"""One reply from a request to its answer: it is generated, recorded, and written.

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

from spmdflow.episodes.ask import Ask, EarlierReply, Reply
from spmdflow.episodes.dialect import NO_EVENT, ApiDialect, EventStream
from spmdflow.episodes.guided import GuidedReplies, after_thought
from spmdflow.episodes.http import ClientLeft, HttpConnection
from spmdflow.episodes.ids import reply_name
from spmdflow.episodes.partial import PartialText
from spmdflow.episodes.recorder import Recorder, Turn
from spmdflow.rollout.resumable import VersionedResponse
from spmdflow.rollout.sampling import Grammar

_SILENCE_SECONDS = 10.0
"""Longest silence of a stream."""


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

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.future: asyncio.Future[VersionedResponse | None] = self._loop.create_future()
        self.tokens: list[int] = []
        """Those so far, if they are asked for."""
        self._changed = asyncio.Event()

    def done(self, drawn: VersionedResponse | None) -> None:
        """See GenerationRequest.done."""
        self._loop.call_soon_threadsafe(self._finish, drawn)

    def fail(self, err: Exception) -> None:
        """See GenerationRequest.fail."""
        self._loop.call_soon_threadsafe(self._fail, err)

    def progress(self, tokens: list[int]) -> None:
        """See GenerationRequest.progress."""
        self._loop.call_soon_threadsafe(self._show, tokens)

    def leave(self) -> None:
        """The client has left: the reply is not waited for. Called in the event loop."""
        self._finish(None)

    async def change(self, seconds: float) -> bool:
        """Waits until there are new tokens or the reply is done; False after this time."""
        try:
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        except TimeoutError:
            return False
        self._changed.clear()
        return True

    def _finish(self, drawn: VersionedResponse | None) -> None:
        if not self.future.done():
            self.future.set_result(drawn)
            self._changed.set()

    def _fail(self, err: Exception) -> None:
        if not self.future.done():
            self.future.set_exception(RequestNotAdded(err))
            self._changed.set()

    def _show(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self._changed.set()


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
        self.past: dict[str, EarlierReply] = {}
        """Id of a reply -> what later requests may continue."""


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
        return dialect.parse(json.loads(body), past=episode.past, warned_fields=self._warned_fields)

    async def reply(
        self,
        episode: RunningEpisode,
        speaker: str,
        dialect: ApiDialect,
        body: bytes,
        http: HttpConnection,
    ) -> None:
        """Has a reply generated and recorded, and writes the answer.

        A GenerationRequest goes to the inbox, and its reply is awaited. ClientLeft, without
        recording, if the request was aborted or the client has disconnected meanwhile. Refusal if
        the request is invalid or does not fit the episode. RequestNotAdded if the generator rejects
        it.
        """
        http.check_client()
        recorder = episode.recorder
        ask = self._guided.with_grammar(self.read(dialect, body, episode))
        if speaker:
            ask = replace(ask, name=speaker)
        turn = recorder.begin(ask)
        pending = PendingReply()
        ids = turn.ids
        visible = self._visible(ask, ids, recorder)
        stream = None
        if ask.stream:
            name = reply_name(recorder.id_seed, turn.number)
            stream = dialect.stream(ask, name=name, num_prompt_tokens=len(ids))
        self._post(
            GenerationRequest(
                number=episode.number,
                name=episode.name,
                ids=ids,
                turn=turn.number,
                speaker=turn.name,
                turn_of_speaker=turn.number_of_name,
                max_new_tokens=turn.max_new_tokens,
                done=pending.done,
                fail=pending.fail,
                stop=ask.ends,
                grammar=after_thought(ask.grammar, turn.text),
                top_log_probs=ask.top_log_probs,
                progress=None if stream is None else pending.progress,
            )
        )
        http.on_leave = pending.leave
        try:
            if stream is not None:
                await self._write_progress(stream, pending, visible, http)
            drawn = await pending.future
        finally:
            http.on_leave = None
            if http.has_left or not pending.future.done():
                self._post(AbandonedRequest(episode.number, episode.name, turn.number))
        http.check_client()
        if drawn is None:
            raise ClientLeft
        reply = self._record(recorder, ask, turn, drawn)
        past = dialect.past_of(ask, reply)
        if past is not None:
            episode.past[past[0]] = past[1]
        if stream is None:
            http.reply(json.dumps(dialect.answer(ask, reply)).encode())
            return
        self._begin_stream(stream, http)
        text = reply.message.get("content") or ""
        if not text.startswith(stream.sent):  # a closing mark made a thought of what was sent
            text = visible.whole_text(reply.drawn.tokens.tolist())
        http.write_part(stream.end(reply, text))
        http.end_stream()

    def _visible(self, ask: Ask, ids: list[int], recorder: Recorder) -> PartialText:
        """What can be shown of the reply to a prompt with these ids."""
        reader = recorder.reader
        return PartialText(
            self._tokenizer,
            ask,
            ids,
            shows_calls=self._guided.style == "qwen_3",
            marks=reader.thought_marks,
            is_open=reader.opens_thought(ids),
        )

    def _record(self, recorder: Recorder, ask: Ask, turn: Turn, drawn: VersionedResponse) -> Reply:
        """Records a response, and returns it as a reply."""
        message, response, reason = recorder.finish(ask, turn, drawn)
        name = reply_name(recorder.id_seed, turn.number)
        recorder.turn_of_reply[name] = turn.number
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
        stream: EventStream,
        pending: PendingReply,
        visible: PartialText,
        http: HttpConnection,
    ) -> None:
        """Writes thought and text of a reply while it is generated; returns when it is complete.

        A comment is written after 10 s without either.
        """
        while not pending.future.done():
            has_news = await pending.change(_SILENCE_SECONDS)
            if pending.future.done():
                return
            self._begin_stream(stream, http)
            if not has_news:
                http.write_part(NO_EVENT)
            shown = visible.of(pending.tokens)
            if shown.thought.startswith(stream.sent_thought):
                http.write_part(stream.add_thought(shown.thought[len(stream.sent_thought) :]))
            if shown.text.startswith(stream.sent):
                http.write_part(stream.add_text(shown.text[len(stream.sent) :]))
            await http.drain()

    def _begin_stream(self, stream: EventStream, http: HttpConnection) -> None:
        """Writes the head of a streamed answer and its first events, unless they were written."""
        if http.may_reply:
            http.begin_stream("text/event-stream")
            http.write_part(stream.begin())
