"""`Fleet`: the generation servers that a rank uses, and the rows that they generate.

    add row -> waiting -> a ready server with a free slot -> finished
                 ^                 |
                 +-----------------+   the server is dead, slow, or answers something wrong

One thread with an event loop does all of it: it asks every server who it is, brings it to the
current weights (`link`), hands out rows, and takes them back. The rank's other threads use the
methods of `Fleet` alone. A row's tokens depend on its own noise, so another server draws the same.

A server is `ready` if it answers, has our model and tokenizer, and has the current weights.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, TypeVar

import torch

from spmdflow.config.schema import RolloutConfig
from spmdflow.datasets.tokenizer import StopStrings
from spmdflow.errors import ConfigError, SpmdflowError, WeightSyncError
from spmdflow.rollout.generator import NEVER, Finished, Request
from spmdflow.serving.client import (
    ResponsePart,
    ServerClient,
    ServerFacts,
    ServerFault,
    WrongAnswer,
    WrongVersion,
)
from spmdflow.serving.link import OpenLink, UpdateReport, WeightLink
from spmdflow.serving.mirror import WeightMirror
from spmdflow.serving.roster import RosterEntry

logger = logging.getLogger(__name__)
T = TypeVar("T")

READY = "ready"
STARTING = "starting"
SYNCING = "syncing"
SLOW = "slow"
DEAD = "dead"
REFUSED = "refused"
_SAY_SECONDS = 10.0
"""Between two log lines about a fleet without servers."""
_FIRST_PAUSE = 0.5
"""Seconds until a server that failed is asked again; doubled with each failure in a row."""
_SYNCING_PAUSE = 0.2
"""Seconds between two questions to another rank's server that has old weights."""
_MOST_WRONG_ANSWERS = 3
"""Wrong answers in a row after which a server is left out for `_REFUSED_SECONDS`."""
_REFUSED_SECONDS = 30.0
_MOST_NAN = 2
"""Servers that must say that the logits of a row are not finite, until it is believed."""


@dataclass(frozen=True)
class FleetSettings:
    """Limits of a fleet, from actor.rollout.server."""

    health_seconds: float
    """Limit of an answer to "who are you", and the time between two of them."""
    stall_seconds: float
    """A row without new tokens for so long goes to another server."""
    transfer_seconds: float
    """Limit of each message of an update, and of the switch."""
    wait_seconds: float
    """Longest time without any server."""
    transport: str
    is_exact: bool
    """Rows that move begin again; otherwise they go on after the tokens that have arrived."""
    takes_any_sampler: bool
    """Servers without row noise are used too (rollout.sampler=server)."""

    @classmethod
    def from_config(cls, cfg: RolloutConfig) -> FleetSettings:
        """The limits that the settings of a rollout give."""
        server = cfg.server
        return cls(
            health_seconds=server.health_seconds,
            stall_seconds=server.stall_seconds,
            transfer_seconds=server.transfer_seconds,
            wait_seconds=server.wait_seconds,
            transport=server.transport,
            is_exact=server.exact,
            takes_any_sampler=cfg.sampler == "server",
        )


@dataclass(frozen=True)
class Identity:
    """What a server must have."""

    model: str
    tokenizer: str
    dtype: str
    longest_row: int
    """Tokens of the longest prompt and response together."""

    def difference(self, facts: ServerFacts, settings: FleetSettings) -> str | None:
        """Why a server with these facts must not be used, or None."""
        pairs = (
            ("model", facts.model, self.model),
            ("tokenizer", facts.tokenizer, self.tokenizer),
            ("precision", facts.dtype, self.dtype),
        )
        for name, got, expected in pairs:
            if got != expected:
                return f"another {name}: got {got or 'none'}, expected {expected or 'none'}"
        if facts.max_model_len < self.longest_row:
            return f"room for {facts.max_model_len} tokens a row, expected {self.longest_row}"
        if not facts.row_noise and not settings.takes_any_sampler:
            return "no row noise: start it with spmdflow serve, or set actor.rollout.sampler=server"
        if settings.is_exact and (facts.max_num_seqs != 1 or facts.prefix_caching):
            return (
                f"{facts.max_num_seqs} rows at a time, prefix caching {facts.prefix_caching}; "
                f"exact mode needs one row and none: start it with --max-batch-size 1"
            )
        return None


@dataclass
class FleetCounters:
    """What has happened since the fleet exists."""

    moved_rows: int = 0
    """Rows that were taken from a server that failed."""
    recomputed_tokens: int = 0
    """Tokens, of prompts and responses, that another server had to compute again."""
    wrong_answers: int = 0
    deaths: int = 0
    """Servers that were ready, and then failed."""
    updates: int = 0
    full_updates: int = 0
    update_bytes: int = 0
    lost_updates: int = 0
    """Updates after which a server had other weights than it should."""
    waiting_seconds: float = 0.0
    """Time in which rows waited and no server was ready."""
    update_seconds: float = 0.0
    """Of the longest update."""
    switch_seconds: float = 0.0
    """Of the longest switch: the part of an update in which a server generates nothing."""


@dataclass
class _Row:
    """A row that is to be generated."""

    id: int
    request: Request
    stop: StopStrings | None
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    num_nan: int = 0
    task: asyncio.Task[None] | None = None
    group: tuple[int, ...] = ()
    """Its prompt, by which the length of its response is guessed."""

    def next_request(self, *, is_exact: bool) -> Request:
        """The request for the tokens that are missing."""
        if is_exact or not self.tokens:
            return self.request
        request = self.request
        drawn = torch.tensor(self.tokens, dtype=torch.int64)
        left = request.sampling.max_new_tokens - len(self.tokens)
        return replace(
            request,
            prompt=torch.cat([request.prompt, drawn]),
            sampling=replace(request.sampling, max_new_tokens=left),
            num_drawn=request.num_drawn + len(self.tokens),
        )

    def to_finished(self) -> Finished:
        """Its tokens so far."""
        tokens = torch.tensor(self.tokens, dtype=torch.int64)
        return Finished(self.id, tokens, torch.tensor(self.log_probs, dtype=torch.float32))


@dataclass
class Server:
    """A server as this rank sees it."""

    client: ServerClient
    entry: RosterEntry
    is_own: bool
    """Whether this rank brings it its weights."""
    state: str = STARTING
    reason: str = ""
    instance: str = ""
    version: int = NEVER
    capacity: int = 1
    rows: dict[int, _Row] = field(default_factory=dict)
    """Rows that it generates for this rank, by id."""
    num_tokens: int = 0
    """Drawn for this rank."""
    recomputed_tokens: int = 0
    """Of rows that it lost, which others computed again."""
    restarts: int = 0
    failures: int = 0
    """In a row."""
    wrong_answers: int = 0
    """In a row."""
    until: float = 0.0
    """Time (monotonic) before which it is not asked again."""
    link: WeightLink | None = None
    task: asyncio.Task[None] | None = None
    """It looks after the server."""
    wake: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def url(self) -> str:
        """Its address."""
        return self.client.url


class Fleet:
    """Servers and rows of one rank. All public methods are for other threads than the fleet's."""

    def __init__(
        self,
        own: Sequence[RosterEntry],
        identity: Identity,
        mirror: WeightMirror,
        settings: FleetSettings,
        *,
        find_others: Callable[[], Sequence[RosterEntry]],
        make_client: Callable[[RosterEntry], ServerClient],
        open_link: OpenLink,
        ends: Sequence[int],
        on_change: Callable[[list[Server]], None] = lambda servers: None,
    ) -> None:
        """own: servers that this rank brings weights. find_others: those of other ranks, at the
        moment. make_client: called in the fleet's thread. open_link: connects to a server.

        ends: token ids that end a response. on_change: called in the fleet's thread, at least each
        second, with all servers.
        """
        self.counters = FleetCounters()
        self._identity = identity
        self._mirror = mirror
        self._settings = settings
        self._find_others = find_others
        self._make_client = make_client
        self._open_link = open_link
        self._ends = tuple(ends)
        self._on_change = on_change
        self._numbers = count()
        self._servers: list[Server] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._waiting: list[_Row] = []
        self._rows: dict[int, _Row] = {}
        self._lengths: dict[tuple[int, ...], tuple[int, int]] = {}
        """Prompt -> number and total length of responses that have ended."""
        self._done: queue.SimpleQueue[Finished | Exception] = queue.SimpleQueue()
        self._no_server_since: float | None = time.monotonic()
        self._said = 0.0
        self._is_open = True
        self._is_suspended = False
        self._mirror_lock = threading.Lock()
        """Held while the mirror's current version is read, and while it changes."""
        self._loop = asyncio.new_event_loop()
        started: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=self._run, args=(own, started), name="spmdflow-fleet", daemon=True
        )
        self._thread.start()
        error = started.get()
        if error is not None:
            raise error

    @property
    def num_ready(self) -> int:
        """Servers that are ready now."""
        return sum(server.state == READY for server in self._servers)

    # For the rank's threads

    def add(self, request: Request, stop: StopStrings | None) -> int:
        """Take a row; return its number. stop: the request's stop strings."""
        row = _Row(next(self._numbers), request, stop, group=tuple(request.prompt.tolist()))
        self._call(self._add(row))
        return row.id

    def take_finished(self, seconds: float) -> list[Finished]:
        """Return rows that have ended: waits at most `seconds` for the first. Raises errors.

        SpmdflowError if there was no server for longer than the settings allow.
        """
        result = []
        try:
            first = self._done.get(timeout=seconds)
            while True:
                if isinstance(first, Exception):
                    raise first
                result.append(first)
                first = self._done.get_nowait()
        except queue.Empty:
            return result

    def abort(self, row_id: int) -> Finished | None:
        """Take a row back with its tokens so far; None if it has ended or was never there."""
        return self._call(self._abort(row_id))

    def suspend(self) -> list[Finished]:
        """Generate nothing until the next `add`; return the rows that have ended by now.

        The others keep their tokens for `abort`. In exact mode waits until all rows have ended, as
        they would be drawn with other weights otherwise. Raises errors as `take_finished`.
        """
        result = self.take_finished(0.0)
        while self._settings.is_exact and self._call(self._count_rows()):
            result += self.take_finished(_SAY_SECONDS)
        self._call(self._suspend())
        return result + self.take_finished(0.0)

    def commit(self, version: int) -> None:
        """Make what the mirror has received the current weights, and bring them to all servers.

        No row may be under way. Returns at once; rows wait for servers with these weights.
        """
        with self._mirror_lock:
            self._mirror.commit(version)
        self._call(self._wake_all())

    def call_all(self, method: str, route: str) -> None:
        """Make a request without a body to all servers that are ready; wait for their answers."""
        self._call(self._call_all(method, route))

    def close(self) -> None:
        """End the thread. Servers stay as they are."""
        if self._is_open:
            self._is_open = False
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run work in the fleet's thread, and return its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _suspend(self) -> None:
        self._is_suspended = True
        tasks = []
        for server in self._servers:
            for row in server.rows.values():
                if row.task is not None:
                    row.task.cancel()
                    tasks.append(row.task)
            server.rows.clear()
        self._waiting.clear()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _count_rows(self) -> int:
        return len(self._rows)

    # In the fleet's thread

    def _run(
        self,
        own: Sequence[RosterEntry],
        started: queue.SimpleQueue[Exception | None],
    ) -> None:
        """The thread: make the clients, then run the event loop until `close`."""
        asyncio.set_event_loop(self._loop)
        try:
            for entry in own:
                self._take_in(entry, is_own=True)
        except SpmdflowError as err:
            started.put(err)
            return
        self._tasks.add(self._loop.create_task(self._watch()))
        started.put(None)
        self._loop.run_forever()
        self._loop.run_until_complete(self._close_all())
        self._loop.close()

    def _take_in(self, entry: RosterEntry, *, is_own: bool) -> None:
        """Begin to look after a server. ConfigError if its address is none."""
        server = Server(self._make_client(entry), entry, is_own)
        self._servers.append(server)
        server.task = self._loop.create_task(self._attend(server))
        self._tasks.add(server.task)

    async def _drop(self, server: Server) -> None:
        """Forget a server."""
        self._servers.remove(server)
        self._release_rows(server)
        if server.task is not None:
            server.task.cancel()
            self._tasks.discard(server.task)
        self._drop_link(server)
        await server.client.close()

    async def _follow_others(self) -> None:
        """Take in servers of other ranks, and forget those that their ranks no longer have."""
        entries = set(await asyncio.to_thread(self._find_others))
        for server in list(self._servers):
            if not server.is_own and server.entry not in entries:
                await self._drop(server)
        known = {server.entry for server in self._servers}
        for entry in entries - known:
            try:
                self._take_in(entry, is_own=False)
            except ConfigError as err:
                logger.warning("warning: rank %d names no server: %s", entry.owner, err)

    async def _close_all(self) -> None:
        """End all tasks and connections."""
        tasks = asyncio.all_tasks(self._loop) - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for server in self._servers:
            if server.link is not None:
                server.link.close()
            await server.client.close()

    async def _add(self, row: _Row) -> None:
        self._is_suspended = False
        self._rows[row.id] = row
        self._waiting.append(row)
        self._dispatch()

    async def _abort(self, row_id: int) -> Finished | None:
        row = self._rows.pop(row_id, None)
        if row is None:
            return None
        if row in self._waiting:
            self._waiting.remove(row)
        if row.task is not None:
            row.task.cancel()
            await asyncio.gather(row.task, return_exceptions=True)
        self._dispatch()
        return row.to_finished()

    async def _wake_all(self) -> None:
        for server in self._servers:
            if server.state == READY and server.version != self._mirror.version:
                server.state = SYNCING
            server.wake.set()

    async def _call_all(self, method: str, route: str) -> None:
        ready = [server for server in self._servers if server.state == READY]
        seconds = self._settings.transfer_seconds
        calls = [server.client.call(method, route, None, seconds=seconds) for server in ready]
        for server, answer in zip(
            ready, await asyncio.gather(*calls, return_exceptions=True), strict=True
        ):
            if isinstance(answer, ServerFault):
                self._fail(server, DEAD, str(answer))

    async def _watch(self) -> None:
        """Each second: report the servers, count the time without any, and say so."""
        while True:
            await self._follow_others()
            self._on_change(self._servers)
            self._check_servers()
            await asyncio.sleep(1.0)

    def _check_servers(self) -> None:
        """Say that rows wait for a server; fail if they have waited for too long."""
        now = time.monotonic()
        has_ready = any(server.state == READY for server in self._servers)
        if has_ready or not self._waiting:
            self._no_server_since = None
            return
        if self._no_server_since is None:
            self._no_server_since = now
            return
        self.counters.waiting_seconds += 1.0
        seconds = now - self._no_server_since
        if now - self._said > _SAY_SECONDS and seconds > _SAY_SECONDS:
            self._said = now
            text = "no generation server is ready for %.0f s; %d rows wait: %s"
            logger.warning(text, seconds, len(self._waiting), self._describe())
        if seconds > self._settings.wait_seconds:
            self._no_server_since = None
            self._done.put(
                SpmdflowError(
                    f"generation servers: none was ready for {seconds:.0f} s, expected one within "
                    f"{self._settings.wait_seconds:g} s ({self._describe()}); start one, or raise "
                    f"actor.rollout.server.wait_seconds"
                )
            )

    def _describe(self) -> str:
        """State and reason of every server, in words."""
        texts = []
        for server in self._servers:
            texts.append(f"{server.url} {server.state} {server.reason}".strip())
        return "; ".join(texts)

    async def _attend(self, server: Server) -> None:
        """Look after one server until the fleet is closed."""
        while True:
            server.wake.clear()
            pause = server.until - time.monotonic()
            if pause <= 0:
                await self._renew(server)
                pause = self._settings.health_seconds
                if server.state == SYNCING:  # its owner is bringing it weights
                    pause = min(pause, _SYNCING_PAUSE)
                if server.failures:
                    pause = min(pause, _FIRST_PAUSE * 2 ** min(server.failures - 1, 6))
            try:
                await asyncio.wait_for(server.wake.wait(), max(pause, 0.05))
            except TimeoutError:
                continue

    async def _renew(self, server: Server) -> None:
        """Ask a server who it is, and bring it to the current weights."""
        try:
            facts = await server.client.facts(seconds=self._settings.health_seconds)
            self._check_identity(server, facts)
            if server.state == REFUSED:
                return
            if self._mirror.version != NEVER and server.version != self._mirror.version:
                server.state = SYNCING
                if server.is_own:
                    await self._bring_weights(server)
            server.failures = 0
            if self._mirror.version in (NEVER, server.version):
                self._be_ready(server)
        except WrongAnswer as err:
            self._count_wrong_answer(server, str(err))
        except (ServerFault, WeightSyncError) as err:
            self._fail(server, DEAD, str(err))

    def _check_identity(self, server: Server, facts: ServerFacts) -> None:
        """Note what a server says of itself; REFUSED if it must not be used."""
        if facts.instance != server.instance:
            server.restarts += bool(server.instance)
            server.instance = facts.instance
            server.version = NEVER
            self._drop_link(server)
        if facts.epoch != server.entry.epoch:
            server.version = NEVER  # another run, or nobody, gave it its weights
        elif not server.is_own:
            server.version = facts.weights_version
        elif facts.weights_version != server.version:
            server.version = NEVER
        server.capacity = 1 if self._settings.is_exact else facts.max_num_seqs
        difference = self._identity.difference(facts, self._settings)
        if difference is not None:
            self._refuse(server, difference)
        elif server.state == REFUSED:
            server.state = STARTING

    async def _bring_weights(self, server: Server) -> None:
        """Bring the current weights to a server, as a delta if it has earlier ones of this run.

        If its hashes differ afterwards, this is reported with the tensor, and it gets all weights.
        """
        if server.link is None:
            server.link = await self._open_link(
                server.client, self._settings.transport, self._settings.transfer_seconds
            )
        for since in dict.fromkeys((server.version, NEVER)):
            try:
                report = await server.link.bring(
                    self._mirror,
                    self._mirror_lock,
                    since=since,
                    epoch=server.entry.epoch,
                    waits=self._settings.is_exact,
                )
            except (ServerFault, WeightSyncError):
                server.version = NEVER
                raise
            self._count_update(report)
            if report.difference is None:
                server.version = report.version
                return
            server.version = NEVER
            self.counters.lost_updates += 1
            text = "warning: generation server %s: %s; it gets all weights"
            logger.warning(text, server.url, report.difference)
        raise WeightSyncError(f"its weights differ after a full update: {report.difference}")

    def _count_update(self, report: UpdateReport) -> None:
        counters = self.counters
        counters.updates += 1
        counters.full_updates += report.is_full
        counters.update_bytes += report.num_bytes
        counters.update_seconds = max(counters.update_seconds, report.seconds)
        counters.switch_seconds = max(counters.switch_seconds, report.switch_seconds)

    def _be_ready(self, server: Server) -> None:
        if server.state != READY:
            logger.info("generation server %s is ready (weights %d)", server.url, server.version)
        server.state = READY
        server.reason = ""
        self._dispatch()

    def _refuse(self, server: Server, reason: str) -> None:
        """Leave a server out, with a warning that names it and the reason."""
        if (server.state, server.reason) != (REFUSED, reason):
            logger.warning("warning: generation server %s is not used: %s", server.url, reason)
        server.state = REFUSED
        server.reason = reason
        self._release_rows(server)

    def _fail(self, server: Server, state: str, reason: str) -> None:
        """Note that a server failed; its rows go to others, and it is asked again later."""
        was_ready = server.state in (READY, SYNCING)
        if was_ready:
            self.counters.deaths += 1
            text = "warning: generation server %s is %s: %s; %d rows go to others"
            logger.warning(text, server.url, state, reason, len(server.rows))
        server.failures += 1
        server.state = state
        server.reason = reason
        server.version = NEVER
        self._drop_link(server)
        self._release_rows(server)

    def _count_wrong_answer(self, server: Server, reason: str) -> None:
        """A server has answered something that no correct server does."""
        self.counters.wrong_answers += 1
        server.wrong_answers += 1
        if server.wrong_answers >= _MOST_WRONG_ANSWERS:
            server.wrong_answers = 0
            server.until = time.monotonic() + _REFUSED_SECONDS
            self._refuse(server, f"{_MOST_WRONG_ANSWERS} wrong answers, the last: {reason}")
        else:
            self._fail(server, DEAD, f"a wrong answer: {reason}")

    def _drop_link(self, server: Server) -> None:
        if server.link is not None:
            server.link.close()
        server.link = None

    def _release_rows(self, server: Server) -> None:
        """Take all rows from a server; they wait for another one."""
        current = asyncio.current_task()
        for row in list(server.rows.values()):
            if row.task is not None and row.task is not current:
                row.task.cancel()
            self._move(server, row)
        self._dispatch()

    def _move(self, server: Server, row: _Row) -> None:
        """Let a row that a server has not finished wait for another one, and count the loss."""
        if server.rows.pop(row.id, None) is None or row.id not in self._rows:
            return
        self.counters.moved_rows += 1
        lost = len(row.request.prompt) + len(row.tokens)
        self.counters.recomputed_tokens += lost
        server.recomputed_tokens += lost
        if self._settings.is_exact:
            row.tokens = []
            row.log_probs = []
        row.task = None
        self._waiting.append(row)

    def _dispatch(self) -> None:
        """Give waiting rows to ready servers: the longest expected first, the emptiest first.

        Servers of other ranks get rows only while none of this rank's own is ready.
        """
        if not self._waiting or self._is_suspended:
            return
        ready = [server for server in self._servers if server.state == READY]
        own = [server for server in ready if server.is_own]
        free = [server for server in own or ready if len(server.rows) < server.capacity]
        self._waiting.sort(key=self._expected_tokens)
        while self._waiting and free:
            server = min(free, key=lambda each: len(each.rows) / each.capacity)
            row = self._waiting.pop()
            server.rows[row.id] = row
            row.task = self._loop.create_task(self._generate(server, row))
            if len(server.rows) >= server.capacity:
                free.remove(server)

    def _expected_tokens(self, row: _Row) -> float:
        """Tokens that a row still needs, as other responses to its prompt, or all, had."""
        most = row.request.sampling.max_new_tokens
        number, total = self._lengths.get(row.group) or self._lengths.get((), (0, 0))
        expected = total / number if number else float(most)
        return min(float(most), expected) - len(row.tokens) + len(row.request.prompt) / most

    async def _generate(self, server: Server, row: _Row) -> None:
        """Generate a row on a server: the task of the row."""
        request = row.next_request(is_exact=self._settings.is_exact)
        stream = server.client.generate(
            request,
            ends=self._ends,
            version=f"{server.entry.epoch}:{server.version}",
            stall_seconds=self._settings.stall_seconds,
        )
        try:
            finish: str | None = None
            while finish is None:
                part = await asyncio.wait_for(anext(stream), self._settings.stall_seconds)
                finish = self._take_part(server, row, part)
            if finish == "abort":
                raise ServerFault("it aborted the row")
            self._finish(server, row)
        except WrongAnswer as err:
            self._count_wrong_answer(server, str(err))
        except WrongVersion as err:
            self._fail(server, DEAD, f"it has other weights: {err}")
        except ServerFault as err:
            self._fail(server, DEAD, str(err))
        except TimeoutError:
            self._fail(server, SLOW, f"no token for {self._settings.stall_seconds:g} s")
            server.until = time.monotonic() + self._settings.stall_seconds
        finally:
            await stream.aclose()  # type: ignore[attr-defined]

    def _take_part(self, server: Server, row: _Row, part: ResponsePart) -> str | None:
        """Append a part to a row; return why the response ends, or None."""
        if any(value != value for value in part.log_probs):  # nan
            row.num_nan += 1
            if row.num_nan < _MOST_NAN and len(self._servers) > 1:
                raise WrongAnswer("a log-probability of nan")
        num_before = len(row.tokens)
        row.tokens += part.tokens
        row.log_probs += part.log_probs
        server.num_tokens += len(part.tokens)
        if row.stop is not None and part.tokens:
            prompt = row.request.prompt.tolist()
            (end,) = row.stop.first_ends([(prompt, row.tokens, num_before)])
            if end is not None:
                del row.tokens[end:]
                del row.log_probs[end:]
                return "stop"
        return part.finish

    def _finish(self, server: Server, row: _Row) -> None:
        """Hand a row that has ended to the rank."""
        server.rows.pop(row.id, None)
        server.wrong_answers = 0
        if self._rows.pop(row.id, None) is not None:
            for group in (row.group, ()):
                number, total = self._lengths.get(group, (0, 0))
                self._lengths[group] = (number + 1, total + len(row.tokens))
            self._done.put(row.to_finished())
        self._dispatch()
