"""Replies that are being generated: the requests, and what brings the tokens back.

The generator belongs to another thread. A GenerationRequest goes there, and its functions bring the
tokens back into the event loop, all at once or, for a stream, as they are drawn.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from spmdflow.config.episode_models import POLICY
from spmdflow.episodes.ask import Refusal
from spmdflow.episodes.http import ClientLeft
from spmdflow.episodes.named_model import OwnSampling
from spmdflow.rollout.resumable import VersionedResponse
from spmdflow.rollout.sampling import Grammar


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
    model: str = POLICY
    """Name of the model that replies."""
    sampling: OwnSampling | None = None
    """Sampling settings of the request. None: it is the policy's, and the run's settings apply."""

    @property
    def identity(self) -> AbandonedRequest:
        """What names this request once its client has left."""
        return AbandonedRequest(self.number, self.name, self.turn, self.model)


class AbandonedRequest(NamedTuple):
    """A GenerationRequest whose client has left."""

    number: int
    name: str
    turn: int
    model: str = POLICY


class RequestNotAdded(Exception):
    """The generator rejects a request that the recorder accepted."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(f"the generator rejects it ({type(cause).__name__}: {cause})")


class LoopCalls:
    """Calls of other threads that wait for the event loop, which is woken once for all of them."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: deque[Callable[[], None]] = deque()
        self._is_scheduled = False
        """Whether the loop will make the calls that wait."""

    def add(self, call: Callable[[], None]) -> None:
        """Has the loop make this call, after those that were added before. Safe in any thread."""
        self._waiting.append(call)
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon_threadsafe(self._make_all)

    def _make_all(self) -> None:
        self._is_scheduled = False  # first: a call that comes from now on schedules this again
        while self._waiting:
            self._waiting.popleft()()


class PendingReply:
    """A reply that is being generated, as the event loop sees it."""

    def __init__(self, calls: LoopCalls, changed: asyncio.Event) -> None:
        """changed: set when there are new tokens, or the reply is done."""
        self.future: asyncio.Future[VersionedResponse | None]
        self.future = asyncio.get_running_loop().create_future()
        self.tokens: list[int] = []
        """Those so far, if they are asked for."""
        self.is_new = False
        """Whether the tokens have changed since a reader has set this to False."""
        self._calls = calls
        self._changed = changed

    def done(self, drawn: VersionedResponse | None) -> None:
        """See GenerationRequest.done."""
        self._calls.add(partial(self.finish, drawn))

    def fail(self, err: Exception) -> None:
        """See GenerationRequest.fail."""
        self._calls.add(partial(self._fail, err))

    def progress(self, tokens: list[int]) -> None:
        """See GenerationRequest.progress."""
        self._calls.add(partial(self._show, tokens))

    def finish(self, drawn: VersionedResponse | None) -> None:
        """Ends the reply, unless it has ended; None: it was aborted. Called in the event loop."""
        if not self.future.done():
            self.future.set_result(drawn)
            self._changed.set()

    def _fail(self, err: Exception) -> None:
        if not self.future.done():
            refused = isinstance(err, Refusal)
            self.future.set_exception(err if refused else RequestNotAdded(err))
            self.future.exception()  # of several choices only one failure is awaited
            self._changed.set()

    def _show(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self.is_new = True
        self._changed.set()


class PendingChoices:
    """The replies to one request that are being generated."""

    def __init__(self, calls: LoopCalls, count: int) -> None:
        self._changed = asyncio.Event()
        self.replies: list[PendingReply] = []
        for _ in range(count):
            self.replies.append(PendingReply(calls, self._changed))

    def have_ended(self) -> bool:
        """Whether all replies have ended."""
        return all(reply.future.done() for reply in self.replies)

    def leave(self) -> None:
        """The client has left: the replies are not waited for. Called in the event loop."""
        for reply in self.replies:
            reply.finish(None)

    async def wait_for_all(self) -> list[VersionedResponse]:
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
