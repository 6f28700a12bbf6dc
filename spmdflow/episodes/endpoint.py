"""The endpoint of a rank: HTTP on loopback, in a thread with its own event loop.

    http://127.0.0.1:PORT/episodes/ID/v1/chat/completions   also /completions, /models

The system chooses the port. An episode's id is random and valid until the episode ends. Its key is
a second random value; if a request has a key, it must be that of the episode. Limits: size of a
request; connections, pending requests and refused requests of one episode; number and time of
connections that have not named an episode. An unexpected error is logged, answered with status 500,
and fails the episode whose request caused it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple
from urllib.parse import unquote

from spmdflow.episodes.connections import (
    MOST_OF_EPISODE,
    MOST_STRANGERS,
    STRANGER_SECONDS,
    ClientConnection,
    Connections,
)
from spmdflow.episodes.fields import Refusal, Reply, parse_request, write_answer, write_error
from spmdflow.episodes.recorder import Recorder
from spmdflow.errors import DataError
from spmdflow.rollout.resumable import VersionedResponse

logger = logging.getLogger(__name__)

MODEL = "policy"
"""Name of the model. Requests with any other name use the same weights."""
_MOST_BODY_BYTES = 4 << 20
_MOST_DISCARDED_BYTES = 64 << 20
_MOST_HEAD_BYTES = 1 << 16
_MOST_UNDER_WAY = 16
"""Maximum number of requests of one episode that wait for an answer."""
_MOST_REFUSED = 100
"""Refused requests of one episode after which it is ended."""
_REASONS = {200: "OK", 400: "Bad Request", 401: "Unauthorized", 404: "Not Found"}
_REASONS |= {
    405: "Method Not Allowed",
    411: "Length Required",
    413: "Content Too Large",
    429: "Too Many Requests",
    500: "Internal Server Error",
}
_MOST_SIZE_DIGITS = 18
"""Maximum number of digits of a content-length."""
_CLOSES = {"unread", "connections", "internal_error"}
"""Codes of refusals after which the connection is closed."""
_WARN_EVERY_SECONDS = 60.0
_UNREADABLE = (
    DataError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
"""Errors that JSON, tokenizers and chat templates raise for an invalid request."""


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


class EpisodeFault(NamedTuple):
    """An episode that must be ended, and the cause."""

    number: int
    name: str
    cause: str


class _Disconnected(Exception):
    """The client has disconnected."""


class _NotAdded(Exception):
    """The generator rejects a request that the recorder accepted."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(f"the generator rejects it ({type(cause).__name__}: {cause})")


class RareWarning:
    """A warning that clients can trigger: logged at most once a minute, with the number omitted."""

    def __init__(self, *, seconds: float = _WARN_EVERY_SECONDS) -> None:
        self._seconds = seconds
        self._next = float("-inf")
        self._num_omitted = 0

    def warn(self, text: str) -> None:
        """Logs the text, unless the last warning is less than a minute old; then only counts it.

        The next warning that is logged reports the number that were omitted.
        """
        now = time.monotonic()
        if now < self._next:
            self._num_omitted += 1
            return
        if self._num_omitted:
            more = f" ({self._num_omitted} more since the last warning)"
        else:
            more = ""
        logger.warning("episodes: %s%s", text, more)
        self._next = now + self._seconds
        self._num_omitted = 0


class _RunningEpisode:
    """The endpoint's state of an episode: its key, its recorder and its numbers of requests."""

    def __init__(self, number: int, name: str, recorder: Recorder) -> None:
        """name: id of the episode. The key is drawn at random."""
        self.number = number
        self.name = name
        self.recorder = recorder
        self.key = secrets.token_urlsafe(24)
        self.turn = asyncio.Lock()
        """Requests of an episode are generated one after another."""
        self.under_way = self.refused = 0


class Endpoint:
    """Answers the requests of episodes. `inbox` receives the replies to generate."""

    def __init__(self, tokenizer: Any, *, stranger_seconds: float = STRANGER_SECONDS) -> None:
        """Opens the port and starts the thread.

        tokenizer: from transformers. stranger_seconds: see Connections.
        """
        self.inbox: queue.SimpleQueue[GenerationRequest | EpisodeFault] = queue.SimpleQueue()
        self.wake, self._waker = socket.socketpair()
        """Becomes readable when the inbox has a new item."""
        self.wake.setblocking(False)
        self._waker.setblocking(False)
        self._tokenizer = tokenizer
        self._episodes: dict[str, _RunningEpisode] = {}
        """By id."""
        self._owners: dict[str, _RunningEpisode] = {}
        """By key."""
        self._warned_fields: set[str] = set()
        self._connections = Connections(stranger_seconds=stranger_seconds)
        self._stranger_warning = RareWarning()
        self._foreign_warning = RareWarning()
        self._loop = asyncio.new_event_loop()
        self._server = self._loop.run_until_complete(
            asyncio.start_server(self._serve, "127.0.0.1", 0, limit=_MOST_HEAD_BYTES)
        )
        self.port: int = self._server.sockets[0].getsockname()[1]
        self._thread = threading.Thread(target=self._run, name="episodes", daemon=True)
        self._thread.start()

    def open(self, number: int, recorder: Recorder) -> tuple[str, dict[str, str]]:
        """Registers an episode. Returns its id, and its base_url, model and api_key.

        Id and key are random; the three values are the arguments of the environment. number: the
        episode's number in GenerationRequest and EpisodeFault.
        """
        name = secrets.token_urlsafe(24)
        episode = self._episodes[name] = _RunningEpisode(number, name, recorder)
        self._owners[episode.key] = episode
        url = f"http://127.0.0.1:{self.port}/episodes/{name}/v1"
        return name, {"base_url": url, "model": MODEL, "api_key": episode.key}

    def forget(self, name: str) -> None:
        """Ends an episode: later requests with its id are refused, and its connections become idle.

        Does nothing for an unknown id.
        """
        episode = self._episodes.pop(name, None)
        if episode is not None:
            del self._owners[episode.key]
            self._loop.call_soon_threadsafe(self._connections.end_episode, name)

    def close(self) -> None:
        """Stops the thread and closes all connections. May be called repeatedly."""
        if self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self.wake.close()
        self._waker.close()

    def _run(self) -> None:
        """Runs the event loop until `close` stops it, then closes port and connections.

        Pending tasks are cancelled and awaited.
        """
        self._loop.run_forever()
        self._server.close()
        self._connections.close_all()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        if tasks:
            self._loop.run_until_complete(asyncio.wait(tasks))

    def _post(self, item: GenerationRequest | EpisodeFault) -> None:
        self.inbox.put(item)
        self.notify()

    def notify(self) -> None:
        """Makes `wake` readable. Safe in any thread."""
        with suppress(BlockingIOError):  # the buffer is full, so the reader wakes up anyway
            self._waker.send(b".")

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serves the requests of one connection, one after another, until it is closed.

        Returns without an error if the client disconnects, misses its deadline or does not speak
        HTTP. Warns, at most once a minute, if this connection displaced an unidentified one.
        """
        connection, is_full = self._connections.admit(writer.transport.abort, self._loop.time())
        if is_full:
            self._stranger_warning.warn(
                f"more than {MOST_STRANGERS} connections without a request; the oldest was closed"
            )
        try:
            while await self._exchange(connection, reader, writer):
                pass
        except (OSError, EOFError, asyncio.LimitOverrunError, _Disconnected):
            pass  # the client has disconnected, timed out or does not speak HTTP
        finally:
            self._connections.drop(connection)
            writer.close()

    async def _exchange(
        self,
        connection: ClientConnection,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> bool:
        """Reads and answers one request. Returns whether the connection stays open.

        A Refusal becomes an answer with its status; the connection then closes for the codes in
        _CLOSES, without an episode, or if the episode has too many refused requests. It also closes
        if the client asks for it. Errors of reading (deadline, end of the stream) are raised.
        """
        async with asyncio.timeout_at(connection.deadline):
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, path, _ = [*head[0].split(" "), "", ""][:3]
        fields = {
            name.lower(): value.strip() for name, _, value in (x.partition(":") for x in head)
        }
        stays_open = True
        kind = "application/json"
        episode: _RunningEpisode | None = None
        try:
            name, speaker, route = _parse_path(path)
            episode = self._find_episode(name, fields.get("authorization", ""))
            self._claim(connection, episode)
            body = await self._read_body(reader, fields)
            reply, kind = await self._answer(episode, speaker, method, route, body, reader)
            status = 200
        except Refusal as err:
            reply = write_error(err)
            status = err.status
            stays_open = self._count_refusal(episode, err) and err.code not in _CLOSES
        head = [f"HTTP/1.1 {status} {_REASONS[status]}", f"content-type: {kind}"]
        head += [f"content-length: {len(reply)}", *([] if stays_open else ["connection: close"])]
        writer.write("\r\n".join([*head, "", ""]).encode() + reply)
        await writer.drain()
        return stays_open and fields.get("connection", "").lower() != "close"

    async def _read_body(self, reader: asyncio.StreamReader, fields: dict[str, str]) -> bytes:
        """Reads and returns the body of a request; b"" without a content-length.

        Refusal with code "unread" if it has a transfer-encoding (status 411), an invalid
        content-length (400) or more than 4 MiB (413). A body that is too large is read first, up to
        64 MiB, so that the client receives the reason.
        """
        if "transfer-encoding" in fields:
            raise Refusal("got no content-length, expected one", status=411, code="unread")
        size = fields.get("content-length", "0")
        is_number = size.isascii() and size.isdigit() and len(size) <= _MOST_SIZE_DIGITS
        if not is_number:
            got = f"content-length: {size}"
            raise Refusal(f"got {got}, expected the body's number of bytes", code="unread")
        if int(size) <= _MOST_BODY_BYTES:
            return await reader.readexactly(int(size))
        remaining = min(int(size), _MOST_DISCARDED_BYTES)
        while remaining and (part := await reader.read(min(remaining, _MOST_HEAD_BYTES))):
            remaining -= len(
                part
            )  # a client that is cut off while it sends does not read the reason
        got = f"a request of {size} bytes"
        expected = f"at most {_MOST_BODY_BYTES}"
        raise Refusal(f"got {got}, expected {expected}; send less", status=413, code="unread")

    def _find_episode(self, name: str, authorization: str) -> _RunningEpisode:
        """Returns the running episode with the id `name`, unless the key is wrong.

        Refusal (404) if there is no such episode, or (401) if the key is unknown or another
        episode's. A request without a key is accepted. A refusal counts against the episode that
        owns the key, and is logged.
        """
        key = authorization.removeprefix("Bearer ").strip()
        episode = self._episodes.get(name)
        owner = self._owners.get(key)
        if episode is None or (key and owner is not episode):
            if owner:
                who = f"row {owner.number} of this rank"
            else:
                who = "a client without a known key"
            self._foreign_warning.warn(f"{who} asked for an episode that is not its own")
            if owner is not None:
                self._count_refusal(owner, Refusal("another's episode"))
            status = 404 if episode is None else 401
            raise Refusal("got no running episode of this client", status=status, code="not_found")
        return episode

    def _claim(self, connection: ClientConnection, episode: _RunningEpisode) -> None:
        """Assigns a connection to its episode. Refusal if the episode has too many."""
        if not self._connections.claim(connection, episode.name):
            raise Refusal(
                f"got more than {MOST_OF_EPISODE} open connections of one episode; close clients "
                f"and responses when they are done, or use one client for the whole episode",
                status=429,
                code="connections",
            )

    def _count_refusal(self, episode: _RunningEpisode | None, err: Refusal) -> bool:
        """Counts a refused request of an episode. Returns whether the client may send more.

        The 100th one ends the episode: an EpisodeFault goes to the inbox. False without an episode.
        """
        if episode is None:
            return False
        episode.refused += 1
        if episode.refused == _MOST_REFUSED:
            cause = f"flooded the endpoint: {_MOST_REFUSED} requests were refused, the last: {err}"
            self._post(EpisodeFault(episode.number, episode.name, cause))
        return episode.refused < _MOST_REFUSED

    async def _answer(
        self,
        episode: _RunningEpisode,
        speaker: str,
        method: str,
        route: str,
        body: bytes,
        reader: asyncio.StreamReader,
    ) -> tuple[bytes, str]:
        """Returns (body, content type) of the answer; Refusal if the request cannot be answered.

        route is models, models/..., chat/completions or completions (404 otherwise). The latter two
        need POST (405) and at most 16 requests under way (429); their replies are generated one
        after another per episode. An error that an invalid request causes becomes a Refusal (400).
        Any other error is reported by `_report_unexpected`.
        """
        if route.startswith("models"):
            entry = {"id": MODEL, "object": "model", "created": 0, "owned_by": "spmdflow"}
            listed = {"object": "list", "data": [entry]}
            answer = listed if route == "models" else entry
            return json.dumps(answer).encode(), "application/json"
        if route not in ("chat/completions", "completions"):
            got = f"the path {route!r}"
            expected = "chat/completions, completions or models"
            raise Refusal(f"got {got}, expected {expected}", status=404, code="not_found")
        if method != "POST":
            raise Refusal(f"got {method}, expected POST", status=405)
        if episode.under_way >= _MOST_UNDER_WAY:
            got = f"more than {_MOST_UNDER_WAY} requests under way"
            raise Refusal(f"got {got} of one episode; wait for answers", status=429, code="busy")
        episode.under_way += 1
        try:
            async with episode.turn:
                is_chat = route == "chat/completions"
                return await self._generate(episode, speaker, is_chat, body, reader)
        except (Refusal, _Disconnected):
            raise
        except _UNREADABLE as err:
            raise Refusal(f"got a request that cannot be read ({err})") from err
        except Exception as err:  # whatever it is, report it to the client and the episode
            raise self._report_unexpected(episode, err) from err
        finally:
            episode.under_way -= 1

    def _report_unexpected(self, episode: _RunningEpisode, err: Exception) -> Refusal:
        """Logs an error that no request should cause, and ends its episode by an EpisodeFault.

        Returns the Refusal for the client, with status 500.
        """
        what = f"{type(err).__name__}: {err}"
        logger.error("episodes: a request failed with %s", what, exc_info=err)
        cause = f"made a request that failed in the endpoint with {what}"
        self._post(EpisodeFault(episode.number, episode.name, cause))
        text = f"the endpoint failed with {what}; see the rank's log"
        return Refusal(text, status=500, code="internal_error")

    async def _generate(
        self,
        episode: _RunningEpisode,
        speaker: str,
        chat: bool,
        body: bytes,
        reader: asyncio.StreamReader,
    ) -> tuple[bytes, str]:
        """Has a reply generated and recorded, and returns (body, content type) of the answer.

        A GenerationRequest goes to the inbox, and its reply is awaited. _Disconnected, without
        recording, if the request was aborted or the client has disconnected meanwhile. Refusal if
        the request is invalid or does not fit the episode. _NotAdded if the generator rejects it.
        """
        ask = parse_request(json.loads(body), chat=chat, warned_fields=self._warned_fields)
        ask = replace(ask, name=speaker)
        turn = episode.recorder.begin(ask)
        future: asyncio.Future[VersionedResponse | None] = self._loop.create_future()

        def done(drawn: VersionedResponse | None) -> None:
            self._loop.call_soon_threadsafe(
                lambda: None if future.done() else future.set_result(drawn)
            )

        def fail(err: Exception) -> None:
            self._loop.call_soon_threadsafe(
                lambda: None if future.done() else future.set_exception(_NotAdded(err))
            )

        ids = turn.ids
        self._post(
            GenerationRequest(
                number=episode.number,
                name=episode.name,
                ids=ids,
                turn=turn.number,
                speaker=turn.name,
                turn_of_speaker=turn.number_of_name,
                max_new_tokens=turn.max_new_tokens,
                done=done,
                fail=fail,
            )
        )
        drawn = await future
        if drawn is None or reader.at_eof():
            raise _Disconnected
        message, response, reason = episode.recorder.finish(ask, turn, drawn)
        reply_id = f"turn-{turn.number}"
        episode.recorder.turn_of_reply[reply_id] = turn.number
        pieces = [self._tokenizer.decode([i]) for i in response.tokens.tolist()] * ask.log_probs
        reply = Reply(message, reason, ids, response, pieces)
        return write_answer(ask, reply, number=reply_id, model=MODEL)


def _parse_path(path: str) -> tuple[str, str, str]:
    """Returns (ID, NAME, ROUTE) of a path /episodes/ID/v1/ROUTE or /episodes/ID/as/NAME/v1/ROUTE.

    Without a name, NAME is empty. Refusal (404) for any other path. A query (?...) is ignored.
    ROUTE may contain slashes.
    """
    parts = path.partition("?")[0].strip("/").split("/")
    name = ""
    if len(parts) > 4 and parts[2] == "as":
        name = unquote(parts[3])
        parts = [*parts[:2], *parts[4:]]
    if len(parts) < 4 or parts[0] != "episodes" or parts[2] != "v1":
        expected = "/episodes/ID/v1/... or /episodes/ID/as/NAME/v1/..."
        raise Refusal(f"got another path, expected {expected}", status=404, code="not_found")
    return parts[1], name, "/".join(parts[3:])
