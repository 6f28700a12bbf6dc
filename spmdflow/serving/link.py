"""`ServerLink`: brings the weights of a mirror to one server, over one connection per worker.

connect    the rank opens its ends, the server's workers open theirs and say what they have
receive    the server is told what comes; the messages travel while it generates
switch     it pauses, puts them into use, and answers with the hashes of what it reads now
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol

from spmdflow.blocks.box import Box
from spmdflow.blocks.hash import MODULUS
from spmdflow.errors import WeightSyncError
from spmdflow.hybrid_engine.sync import compare_hashes
from spmdflow.rollout.generator import NEVER
from spmdflow.serving.client import ServerClient, WrongAnswer
from spmdflow.serving.mirror import BoxOf, SharedMirror
from spmdflow.serving.transport import UpdateSender, open_sender
from spmdflow.serving.update import BoxUpdate, PackedMessage, cut_into_messages

_MOST_BOXES = 1 << 20
_NUMBERS = count(1)


@dataclass(frozen=True)
class UpdateReport:
    """What happened in an update of one server."""

    version: int
    is_full: bool
    """All weights were sent, not what changed."""
    num_bytes: int
    """Sent to all workers."""
    seconds: float
    switch_seconds: float
    """In which the server generated nothing."""
    difference: str | None
    """The first tensor that differs on the server, in words; None if none does."""


class UpdateLink(Protocol):
    """How one server gets weights."""

    async def bring(
        self,
        shared: SharedMirror,
        *,
        since: int,
        epoch: str,
        waits: bool,
    ) -> UpdateReport:
        """Bring the server from version `since` to the mirror's; see `ServerLink.bring`."""

    def close(self) -> None:
        """Close the connections."""


OpenLink = Callable[[ServerClient, str, float], Awaitable[UpdateLink]]
"""(client, transport, limit of each wait in seconds) -> the open link."""


class ServerLink:
    """The connection to one server of this package."""

    def __init__(
        self, client: ServerClient, senders: Sequence[UpdateSender], *, seconds: float
    ) -> None:
        """seconds: limit of each wait. `open` makes a complete one."""
        self._client = client
        self._senders = senders
        self._seconds = seconds
        self._boxes: list[list[BoxOf]] = []
        """Boxes of each worker."""

    @classmethod
    async def open(cls, client: ServerClient, transport: str, seconds: float) -> ServerLink:
        """Connect to all workers of a server. ServerFault or WeightSyncError if that fails."""
        facts = await client.facts(seconds=seconds)
        senders = []
        for _ in range(facts.num_workers):
            senders.append(
                open_sender(transport, host=client.host, port=client.port, seconds=seconds)
            )
        link = cls(client, senders, seconds=seconds)
        body = {
            "transport": transport,
            "facts": [sender.facts for sender in senders],
            "seconds": seconds,
        }
        answer = await client.call("POST", "spmdflow/connect", body, seconds=4 * seconds)
        replies = _list_of(answer, "replies", facts.num_workers)
        for boxes in _list_of(answer, "boxes", facts.num_workers):
            link._boxes.append(_read_boxes(boxes))
        await link._connect(replies)
        return link

    async def _connect(self, replies: Sequence[Mapping[str, Any]]) -> None:
        """Finish connecting. A gloo worker connects with its first, empty update."""
        number = next(_NUMBERS)
        empty: list[list[Any]] = [[] for _ in self._senders]
        await self._announce(number, empty)
        await asyncio.gather(
            *(
                asyncio.to_thread(sender.connect, reply)
                for sender, reply in zip(self._senders, replies, strict=True)
            )
        )

    async def bring(
        self,
        shared: SharedMirror,
        *,
        since: int,
        epoch: str,
        waits: bool,
    ) -> UpdateReport:
        """Bring the server from version `since` to the mirror's.

        since: NEVER if it is unknown what the server has. waits: requests that it runs end first;
        otherwise they are aborted. ServerFault or WeightSyncError if it fails; what the server has
        is unknown then. Hashes that differ are in the report.
        """
        began = time.perf_counter()
        version, is_full, packed, facts = await asyncio.to_thread(self._pack, shared, since)
        number = next(_NUMBERS)
        await self._announce(number, facts)
        await asyncio.gather(
            *(
                asyncio.to_thread(sender.send, messages, update=number)
                for sender, messages in zip(self._senders, packed, strict=True)
            )
        )
        switched = time.perf_counter()
        body = {
            "number": number,
            "version": version,
            "epoch": epoch,
            "verify": True,
            "mode": "wait" if waits else "abort",
            "seconds": self._seconds,
        }
        answer = await self._client.call("POST", "spmdflow/switch", body, seconds=4 * self._seconds)
        ended = time.perf_counter()
        expected = await asyncio.to_thread(_hashes_of, shared, version)
        num_bytes = sum(message.num_bytes for messages in packed for message in messages)
        return UpdateReport(
            version=version,
            is_full=is_full,
            num_bytes=num_bytes,
            seconds=ended - began,
            switch_seconds=ended - switched,
            difference=_difference(expected, answer.get("hashes"), version),
        )

    def _pack(
        self, shared: SharedMirror, since: int
    ) -> tuple[int, bool, list[list[PackedMessage]], list[list[Any]]]:
        """Return the version, whether all of it is sent, and each worker's messages and facts.

        Copies the values.
        """
        packed = []
        facts = []
        with shared.lock_mirror() as mirror:
            version = mirror.version
            is_full = since == NEVER or not mirror.has_changes_since(since)
            for boxes in self._boxes:
                messages: list[list[BoxUpdate]] = cut_into_messages(
                    mirror.updates(boxes, since=since)
                )
                packed.append([PackedMessage.of(each, mirror.dtype) for each in messages])
                facts.append([[list(one.facts) for one in each] for each in messages])
        return version, is_full, packed, facts

    async def _announce(self, number: int, facts: Sequence[Any]) -> None:
        """Tell the workers what arrives."""
        body = {"number": number, "messages": facts}
        await self._client.call("POST", "spmdflow/receive", body, seconds=4 * self._seconds)

    def close(self) -> None:
        """Close the connections."""
        for sender in self._senders:
            sender.close()


def _hashes_of(shared: SharedMirror, version: int) -> dict[str, int] | None:
    """The hashes of a version; None if the mirror has a newer one by now."""
    with shared.lock_mirror() as mirror:
        if mirror.version != version:
            return None
        return mirror.hashes()


def _difference(expected: Mapping[str, int] | None, answer: object, version: int) -> str | None:
    """Compare hashes; return the first that differs in words, or None."""
    if not isinstance(answer, dict):
        raise WrongAnswer("a switch without hashes")
    actual = {}
    for name, value in answer.items():
        if not isinstance(name, str) or type(value) is not int:
            raise WrongAnswer("hashes that are no numbers")
        actual[name] = value % MODULUS
    if expected is None:
        return None
    try:
        compare_hashes(expected, actual, version)
    except WeightSyncError as err:
        return str(err).partition("; the run must not")[0]
    return None


def _list_of(answer: Mapping[str, Any], name: str, size: int) -> list[Any]:
    """A list of this size in an answer. WrongAnswer otherwise."""
    value = answer.get(name)
    if not isinstance(value, list) or len(value) != size:
        raise WrongAnswer(f"{name} is no list of {size}")
    return value


def _read_boxes(value: object) -> list[BoxOf]:
    """The boxes of a worker. WrongAnswer for anything else."""
    if not isinstance(value, list) or len(value) > _MOST_BOXES:
        raise WrongAnswer("boxes that are no list")
    result = []
    for entry in value:
        try:
            name, bounds = entry
            pairs = tuple((start, stop) for start, stop in bounds)
        except (TypeError, ValueError) as err:
            raise WrongAnswer(f"a box {str(entry)[:60]}") from err
        if not isinstance(name, str):
            raise WrongAnswer("a box without a name")
        for start, stop in pairs:
            if type(start) is not int or type(stop) is not int or not 0 <= start <= stop:
                raise WrongAnswer(f"a box with the bounds {str(bounds)[:60]}")
        result.append((name, Box(pairs)))
    return result
