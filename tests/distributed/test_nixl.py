"""Updates of weights by one-sided writes: the ends in real processes, and what happens to them."""

from __future__ import annotations

import base64
import gc
import hashlib
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from spmdflow.blocks.box import Box
from spmdflow.blocks.hash import positional_hash
from spmdflow.errors import WeightSyncError
from spmdflow.rollout.generator import NEVER
from spmdflow.serving.mirror import WeightMirror
from spmdflow.serving.nixl import PACKAGES, NixlReceiver, NixlSender
from spmdflow.serving.update import PackedMessage, apply_update, message_sizes
from tests.forked import fork_server

pytestmark = pytest.mark.skipif(
    not any(map(find_spec, PACKAGES)),
    reason="extra nixl is not installed: pip install -e '.[nixl]'",
)

SHAPES = {"first": (301, 203), "second": (7,), "third": (2001,), "fourth": (64, 33)}
PATIENT = 60.0
"""Limit of waits that end sooner unless something is wrong."""
SHORT = 2.0
"""Limit of waits that reach it."""


def serve(pipe: Connection, seconds: float) -> None:
    """A worker's process: holds tensors of SHAPES and takes updates until it is told to end."""
    facts, dtype = pipe.recv()
    live = [torch.zeros(shape, dtype=dtype) for shape in SHAPES.values()]
    num_bytes = sum(each.nbytes for each in live)
    receiver = NixlReceiver(facts, num_bytes=num_bytes, seconds=seconds)
    pipe.send(receiver.reply)
    while (command := pipe.recv()) is not None:
        update, facts = command
        sizes = [message_sizes(each) for each in facts]
        arriving = receiver.receive(sizes, dtype, update=update)
        for message, each in zip(arriving, facts, strict=True):
            for part in message.split(each):
                apply_update(live[part.index], part.values, part.positions)
        pipe.send([positional_hash(each) for each in live])
    receiver.close()


def stop_in_an_update(pipe: Connection, how: int, sizes: Sequence[tuple[int, int]]) -> None:
    """A worker's process that is killed or stopped after the first message of an update."""
    num_bytes = sum(4 * positions + 2 * values for positions, values in sizes)
    receiver = NixlReceiver(pipe.recv(), num_bytes=num_bytes, seconds=PATIENT)
    pipe.send(receiver.reply)
    next(receiver.receive(sizes, torch.bfloat16, update=1))
    os.kill(os.getpid(), how)


@pytest.fixture
def workers() -> Iterator[list[Any]]:
    """Processes of a test, which end with it."""
    started: list[Any] = []
    yield started
    for process in started:
        if process.is_alive():
            os.kill(process.pid, signal.SIGKILL)
        process.join()


def start(workers: list[Any], target: Any, *arguments: object) -> Connection:
    """Start a worker's process; its pipe."""
    context = fork_server()
    own, other = context.Pipe()
    process = context.Process(target=target, args=(other, *arguments), daemon=True)
    process.start()
    other.close()
    workers.append(process)
    return own


def connected(sender: NixlSender, receiver: NixlReceiver) -> None:
    sender.connect(receiver.reply)


def message_of(num_positions: int, num_values: int) -> PackedMessage:
    positions = torch.arange(num_positions, dtype=torch.int32)
    return PackedMessage(positions, torch.randn(num_values).bfloat16())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_hashes_are_equal_when_whole_boxes_and_deltas_are_written_by_turns(
    workers: list[Any], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    mirror = WeightMirror(SHAPES, dtype)
    boxes = [(name, Box.of_shape(shape)) for name, shape in SHAPES.items()]
    pipe = start(workers, serve, PATIENT)
    sender = NixlSender(seconds=PATIENT)
    pipe.send((sender.facts, dtype))
    sender.connect(pipe.recv())
    since = NEVER
    kinds = set()

    for version in range(6):
        for (_, tensor, _), part in zip(mirror.next_blocks(), (0.1, 1.0, 0.01, 0.3), strict=True):
            new = torch.where(torch.rand(tensor.shape) < part, torch.randn(tensor.shape), 0.5)
            tensor.copy_(new if version in (0, 3) else mirrored(mirror, tensor.shape, part))
        mirror.commit(version)
        updates = mirror.updates(boxes, since=since)
        kinds |= {update.positions is None for update in updates}
        facts = [[list(update.facts)] for update in updates]
        pipe.send((version, facts))
        sender.send([PackedMessage.of([each], dtype) for each in updates], update=version)

        assert pipe.recv() == list(mirror.hashes().values())
        since = version
    assert kinds == {True, False}
    pipe.send(None)
    workers[0].join(PATIENT)
    assert workers[0].exitcode == 0
    sender.close()


def mirrored(mirror: WeightMirror, shape: Sequence[int], part: float) -> torch.Tensor:
    """The mirror's tensor of this shape with new values in a part of its elements."""
    name = next(name for name, own in mirror.shapes.items() if tuple(own) == tuple(shape))
    whole = mirror.updates([(name, Box.of_shape(shape))], since=NEVER)[0].values.reshape(shape)
    return torch.where(torch.rand(shape) < part, torch.randn(shape).to(whole.dtype), whole)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_sender_is_released_within_its_limit_when_the_worker_stops_in_an_update(
    workers: list[Any], how: signal.Signals
) -> None:
    messages = [message_of(0, 1 << 22) for _ in range(5)]
    sizes = [(len(each.positions), len(each.values)) for each in messages]
    pipe = start(workers, stop_in_an_update, how, sizes)
    sender = NixlSender(seconds=SHORT)
    pipe.send(sender.facts)
    sender.connect(pipe.recv())
    begun = time.monotonic()

    with pytest.raises(WeightSyncError, match=r"got message 1/\d of an update, which .*; look at"):
        sender.send(messages, update=1)

    assert time.monotonic() - begun < SHORT + 8  # message 0 may take its time
    again = start(workers, serve, PATIENT)
    sender = NixlSender(seconds=PATIENT)
    again.send((sender.facts, torch.bfloat16))
    sender.connect(again.recv())
    again.send((1, [[[1, -1, 7]]]))
    sender.send([message_of(0, 7)], update=1)
    assert len(again.recv()) == len(SHAPES)
    sender.close()


def test_connection_fails_when_the_worker_was_killed_before_it(workers: list[Any]) -> None:
    pipe = start(workers, serve, PATIENT)
    sender = NixlSender(seconds=SHORT)
    pipe.send((sender.facts, torch.bfloat16))
    reply = pipe.recv()
    os.kill(workers[0].pid, signal.SIGKILL)
    workers[0].join()

    with pytest.raises(WeightSyncError, match="got .*, expected both ends .* alive .*; look at"):
        sender.connect(reply)  # refuses it already where UCX connects at once
        sender.send([message_of(0, 7)], update=1)

    sender.close()


def test_fifty_connections_leave_nothing_when_each_is_closed() -> None:
    """Descriptors, threads and memory, of which a connection has 8 MB. UCX takes 0.1 s for each."""
    message = message_of(1000, 1 << 22)
    before: list[int] = []

    for index in range(51):
        sender = NixlSender(seconds=PATIENT)
        receiver = NixlReceiver(sender.facts, num_bytes=message.num_bytes, seconds=PATIENT)
        connected(sender, receiver)
        exchange(sender, receiver, message)
        sender.close()
        receiver.close()
        del sender, receiver
        if index == 0:
            before = what_is_open()

    after = what_is_open()
    assert after[:2] == before[:2]
    assert after[2] - before[2] < 100 << 20  # fifty times 8 MB would be four times that


def what_is_open() -> list[int]:
    """Descriptors, threads and resident bytes of this process."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    counts = [len(list(Path("/proc/self", name).iterdir())) for name in ("fd", "task")]
    return [*counts, pages * os.sysconf("SC_PAGE_SIZE")]


def exchange(sender: NixlSender, receiver: NixlReceiver, message: PackedMessage) -> None:
    """Send a message, and compare what arrives."""
    size = (len(message.positions), len(message.values))
    arrived: list[PackedMessage] = []
    arriving = receiver.receive([size], torch.bfloat16, update=1)
    thread = threading.Thread(target=lambda: arrived.extend(arriving))
    thread.start()
    sender.send([message], update=1)
    thread.join()
    assert torch.equal(arrived[0].positions, message.positions)
    assert torch.equal(arrived[0].values, message.values)


def damaged(reply: dict[str, Any], metadata: bytes) -> dict[str, Any]:
    """The reply with other metadata, and their own SHA-256."""
    digest = hashlib.sha256(metadata).hexdigest()
    return reply | {"metadata": base64.b64encode(metadata).decode(), "sha256": digest}


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda reply: {}, id="empty"),
        pytest.param(lambda reply: reply | {"metadata": 7}, id="a number"),
        pytest.param(lambda reply: reply | {"metadata": "?" * 40}, id="no base64"),
        pytest.param(lambda reply: reply | {"metadata": reply["metadata"][:-4]}, id="cut"),
        pytest.param(lambda reply: reply | {"sha256": "0" * 64}, id="another digest"),
        pytest.param(lambda reply: reply | {"address": "7"}, id="an address as text"),
        pytest.param(lambda reply: reply | {"address": -7}, id="a negative address"),
        pytest.param(lambda reply: reply | {"num_bytes": True}, id="a size as truth"),
        pytest.param(lambda reply: reply | {"num_bytes": 1 << 70}, id="a size beyond memory"),
        pytest.param(lambda reply: damaged(reply, b""), id="no metadata"),
        pytest.param(lambda reply: damaged(reply, b"nixlSerDes|" + b"7" * 99), id="nonsense"),
        pytest.param(lambda reply: damaged(reply, bytes(1000)), id="zeros"),
    ],
)
def test_reply_is_refused_when_it_is_not_what_the_worker_sent(damage: Any) -> None:
    sender = NixlSender(seconds=SHORT)
    receiver = NixlReceiver(sender.facts, num_bytes=1000, seconds=SHORT)

    with pytest.raises(WeightSyncError, match="got .*, expected .*; "):
        sender.connect(damage(receiver.reply))

    sender.close()
    receiver.close()


def test_update_is_refused_by_both_ends_when_it_exceeds_the_staging_memory() -> None:
    sender = NixlSender(seconds=SHORT)
    receiver = NixlReceiver(sender.facts, num_bytes=1000, seconds=SHORT)
    connected(sender, receiver)

    with pytest.raises(WeightSyncError, match="got an update of 1088 bytes, expected at most 1064"):
        sender.send([message_of(16, 512)], update=1)
    with pytest.raises(WeightSyncError, match="got an update of 1088 bytes, expected at most 1064"):
        next(receiver.receive([(16, 512)], torch.bfloat16, update=1))

    exchange(sender, receiver, message_of(3, 5))
    sender.close()
    receiver.close()


def test_receiver_gives_up_when_another_update_arrives_than_the_announced_one() -> None:
    sender = NixlSender(seconds=PATIENT)
    receiver = NixlReceiver(sender.facts, num_bytes=1000, seconds=SHORT)
    connected(sender, receiver)
    failed: list[WeightSyncError] = []

    def receive() -> None:
        try:
            next(receiver.receive([(0, 7)], torch.bfloat16, update=2))
        except WeightSyncError as err:
            failed.append(err)

    thread = threading.Thread(target=receive)
    thread.start()
    sender.send([message_of(0, 7)], update=1)
    thread.join(PATIENT)

    assert "message 2/0 of an update, which has not arrived within 2 s" in str(failed[0])
    sender.close()
    receiver.close()


def test_receiver_that_waits_fails_at_once_when_it_is_closed() -> None:
    sender = NixlSender(seconds=PATIENT)
    receiver = NixlReceiver(sender.facts, num_bytes=1000, seconds=1000)
    failed: list[WeightSyncError] = []

    def receive() -> None:
        try:
            next(receiver.receive([(0, 7)], torch.bfloat16, update=1))
        except WeightSyncError as err:
            failed.append(err)

    thread = threading.Thread(target=receive)
    thread.start()
    receiver.close()
    thread.join(PATIENT)

    assert "closed" in str(failed[0])
    sender.close()
