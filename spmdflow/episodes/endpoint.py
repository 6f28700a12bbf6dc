"""The endpoint of a rank: HTTP or HTTPS, in a thread with its own event loop.

    http://127.0.0.1:PORT/episodes/ID/v1/chat/completions   also /responses, /messages, ...

`address` says where it listens. An episode's id is random and valid until the episode ends. Its key
is a second random value; if a request has a key, it must be that of the episode. Where clients of
other machines can connect, every request needs it. Limits: size of a
request; connections and refused requests of one episode; number and time of connections that have
not named an episode; time of slow clients. An unexpected error is logged, answered with status 500,
and fails the episode whose request caused it.

Requests of one episode are generated at the same time. If a client leaves while its reply is
generated, the generator is told to stop, and nothing is recorded.
"""

from __future__ import annotations

import asyncio
import json
import logging
import queue
import secrets
import socket
import ssl
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple
from urllib.parse import unquote

from spmdflow.config.endpoint import EndpointConfig
from spmdflow.episodes.address import EndpointAddress, open_address
from spmdflow.episodes.ask import Refusal
from spmdflow.episodes.connections import (
    ClientConnection,
    ConnectionLimits,
    Connections,
)
from spmdflow.episodes.dialect import MODEL, ApiDialect
from spmdflow.episodes.fields import ChatDialect, CompletionDialect
from spmdflow.episodes.generation import ModelUse, OtherModels, ReplyGenerator, RunningEpisode
from spmdflow.episodes.guided import GuidedReplies
from spmdflow.episodes.http import ClientLeft, HttpConnection, HttpRequest, MalformedRequest
from spmdflow.episodes.messages import MessagesDialect
from spmdflow.episodes.named_model import NamedModels
from spmdflow.episodes.pending import AbandonedRequest, GenerationRequest, LoopCalls
from spmdflow.episodes.recorder import Recorder
from spmdflow.episodes.responses import ResponsesDialect
from spmdflow.episodes.server_call import ServerCalls
from spmdflow.errors import DataError

logger = logging.getLogger(__name__)

_MESSAGES = MessagesDialect()
_CHAT = ChatDialect()
DIALECTS: dict[str, ApiDialect] = {
    "chat/completions": _CHAT,
    "completions": CompletionDialect(),
    "responses": ResponsesDialect(),
    "messages": _MESSAGES,
    "messages/count_tokens": _MESSAGES,
}
"""Route -> the dialect of its requests."""
_MOST_REFUSED = 100
"""Refused requests of one episode after which it is ended."""
_BACKLOG = 1024
"""Connections that may wait to be accepted: all episodes of a rank may begin at once."""
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


class EpisodeFault(NamedTuple):
    """An episode that must be ended, and the cause."""

    number: int
    name: str
    cause: str


InboxItem = GenerationRequest | AbandonedRequest | EpisodeFault


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


class Endpoint:
    """Answers the requests of episodes. `inbox` receives the replies to generate."""

    def __init__(
        self,
        *,
        address: EndpointAddress | None = None,
        limits: ConnectionLimits | None = None,
        guided: GuidedReplies | None = None,
        models: NamedModels | None = None,
        server_keys: Mapping[str, str] | None = None,
    ) -> None:
        """Listens and starts the thread.

        address: None: loopback, at a port that the system chooses. It is closed with the endpoint.
        limits: of connections; None: the defaults. guided: what replies can be made to conform to;
        None: calls in the form <tool_call>. models: those besides the policy. server_keys: model ->
        key of its server.
        """
        self.inbox: queue.SimpleQueue[InboxItem] = queue.SimpleQueue()
        self.wake, self._waker = socket.socketpair()
        """Becomes readable when the inbox has a new item."""
        self.wake.setblocking(False)
        self._waker.setblocking(False)
        self._is_awake = False
        """Whether `wake` is readable, so that it need not be made so."""
        self._episodes: dict[str, RunningEpisode] = {}
        """By id."""
        self._owners: dict[str, RunningEpisode] = {}
        """By key."""
        self._limits = limits or ConnectionLimits()
        self._connections = Connections(self._limits)
        self._models = models or NamedModels()
        self._servers = ServerCalls(server_keys)
        self._address = address or open_address(EndpointConfig())
        self._loop = asyncio.new_event_loop()
        self._replies = ReplyGenerator(
            guided or GuidedReplies(),
            self._post,
            self._models,
            self._servers,
            LoopCalls(self._loop),
        )
        self._stranger_warning = RareWarning()
        self._foreign_warning = RareWarning()
        self._tls_warning = RareWarning()
        self._server = self._loop.run_until_complete(self._listen())
        self.port: int = self._address.port
        self._thread = threading.Thread(target=self._run, name="episodes", daemon=True)
        self._thread.start()

    async def _listen(self) -> asyncio.Server:
        return await self._loop.create_server(
            lambda: HttpConnection(self._serve, tls=self._address.tls),
            sock=self._address.listener,
            backlog=_BACKLOG,
        )

    def open(
        self, number: int, recorder: Recorder, others: OtherModels | None = None
    ) -> tuple[str, dict[str, str]]:
        """Registers an episode. Returns its id, and its base_url, model and api_key.

        Id and key are random; the three values are the arguments of the environment. number: the
        episode's number in GenerationRequest and EpisodeFault. others: what it needs for models
        that are not the policy.
        """
        name = secrets.token_urlsafe(24)
        episode = self._episodes[name] = RunningEpisode(number, name, recorder, others)
        self._owners[episode.key] = episode
        url = f"{self._address.url}/episodes/{name}/v1"
        return name, {"base_url": url, "model": MODEL, "api_key": episode.key}

    def forget(self, name: str) -> dict[str, ModelUse]:
        """Ends an episode: later requests with its id are refused, its connections become idle, and
        its requests to servers are cancelled.

        Returns how often it used models that are not the policy; {} for an unknown id.
        """
        episode = self._episodes.pop(name, None)
        if episode is None:
            return {}
        del self._owners[episode.key]
        self._loop.call_soon_threadsafe(self._end_episode, episode)
        return episode.uses

    def _end_episode(self, episode: RunningEpisode) -> None:
        self._connections.end_episode(episode.name)
        for call in episode.calls:
            call.cancel()

    def close(self) -> None:
        """Stops the thread and closes all connections. May be called repeatedly."""
        if self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._address.close()
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
        self._loop.run_until_complete(self._servers.close())

    def _post(self, item: InboxItem) -> None:
        self.inbox.put(item)
        self.notify()

    def notify(self) -> None:
        """Makes `wake` readable until `take_all` is called. Safe in any thread."""
        if self._is_awake:
            return
        self._is_awake = True
        with suppress(BlockingIOError):  # the buffer is full, so the reader wakes up anyway
            self._waker.send(b".")

    def take_all(self) -> list[InboxItem]:
        """Empties the inbox, in order, after which `wake` is not readable."""
        self._is_awake = False  # first: what comes from now on makes it readable again
        with suppress(BlockingIOError):
            self.wake.recv(1 << 16)
        items = []
        with suppress(queue.Empty):
            while True:
                items.append(self.inbox.get_nowait())
        return items

    async def _serve(self, http: HttpConnection) -> None:
        """Serves the requests of one connection, one after another, until it is closed.

        Returns without an error if the client disconnects, misses its deadline or does not speak
        HTTP or TLS. Warns, at most once a minute, if this connection displaced another one, or if
        its TLS failed.
        """
        now = self._loop.time()
        connection, displaces = self._connections.admit(http.abort, now, http.address)
        if displaces:
            self._stranger_warning.warn("too many idle connections; the oldest was closed")
        try:
            await http.start_tls(now + self._limits.stranger_seconds)
            while await self._exchange(connection, http):
                self._connections.rest(connection)
        except ClientLeft:
            pass  # it has disconnected, or was too slow
        except ssl.SSLError as err:
            self._tls_warning.warn(
                f"a client could not begin TLS ({err.reason or err}); if it is one of an "
                f"environment, give it an https URL and the certificate to trust"
            )
        finally:
            self._connections.drop(connection)
            http.close()

    async def _exchange(self, connection: ClientConnection, http: HttpConnection) -> bool:
        """Reads and answers one request. Returns whether the connection stays open.

        A Refusal becomes an answer with its status; the connection then closes for the codes in
        _CLOSES, without an episode, or if the episode has too many refused requests. It also closes
        if the client asks for it. ClientLeft if there is nobody to answer.
        """
        dialect: ApiDialect = _CHAT
        episode: RunningEpisode | None = None
        try:
            request = await self._next_request(connection, http)
            name, speaker, route = _parse_path(request.path)
            dialect = DIALECTS.get(route, _CHAT)
            episode = self._find_episode(name, _key_of(request))
            self._claim(connection, episode)
            body = await _read_body(http, request)
            await self._answer(episode, speaker, request.method, route, body, http)
        except Refusal as err:
            stays_open = self._count_refusal(episode, err) and err.code not in _CLOSES
            _refuse(http, dialect, err, closes=not stays_open)
            await http.drain()
            return stays_open and http.stays_open
        await http.drain()
        return http.stays_open

    async def _next_request(
        self, connection: ClientConnection, http: HttpConnection
    ) -> HttpRequest:
        """The head of the next request. Refusal, with code "unread", for what is no HTTP."""
        try:
            return await http.next_request(connection.deadline)
        except MalformedRequest as err:
            episode = self._episodes.get(connection.episode or "")
            refusal = Refusal(str(err), status=err.status, code="unread")
            self._count_refusal(episode, refusal)
            raise refusal from err

    def _find_episode(self, name: str, key: str) -> RunningEpisode:
        """Returns the running episode with the id `name`, unless the key is wrong.

        Refusal (404) if there is no such episode, or (401) if the key is unknown or another
        episode's. A request without a key is accepted, unless clients of other machines can
        connect. A refusal counts against the episode that owns the key, and is logged.
        """
        episode = self._episodes.get(name)
        owner = self._owners.get(key)
        is_open = not key and not self._address.needs_key
        if episode is None or not (is_open or owner is episode):
            if owner:
                who = f"row {owner.number} of this rank"
            else:
                who = "a client without a known key"
            self._foreign_warning.warn(f"{who} asked for an episode that is not its own")
            if owner is not None:
                self._count_refusal(owner, Refusal("another's episode"))
            status = 404 if episode is None else 401
            text = "got no running episode of this client"
            if episode is not None and not key:
                text = "the request has no key; send the episode's api_key as Authorization: Bearer"
            raise Refusal(text, status=status, code="not_found")
        return episode

    def _claim(self, connection: ClientConnection, episode: RunningEpisode) -> None:
        """Assigns a connection to its episode. Refusal if the episode has too many."""
        if not self._connections.claim(connection, episode.name):
            raise Refusal(
                f"got more than {self._limits.of_episode} open connections of one episode; close "
                f"clients and responses when they are done, or use one client for the episode",
                status=429,
                code="connections",
                may_retry=True,
            )

    def _count_refusal(self, episode: RunningEpisode | None, err: Refusal) -> bool:
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
        episode: RunningEpisode,
        speaker: str,
        method: str,
        route: str,
        body: bytes,
        http: HttpConnection,
    ) -> None:
        """Writes the answer to a request; Refusal if it cannot be answered.

        route is models, models/..., or one of DIALECTS (404 otherwise). The latter need POST (405);
        their replies are generated at the same time. An error that an invalid request causes
        becomes a Refusal (400). Any other error is reported by `_report_unexpected`.
        """
        if route == "models" or route.startswith("models/"):
            http.reply(json.dumps(_models(route, self._models.names())).encode())
            return
        if route not in DIALECTS:
            got = f"the path {route!r}"
            expected = f"models or one of {', '.join(DIALECTS)}"
            raise Refusal(f"got {got}, expected {expected}", status=404, code="not_found")
        if method != "POST":
            raise Refusal(f"got {method}, expected POST", status=405)
        episode.under_way += 1
        dialect = DIALECTS[route]
        try:
            if route == "messages/count_tokens":
                count = self._replies.count_tokens(dialect, body, episode)
                http.reply(json.dumps({"input_tokens": count}).encode())
                return
            await self._replies.reply(episode, speaker, dialect, body, http)
        except (Refusal, ClientLeft):
            raise
        except _UNREADABLE as err:
            raise Refusal(f"got a request that cannot be read ({err})") from err
        except Exception as err:  # whatever it is, report it to the client and the episode
            raise self._report_unexpected(episode, err) from err
        finally:
            episode.under_way -= 1

    def _report_unexpected(self, episode: RunningEpisode, err: Exception) -> Refusal:
        """Logs an error that no request should cause, and ends its episode by an EpisodeFault.

        Returns the Refusal for the client, with status 500.
        """
        what = f"{type(err).__name__}: {err}"
        logger.error("episodes: a request failed with %s", what, exc_info=err)
        cause = f"made a request that failed in the endpoint with {what}"
        self._post(EpisodeFault(episode.number, episode.name, cause))
        text = f"the endpoint failed with {what}; see the rank's log"
        return Refusal(text, status=500, code="internal_error")


def _models(route: str, names: list[str]) -> dict[str, Any]:
    """The answer to models or models/NAME, with the fields that both OpenAI and Anthropic have.

    A name that is none of `names` is the policy's, because it answers requests with that name.
    """
    if route == "models":
        entries = [_model(name) for name in names]
        ends = {"first_id": names[0], "last_id": names[-1], "has_more": False}
        return {"object": "list", "data": entries, **ends}
    name = unquote(route.removeprefix("models/"))
    return _model(name if name in names else MODEL)


def _model(name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "spmdflow",
        "type": "model",
        "display_name": name,
        "created_at": "1970-01-01T00:00:00Z",
    }


def _key_of(request: HttpRequest) -> str:
    """The key of a request, as OpenAI's or Anthropic's clients send it; empty: it has none."""
    key = request.headers.get("authorization", "").removeprefix("Bearer ").strip()
    return key or request.headers.get("x-api-key", "").strip()


async def _read_body(http: HttpConnection, request: HttpRequest) -> bytes:
    """The body of a request. Refusal, with code "unread", if it is too large or no HTTP."""
    try:
        return await http.read_body(request)
    except MalformedRequest as err:
        raise Refusal(str(err), status=err.status, code="unread") from err


def _refuse(http: HttpConnection, dialect: ApiDialect, refusal: Refusal, *, closes: bool) -> None:
    """Writes the answer to a request that is refused. A stream that has begun is cut off."""
    if not http.may_reply:
        http.abort()
        return
    headers = (("x-should-retry", "true" if refusal.may_retry else "false"),)
    body = json.dumps(dialect.error(refusal)).encode()
    http.reply(body, status=refusal.status, headers=headers, closes=closes)


def _parse_path(path: str) -> tuple[str, str, str]:
    """Returns (ID, NAME, ROUTE) of a path /episodes/ID/v1/ROUTE or /episodes/ID/as/NAME/v1/ROUTE.

    Without a name, NAME is empty. v1 may be absent, or occur twice, because some clients add it to
    the URL and others do not. Refusal (404) for any other path. A query (?...) is ignored. ROUTE
    may contain slashes.
    """
    parts = path.partition("?")[0].strip("/").split("/")
    if len(parts) < 3 or parts[0] != "episodes":
        expected = "/episodes/ID/v1/... or /episodes/ID/as/NAME/v1/..."
        raise Refusal(f"got another path, expected {expected}", status=404, code="not_found")
    name = ""
    route = parts[2:]
    if len(route) > 2 and route[0] == "as":
        name = unquote(route[1])
        route = route[2:]
    while route and route[0] == "v1":
        route = route[1:]
    return parts[1], name, "/".join(route)
