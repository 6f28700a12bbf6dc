"""The first rank of a replica: running episodes, their requests, and their results."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from spmdflow.config.episode_models import POLICY
from spmdflow.data.row_id import seed_of
from spmdflow.episodes.credit import CreditedSegment, CreditRule, credit_segments
from spmdflow.episodes.endpoint import Endpoint
from spmdflow.episodes.frozen import FrozenModels
from spmdflow.episodes.generation import ModelUse, OtherModels
from spmdflow.episodes.judgement import EPISODES
from spmdflow.episodes.judging import describe_episode, judged_scores
from spmdflow.episodes.pending import AbandonedRequest, GenerationRequest
from spmdflow.episodes.pool import EndedEpisode, EnvironmentPool
from spmdflow.episodes.recorder import Recorder, Segment
from spmdflow.episodes.result import Episode, row_of
from spmdflow.errors import DataError
from spmdflow.rollout.resumable import VersionedResponse

_IDLE_SECONDS = 1.0
"""Longest wait without a request. Then the other ranks of the replica get a sign of life."""


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
            turn=turn_of_seed(draw),
            max_new_tokens=draw.max_new_tokens,
            stop=list(draw.stop),
            grammar=[] if grammar is None else [grammar.kind, grammar.text],
            top_log_probs=draw.top_log_probs,
        )


def turn_of_seed(draw: GenerationRequest) -> int:
    """Return the number that the seed of a reply is derived from.

    Without a name it is the turn's number in the episode, of those with the same model. With one it
    is derived from the name and the number of its turn, so that it does not depend on the requests
    of other names.
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


class ReplicaLeader:
    """The first rank's part of a run: running episodes, their requests, and results."""

    def __init__(
        self,
        pool: EnvironmentPool,
        endpoint: Endpoint,
        new_recorder: Callable[[int], Recorder],
        check: Callable[[GenerationRequest], None],
        rule: CreditRule | None = None,
        frozen: FrozenModels | None = None,
        others: Callable[[int], OtherModels] | None = None,
        *,
        has_judge: bool = False,
    ) -> None:
        """new_recorder: called with an episode's number. check: raises an error if a request is
        invalid. rule: rewards of segments; None: only the longest segment of an episode is
        returned. frozen: models with frozen weights. others: what the episode of a number needs for
        models that are not the policy. None: there are none. has_judge: keep what a judge needs of
        episodes that have ended."""
        self._rule = rule
        self._frozen = frozen
        self._others = others
        self._uses: dict[int, dict[str, ModelUse]] = {}
        """Of closed episodes that have not been recorded: how they used other models."""
        self._has_judge = has_judge
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
        self._rows: dict[int, dict[str, Any]] = {}
        """Row of each episode, if there is a judge."""
        self._ends: dict[int, tuple[EndedEpisode, Recorder]] = {}
        """Episodes that have ended, and may still be judged."""
        self._judged: dict[int, EndedEpisode | None] = {}
        """Calls of the judge, by number; None: it has not returned."""

    def begin(self, rows: Mapping[int, dict[str, Any]], *, first: bool) -> None:
        """Adds episodes, by number."""
        if self._has_judge:
            self._rows |= rows
        self._pool.begin(rows, first=first)

    @property
    def has_failed(self) -> bool:
        """Whether any episode has failed."""
        return self._fails

    def id_seed_of(self, number: int) -> int:
        """The seed from which the ids of an ended episode derive. Only if there is a judge."""
        return self._ends[number][1].id_seed

    def describe(self, number: int) -> dict[str, Any]:
        """What a judge gets of an ended episode."""
        recorder = self._ends[number][1]
        return describe_episode(self._rows[number], self._episodes[number], recorder)

    def begin_judges(self, groups: Mapping[int, list[dict[str, Any]]]) -> None:
        """Calls the judge for groups of episodes (`describe`), by number, before other episodes."""
        self._judged |= dict.fromkeys(groups)
        rows = {number: {EPISODES: episodes} for number, episodes in groups.items()}
        self._pool.begin(rows, first=True, judge=True)

    def have_judged(self, numbers: Sequence[int]) -> bool:
        """Whether the judge has returned for all of these groups."""
        return all(self._judged[number] is not None for number in numbers)

    def take_judgement(self, number: int) -> tuple[dict[str, float] | None, str]:
        """Removes and returns what the judge returned (`pack_scores`), or None and the cause."""
        ended = self._judged.pop(number)
        assert ended is not None, number
        return ended.scores, ended.cause

    def set_scores(self, number: int, judged: dict[str, float] | None, cause: str) -> None:
        """Gives an ended episode the scores of the judge, unless it has none of its own.

        None: it is omitted, or failed with this cause, if there is one.
        """
        ended, recorder = self._ends[number]
        episode = self._episodes[number]
        if episode.scores is None:
            return
        assert ended.scores is not None, "its result has scores"
        scores = judged_scores(ended.scores, judged)
        self._store(ended._replace(scores=scores, cause=cause), recorder, episode.uses)

    def collect_changes(self, is_over: Callable[[], bool], *, idle: bool) -> StepChanges:
        """Starts waiting episodes; returns new requests, aborted requests and ended episodes.

        Waits up to 1 s for something new if `idle` is set and is_over() is false. A request is
        dropped if its episode has ended, and fails with the error of `check` if it is invalid. Each
        change is returned once. done: is_over() after that.
        """
        self._pool.start_waiting(self._open_episode)
        is_idle = idle and (self._frozen is None or self._frozen.is_idle)
        seconds = _IDLE_SECONDS if is_idle and not is_over() else 0.0
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
            if item.model != POLICY:
                assert self._frozen is not None, item.model
                self._frozen.add(item)
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
        if self._frozen is not None:
            self._frozen.end_episodes(ended_episodes)
        return StepChanges(added, aborted, ended_episodes, is_over())

    def _read_inbox(self, new_requests: list[GenerationRequest]) -> dict[int, str]:
        """Empties the endpoint's inbox: returns running episodes to end -> cause.

        Appends all generation requests to `new_requests`, in order, and aborts those whose clients
        have left.
        """
        causes = {}
        for item in self._endpoint.take_all():
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
            if draw.identity == item:
                new_requests.remove(draw)
        if item.model != POLICY:
            assert self._frozen is not None, item.model
            self._frozen.abandon(item)
            return
        for request, draw in list(self._drawing.items()):
            if draw.identity == item:
                del self._drawing[request]
                self._aborted.append(request)

    def step_frozen(self) -> None:
        """Draws a few tokens for the requests to models with frozen weights."""
        if self._frozen is not None:
            self._frozen.step()

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
            self._ends.pop(n, None)
            self._rows.pop(n, None)
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

    def sleep(self) -> None:
        """Frees the caches of models with frozen weights."""
        if self._frozen is not None:
            self._frozen.sleep()

    def close(self) -> None:
        """Ends the worker processes, the endpoint, and models with frozen weights."""
        self._pool.close()
        self._endpoint.close()
        if self._frozen is not None:
            self._frozen.close()

    def _open_episode(self, number: int) -> dict[str, str]:
        """Opens an episode at the endpoint with a new recorder; returns what its environment gets.

        These are base_url, model and api_key. If the episode was open (its process was lost), it is
        closed first and starts from scratch.
        """
        self._close_episode(number)
        self._recorders[number] = self._new_recorder(number)
        others = None if self._others is None else self._others(number)
        self._names[number], arguments = self._endpoint.open(
            number, self._recorders[number], others
        )
        return arguments

    def _close_episode(self, number: int) -> None:
        """Closes an episode at the endpoint and aborts its requests that are in the generator.

        Their clients are told with done(None). Records both for the next `collect_changes`. Does
        nothing if the episode is not open.
        """
        if number in self._names:
            self._uses[number] = self._endpoint.forget(self._names.pop(number))
            self._ended.append(number)
        for request, draw in list(self._drawing.items()):
            if draw.number == number:
                del self._drawing[request]
                self._aborted.append(request)
                draw.done(None)

    def _record_end(self, ended: EndedEpisode) -> None:
        """Closes an episode that has ended, and stores its result, or that of a judge."""
        self._close_episode(ended.number)
        recorder = self._recorders.pop(ended.number)
        uses = {}
        for model, use in self._uses.pop(ended.number, {}).items():
            uses[model] = [use.requests, use.failed, use.tokens]
        if ended.number in self._judged:
            self._judged[ended.number] = ended
            return
        if self._has_judge:
            self._ends[ended.number] = ended, recorder
        self._store(ended, recorder, uses)

    def _store(
        self, ended: EndedEpisode, recorder: Recorder, uses: Mapping[str, list[int]]
    ) -> None:
        """Stores the result of an episode in self._episodes.

        The result has the trained segment with the most sampled tokens, or an empty one. scores is
        None if nothing was sampled. The episode also fails if the scores of its parts do not fit
        what was recorded. A failure is remembered for strict runs. uses: see `Episode`.
        """
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
            tuple(row_of(each) for each in credited) if self._rule is not None else (),
            uses,
        )
