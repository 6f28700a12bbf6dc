"""`ServerCare`: keeps a rank's servers known, alive and up to date. Knows no rows.

It asks each server who it is, again and again: one that does not answer, or is another one than it
should be, gets no rows. A server that is ready gets each new version of the weights (`link`). Those
of other ranks get theirs from their owner. All of it runs in the fleet's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence

from spmdflow.errors import ConfigError, WeightSyncError
from spmdflow.rollout.generator import NEVER
from spmdflow.serving.client import ServerClient, ServerFacts, ServerFault, WrongAnswer
from spmdflow.serving.link import OpenLink, UpdateReport
from spmdflow.serving.member import (
    DEAD,
    READY,
    REFUSED,
    STARTING,
    SYNCING,
    FleetCounters,
    FleetSettings,
    Identity,
    Server,
)
from spmdflow.serving.mirror import SharedMirror
from spmdflow.serving.roster import RosterEntry

logger = logging.getLogger(__name__)

_FIRST_PAUSE = 0.5
"""Seconds until a server that failed is asked again; doubled with each failure in a row, up to
health_seconds."""
_LEAST_PAUSE = 0.05
_SYNCING_PAUSE = 0.2
"""Seconds between two questions to another rank's server that has old weights."""
_MOST_WRONG_ANSWERS = 3
"""Wrong answers in a row after which a server is not used for `_REFUSED_SECONDS`."""
_REFUSED_SECONDS = 30.0


class ServerCare:
    """The servers of a rank."""

    def __init__(
        self,
        identity: Identity,
        shared: SharedMirror,
        settings: FleetSettings,
        counters: FleetCounters,
        *,
        find_others: Callable[[], Sequence[RosterEntry]],
        make_client: Callable[[RosterEntry], ServerClient],
        open_link: OpenLink,
        on_ready: Callable[[], None],
        on_lost: Callable[[Server], None],
        on_end: Callable[[asyncio.Task[None]], None],
    ) -> None:
        """counters: what happens is added to them. find_others: servers of other ranks, now.

        on_ready: called when a server is ready. on_lost: called with one that no longer is.
        on_end: called with the task that looks after a server, when it ends.
        """
        self.servers: list[Server] = []
        self._identity = identity
        self._shared = shared
        self._settings = settings
        self._counters = counters
        self._find_others = find_others
        self._make_client = make_client
        self._open_link = open_link
        self._on_ready = on_ready
        self._on_lost = on_lost
        self._on_end = on_end

    @property
    def ready(self) -> list[Server]:
        """Servers that are ready now."""
        return [server for server in self.servers if server.state == READY]

    def take_in(self, entry: RosterEntry, *, is_own: bool) -> None:
        """Begin to look after a server. ConfigError if its address is none."""
        server = Server(self._make_client(entry), entry, is_own)
        self.servers.append(server)
        server.task = asyncio.get_running_loop().create_task(self._attend(server))
        server.task.add_done_callback(self._on_end)

    async def follow_others(self) -> None:
        """Take in servers of other ranks, and forget those that their ranks no longer have."""
        entries = set(await asyncio.to_thread(self._find_others))
        for server in list(self.servers):
            if not server.is_own and server.entry not in entries:
                await self._drop(server)
        known = {server.entry for server in self.servers}
        for entry in entries - known:
            try:
                self.take_in(entry, is_own=False)
            except ConfigError as err:
                logger.warning("warning: rank %d names no server: %s", entry.owner, err)

    def announce_version(self) -> None:
        """The mirror has a new version: no server is ready until it has it."""
        for server in self.servers:
            if server.state == READY and server.version != self._shared.version:
                server.state = SYNCING
            server.wake.set()

    def fail(self, server: Server, state: str, reason: str) -> None:
        """Note that a server failed; its rows go to others, and it is asked again later."""
        was_ready = server.state in (READY, SYNCING)
        if was_ready:
            self._counters.deaths += 1
            text = "warning: generation server %s is %s: %s; %d rows go to others"
            logger.warning(text, server.url, state, reason, len(server.rows))
        server.failures += 1
        server.state = state
        server.reason = reason
        server.version = NEVER
        self._drop_link(server)
        self._on_lost(server)

    def count_wrong_answer(self, server: Server, reason: str) -> None:
        """A server has answered something that no correct server does."""
        self._counters.wrong_answers += 1
        server.wrong_answers += 1
        if server.wrong_answers >= _MOST_WRONG_ANSWERS:
            server.wrong_answers = 0
            server.until = time.monotonic() + _REFUSED_SECONDS
            self._refuse(server, f"{_MOST_WRONG_ANSWERS} wrong answers, the last: {reason}")
        else:
            self.fail(server, DEAD, f"a wrong answer: {reason}")

    def describe(self) -> str:
        """State and reason of every server, in words."""
        texts = []
        for server in self.servers:
            texts.append(f"{server.url} {server.state} {server.reason}".strip())
        return "; ".join(texts)

    async def close(self) -> None:
        """Close the connections to all servers, whose tasks have ended."""
        for server in self.servers:
            self._drop_link(server)
            await server.client.close()

    async def _drop(self, server: Server) -> None:
        """Forget a server."""
        self.servers.remove(server)
        self._on_lost(server)
        if server.task is not None:
            server.task.cancel()
        self._drop_link(server)
        await server.client.close()

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
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(server.wake.wait(), max(pause, _LEAST_PAUSE))

    async def _renew(self, server: Server) -> None:
        """Ask a server who it is, and bring it to the current weights."""
        try:
            facts = await server.client.facts(seconds=self._settings.health_seconds)
            self._check_identity(server, facts)
            if server.state == REFUSED:
                return
            if self._shared.version != NEVER and server.version != self._shared.version:
                server.state = SYNCING
                if server.is_own:
                    await self._bring_weights(server)
            server.failures = 0
            if self._shared.version in (NEVER, server.version):
                self._be_ready(server)
        except WrongAnswer as err:
            self.count_wrong_answer(server, str(err))
        except (ServerFault, WeightSyncError) as err:
            if not self._makes_progress(server):
                self.fail(server, DEAD, str(err))

    def _makes_progress(self, server: Server) -> bool:
        """Whether a server has sent a token so lately that it is alive, however slowly it answers.

        A busy server may miss the limit of a question while it generates; its rows stay.
        """
        is_recent = time.monotonic() - server.last_token < self._settings.health_seconds
        return server.state == READY and is_recent

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
                    self._shared,
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
            self._counters.lost_updates += 1
            text = "warning: generation server %s: %s; it gets all weights"
            logger.warning(text, server.url, report.difference)
        raise WeightSyncError(f"its weights differ after a full update: {report.difference}")

    def _count_update(self, report: UpdateReport) -> None:
        counters = self._counters
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
        self._on_ready()

    def _refuse(self, server: Server, reason: str) -> None:
        """Use a server no longer, with a warning that names it and the reason."""
        if (server.state, server.reason) != (REFUSED, reason):
            logger.warning("warning: generation server %s is not used: %s", server.url, reason)
        server.state = REFUSED
        server.reason = reason
        server.version = NEVER
        self._drop_link(server)
        self._on_lost(server)

    def _drop_link(self, server: Server) -> None:
        if server.link is not None:
            server.link.close()
        server.link = None
