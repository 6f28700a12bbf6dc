"""Answers one request of a client: its replies are generated, recorded and written."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from spmdflow.config.episode_models import EpisodeModel, ServerModel
from spmdflow.data.row_id import seed_of
from spmdflow.datasets.chat import ChatTemplate
from spmdflow.episodes.ask import Ask, EarlierReply, Refusal, Reply, warn_of_ignored
from spmdflow.episodes.dialect import NO_EVENT, ApiDialect, EventStream
from spmdflow.episodes.guided import GuidedReplies, after_thought
from spmdflow.episodes.http import ClientLeft, HttpConnection
from spmdflow.episodes.ids import reply_name
from spmdflow.episodes.named_model import NamedModels, OwnSampling, take_sampling
from spmdflow.episodes.partial import PartialText
from spmdflow.episodes.pending import (
    AbandonedRequest,
    GenerationRequest,
    LoopCalls,
    PendingChoices,
    PendingReply,
)
from spmdflow.episodes.recorder import Limits, Recorder, Turn, too_many_turns
from spmdflow.episodes.server_call import ServerCalls
from spmdflow.rollout.resumable import VersionedResponse
from spmdflow.rollout.sampling import Grammar

_SILENCE_SECONDS = 10.0
"""Longest silence of a stream."""
_TOKENS_OF_MARK = 16
"""Tokens at the end of a prompt that may open a thought: at most one for each byte, and a space."""
EFFORT = "reasoning_effort"
"""The variable with which chat templates set how long the model thinks."""


class ModelRequest(NamedTuple):
    """A request, and the model that it names."""

    ask: Ask
    model: EpisodeModel | None
    """None: the policy."""
    sampling: OwnSampling | None
    """None for the policy."""


class OtherModels(NamedTuple):
    """What an episode needs for models that are not the policy. Nothing of them is trained."""

    new_recorder: Callable[[EpisodeModel], Recorder]
    """Makes the recorder of a model with frozen weights."""
    limits_of: Callable[[EpisodeModel], Limits]


@dataclass
class ModelUse:
    """How often an episode used a model."""

    requests: int = 0
    failed: int = 0
    """Requests that were refused: a server failed, weights are missing, a limit is reached."""
    tokens: int = 0
    """Of its replies."""


class RunningEpisode:
    """The endpoint's state of an episode: its key, its recorders and its numbers of requests."""

    def __init__(
        self,
        number: int,
        name: str,
        recorder: Recorder,
        others: OtherModels | None = None,
    ) -> None:
        """name: id of the episode. others: what it needs for models that are not the policy. The
        key is drawn at random."""
        self.number = number
        self.name = name
        self.recorder = recorder
        self.key = secrets.token_urlsafe(24)
        self.under_way = 0
        self.refused = 0
        self.past: dict[str, EarlierReply] = {}
        """Id of a reply -> what later requests may continue."""
        self.uses: dict[str, ModelUse] = {}
        """How often models other than the policy were used, by name."""
        self.calls: set[asyncio.Task[Any]] = set()
        """Requests to servers outside of the run that are under way."""
        self._others = others
        self._recorders: dict[str, Recorder] = {}

    def recorder_of(self, model: EpisodeModel | None) -> Recorder:
        """The recorder of a model; None: the policy. Made for its first request."""
        if model is None:
            return self.recorder
        if model.name not in self._recorders:
            assert self._others is not None, "models are set up"
            self._recorders[model.name] = self._others.new_recorder(model)
        return self._recorders[model.name]

    def limits_of(self, model: EpisodeModel) -> Limits:
        """The limits of this episode with a model that is not the policy."""
        assert self._others is not None, "models are set up"
        return self._others.limits_of(model)

    def use_of(self, model: EpisodeModel) -> ModelUse:
        """The numbers of a model, which may be changed."""
        return self.uses.setdefault(model.name, ModelUse())


class ReplyGenerator:
    """Has replies generated. Used only in the endpoint's thread."""

    def __init__(
        self,
        guided: GuidedReplies,
        post: Callable[[GenerationRequest | AbandonedRequest], None],
        models: NamedModels,
        servers: ServerCalls,
        calls: LoopCalls,
    ) -> None:
        """post: hands a request to the generator's thread. models: those besides the policy.
        servers: calls those that run outside. calls: of the generator's thread, with replies."""
        self.models = models
        self._servers = servers
        self._guided = guided
        self._post = post
        self._calls = calls
        self._warned_fields: set[str] = set()

    def read(self, dialect: ApiDialect, body: bytes, episode: RunningEpisode) -> ModelRequest:
        """The request in its internal form, and the model that it names. Refusal if it cannot be
        met."""
        fields = json.loads(body)
        model = None
        sampling = None
        if isinstance(fields, dict):
            model = self.models.find(fields.get("model"))
        if model is not None:
            fields, sampling = take_sampling(fields)
        ask = dialect.parse(fields, past=episode.past, warned_fields=self._warned_fields)
        if model is not None:
            ask = ask._replace(model=model.name)
        return ModelRequest(ask, model, sampling)

    def count_tokens(self, dialect: ApiDialect, body: bytes, episode: RunningEpisode) -> int:
        """Number of tokens of a request's prompt. Refusal if the model runs on a server."""
        request = self.read(dialect, body, episode)
        if isinstance(request.model, ServerModel):
            raise Refusal(
                f"count_tokens: got the model {request.model.name!r}, expected one whose tokenizer "
                f"the run has; ask its server"
            )
        recorder = episode.recorder_of(request.model)
        return recorder.count_tokens(self._with_template_arguments(request.ask, recorder.chat))

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
        return ask._replace(template_arguments=arguments or None)

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
        request = self.read(dialect, body, episode)
        model = request.model
        if speaker:
            request = request._replace(ask=request.ask._replace(name=speaker))
        if model is None:
            await self._generate(episode, request, dialect, http)
            return
        use = episode.use_of(model)
        use.requests += 1
        try:
            await self.models.wait_until_sealed(model)
            if isinstance(model, ServerModel):
                await self._call(episode, model, request, dialect, http)
            else:
                await self._generate(episode, request, dialect, http)
        except Refusal:
            use.failed += 1
            raise

    async def _generate(
        self,
        episode: RunningEpisode,
        request: ModelRequest,
        dialect: ApiDialect,
        http: HttpConnection,
    ) -> None:
        """Has a generator of this run reply, once for each choice, and writes the answer."""
        recorder = episode.recorder_of(request.model)
        ask = self._with_template_arguments(request.ask, recorder.chat)
        request = request._replace(ask=self._guided.with_grammar(ask))
        ask = request.ask
        turns = recorder.begin_choices(ask)
        names = recorder.name_choices(turns)
        choices = PendingChoices(self._calls, ask.num_choices)
        ids = turns[0].ids
        streams: list[EventStream] = []
        visible: PartialText | None = None
        if ask.stream:
            visible = self._visible(ask, ids, recorder)
            streams = dialect.stream_choices(ask, name=names[0], num_prompt_tokens=len(ids))
        grammar = ask.grammar
        if grammar is not None:
            end_of_prompt = recorder.tokenizer.decode(ids[-_TOKENS_OF_MARK:])
            grammar = after_thought(grammar, end_of_prompt)
        for turn, pending in zip(turns, choices.replies, strict=True):
            self._post(_generation_request(episode, request, turn, pending, grammar))
        http.on_leave = choices.leave
        try:
            if visible is not None:
                await self._write_progress(streams, choices, visible, http)
            drawn = await choices.wait_for_all()
        finally:
            http.on_leave = None
            for turn, pending in zip(turns, choices.replies, strict=True):
                if http.has_left or not pending.future.done():
                    self._post(
                        AbandonedRequest(episode.number, episode.name, turn.number, ask.model)
                    )
        http.check_client()
        replies = []
        for name, turn, response in zip(names, turns, drawn, strict=True):
            replies.append(self._record(recorder, ask, turn, response, name))
        self._answer(episode, request, replies, streams, dialect, http, visible=visible)

    async def _call(
        self,
        episode: RunningEpisode,
        model: ServerModel,
        request: ModelRequest,
        dialect: ApiDialect,
        http: HttpConnection,
    ) -> None:
        """Has a server outside of the run reply, and writes the answer.

        ClientLeft if the client or the episode has gone meanwhile. Refusal for several choices.
        """
        ask = request.ask
        if ask.num_choices > 1:
            raise Refusal(
                f"n: got {ask.num_choices} for the model {model.name!r}, which is on a server, "
                f"expected 1; send several requests"
            )
        limits = episode.limits_of(model)
        number = episode.use_of(model).requests - 1
        if number >= limits.max_turns:
            raise too_many_turns(number, limits.max_turns, model.name)
        name = reply_name(seed_of(episode.recorder.id_seed, "model", name=model.name), number)
        most = min(ask.max_tokens or limits.max_new_tokens, limits.max_new_tokens)
        stream = None
        if ask.stream:
            stream = dialect.stream(ask, name=name, num_prompt_tokens=0)
        call = asyncio.ensure_future(
            self._servers.reply(
                model, ask, request.sampling or OwnSampling(), name=name, max_new_tokens=most
            )
        )
        episode.calls.add(call)

        def leave() -> None:
            call.cancel()

        http.on_leave = leave
        try:
            while stream is not None and not call.done():
                await asyncio.wait([call], timeout=_SILENCE_SECONDS)
                if not call.done():
                    self._begin_stream(stream, http)
                    http.write_part(NO_EVENT)
                    await http.drain()
            await asyncio.wait([call])
        finally:
            http.on_leave = None
            episode.calls.discard(call)
            call.cancel()
        http.check_client()
        if call.cancelled():
            raise ClientLeft
        streams = [] if stream is None else [stream]
        self._answer(episode, request, [call.result()], streams, dialect, http)

    def _answer(
        self,
        episode: RunningEpisode,
        request: ModelRequest,
        replies: list[Reply],
        streams: list[EventStream],
        dialect: ApiDialect,
        http: HttpConnection,
        *,
        visible: PartialText | None = None,
    ) -> None:
        """Writes the answer, or the end of its streams, and remembers what later requests may refer
        to. The tokens of a model that is not the policy are counted.

        visible: what wrote to the streams; None: nothing has been written.
        """
        ask = request.ask
        if request.model is not None:
            episode.use_of(request.model).tokens += sum(reply.num_tokens for reply in replies)
        past = dialect.past_of(ask, replies[0])
        if past is not None:
            episode.past[past[0]] = past[1]
        if not streams:
            http.reply(json.dumps(dialect.answer_choices(ask, replies)).encode())
            return
        self._begin_stream(streams[0], http)
        for stream, reply in zip(streams, replies, strict=True):
            text = reply.message.get("content") or ""
            if visible is not None and not text.startswith(stream.sent):
                # a closing mark made a thought of what was sent
                text = visible.whole_text(reply.drawn.tokens.tolist())
            http.write_part(stream.end(reply, text))
        http.write_part(streams[0].close(replies))
        http.end_stream()

    def _visible(self, ask: Ask, ids: list[int], recorder: Recorder) -> PartialText:
        """What can be shown of replies to a prompt with these ids."""
        reader = recorder.reader_of(ask)
        return PartialText(
            recorder.tokenizer,
            ask,
            ids,
            shows_calls=self._guided.style == "qwen_3",
            marks=reader.thought_marks,
            is_open=reader.opens_thought(ids),
        )

    def _record(
        self, recorder: Recorder, ask: Ask, turn: Turn, drawn: VersionedResponse, name: str
    ) -> Reply:
        """Records a response, and returns it as a reply with this name."""
        message, response, reason = recorder.finish(ask, turn, drawn)
        pieces: list[str] = []
        top_pieces: list[tuple[str, ...]] = []
        decode = recorder.tokenizer.decode
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
        visible: PartialText,
        http: HttpConnection,
    ) -> None:
        """Writes thoughts and texts of replies while they are generated; returns when all are
        complete.

        A comment is written after 10 s without either.
        """
        while not choices.have_ended():
            has_news = await choices.change(_SILENCE_SECONDS)
            if choices.have_ended():
                return
            self._begin_stream(streams[0], http)
            if not has_news:
                http.write_part(NO_EVENT)
            for stream, pending in zip(streams, choices.replies, strict=True):
                if not pending.is_new:
                    continue
                pending.is_new = False
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


def _generation_request(
    episode: RunningEpisode,
    request: ModelRequest,
    turn: Turn,
    pending: PendingReply,
    grammar: Grammar | None,
) -> GenerationRequest:
    """The request for the reply of a turn."""
    ask = request.ask
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
        model=ask.model,
        sampling=request.sampling,
    )
