"""Runs the episodes of one generation replica: the generator is stepped until all have ended.

The replica's first rank has the endpoint and the environments. Before each step it broadcasts which
requests are new and which are aborted, so that all ranks step the same requests. It checks each
request first: an invalid request fails its episode, never the run.
"""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import torch

from spmdflow.config.episode import EpisodeConfig
from spmdflow.data.row_id import seed_of
from spmdflow.datasets.chat import ChatTemplate
from spmdflow.episodes.credit import CreditedSegment, CreditRule, credit_segments
from spmdflow.episodes.endpoint import Endpoint, InboxItem
from spmdflow.episodes.generation import AbandonedRequest, GenerationRequest
from spmdflow.episodes.guided import GuidedReplies
from spmdflow.episodes.pool import EndedEpisode, EnvironmentPool
from spmdflow.episodes.recorder import Call, Limits, Recorder, Segment
from spmdflow.errors import ColumnError, DataError
from spmdflow.parallel.group import broadcast_plain
from spmdflow.rollout.generator import Replica, Request
from spmdflow.rollout.grammar import compile_grammar
from spmdflow.rollout.resumable import ResumableRequests, VersionedResponse
from spmdflow.rollout.sampling import Grammar, Sampling
from spmdflow.rollout.vllm_tools import vllm_call_reader

_IDLE_SECONDS = 1.0
"""Longest wait without a request. Then the other ranks of the replica get a sign of life."""


class SegmentRow(NamedTuple):
    """A segment that is trained. Prompt to routes are as in `Segment`."""

    name: str
    prompt: list[int]
    tokens: list[int]
    mask: list[bool]
    log_probs: list[float]
    versions: list[int]
    calls: list[list[Call]]
    routes: np.ndarray | None
    score: float
    weight: float
    """How much it counts in baselines and losses."""
    rewards: list[float]
    """Of each of the tokens."""


class Episode(NamedTuple):
    """The result of one row's episode."""

    number: int
    scores: dict[str, Any] | None
    """None: it failed, or the environment returned None."""
    cause: str
    """Why it failed. Empty: it did not fail."""
    num_turns: int
    num_segments: int
    prompt: list[int]
    tokens: list[int]
    mask: list[bool]
    log_probs: list[float]
    versions: list[int]
    """-1 where the mask is False."""
    calls: list[list[Call]]
    """Tool calls of each reply."""
    routes: np.ndarray | None = None
    """See `Segment.routes`."""
    segments: tuple[SegmentRow, ...] = ()
    """All its trained segments, in the order of their last replies. Empty if they are not recorded
    (segments is not "all"), and for an episode without a score."""


class EpisodeRunner:
    """Runs episodes. The replica's first rank has endpoint and environments; the others only
    step."""

    def __init__(
        self,
        cfg: EpisodeConfig,
        limits: Limits,
        requests: ResumableRequests,
        *,
        chat: ChatTemplate,
        end_tokens: tuple[int, ...],
        replica: Replica,
    ) -> None:
        """On the first rank, opens the endpoint and starts the worker processes in the
        background."""
        tokenizer = chat.tokenizer
        self._chat = chat
        self._limits = limits
        self._requests = requests
        self._replica = replica
        self._end_tokens = end_tokens
        name = cfg.tool_parser
        self._read_calls = vllm_call_reader(name, tokenizer) if name else None
        self._numbers = count()
        self._seeds_of_episode: dict[int, tuple[Sampling, Callable[[int], int]]] = {}
        """Sampling and seed(turn) of each episode that has started and is not finished."""
        self._leader: _ReplicaLeader | None = None
        if replica.replica_rank == 0:
            pool = EnvironmentPool(cfg)
            own_form = getattr(tokenizer, "response_template", None) or getattr(
                tokenizer, "response_schema", None
            )
            guided = GuidedReplies(requests.is_guided, cfg.tool_parser, bool(own_form))
            endpoint = Endpoint(tokenizer, guided=guided)
            rule = CreditRule(cfg.credit, cfg.credit_discount) if cfg.segments == "all" else None
            self._leader = _ReplicaLeader(pool, endpoint, self._new_recorder, self._check, rule)

    def run(
        self,
        rows: Sequence[dict[str, Any]],
        sampling: Sampling,
        seed_of_turn: Callable[[int, int], int],
        *,
        strict: bool = False,
    ) -> list[Episode]:
        """One episode for each row, in order; the same on all ranks of the replica.

        seed_of_turn(row index, turn): seed of a reply. strict: stop at the first failure; the
        result may then lack later rows.
        """
        numbers = self.begin(rows, sampling, seed_of_turn)
        return self.finish(numbers, greedy=sampling.greedy, strict=strict)

    def begin(
        self,
        rows: Sequence[dict[str, Any]],
        sampling: Sampling,
        seed_of_turn: Callable[[int, int], int],
    ) -> list[int]:
        """Queues one episode per row and returns their numbers, which are equal on all ranks.

        Greedy episodes go to the front of the queue, others to its end. Only the replica's first
        rank runs environments; all ranks must call this with the same arguments. seed_of_turn(row
        index, turn): seed of a reply.
        """
        numbers = [next(self._numbers) for _ in rows]
        for index, number in enumerate(numbers):
            self._seeds_of_episode[number] = sampling, partial(seed_of_turn, index)
        if self._leader:
            self._leader.begin(dict(zip(numbers, rows, strict=True)), first=sampling.greedy)
        return numbers

    def finish(
        self, numbers: Sequence[int], *, greedy: bool = False, strict: bool = False
    ) -> list[Episode]:
        """Steps all episodes until these have ended, and returns their results in order.

        All ranks of the replica call it together and get the same results. Result i has number i.
        strict: stop at the first failure of any episode; results of episodes that have not ended
        are missing. The generator forgets the caches of these conversations.
        """
        leader = self._leader
        self.run_until(
            lambda: leader is None or leader.have_ended(numbers, strict=strict), greedy=greedy
        )
        for number in numbers:
            del self._seeds_of_episode[number]
        self._requests.forget(numbers)
        own_results = None
        if leader:
            own_results = [_to_plain(episode) for episode in leader.take_results(numbers)]
        return [_from_plain(fields) for fields in self._broadcast(own_results)]

    def run_until(self, is_over: Callable[[], bool], *, greedy: bool = False) -> None:
        """Generates replies for the episodes until is_over() is true on the replica's first rank.

        All ranks of the replica call it together. Before each step the first rank broadcasts which
        requests are new or aborted and which episodes have ended; every rank then steps the
        generator. greedy: step greedy episodes, otherwise all others. While those have no requests,
        the other kind is stepped, whose episodes may occupy the worker processes.
        """
        leader = self._leader
        requests = self._requests
        while True:
            steps_greedy = greedy != requests.is_idle(greedy=greedy)
            idle = requests.is_idle(greedy=steps_greedy)
            changes = self._share_changes(
                leader.collect_changes(is_over, idle=idle) if leader else None
            )
            for request in changes.aborted:
                requests.abort(request)
            requests.forget(changes.ended)
            for fields in changes.added:
                request = requests.add(self._request_of_turn(AddedRequest(*fields)))
                if leader:
                    leader.confirm_added(request)
            if changes.done:
                return
            for drawn in (
                () if requests.is_idle(greedy=steps_greedy) else requests.step(greedy=steps_greedy)
            ):
                if leader:
                    leader.deliver(drawn)
            if leader:
                leader.show_progress(requests.tokens_so_far)

    @property
    def num_under_way(self) -> int:
        """Number of episodes that are waiting or running on the first rank; 0 on other ranks."""
        if self._leader:
            return self._leader.num_under_way
        return 0

    def wake(self) -> None:
        """Makes `run_until` check again. Safe in any thread."""
        if self._leader:
            self._leader.wake()

    def close(self) -> None:
        """Ends the worker processes and the endpoint."""
        if self._leader:
            self._leader.close()

    def _request_of_turn(self, added: AddedRequest) -> Request:
        """The generator's request for a turn of an episode."""
        sampling, seed_of = self._seeds_of_episode[added.number]
        return Request(
            prompt=torch.tensor(added.prompt, dtype=torch.int64),
            seed=seed_of(added.turn),
            sampling=replace(
                sampling,
                max_new_tokens=added.max_new_tokens,
                stop=tuple(added.stop),
                grammar=Grammar.of(added.grammar),
                top_log_probs=added.top_log_probs,
            ),
            conversation=added.number,
        )

    def _check(self, draw: GenerationRequest) -> None:
        """Raises the error that adding the request would raise, before any rank receives it.

        ColumnError for no tokens or a token id beyond the vocabulary, ConfigError if it is too
        long.
        """
        request = self._request_of_turn(AddedRequest.of(draw))
        known = range(self._limits.vocab_size)
        foreign = []
        for token in draw.ids:
            if token not in known:
                foreign.append(token)
        if foreign:
            got = f"the token ids {foreign[:3]}"
            expected = f"ids from 0 to {known[-1]}"
            raise ColumnError.of("run_episodes", got, expected, "send ids of the model's tokenizer")
        if request.sampling.grammar is not None:
            compile_grammar(
                request.sampling.grammar,
                tokenizer_path=request.sampling.tokenizer_path,
                vocab_size=self._limits.vocab_size,
                ends=self._end_tokens,
            )
        self._requests.check(request)

    def _new_recorder(self, number: int) -> Recorder:
        """The recorder of an episode. Ids derive from the seed of its first reply."""
        recorder = Recorder(self._chat, self._end_tokens, self._limits, self._read_calls)
        _, seed_of = self._seeds_of_episode[number]
        recorder.id_seed = seed_of(0)
        return recorder

    def _share_changes(self, mine: StepChanges | None) -> StepChanges:
        """The first rank's changes, on every rank of the replica (collective)."""
        return StepChanges(*self._broadcast(mine))

    def _broadcast(self, mine: Any) -> Any:
        """Returns the first rank's value on every rank of the replica (collective).

        mine: a sequence of plain data on the first rank, None on all others. The result is a list,
        except for a replica of one rank, which returns `mine` unchanged.
        """
        if self._replica.size == 1:
            return mine
        group = self._replica.group(self._replica.ranks, "gloo")
        return broadcast_plain(mine if mine is None else list(mine), group)


def _to_plain(episode: Episode) -> tuple[Any, ...]:
    segments: Any = tuple(tuple(each) for each in episode.segments)
    return tuple(episode._replace(segments=segments))


def _from_plain(fields: Sequence[Any]) -> Episode:
    episode = Episode(*fields)
    return episode._replace(segments=tuple(SegmentRow(*each) for each in episode.segments))


class AddedRequest(NamedTuple):
    """A new request as plain data, which every rank of the replica gets."""

    number: int
    """Of the episode."""
    prompt: list[int]
    turn: int
    """What the seed of the reply is derived from."""
    max_new_tokens: int
    stop: list[str]
    grammar: list[str]
    """Its kind and text; empty: none."""
    top_log_probs: int

    @classmethod
    def of(cls, draw: GenerationRequest) -> AddedRequest:
        """The plain data of a request from the endpoint."""
        grammar = draw.grammar
        return cls(
            number=draw.number,
            prompt=draw.ids,
            turn=_turn_of_seed(draw),
            max_new_tokens=draw.max_new_tokens,
            stop=list(draw.stop),
            grammar=[] if grammar is None else [grammar.kind, grammar.text],
            top_log_probs=draw.top_log_probs,
        )


def _turn_of_seed(draw: GenerationRequest) -> int:
    """Return the number that the seed of a reply is derived from.

    Without a name it is the turn's number in the episode. With one it is derived from the name and
    the number of its turn, so that it does not depend on the requests of other names.
    """
    if not draw.speaker:
        return draw.turn
    return seed_of(draw.turn_of_speaker, "speaker", name=draw.speaker)


class StepChanges(NamedTuple):
    """What changes before a step of the generator."""

    added: list[AddedRequest]
    """New requests."""
    aborted: list[int]
    ended: list[int]
    """Episodes that have ended."""
    done: bool


class _ReplicaLeader:
    """The first rank's part of a run: running episodes, their requests, and results."""

    def __init__(
        self,
        pool: EnvironmentPool,
        endpoint: Endpoint,
        new_recorder: Callable[[int], Recorder],
        check: Callable[[GenerationRequest], None],
        rule: CreditRule | None = None,
    ) -> None:
        """new_recorder: called with an episode's number. check: raises an error if a request is
        invalid. rule: rewards of segments; None: only the longest segment of an episode is
        returned."""
        self._rule = rule
        self._pool = pool
        self._endpoint = endpoint
        self._new_recorder = new_recorder
        self._check = check
        self._names: dict[int, str] = {}
        """Running episode -> its id."""
        self._recorders: dict[int, Recorder] = {}
        self._unconfirmed: deque[GenerationRequest] = deque()
        """Requests that were sent to the ranks and not yet added to the generator."""
        self._drawing: dict[int, GenerationRequest] = {}
        """Number in the generator -> the request of the endpoint."""
        self._aborted: list[int] = []
        self._ended: list[int] = []
        self._episodes: dict[int, Episode] = {}
        self._fails = False

    def begin(self, rows: Mapping[int, dict[str, Any]], *, first: bool) -> None:
        """Adds episodes, by number."""
        self._pool.begin(rows, first=first)

    def collect_changes(self, is_over: Callable[[], bool], *, idle: bool) -> StepChanges:
        """Starts waiting episodes; returns new requests, aborted requests and ended episodes.

        Waits up to 1 s for something new if `idle` is set and is_over() is false. A request is
        dropped if its episode has ended, and fails with the error of `check` if it is invalid. Each
        change is returned once. done: is_over() after that.
        """
        self._pool.start_waiting(self._open_episode)
        seconds = _IDLE_SECONDS if idle and not is_over() else 0.0
        new_requests: list[GenerationRequest] = []
        wake = self._endpoint.wake.fileno()
        for ended in self._pool.advance(
            seconds, wake=wake, faults=partial(self._read_inbox, new_requests)
        ):
            self._record_end(ended)
        added = []
        for item in new_requests:
            if self._names.get(item.number) != item.name:
                item.done(None)  # its episode has ended
                continue
            try:
                self._check(item)
            except Exception as err:  # any error fails this episode, not the run
                item.fail(err)
                continue
            self._unconfirmed.append(item)
            added.append(AddedRequest.of(item))
        aborted = self._aborted
        self._aborted = []
        ended_episodes = self._ended
        self._ended = []
        return StepChanges(added, aborted, ended_episodes, is_over())

    def _read_inbox(self, new_requests: list[GenerationRequest]) -> dict[int, str]:
        """Empties the endpoint's inbox: returns running episodes to end -> cause.

        Appends all generation requests to `new_requests`, in order, and aborts those whose clients
        have left.
        """
        with suppress(BlockingIOError):
            self._endpoint.wake.recv(1 << 16)
        causes = {}
        with suppress(queue.Empty):
            while True:
                item: InboxItem = self._endpoint.inbox.get_nowait()
                if isinstance(item, GenerationRequest):
                    new_requests.append(item)
                elif isinstance(item, AbandonedRequest):
                    self._abandon(item, new_requests)
                elif self._names.get(item.number) == item.name:
                    causes[item.number] = item.cause
        return causes

    def _abandon(self, item: AbandonedRequest, new_requests: list[GenerationRequest]) -> None:
        """Aborts the request of a client that has left, wherever it is."""
        for draw in list(new_requests):
            if (draw.number, draw.name, draw.turn) == item:
                new_requests.remove(draw)
        for request, draw in list(self._drawing.items()):
            if (draw.number, draw.name, draw.turn) == item:
                del self._drawing[request]
                self._aborted.append(request)

    def show_progress(self, tokens_so_far: Callable[[list[int]], list[list[int]]]) -> None:
        """Hands the tokens so far of streamed replies to the endpoint.

        tokens_so_far: returns those of requests of the generator, by their numbers.
        """
        streamed = {}
        for request, draw in self._drawing.items():
            if draw.progress is not None:
                streamed[request] = draw.progress
        if not streamed:
            return
        for progress, tokens in zip(streamed.values(), tokens_so_far(list(streamed)), strict=True):
            if tokens:
                progress(tokens)

    def confirm_added(self, request: int) -> None:
        """Records the number that the generator gave to the oldest unconfirmed request."""
        self._drawing[request] = self._unconfirmed.popleft()

    def deliver(self, drawn: VersionedResponse) -> None:
        """Hands a finished response to its client."""
        self._drawing.pop(drawn.id).done(drawn)

    def have_ended(self, numbers: Sequence[int], *, strict: bool) -> bool:
        """Whether these episodes have ended or, if strict is set, any episode has failed."""
        return (strict and self._fails) or self._episodes.keys() >= set(numbers)

    def take_results(self, numbers: Sequence[int]) -> list[Episode]:
        """Removes and returns the results of these episodes; those that have not ended are skipped.

        The number of a result is its episode's index in `numbers`.
        """
        results = []
        for index, n in enumerate(numbers):
            results.append((index, self._episodes.pop(n, None)))
        result = []
        for index, episode in results:
            if episode:
                result.append(episode._replace(number=index))
        return result

    @property
    def num_under_way(self) -> int:
        """Number of episodes that are waiting or running."""
        return self._pool.num_under_way

    def wake(self) -> None:
        """Makes `collect_changes` return. Safe in any thread."""
        self._endpoint.notify()

    def close(self) -> None:
        """Ends the worker processes and the endpoint."""
        self._pool.close()
        self._endpoint.close()

    def _open_episode(self, number: int) -> dict[str, str]:
        """Opens an episode at the endpoint with a new recorder; returns what its environment gets.

        These are base_url, model and api_key. If the episode was open (its process was lost), it is
        closed first and starts from scratch.
        """
        self._close_episode(number)
        self._recorders[number] = self._new_recorder(number)
        self._names[number], arguments = self._endpoint.open(number, self._recorders[number])
        return arguments

    def _close_episode(self, number: int) -> None:
        """Closes an episode at the endpoint and aborts its requests that are in the generator.

        Their clients are told with done(None). Records both for the next `collect_changes`. Does
        nothing if the episode is not open.
        """
        if number in self._names:
            self._endpoint.forget(self._names.pop(number))
            self._ended.append(number)
        for request, draw in list(self._drawing.items()):
            if draw.number == number:
                del self._drawing[request]
                self._aborted.append(request)
                draw.done(None)

    def _record_end(self, ended: EndedEpisode) -> None:
        """Closes an episode that has ended, and stores its result in self._episodes.

        The result has the trained segment with the most sampled tokens, or an empty one. scores is
        None if nothing was sampled. The episode also fails if the scores of its parts do not fit
        what was recorded. A failure is remembered for strict runs.
        """
        self._close_episode(ended.number)
        recorder = self._recorders.pop(ended.number)
        scores = ended.scores if recorder.longest() else None
        cause = ended.cause
        credited: list[CreditedSegment] = []
        if scores is not None and (self._rule is not None or ended.parts):
            rule = self._rule or CreditRule("episode", 1.0)
            try:
                credited = credit_segments(
                    recorder.segments, recorder.turn_of_reply, scores["score"], ended.parts, rule
                )
            except DataError as err:
                cause = str(err)
            if not credited:
                scores = None
        longest = max((x.segment for x in credited), key=lambda x: x.num_sampled, default=None)
        segment = longest or recorder.longest() or Segment([])
        self._fails |= bool(cause)
        self._episodes[ended.number] = Episode(
            ended.number,
            scores,
            cause,
            recorder.num_turns,
            len(recorder.segments),
            segment.prompt,
            segment.tokens,
            segment.mask,
            segment.log_probs,
            segment.versions,
            segment.calls,
            segment.routes,
            tuple(_row_of(each) for each in credited) if self._rule is not None else (),
        )


def _row_of(credited: CreditedSegment) -> SegmentRow:
    segment = credited.segment
    return SegmentRow(
        segment.name,
        segment.prompt,
        segment.tokens,
        segment.mask,
        segment.log_probs,
        segment.versions,
        segment.calls,
        segment.routes,
        credited.score,
        credited.weight,
        credited.rewards,
    )
