"""HTTP/1.1 over one connection, by h11: requests come in, answers go out. Knows no episodes.

A connection may be encrypted: TLS begins when the endpoint has admitted it (`start_tls`), so that
connections count against the limits before they cost a handshake.

h11 parses what arrives and frames what is sent: bodies with a length and in chunks, `Expect:
100-continue`, connections that stay open. Requests that a client sends before it has read the
answer to an earlier one (pipelining) wait in the buffer and are answered in their order.

Every wait for the client has a limit: for the complete head, for the complete body, and for a
client that does not read its answer.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Coroutine
from functools import lru_cache
from typing import Any, NamedTuple

import h11

REQUEST_SECONDS = 60.0
"""Time within which a request must be complete once its first byte has come, and within which a
client must read what is written to it."""
MOST_BODY_BYTES = 4 << 20
_SHUTDOWN_SECONDS = 5.0
"""Time for a client to take part in the end of TLS, and to read what was written before."""
_MOST_DISCARDED_BYTES = 64 << 20
_MOST_HEAD_BYTES = 1 << 16
_MOST_BUFFERED_BYTES = 1 << 18
"""Bytes that may wait unread before the connection is read no further."""


class HttpRequest(NamedTuple):
    """The head of a request."""

    method: str
    path: str
    """As the client wrote it, with its query."""
    headers: dict[str, str]
    """Lower-case name -> value. If a name occurs twice, the last value."""


class MalformedRequest(Exception):
    """What a client sent is no HTTP, or a body of the wrong size. The text says what is wrong."""

    def __init__(self, text: str, status: int = 400) -> None:
        """status: of the answer that tells the client."""
        super().__init__(text)
        self.status = status


class ClientLeft(Exception):
    """The client has closed the connection, or was too slow."""


class HttpConnection(asyncio.Protocol):
    """One connection of a client. Used only in its event loop."""

    def __init__(
        self,
        serve: Callable[[HttpConnection], Coroutine[Any, Any, None]],
        *,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """serve: started as a task when the connection is open; it reads requests and replies.
        tls: with it, `serve` calls `start_tls` first."""
        self._serve = serve
        self._tls = tls
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=_MOST_HEAD_BYTES)
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._task: asyncio.Task[None] | None = None
        self._num_buffered = 0
        self._waiting: asyncio.Future[None] | None = None
        """Done when data arrives, the client leaves, or writing may go on."""
        self._may_write = True
        self.has_left = False
        """Whether the client has closed its end."""
        self.on_leave: Callable[[], None] | None = None
        """Called once, when the client leaves."""

    @property
    def address(self) -> str:
        """The client's address, without the port."""
        assert self._transport is not None
        name = self._transport.get_extra_info("peername")
        return str(name[0]) if name else ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        if self._tls is not None:
            transport.pause_reading()  # what comes belongs to the handshake
        self._task = self._loop.create_task(self._serve(self))

    async def start_tls(self, deadline: float) -> None:
        """Does the handshake, if the connection is encrypted.

        deadline: time (of the loop) by which it must be complete. ClientLeft if it is not, or if
        the client leaves; ssl.SSLError if it speaks no TLS or does not trust the certificate.
        """
        if self._tls is None:
            return
        assert self._transport is not None
        try:
            secured = await self._loop.start_tls(
                self._transport,
                self,
                self._tls,
                server_side=True,
                ssl_handshake_timeout=max(0.001, deadline - self._loop.time()),
                ssl_shutdown_timeout=_SHUTDOWN_SECONDS,
            )
        except ssl.SSLError:
            raise
        except OSError as err:  # it has left, or was too slow
            raise ClientLeft from err
        if secured is None:
            raise ClientLeft
        self._transport = secured

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol. Stops reading while too much is buffered."""
        assert self._transport is not None
        self._http.receive_data(data)
        self._num_buffered += len(data)
        if self._num_buffered > _MOST_BUFFERED_BYTES:
            self._transport.pause_reading()
        self._wake()

    def eof_received(self) -> bool:
        """See asyncio.Protocol. True: an answer may still be written, which TLS does not allow."""
        if not self.has_left:
            self._http.receive_data(b"")
        self._leave()
        return self._tls is None

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._may_write = False
        self._leave()

    def pause_writing(self) -> None:
        """See asyncio.Protocol."""
        self._may_write = False

    def resume_writing(self) -> None:
        """See asyncio.Protocol."""
        self._may_write = True
        self._wake()

    def check_client(self) -> None:
        """ClientLeft if the client has closed its end."""
        if self.has_left:
            raise ClientLeft

    def abort(self) -> None:
        """Closes the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    def close(self) -> None:
        """Closes the connection when all that was written has been sent."""
        if self._transport is not None:
            self._transport.close()

    def _leave(self) -> None:
        """Records that the client has left, and tells whoever waits."""
        if self.has_left:
            self._wake()
            return
        self.has_left = True
        self._wake()
        if self.on_leave is not None:
            self.on_leave()

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    async def _wait(self, deadline: float | None) -> None:
        """Waits until `_wake` is called. ClientLeft after the deadline (None: no limit)."""
        waiting: asyncio.Future[None] = self._loop.create_future()
        self._waiting = waiting
        timer = None
        if deadline is not None:
            timer = self._loop.call_at(deadline, _expire, waiting)
        try:
            await waiting
        finally:
            self._waiting = None
            if timer is not None:
                timer.cancel()

    async def _next_event(self, deadline: float | None) -> Any:
        """h11's next event: a request's head, a part of its body, its end, or the client's end.

        Waits for data as long as it is incomplete. deadline: None while nothing of a request has
        come; then REQUEST_SECONDS from its first byte. MalformedRequest for what is no HTTP.
        """
        assert self._transport is not None
        while True:
            try:
                event = self._http.next_event()
            except h11.RemoteProtocolError as err:
                if self.has_left:
                    raise ClientLeft from err
                raise MalformedRequest(f"no valid HTTP: {err}", err.error_status_hint) from err
            if event is not h11.NEED_DATA:
                return event
            if self.has_left:
                raise ClientLeft
            if deadline is None and self._num_buffered:
                deadline = self._loop.time() + REQUEST_SECONDS
            if self._http.they_are_waiting_for_100_continue:
                proceed = h11.InformationalResponse(status_code=100, headers=[])
                self._write(self._http.send(proceed))
            self._num_buffered = 0
            self._transport.resume_reading()
            await self._wait(deadline)

    async def next_request(self, deadline: float | None) -> HttpRequest:
        """Returns the head of the next request.

        deadline: time (of the loop) by which it must have come; None: the connection may stay idle,
        but a head whose first byte has come must be complete within REQUEST_SECONDS. ClientLeft if
        the client closes the connection or is too slow, MalformedRequest if it sends no HTTP.
        """
        if self._http.our_state is h11.DONE:
            self._http.start_next_cycle()
        if not self.has_left and not self._http.trailing_data[0]:
            await self._wait(deadline)  # nothing has come, so there is nothing to parse
        event = await self._next_event(deadline)
        if not isinstance(event, h11.Request):
            raise ClientLeft
        headers = {}
        for name, value in event.headers.raw_items():
            headers[name.decode("latin-1").lower()] = value.decode("latin-1")
        method = event.method.decode("latin-1")
        return HttpRequest(method, event.target.decode("latin-1"), headers)

    async def read_body(self, request: HttpRequest) -> bytes:
        """Returns the body of the request whose head was read last.

        MalformedRequest (413) for more than 4 MiB; such a body is read first, up to 64 MiB, because
        a client that is cut off while it sends does not read the reason. A client that waits for
        100-continue gets the answer at once.
        """
        announced = int(request.headers.get("content-length", "0"))
        is_too_large = announced > MOST_BODY_BYTES
        if is_too_large and self._http.they_are_waiting_for_100_continue:
            raise _too_large(announced)
        deadline = self._loop.time() + REQUEST_SECONDS
        parts = []
        size = 0
        while isinstance(event := await self._next_event(deadline), h11.Data):
            size += len(event.data)
            is_too_large |= size > MOST_BODY_BYTES
            if not is_too_large:
                parts.append(bytes(event.data))
            if size >= _MOST_DISCARDED_BYTES:
                break
        if is_too_large:
            raise _too_large(max(size, announced))
        return b"".join(parts)

    def reply(
        self,
        body: bytes,
        *,
        status: int = 200,
        kind: str = "application/json",
        headers: tuple[tuple[str, str], ...] = (),
        closes: bool = False,
    ) -> None:
        """Writes a complete answer. kind: the content type. closes: announces the end."""
        closes = closes or not self._has_whole_request()
        head = _response_head(status, kind, len(body), headers, closes=closes)
        data = self._http.send(head) or b""
        data += self._http.send(h11.Data(data=body)) or b""
        data += self._http.send(h11.EndOfMessage()) or b""
        self._write(data)

    def begin_stream(self, kind: str) -> None:
        """Writes the head of an answer of status 200 whose body follows in parts."""
        head = [("content-type", kind), ("cache-control", "no-cache")]
        self._write(self._http.send(h11.Response(status_code=200, headers=head)))

    def write_part(self, data: bytes) -> None:
        """Writes a part of the body of a streamed answer. Does nothing for no data."""
        if data:
            self._write(self._http.send(h11.Data(data=data)))

    def end_stream(self) -> None:
        """Writes the end of a streamed answer."""
        self._write(self._http.send(h11.EndOfMessage()))

    @property
    def may_reply(self) -> bool:
        """Whether no answer to the current request has begun."""
        return self._http.our_state in (h11.IDLE, h11.SEND_RESPONSE)

    @property
    def stays_open(self) -> bool:
        """Whether the client may send another request: both sides are done with this one."""
        return bool(self._http.our_state is h11.DONE and self._http.their_state is h11.DONE)

    async def drain(self) -> None:
        """Waits until the client has read enough that more may be written.

        ClientLeft if it has left, or reads nothing for REQUEST_SECONDS.
        """
        deadline = self._loop.time() + REQUEST_SECONDS
        while not self._may_write:
            if self.has_left:
                raise ClientLeft
            await self._wait(deadline)

    def _has_whole_request(self) -> bool:
        return bool(self._http.their_state in (h11.DONE, h11.MUST_CLOSE, h11.CLOSED))

    def _write(self, data: bytes | None) -> None:
        if data and self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)


@lru_cache(maxsize=1024)
def _response_head(
    status: int, kind: str, size: int, headers: tuple[tuple[str, str], ...], *, closes: bool
) -> h11.Response:
    """The head of an answer. h11 checks each header, so heads are kept: many are equal."""
    fields = [("content-type", kind), ("content-length", str(size)), *headers]
    if closes:
        fields.append(("connection", "close"))
    return h11.Response(status_code=status, headers=fields)


def _expire(waiting: asyncio.Future[None]) -> None:
    """Ends a wait whose deadline has come."""
    if not waiting.done():
        waiting.set_exception(ClientLeft())


def _too_large(size: int) -> MalformedRequest:
    text = f"got a request of {size} bytes, expected at most {MOST_BODY_BYTES}; send less"
    return MalformedRequest(text, 413)
