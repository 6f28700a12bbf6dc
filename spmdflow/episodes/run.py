"""Runs the episodes of one generation replica: the generator is stepped until all have ended.

The replica's first rank has the endpoint and the environments. Before each step it tells the other
ranks which requests are new and which are aborted, so that all step the same requests. It checks
each request first: whatever is wrong with one fails its episode, never the run.
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

import torch

from spmdflow.config.episode import EpisodeConfig
from spmdflow.datasets.chat import ChatTemplate
from spmdflow.episodes.endpoint import Draw, Endpoint, EpisodeFault
from spmdflow.episodes.pool import Ended, EnvironmentPool
from spmdflow.episodes.recorder import Call, Limits, Recorder, Segment
from spmdflow.errors import ColumnError
from spmdflow.parallel.group import broadcast_plain
from spmdflow.rollout.generator import Replica, Request
from spmdflow.rollout.resumable import ResumableRequests, VersionedResponse
from spmdflow.rollout.sampling import Sampling
from spmdflow.rollout.vllm_tools import vllm_call_reader

_IDLE_SECONDS = 1.0
"""Longest wait without a request; then the other ranks of the replica hear that all is well."""


class Episode(NamedTuple):
    """What became of a row."""

    number: int
    scores: dict[str, Any] | None
    """None: it failed or was left out."""
    cause: str
    """Why it failed; empty: it did not."""
    num_turns: int
    num_segments: int
    prompt: list[int]
    tokens: list[int]
    mask: list[bool]
    log_probs: list[float]
    versions: list[int]
    """-1 where the mask is False."""
    calls: list[list[Call]]
    """Of tools, in each reply."""


class EpisodeRunner:
    """Environments and endpoint of a replica's first rank; the other ranks only step."""

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
        """Worker processes start in the background."""
        tokenizer = chat.tokenizer
        self._chat = chat
        self._limits = limits
        self._requests = requests
        self._replica = replica
        self._end_tokens = end_tokens
        name = cfg.tool_parser
        self._read_calls = vllm_call_reader(name, tokenizer) if name else None
        self._numbers = count()
        self._begun: dict[int, tuple[Sampling, Callable[[int], int]]] = {}
        """Sampling and seed(turn) of each episode that was begun and not taken."""
        self._lead: _Lead | None = None
        if replica.replica_rank == 0:
            pool = EnvironmentPool(cfg)
            endpoint = Endpoint(tokenizer)
            self._lead = _Lead(pool, endpoint, self._new_recorder, self._check)

    def run(
        self,
        rows: Sequence[dict[str, Any]],
        sampling: Sampling,
        seed_of_turn: Callable[[int, int], int],
        *,
        strict: bool = False,
    ) -> list[Episode]:
        """One episode for each row, in order; the same on all ranks of the replica.

        seed_of_turn(row's place, turn): seed of a reply. strict: stop at the first failure; later
        rows may then be missing.
        """
        numbers = self.begin(rows, sampling, seed_of_turn)
        return self.finish(numbers, greedy=sampling.greedy, strict=strict)

    def begin(
        self,
        rows: Sequence[dict[str, Any]],
        sampling: Sampling,
        seed_of_turn: Callable[[int, int], int],
    ) -> list[int]:
        """Take episodes on, behind those begun before (greedy ones: before them); their numbers."""
        numbers = [next(self._numbers) for _ in rows]
        for place, number in enumerate(numbers):
            self._begun[number] = sampling, partial(seed_of_turn, place)
        if self._lead:
            self._lead.begin(dict(zip(numbers, rows, strict=True)), first=sampling.greedy)
        return numbers

    def finish(
        self, numbers: Sequence[int], *, greedy: bool = False, strict: bool = False
    ) -> list[Episode]:
        """Go on with all episodes until these have ended; they are numbered by their places."""
        lead = self._lead
        self.go_on(lambda: lead is None or lead.has(numbers, strict=strict), greedy=greedy)
        for number in numbers:
            del self._begun[number]
        self._requests.forget(numbers)
        told = [tuple(each) for each in lead.take(numbers)] if lead else None
        return [Episode(*each) for each in self._broadcast(told)]

    def go_on(self, is_over: Callable[[], bool], *, greedy: bool = False) -> None:
        """Draw for the episodes until is_over(), as the replica's first rank sees it.

        greedy: for those that take the likeliest tokens, else for all others; while none of them
        asks, for the other sort, whose episodes may be in the way.
        """
        lead = self._lead
        requests = self._requests
        while True:
            sort = greedy != requests.is_idle(greedy=greedy)
            idle = requests.is_idle(greedy=sort)
            news = self._agree(lead.look(is_over, idle=idle) if lead else None)
            for request in news.aborted:
                requests.abort(request)
            requests.forget(news.ended)
            for number, prompt, turn, most in news.added:
                request = requests.add(self._request(number, prompt, turn, most))
                if lead:
                    lead.added(request)
            if news.done:
                return
            for drawn in () if requests.is_idle(greedy=sort) else requests.step(greedy=sort):
                if lead:
                    lead.drawn(drawn)

    @property
    def num_under_way(self) -> int:
        """Episodes that wait or run, as the replica's first rank sees it."""
        if self._lead:
            return self._lead.num_under_way
        return 0

    def wake(self) -> None:
        """Have `go_on` look again (another thread)."""
        if self._lead:
            self._lead.wake()

    def close(self) -> None:
        """End the worker processes and the endpoint."""
        if self._lead:
            self._lead.close()

    def _request(self, number: int, prompt: list[int], turn: int, most: int) -> Request:
        """What the generator draws for an episode's turn."""
        sampling, seed_of = self._begun[number]
        return Request(
            prompt=torch.tensor(prompt, dtype=torch.int64),
            seed=seed_of(turn),
            sampling=replace(sampling, max_new_tokens=most),
            conversation=number,
        )

    def _check(self, draw: Draw) -> None:
        """Raise what would be raised by adding a request, before any rank hears of it."""
        request = self._request(draw.number, draw.ids, draw.turn, draw.max_new_tokens)
        known = range(self._limits.vocab_size)
        foreign = []
        for token in draw.ids:
            if token not in known:
                foreign.append(token)
        if foreign:
            got = f"the token ids {foreign[:3]}"
            expected = f"ids from 0 to {known[-1]}"
            raise ColumnError.of("run_episodes", got, expected, "send ids of the model's tokenizer")
        self._requests.check(request)

    def _new_recorder(self) -> Recorder:
        return Recorder(self._chat, self._end_tokens, self._limits, self._read_calls)

    def _agree(self, mine: News | None) -> News:
        """The first rank's news, on every rank of the replica."""
        return News(*self._broadcast(mine))

    def _broadcast(self, mine: Any) -> Any:
        """What the first rank passes: plain data of any size, also hours of episodes."""
        if self._replica.size == 1:
            return mine
        group = self._replica.group(self._replica.ranks, "gloo")
        return broadcast_plain(mine if mine is None else list(mine), group)


class News(NamedTuple):
    """What changes before a step."""

    added: list[tuple[int, list[int], int, int]]
    """Of each new request: its row's place, prompt, turn and most tokens."""
    aborted: list[int]
    ended: list[int]
    """Rows whose episodes ask for no more."""
    done: bool


class _Lead:
    """The first rank's part of a run: what is under way, and what became of each row."""

    def __init__(
        self,
        pool: EnvironmentPool,
        endpoint: Endpoint,
        new_recorder: Callable[[], Recorder],
        check: Callable[[Draw], None],
    ) -> None:
        """check: raises what is wrong with a request."""
        self._pool = pool
        self._endpoint = endpoint
        self._new_recorder = new_recorder
        self._check = check
        self._names: dict[int, str] = {}
        """Running episode -> its id."""
        self._recorders: dict[int, Recorder] = {}
        self._asked: deque[Draw] = deque()
        """Those that are being added to the generator."""
        self._drawing: dict[int, Draw] = {}
        """Request of the generator -> what asked for it."""
        self._aborted: list[int] = []
        self._ended: list[int] = []
        self._episodes: dict[int, Episode] = {}
        self._fails = False

    def begin(self, rows: Mapping[int, dict[str, Any]], *, first: bool) -> None:
        """Take episodes on, by number."""
        self._pool.begin(rows, first=first)

    def look(self, is_over: Callable[[], bool], *, idle: bool) -> News:
        """Start, end and hear episodes; waits for something new if idle and not over."""
        self._pool.hand_out(self._enter)
        seconds = _IDLE_SECONDS if idle and not is_over() else 0.0
        asked: list[Draw] = []
        wake = self._endpoint.wake.fileno()
        for ended in self._pool.advance(seconds, wake=wake, faults=partial(self._hear, asked)):
            self._end(ended)
        added = []
        for item in asked:
            if self._names.get(item.number) != item.name:
                item.done(None)  # of an episode that has ended
                continue
            try:
                self._check(item)
            except Exception as err:  # of whatever kind: it is this episode's, not the run's
                item.fail(err)
                continue
            self._asked.append(item)
            added.append((item.number, item.ids, item.turn, item.max_new_tokens))
        aborted = self._aborted
        self._aborted = []
        gone = self._ended
        self._ended = []
        return News(added, aborted, gone, is_over())

    def _hear(self, asked: list[Draw]) -> dict[int, str]:
        """Add what running episodes ask for; those that have to be ended -> why."""
        with suppress(BlockingIOError):
            self._endpoint.wake.recv(1 << 16)
        causes = {}
        with suppress(queue.Empty):
            while True:
                item: Draw | EpisodeFault = self._endpoint.inbox.get_nowait()
                if isinstance(item, Draw):
                    asked.append(item)
                elif self._names.get(item.number) == item.name:
                    causes[item.number] = item.cause
        return causes

    def added(self, request: int) -> None:
        """The generator has taken the next request."""
        self._drawing[request] = self._asked.popleft()

    def drawn(self, drawn: VersionedResponse) -> None:
        """A reply has ended."""
        self._drawing.pop(drawn.id).done(drawn)

    def has(self, numbers: Sequence[int], *, strict: bool) -> bool:
        """Whether these episodes have ended, or, if strict, one has failed."""
        return (strict and self._fails) or self._episodes.keys() >= set(numbers)

    def take(self, numbers: Sequence[int]) -> list[Episode]:
        """What became of these episodes, as far as they have ended; numbered by place."""
        found = []
        for place, n in enumerate(numbers):
            found.append((place, self._episodes.pop(n, None)))
        result = []
        for place, each in found:
            if each:
                result.append(each._replace(number=place))
        return result

    @property
    def num_under_way(self) -> int:
        """Episodes that wait or run."""
        return self._pool.num_under_way

    def wake(self) -> None:
        """Have `look` return (another thread)."""
        self._endpoint.notify()

    def close(self) -> None:
        """End the worker processes and the endpoint."""
        self._pool.close()
        self._endpoint.close()

    def _enter(self, number: int) -> dict[str, str]:
        """Start an episode, from its beginning if its process was lost."""
        self._leave(number)
        self._recorders[number] = self._new_recorder()
        self._names[number], told = self._endpoint.open(number, self._recorders[number])
        return told

    def _leave(self, number: int) -> None:
        """Forget an episode's id; its requests are aborted."""
        if number in self._names:
            self._endpoint.forget(self._names.pop(number))
            self._ended.append(number)
        for request, draw in list(self._drawing.items()):
            if draw.number == number:
                del self._drawing[request]
                self._aborted.append(request)
                draw.done(None)

    def _end(self, ended: Ended) -> None:
        self._leave(ended.number)
        recorder = self._recorders.pop(ended.number)
        found = recorder.longest() or Segment([])
        scores = ended.scores if found.num_sampled else None
        self._fails |= bool(ended.cause)
        self._episodes[ended.number] = Episode(
            ended.number,
            scores,
            ended.cause,
            recorder.num_turns,
            len(recorder.segments),
            found.prompt,
            found.tokens,
            found.mask,
            found.log_probs,
            found.versions,
            found.calls,
        )
