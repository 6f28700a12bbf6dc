"""Envelopes and the two sockets: a ROUTER at the controller and a DEALER on every rank.

This is the only file that imports zmq. Each message is one envelope, which starts with the run's
random id. An envelope with another id is dropped with a warning. Connections are never repaired: if
one is lost, the peer is gone. TCP keep-alive detects dead nodes. A stopped process stays connected.
Each socket is used by one thread at a time.

TCP connections use CURVE. Both key pairs derive from the run's key (runtime/rendezvous.py) and its
id. The public keys are never published, so a peer without the run's key cannot complete the
handshake: no message of it is read, and none is sent to it. A handshake may take 5 s. While too
many handshakes are pending, and once all ranks are connected, the kernel drops new connections.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import hashlib
import hmac
import logging
import os
import select
import socket
import struct
import threading
from typing import Any, cast

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from spmdflow.errors import MessageError
from spmdflow.message import MAX_MESSAGE_BYTES, decode, encode
from spmdflow.runtime.inflow import Inflow

logger = logging.getLogger(__name__)

RUN_ID_BYTES = 16
LOCAL_ADDRESS = "inproc://spmdflow-controller"
"""Where rank 0 reaches its own ROUTER, without TCP."""

_IDENTITY = struct.Struct(">cI")
_CLOSE_MILLISECONDS = 2000
_LOST = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_UNAUTHENTICATED_CHANGE: dict[int, int] = {
    zmq.EVENT_ACCEPTED: 1,
    zmq.EVENT_HANDSHAKE_SUCCEEDED: -1,
    zmq.EVENT_DISCONNECTED: -1,
}
"""Event -> change of the number of connections that have not authenticated yet."""
_MAX_QUEUED = 100_000
"""Messages that may be queued for one peer, in either direction."""
_HANDSHAKE_MILLISECONDS = 5000
_MAX_UNAUTHENTICATED = 64
"""Connections that may be unauthenticated at a time, in addition to one for each rank."""
_MAX_EVENTS = 1000
"""Connection events that are read in one turn."""
_DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)
"""Socket filter (classic BPF) of one instruction: keep 0 bytes of every packet."""
_SO_ATTACH_FILTER = 26
_SO_DETACH_FILTER = 27
_OPTIONS = (
    (zmq.SNDHWM, _MAX_QUEUED),
    (zmq.RCVHWM, _MAX_QUEUED),
    (zmq.LINGER, _CLOSE_MILLISECONDS),
    (zmq.RECONNECT_IVL, -1),
    (zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES + 2**10),
    (zmq.TCP_KEEPALIVE, 1),  # a dead node is noticed within about a minute
    (zmq.TCP_KEEPALIVE_IDLE, 20),
    (zmq.TCP_KEEPALIVE_INTVL, 5),
    (zmq.TCP_KEEPALIVE_CNT, 6),
    (zmq.TCP_MAXRT, 60_000),
)
_MAX_WARNINGS = 10
# plain ints: arithmetic on zmq's enums costs more than the calls
_NOW = int(zmq.NOBLOCK)
_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
_EVENTS = int(zmq.EVENTS)
_POLLIN = int(zmq.POLLIN)


class Kind(enum.IntEnum):
    """What an envelope contains. The arrow shows the sender (c: controller, r: rank)."""

    HELLO = 1  # r -> c: connected
    WELCOME = 2  # c -> r: all ranks are connected; the processes on the node of the rank
    COMMAND = 3  # c -> r: [ticket, number, lane, label, seconds, payload]
    REPLY = 4  # r -> c: [ticket, payload, fields of a CallDuration]
    FAILURE = 5  # r -> c: a Failure
    BEAT = 6  # both: heartbeat; r -> c: what its lanes are doing (failure/stall.py)
    STOP = 7  # r -> c: number of a signal that the rank received and that asks the run to stop
    ABORT = 8  # c -> r: [ranks to kill]; write stacks and exit
    CLOSE = 9  # c -> r: finish all commands, then send BYE
    BYE = 10  # r -> c: all lanes have ended
    ENDED = 11  # r -> c: [rank, how]: a process on the rank's node ended; the controller is remote
    UNWIND = 12  # c -> r: the Failure that ended the run; drop queued commands, leave the lanes
    UNWOUND = 13  # r -> c: all lanes have ended; CLOSE follows when all ranks have sent this
    LOOK = 14  # c -> r: [ranks that do not answer]; write stacks, and signal those ranks for theirs


_KINDS = {int(kind): kind for kind in Kind}


class Envelopes:
    """Encodes and decodes the envelopes of one run."""

    def __init__(self, run_id: bytes) -> None:
        self._run_id = run_id
        self._prefix = {kind: run_id + bytes([kind]) for kind in Kind}
        self._num_foreign = 0

    def seal(self, kind: Kind, body: Any = None) -> bytes:
        """Bytes of one envelope."""
        return self._prefix[kind] + encode(body)

    def open(self, data: bytes, sender: int) -> tuple[Kind, Any] | None:
        """Decode an envelope into (kind, body); None, with a warning, if it is from another run.

        Only the first 10 of these are logged. MessageError for an unknown kind, or if the body
        cannot be decoded. sender: rank, for the log.
        """
        if not data.startswith(self._run_id):
            self._num_foreign += 1
            if self._num_foreign <= _MAX_WARNINGS:
                logger.warning(
                    "dropped %d bytes of another run, sent as rank %d", len(data), sender
                )
            return None
        kind = _KINDS.get(data[RUN_ID_BYTES]) if len(data) > RUN_ID_BYTES else None
        if kind is None:
            raise MessageError(
                f"message: got kind {data[RUN_ID_BYTES:][:1]!r}, expected one of {list(_KINDS)}; "
                f"run the same version of spmdflow on every rank"
            )
        return kind, decode(memoryview(data)[RUN_ID_BYTES + 1 :])


class _Socket(Envelopes):
    """What both ends share: a socket that never reconnects, and a monitor of its connections."""

    _events = int(_LOST)

    def __init__(
        self, kind: int, run_id: bytes, *, context: zmq.Context[zmq.Socket[bytes]]
    ) -> None:
        """Create the socket, which neither binds nor connects yet, and its monitor."""
        super().__init__(run_id)
        self._socket = context.socket(kind)
        for option, value in _OPTIONS:
            self._socket.setsockopt(option, value)
        self.descriptor = _descriptor(self._socket)
        """Readable when there may be input. Reliable only after `receive` has returned None."""
        self._monitor = self._socket.get_monitor_socket(self._events)
        self.lost_descriptor = _descriptor(self._monitor)
        """Readable when a connection may have ended. libzmq's own thread notices that."""
        self.any_lost()  # libzmq signals events only after a read that returned nothing

    def any_lost(self) -> bool:
        """Return whether a connection has ended or failed its handshake since the last call.

        Reads up to 1000 events of the socket's monitor, and passes each to `_on_event`. Does not
        wait.
        """
        is_lost = False
        with contextlib.suppress(zmq.Again):
            for _ in range(_MAX_EVENTS):  # others may connect all the time
                event = recv_monitor_message(self._monitor, zmq.NOBLOCK)
                is_lost |= self._on_event(event["event"], int(event["value"]))
        return is_lost

    def _on_event(self, event: int, value: int) -> bool:
        """Whether the event is the end of a connection. value: usually its descriptor."""
        return bool(event & _LOST)

    def close(self) -> None:
        """Send what is queued (for at most 2 s) and close the sockets."""
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(_CLOSE_MILLISECONDS)


class Hub(_Socket):
    """The controller's end: a ROUTER that addresses its peers by rank."""

    _events = int(_LOST | zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED)

    def __init__(
        self, run_id: bytes, *, key: bytes | None = None, max_ranks: int = _MAX_UNAUTHENTICATED
    ) -> None:
        """Create the socket, which only this process can reach until `bind`.

        key: what peers over TCP must know; None: nothing. max_ranks: how many will connect.
        """
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.waiter = Waiter()
        self._listeners: list[socket.socket] = []
        self._max_unauthenticated = max_ranks + _MAX_UNAUTHENTICATED
        self._num_unauthenticated = 0
        self._is_full = False
        self._inflow = Inflow()
        self._ports = set[int]()
        super().__init__(zmq.ROUTER, run_id, context=self.context)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MILLISECONDS)
        if key:
            self._socket.curve_publickey, self._socket.curve_secretkey = _keys(key, run_id, 0)
            self._socket.curve_server = True
        self._socket.bind(LOCAL_ADDRESS)
        self._admitted: set[int] = set()
        self.waiter.watch(self.lost_descriptor)
        self.waiter.watch(self.descriptor)

    def bind(self, host: str) -> str:
        """Listen on a free port of the interface `host` (its IP); return the address.

        The address is like "tcp://10.0.0.1:4711", with IPv6 in brackets. The kernel drops new
        connections while too many are unauthenticated; the peer's kernel then tries again after 1
        s.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        backlog = self._max_unauthenticated
        with socket.create_server((host, 0), family=family, backlog=backlog) as listener:
            listener.setblocking(False)
            port = listener.getsockname()[1]
            self._ports.add(port)
            self._listeners.append(listener.dup())
            self._socket.setsockopt(zmq.USE_FD, listener.fileno())
            self._socket.setsockopt(zmq.IPV6, int(":" in host))
            name = f"[{host}]" if ":" in host else host
            self._socket.bind(f"tcp://{name}:{port}")
            listener.detach()  # libzmq closes it
        return self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def end_listening(self) -> None:
        """Drop all new connections from now on, and close the listeners.

        Called when all ranks are connected. Established connections are not affected.
        """
        self._drop_connections(True)
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()

    def _on_event(self, event: int, value: int) -> bool:
        """Handle a connection event; return whether it is the end of a connection.

        Counts the unauthenticated connections (accepted, without a finished handshake). Above the
        limit, new connections are dropped until only half of the limit are left. Also registers the
        connection for `cut_endless`. value: the connection's descriptor.
        """
        if event == zmq.EVENT_ACCEPTED:
            self._inflow.add_connection(value)
        elif event == zmq.EVENT_DISCONNECTED:
            self._inflow.remove_connection(value)
        if self._listeners:
            self._num_unauthenticated += _UNAUTHENTICATED_CHANGE.get(event, 0)
            if self._is_full:
                limit = self._max_unauthenticated // 2
            else:
                limit = self._max_unauthenticated
            if self._is_full != (self._num_unauthenticated > limit):
                self._drop_connections(not self._is_full)
        return super()._on_event(event, value)

    def _drop_connections(self, drop: bool) -> None:
        """Make the kernel drop (drop=True) or accept new connections, with a socket filter.

        Established connections are not affected. Without socket filters in the kernel it has no
        effect.
        """
        self._is_full = drop
        code = ctypes.create_string_buffer(_DROP_ALL)
        program = struct.pack("HP", 1, ctypes.addressof(code))
        for listener in self._listeners:
            with contextlib.suppress(OSError):  # a kernel without socket filters
                option = _SO_ATTACH_FILTER if drop else _SO_DETACH_FILTER
                listener.setsockopt(socket.SOL_SOCKET, option, program)

    def admit(self, rank: int) -> None:
        """Allow `send` to rank from now on, because it has sent the run's id."""
        self._admitted.add(rank)

    def send(self, rank: int, envelope: bytes) -> bool:
        """Queue an envelope for rank; return False if it is not admitted or no longer connected.

        Does not wait. MessageError if 100,000 messages are queued for it already.
        """
        if rank not in self._admitted:
            return False
        try:
            self._socket.send(_IDENTITY.pack(b"r", rank), _MORE)
            self._socket.send(envelope, _NOW)
        except zmq.ZMQError as err:
            if err.errno == zmq.EAGAIN:
                raise MessageError(
                    f"message: {_MAX_QUEUED} are queued for rank {rank}, which does not read them; "
                    f"let the script wait for results before it makes more calls"
                ) from err
            if err.errno == zmq.EHOSTUNREACH:
                return False
            raise
        return True

    def receive(self) -> tuple[int, bytes] | None:
        """Return (rank, envelope) of the next message; None if there is none. Does not wait.

        The rank is -1 if the sender's identity is not a rank's or the message has several parts.
        Counts the message for `cut_endless`.
        """
        if not _has_input(self._socket):
            return None
        first, envelope, *more = self._socket.recv_multipart(_NOW, copy=not self._listeners)
        identity = first if isinstance(first, bytes) else first.bytes
        is_ours = len(identity) == _IDENTITY.size and not more  # a message is one envelope
        rank = _IDENTITY.unpack(identity)[1] if is_ours else -1
        self._inflow.num_messages[rank] += 1
        if isinstance(envelope, bytes):
            return rank, envelope
        with contextlib.suppress(zmq.ZMQError):  # not over TCP
            self._inflow.set_rank(int(envelope.get(zmq.SRCFD)), rank)
        return rank, envelope.bytes

    def cut_endless(self) -> list[int]:
        """Close connections that receive a message without end. Their ranks (-1: unknown)."""
        return self._inflow.cut_endless(self._ports)

    def close(self) -> None:
        """Send what is queued (for at most 2 s) and close all sockets and descriptors."""
        self.end_listening()
        super().close()
        self.waiter.close()

    def terminate(self) -> None:
        """End libzmq's threads. Called after `close` of this hub and of its local endpoint."""
        self.context.term()


class RankSocket(_Socket):
    """A rank's end: a DEALER connected to the controller. Calls must not overlap."""

    def __init__(
        self,
        address: str,
        rank: int,
        *,
        run_id: bytes,
        key: bytes | None = None,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
    ) -> None:
        """Connect to the controller at address.

        key: see `Hub`. context: that of the hub if it is in this process.
        """
        self._own_context = zmq.Context() if context is None else None
        super().__init__(zmq.DEALER, run_id, context=context or self._own_context or zmq.Context())
        self._socket.setsockopt(zmq.ROUTING_ID, _IDENTITY.pack(b"r", rank))
        if key:
            self._socket.curve_publickey, self._socket.curve_secretkey = _keys(key, run_id, 1)
            self._socket.curve_serverkey = _keys(key, run_id, 0)[0]
        self._socket.setsockopt(zmq.IPV6, int("[" in address))
        self._socket.connect(address)

    def send(self, envelope: bytes) -> bool:
        """Queue an envelope for the controller. True if input may have arrived unnoticed meanwhile.

        Without a connection the envelope is dropped, and `any_lost` reports the loss.
        """
        with contextlib.suppress(zmq.Again):
            self._socket.send(envelope, _NOW)
        return _has_input(self._socket)

    def receive(self) -> bytes | None:
        """The envelope of the next message; None if there is none."""
        if _has_input(self._socket):
            return self._socket.recv(_NOW)
        return None

    def close(self) -> None:
        """Send what is queued (for at most 2 s), close the socket and end libzmq's threads."""
        super().close()
        if self._own_context:
            self._own_context.term()


def _has_input(socket: zmq.Socket[bytes]) -> bool:
    return bool(cast(int, socket.getsockopt(_EVENTS)) & _POLLIN)


def _descriptor(socket: zmq.Socket[bytes]) -> int:
    return cast(int, socket.getsockopt(zmq.FD))


def _keys(key: bytes, run_id: bytes, side: int) -> tuple[bytes, bytes]:
    """CURVE key pair (public, secret) of a side: 0 controller, 1 ranks."""
    seed = hmac.digest(key, run_id + bytes([side]), hashlib.sha256)
    private = z85.encode(seed)
    return zmq.curve_public(private), private


class Waiter:
    """Waits until descriptors are readable.

    `wait` belongs to one thread. Any thread may call `wake`, even after `close`.
    """

    def __init__(self) -> None:
        """Watches no descriptor yet."""
        self._epoll = select.epoll()
        self._guard = threading.Lock()  # a closed descriptor's number may belong to a file
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._wake, select.EPOLLIN)

    def watch(self, descriptor: int) -> None:
        """Let `wait` return when descriptor is readable."""
        self._epoll.register(descriptor, select.EPOLLIN)

    def forget(self, descriptor: int) -> None:
        """Undo `watch`. Both can be called from any thread, even while another one waits."""
        self._epoll.unregister(descriptor)

    def wait(self, seconds: float) -> list[int]:
        """Wait until a watched descriptor is readable; return all readable ones.

        Empty after `seconds`, or if only `wake` was called, which ends the wait early. That wake-up
        is consumed.
        """
        ready = []
        for descriptor, _ in self._epoll.poll(seconds):
            ready.append(descriptor)
        if self._wake in ready:
            ready.remove(self._wake)
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake)
        return ready

    def wake(self) -> None:
        """Let the running or next `wait` return at once."""
        with self._guard:
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Close the epoll and event descriptors. `wake` does nothing afterwards."""
        with self._guard:
            self._epoll.close()
            os.close(self._wake)
            self._wake = -1
