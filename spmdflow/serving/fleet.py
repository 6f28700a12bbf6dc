"""`Fleet`: the rows of a rank, and the generation servers that generate them.

    add row -> waiting -> a ready server with a free slot -> finished
                 ^                 |
                 +-----------------+   the server is dead, slow, or answers something wrong

One thread with an event loop hands out the rows, takes them back, and looks after the servers
(`care`). The rank's other threads use the public methods of `Fleet` alone. A row's tokens depend on
its own noise, so another server draws the same.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from itertools import count
from typing import Any, TypeVar

from spmdflow.datasets.tokenizer import StopStrings
from spmdflow.errors import SpmdflowError
from spmdflow.rollout.generator import NEVER, Finished, Request
from spmdflow.serving.care import ServerCare
from spmdflow.serving.client import (
    ResponsePart,
    ServerClient,
    ServerFault,
    WrongAnswer,
    WrongVersion,
)
from spmdflow.serving.link import OpenLink
from spmdflow.serving.member import (
    DEAD,
    SLOW,
    FleetCounters,
    FleetRow,
    FleetSettings,
    Identity,
    Server,
)
from spmdflow.serving.mirror import SharedMirror, WeightMirror
from spmdflow.serving.roster import RosterEntry

logger = logging.getLogger(__name__)
T = TypeVar("T")

_SAY_SECONDS = 10.0
"""Between two log lines about a fleet without servers."""
_MOST_NAN = 2
"""Answers with a log-probability of nan after which a row is handed over with it: the weights are
then the cause, not a server."""


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
        self._shared = SharedMirror(mirror)
        self._settings = settings
        self._care = ServerCare(
            identity,
            self._shared,
            settings,
            self.counters,
            find_others=find_others,
            make_client=make_client,
            open_link=open_link,
            on_ready=self._dispatch,
            on_lost=self._release_rows,
            on_end=self._pass_on_error,
        )
        self._ends = tuple(ends)
        self._on_change = on_change
        self._numbers = count()
        self._waiting: list[FleetRow] = []
        self._rows: dict[int, FleetRow] = {}
        self._lengths: dict[tuple[int, ...], tuple[int, int]] = {}
        """Prompt -> number and total length of responses that have ended."""
        self._done: queue.SimpleQueue[Finished | Exception] = queue.SimpleQueue()
        self._no_server_since: float | None = time.monotonic()
        self._said = 0.0
        self._is_open = True
        self._is_suspended = False
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
        return len(self._care.ready)

    @property
    def servers(self) -> list[Server]:
        """All servers, those of other ranks too."""
        return list(self._care.servers)

    # For the rank's threads

    def add(self, request: Request, stop: StopStrings | None) -> int:
        """Take a row; return its number. stop: the request's stop strings."""
        row = FleetRow(next(self._numbers), request, stop, group=tuple(request.prompt.tolist()))
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
        self._shared.commit(version)
        self._call(self._announce_version())

    def call_all(self, method: str, route: str) -> None:
        """Make a request without a body to all servers that are ready; wait for their answers."""
        self._call(self._call_all(method, route))

    def forget_versions(self) -> None:
        """Bring all weights to all servers of this rank again, whatever they had."""
        self._call(self._forget_versions())

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
        for server in self._care.servers:
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
            self._loop.run_until_complete(self._begin(own))
        except SpmdflowError as err:
            started.put(err)
            return
        started.put(None)
        self._loop.run_forever()
        self._loop.run_until_complete(self._end())
        self._loop.close()

    async def _begin(self, own: Sequence[RosterEntry]) -> None:
        """Take in the rank's servers, and begin to watch all. ConfigError for a wrong address."""
        for entry in own:
            self._care.take_in(entry, is_own=True)
        self._watching = self._loop.create_task(self._watch())
        self._watching.add_done_callback(self._pass_on_error)

    async def _end(self) -> None:
        """End all tasks and connections."""
        tasks = asyncio.all_tasks(self._loop) - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._care.close()

    async def _add(self, row: FleetRow) -> None:
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
        for server in self._care.servers:
            server.rows.pop(row_id, None)
        self._dispatch()
        return row.to_finished()

    async def _forget_versions(self) -> None:
        for server in self._care.servers:
            if server.is_own:
                server.version = NEVER
        self._care.announce_version()

    async def _announce_version(self) -> None:
        self._lengths = {(): self._lengths.get((), (0, 0))}
        self._care.announce_version()

    async def _call_all(self, method: str, route: str) -> None:
        ready = self._care.ready
        seconds = self._settings.transfer_seconds
        calls = [server.client.call(method, route, None, seconds=seconds) for server in ready]
        for server, answer in zip(
            ready, await asyncio.gather(*calls, return_exceptions=True), strict=True
        ):
            if isinstance(answer, ServerFault):
                self._care.fail(server, DEAD, str(answer))

    async def _watch(self) -> None:
        """Each second: report the servers, count the time without any, and say so."""
        while True:
            await self._care.follow_others()
            self._on_change(self._care.servers)
            self._check_servers()
            await asyncio.sleep(1.0)

    def _check_servers(self) -> None:
        """Say that rows wait for a server; fail if they have waited for too long."""
        now = time.monotonic()
        if self._care.ready or not self._waiting:
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
            logger.warning(text, seconds, len(self._waiting), self._care.describe())
        limit = self._settings.wait_seconds
        if seconds > limit:
            self._no_server_since = None
            self._done.put(
                SpmdflowError(
                    f"generation servers: none was ready for {seconds:.0f} s, expected one within "
                    f"{limit:g} s ({self._care.describe()}); start one, or raise "
                    f"actor.rollout.server.wait_seconds"
                )
            )

    def _release_rows(self, server: Server) -> None:
        """Take all rows from a server; they wait for another one."""
        current = asyncio.current_task()
        for row in list(server.rows.values()):
            if row.task is not None and row.task is not current:
                row.task.cancel()
            self._move(server, row)
        self._dispatch()

    def _move(self, server: Server, row: FleetRow) -> None:
        """Let a row that a server has not finished wait for another one, and count the loss."""
        if server.rows.pop(row.id, None) is None or row.id not in self._rows:
            return
        row.task = None
        if row.is_complete(self._ends):  # only the end of its stream is missing
            self._hand_over(row)
            return
        lost = len(row.request.prompt) + len(row.tokens)
        self.counters.moved_rows += 1
        self.counters.recomputed_tokens += lost
        server.recomputed_tokens += lost
        if self._settings.is_exact:
            row.tokens = []
            row.log_probs = []
        self._waiting.append(row)

    def _dispatch(self) -> None:
        """Give waiting rows to ready servers: the longest expected first, the emptiest first.

        Servers of other ranks get rows only while none of this rank's own is ready.
        """
        if not self._waiting or self._is_suspended:
            return
        ready = self._care.ready
        own = [server for server in ready if server.is_own]
        free = [server for server in own or ready if len(server.rows) < server.capacity]
        if not free:
            return
        self._waiting.sort(key=self._expected_tokens)
        while self._waiting and free:
            server = min(free, key=lambda each: len(each.rows) / each.capacity)
            row = self._waiting.pop()
            server.rows[row.id] = row
            row.task = self._loop.create_task(self._generate(server, row))
            row.task.add_done_callback(self._pass_on_error)
            if len(server.rows) >= server.capacity:
                free.remove(server)

    def _pass_on_error(self, task: asyncio.Task[None]) -> None:
        """Raise an unexpected error of a task in the rank's thread, which waits for rows."""
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception):
            self._done.put(error)

    def _expected_tokens(self, row: FleetRow) -> float:
        """Tokens that a row still needs, as other responses to its prompt, or all, had."""
        most = row.request.sampling.max_new_tokens
        number, total = self._lengths.get(row.group) or self._lengths.get((), (0, 0))
        expected = total / number if number else float(most)
        return min(float(most), expected) - len(row.tokens) + len(row.request.prompt) / most

    async def _generate(self, server: Server, row: FleetRow) -> None:
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
            self._care.count_wrong_answer(server, str(err))
        except WrongVersion as err:
            self._care.fail(server, DEAD, f"it has other weights: {err}")
        except ServerFault as err:
            self._care.fail(server, DEAD, str(err))
        except TimeoutError:
            self._care.fail(server, SLOW, f"no token for {self._settings.stall_seconds:g} s")
            server.until = time.monotonic() + self._settings.stall_seconds
        finally:
            await stream.aclose()  # type: ignore[attr-defined]

    def _take_part(self, server: Server, row: FleetRow, part: ResponsePart) -> str | None:
        """Append a part to a row; return why the response ends, or None."""
        if any(value != value for value in part.log_probs):  # nan
            row.num_nan += 1
            if row.num_nan < _MOST_NAN and len(self._care.servers) > 1:
                raise WrongAnswer("a log-probability of nan")
        num_before = len(row.tokens)
        row.tokens += part.tokens
        row.log_probs += part.log_probs
        server.num_tokens += len(part.tokens)
        server.last_token = time.monotonic()
        if row.stop is not None and part.tokens:
            prompt = row.request.prompt.tolist()
            (end,) = row.stop.first_ends([(prompt, row.tokens, num_before)])
            if end is not None:
                del row.tokens[end:]
                del row.log_probs[end:]
                return "stop"
        return part.finish

    def _finish(self, server: Server, row: FleetRow) -> None:
        """Hand a row that has ended to the rank."""
        server.rows.pop(row.id, None)
        server.wrong_answers = 0
        self._hand_over(row)
        self._dispatch()

    def _hand_over(self, row: FleetRow) -> None:
        """Give a row to the rank, unless it was aborted; note its length."""
        if self._rows.pop(row.id, None) is None:
            return
        for group in (row.group, ()):
            number, total = self._lengths.get(group, (0, 0))
            self._lengths[group] = (number + 1, total + len(row.tokens))
        self._done.put(row.to_finished())
