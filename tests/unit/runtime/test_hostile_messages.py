"""Random and mutated messages against the real io thread, and against what decodes them."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import random
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spmdflow.errors import MessageError, ProtocolError
from spmdflow.failure.peers import Peers
from spmdflow.failure.process import Process
from spmdflow.failure.settings import SessionSettings
from spmdflow.message import HOMES, decode, encode
from spmdflow.parallel.layout import Layout
from spmdflow.runtime.call import Call
from spmdflow.runtime.io import Io
from spmdflow.runtime.wire import RUN_ID_BYTES, Envelopes, Hub, Kind, RankSocket
from spmdflow.worker_api.metric import Sum
from spmdflow.worker_api.register import find_map_function
from spmdflow.worker_api.worker import find_worker_class
from tests.unit.runtime.noisy_record import CALLS, NoisyRecord

KEY = b"of this run"
NUMBER = 100_000
DANGEROUS = ("import", "exec", "compile", "open", "os.", "subprocess.", "socket.", "ctypes.")
watched: list[str] = []
_watching = threading.local()


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if getattr(_watching, "on", False) and event.startswith(DANGEROUS):
        watched.append(f"{event} {arguments[:1]}")


sys.addaudithook(_watch)


@contextlib.contextmanager
def audit() -> Iterator[list[str]]:
    """What this thread imports, executes, compiles or opens within the context."""
    for module in HOMES:
        importlib.import_module(module)
    gc.collect()  # what other tests left is not ended here
    watched.clear()
    _watching.on = True
    try:
        yield watched
    finally:
        _watching.on = False


def samples(envelopes: Envelopes, names: list[str]) -> list[bytes]:
    """Messages of each kind but HELLO, which makes a member of who has the key.

    Commands among them name what they should not.
    """
    layout = {"ranks": [0], "pp_size": 1, "dp_size": 1, "tp_size": 1}
    bodies: list[Any] = [None, [1, {"value": {"x": [Sum(1.0), Layout.data_parallel((0,))]}}]]
    for name in names:
        head = [1, 1, "compute", "a.spawn", 10.0]
        bodies.append([*head, {"operation": "spawn", "class": name, "layout": layout}])
        bodies.append([*head, {"operation": "map", "function": name, "arguments": {"x": 1}}])
    return [
        envelopes.seal(kind, body) for body in bodies for kind in Kind if kind is not Kind.HELLO
    ]


NAMES = [
    "os:system",
    "subprocess:Popen",
    "builtins:eval",
    "antigravity:fly",
    "spmdflow.doctor.__main__:main",
    "spmdflow.models.base:os.system",
    "spmdflow_script:main",
    "pathlib:Path.unlink",
    "cProfile:run",
]


def mutate(data: bytes, draw: random.Random) -> bytes:
    """Flip, cut, repeat, insert, or swap in what is dangerous."""
    made = bytearray(data)
    for _ in range(draw.randrange(1, 5)):
        place = draw.randrange(len(made) + 1)
        match draw.randrange(5):
            case 0 if made:
                made[place % len(made)] ^= 1 << draw.randrange(8)
            case 1:
                del made[place : place + draw.randrange(1, 9)]
            case 2:
                made[place:place] = made[place : place + draw.randrange(1, 64)]
            case 3:
                made[place:place] = draw.randbytes(draw.randrange(1, 17))
            case _:
                name = draw.choice(NAMES).encode()
                made[place : place + len(name)] = name
    return bytes(made)


class _MallocInfo(ctypes.Structure):
    """What glibc's mallinfo2 returns: ten counts, of which uordblks are the bytes in use."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def memory() -> tuple[int, int]:
    """Python's blocks in use, and the bytes that C libraries hold in all of malloc's arenas.

    Both count what is held, and not what the allocators have from the system: that depends on
    how threads took turns.
    """
    gc.collect()
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = _MallocInfo
    return sys.getallocatedblocks(), mallinfo().uordblks


class Session:
    """A real io thread, whose two ranks are sockets of this test."""

    def __init__(self, run_dir: Path) -> None:
        self.run_id = os.urandom(RUN_ID_BYTES)
        self.envelopes = Envelopes(self.run_id)
        hub = Hub(self.run_id, key=KEY)
        me = Process.of(os.getpid())
        peers = Peers({0: me, 1: me}, own_rank=0)
        self.io = Io(hub, peers=peers, settings=SessionSettings(run_dir, (0, 1)))
        self.handled = 0
        handle = self.io._handle

        def count(rank: int, data: bytes) -> None:
            self.handled += 1
            handle(rank, data)

        self.io._handle = count  # type: ignore[method-assign]
        self._hub = hub
        self.address = hub.bind("127.0.0.1")
        self.io.thread.start()

    def connect(self, rank: int) -> RankSocket:
        return RankSocket(self.address, rank, run_id=self.run_id, key=KEY)

    def join(self) -> None:
        self.ranks = [self.connect(rank) for rank in (0, 1)]
        for endpoint in self.ranks:
            endpoint.send(self.envelopes.seal(Kind.HELLO))
        self.io.met.result()

    def wait_until_gone(self, rank: int) -> None:
        """Until libzmq has forgotten the connection of a rank: it takes none beside it."""
        gone = threading.Event()

        def ask() -> None:
            self._hub.admit(rank)  # nothing is sent to others
            if not self._hub.send(rank, b""):
                gone.set()

        limit = time.monotonic() + 60
        while not gone.wait(0.01) and time.monotonic() < limit:
            self.io.post(ask)
        self._hub._admitted.discard(rank)
        assert gone.is_set()

    def round_trip(self, number: int) -> dict[int, Any]:
        """One order to both ranks, answered."""
        commands = {rank: {"operation": "note"} for rank in (0, 1)}
        pending = self.io.submit(Call(number, "compute", "a.note", commands, 60.0))
        for rank, endpoint in enumerate(self.ranks):
            ticket = self._next(endpoint, Kind.COMMAND)[0]
            endpoint.send(self.envelopes.seal(Kind.REPLY, [ticket, {"rank": rank}, [0.0, 0.0]]))
        return pending.result()

    def end(self) -> None:
        self.io.post(lambda: setattr(self.io, "_close_wanted", True))
        for endpoint in self.ranks:
            self._next(endpoint, Kind.CLOSE)
            endpoint.send(self.envelopes.seal(Kind.BYE))
        self.io.thread.join(60)
        for endpoint in self.ranks:
            endpoint.close()
        self._hub.terminate()

    def _next(self, endpoint: RankSocket, kind: Kind) -> Any:
        limit = time.monotonic() + 60
        while time.monotonic() < limit:
            data = endpoint.receive()
            if data is None:
                time.sleep(0.0005)
            elif (envelope := self.envelopes.open(data, 0)) and envelope[0] is kind:
                return envelope[1]
        raise AssertionError(f"no {kind.name} came")


def _storm(session: Session, stranger: RankSocket, number: int, draw: random.Random) -> None:
    """Send so many messages and wait until the io thread has handled them."""
    good = samples(session.envelopes, NAMES)
    start = session.handled
    for sent in range(number):
        data = draw.randbytes(draw.randrange(200)) if sent % 5 == 0 else draw.choice(good)
        stranger.send(data if sent % 7 == 0 else mutate(data, draw))
        while sent - (session.handled - start) > 1000:  # its own queue is in this process too
            time.sleep(0.0005)
    limit = time.monotonic() + 600
    while session.handled < start + number and time.monotonic() < limit:
        time.sleep(0.01)
    assert session.handled >= start + number


def _growth(
    session: Session, stranger: RankSocket, number: int, draw: random.Random
) -> tuple[int, int]:
    """Python's blocks and malloc's bytes that this process holds more after so many messages.

    A tenth of them goes before, for what is made once.
    """
    _storm(session, stranger, number // 10, draw)
    blocks, held = memory()
    _storm(session, stranger, number - number // 10, draw)
    later_blocks, later_held = memory()
    return later_blocks - blocks, later_held - held


def test_messages_from_no_member_or_before_a_member_joined_change_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draw = random.Random(NUMBER)
    session = Session(tmp_path)
    # with the key: the worst case
    early = session.connect(1)
    unknown = session.connect(7)
    before_joining = _growth(session, early, NUMBER // 2, draw)
    early.close()
    session.wait_until_gone(1)
    session.join()
    from_no_member = _growth(session, unknown, NUMBER // 2, draw)
    answers = [session.round_trip(turn) for turn in range(1, 51)]
    session.end()
    unknown.close()
    with capsys.disabled():
        sys.stdout.write(f"\n{NUMBER} messages: {before_joining}, {from_no_member} more\n")

    assert answers == [{0: {"rank": 0}, 1: {"rank": 1}}] * 50
    assert not session.io.has_failed
    for blocks, held in (before_joining, from_no_member):
        # one block or 20 bytes of each message
        assert blocks < NUMBER // 20
        assert held < 20 * NUMBER // 2
    assert not list(tmp_path.iterdir())


def test_decoding_random_and_mutated_messages_runs_and_opens_nothing() -> None:
    draw = random.Random(NUMBER)
    envelopes = Envelopes(b"r" * RUN_ID_BYTES)
    good = [data[RUN_ID_BYTES + 1 :] for data in samples(envelopes, NAMES)]
    decoded = refused = 0
    with audit() as done:
        for turn in range(NUMBER):
            data = draw.randbytes(draw.randrange(200)) if turn % 5 == 0 else draw.choice(good)
            try:
                _name_everything(decode(mutate(data, draw)))
                decoded += 1
            except MessageError:
                refused += 1

    assert done == []
    assert decoded > NUMBER // 50 and refused > NUMBER // 10


def _name_everything(value: Any) -> None:
    """Ask for every text in value as if a command named it."""
    if isinstance(value, str):
        for find in (find_worker_class, find_map_function):
            with pytest.raises(ProtocolError):
                find(value)
    elif isinstance(value, dict):
        _name_everything(list(value.items()))
    elif isinstance(value, list | tuple):
        for item in value:
            _name_everything(item)


def test_a_record_is_rebuilt_without_a_line_of_its_class() -> None:
    data = encode(NoisyRecord(1, (2,)))
    CALLS.clear()
    back = decode(data)

    assert CALLS == []
    assert (back.left, back.right, back.made) == (1, (2,), 3)
