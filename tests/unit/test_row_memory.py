"""Rows read out of another process's memory: equal bytes, and every reason not to believe them."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, Pipe

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spmdflow.blocks.stretch import byte_stretches, row_runs
from spmdflow.data.column import Column, column_of
from spmdflow.data.store import RowStore
from spmdflow.errors import TransferError
from spmdflow.transfer import memory
from spmdflow.transfer.lane import CountedTransport, Receive, Release, run_release
from spmdflow.transfer.memory import Neighbour, Shelf, Stretches, can_read, read_column

FRAME = 7
IDS = np.array([30, 10, 20, 50, 40])
COLUMNS = {
    "dense": column_of("dense", torch.arange(10.0).reshape(5, 2), 5),
    "ragged": Column("ragged", torch.arange(9), torch.tensor([2, 0, 3, 4, 0])),
    "text": column_of("text", ["", "zwei \u00fc", "c", "", "end"], 5),
    "empty": Column("dense", torch.zeros(5, 0)),
}


class Producer:
    """Another process that has rows on its shelf and frees them when told."""

    def __init__(self) -> None:
        self._pipe, child_pipe = Pipe()
        self.pid = os.fork()
        if not self.pid:
            _produce(child_pipe)
        self.owner: Neighbour = self._pipe.recv()
        self.places: dict[str, memory.Place] = self._pipe.recv()

    def free(self) -> None:
        self._pipe.send("free")
        assert self._pipe.recv() == "freed"

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def _produce(pipe: Connection) -> None:
    shelf = Shelf()
    pipe.send(shelf.owner())
    pipe.send(shelf.put(FRAME, COLUMNS))
    pipe.recv()
    shelf.free([FRAME, 1000])
    pipe.send("freed")
    pipe.recv()


@pytest.fixture
def producer() -> Iterator[Producer]:
    producer = Producer()
    if not can_read(producer.owner):
        producer.kill()
        pytest.skip("this kernel lets no process read another one's memory")
    yield producer
    try:
        producer.kill()
    except ProcessLookupError:
        pass


def rows_of(name: str, places: dict[str, memory.Place], ids: np.ndarray) -> Stretches:
    column = COLUMNS[name]
    lengths = None if column.lengths is None else column.lengths.numpy()
    runs = row_runs(IDS, ids)
    assert runs is not None
    return Stretches(places[name], byte_stretches(runs, lengths, column.spec.item_bytes))


def receive(producer: Producer, ids: np.ndarray) -> tuple[RowStore, CountedTransport]:
    """All columns of the rows ids, as the transfer lane gets them."""
    transport, store = CountedTransport(None, seconds=1), RowStore()
    transport.neighbours = {3: producer.owner}
    wanted = {name: column.take(_places(ids)) for name, column in COLUMNS.items()}
    lengths = {n: c.lengths.numpy() for n, c in wanted.items() if c.lengths is not None}
    specs = {name: column.spec for name, column in COLUMNS.items()}
    reads = {name: rows_of(name, producer.places, ids) for name in COLUMNS}
    edge = Receive(3, tuple(COLUMNS), ids, specs, lengths, reads)
    run_release(Release(1, FRAME, (), (edge,)), store, transport)
    return store, transport


def _places(ids: np.ndarray) -> torch.Tensor:
    return torch.tensor([IDS.tolist().index(i) for i in ids])


@pytest.mark.parametrize("ids", [IDS, np.sort(IDS), np.array([50, 10]), np.array([20])])
def test_rows_of_every_kind_arrive_equal_and_their_bytes_are_counted(
    producer: Producer, ids: np.ndarray
) -> None:
    store, transport = receive(producer, ids)

    got = store.take(FRAME, list(COLUMNS), ids)
    expected = {name: column.take(_places(ids)) for name, column in COLUMNS.items()}
    for name, column in expected.items():
        assert torch.equal(got[name].values, column.values)
        assert str(got[name].lengths) == str(column.lengths)
    counted = transport.take_counter()
    assert counted.received == {3: sum(c.values.nbytes for c in expected.values())}
    assert (counted.sent, counted.header_bytes) == ({}, 24 * len(COLUMNS))


def test_freed_rows_are_refused_although_their_memory_is_still_there(producer: Producer) -> None:
    producer.free()

    with pytest.raises(TransferError, match="were freed before they were read"):
        receive(producer, IDS)


def test_rows_of_another_call_or_process_or_beyond_the_column_are_refused(
    producer: Producer,
) -> None:
    rows = rows_of("dense", producer.places, IDS)
    into = np.zeros(80, dtype=np.uint8)
    stranger = Neighbour(producer.pid, producer.owner.token + 1, producer.owner.token_address)

    assert not can_read(stranger)
    with pytest.raises(TransferError, match="expected .*at least 40"):
        read_column(stranger, FRAME, rows, into[:40])
    with pytest.raises(TransferError, match=rf"got .*{FRAME}, 40\]"):
        read_column(producer.owner, FRAME + 1, rows, into[:40])
    with pytest.raises(TransferError, match="at least 48"):
        beyond = Stretches(rows.place, np.array([[0, 48]]))
        read_column(producer.owner, FRAME, beyond, into[:48])


def test_producer_that_was_killed_is_an_error_that_names_it(producer: Producer) -> None:
    producer.kill()

    with pytest.raises(TransferError, match=f"process {producer.pid}: read 0 of 40 bytes"):
        receive(producer, IDS)
    assert not can_read(producer.owner)


def test_producer_killed_in_the_middle_of_a_read_is_an_error(
    producer: Producer, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = memory._readv

    def kill_after_some(*arguments: int) -> int:
        copied = real(*arguments)
        if producer.pid in arguments and os.path.exists(f"/proc/{producer.pid}"):
            producer.kill()
        return min(copied, 8)

    monkeypatch.setattr(memory, "_readv", kill_after_some)

    with pytest.raises(TransferError, match=r"read 8 of 40 bytes of its memory, then No such"):
        receive(producer, IDS)


def test_kernel_that_copies_little_at_a_time_copies_everything(
    producer: Producer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "_readv", _at_most(memory._readv, 5))

    store, _ = receive(producer, np.sort(IDS))

    got = store.take(FRAME, ["ragged"], np.sort(IDS))["ragged"]
    assert torch.equal(got.values, COLUMNS["ragged"].take(_places(np.sort(IDS))).values)


def _at_most(real: Callable[..., int], limit: int) -> Callable[..., int]:
    def copy_some(pid: int, here: int, _one: int, there: int, count: int, flags: int) -> int:
        memory.ctypes.cast(here, memory.ctypes.POINTER(memory.ctypes.c_int64))[1] = limit
        return real(pid, here, 1, there, count, flags)

    return copy_some


def test_kernel_that_refuses_is_noticed_without_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_readv", lambda *_: -1)

    assert not can_read(Shelf().owner())


def test_columns_with_gaps_are_not_offered_and_stamps_are_used_again() -> None:
    shelf = Shelf()
    gaps = Column("dense", torch.zeros(4, 4)[:, ::2])

    first = shelf.put(1, {"gaps": gaps, "whole": COLUMNS["dense"]})
    shelf.free([1])
    second = shelf.put(2, {"whole": COLUMNS["dense"]})

    assert first.keys() == {"whole"}
    assert second == first


def test_more_pieces_than_one_system_call_takes_are_all_read(producer: Producer) -> None:
    scattered = Stretches(producer.places["dense"], np.tile([[0, 4], [36, 4]], (1500, 1)))
    into = np.zeros(12000, dtype=np.uint8)

    assert read_column(producer.owner, FRAME, scattered, into) == 12000
    assert set(into.view(np.float32).tolist()) == {0.0, 9.0}


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_stretches_give_the_bytes_of_the_wanted_rows(data: st.DataObject) -> None:
    held = np.array(data.draw(st.lists(st.integers(0, 40), unique=True, max_size=12)), np.int64)
    wanted = np.array(data.draw(st.permutations(held.tolist())), np.int64)
    ids = wanted[: data.draw(st.integers(0, len(held)))]
    lengths = np.array(
        data.draw(st.lists(st.integers(0, 3), min_size=len(held), max_size=len(held))), np.int64
    )
    raw = np.arange(2 * lengths.sum())
    ends = 2 * np.cumsum(lengths)
    rows = {
        int(i): raw[e - 2 * n : e].tolist() for i, e, n in zip(held, ends, lengths, strict=True)
    }

    runs = row_runs(held, ids)
    assert runs is not None
    parts = byte_stretches(runs, lengths, 2)

    got = [byte for offset, size in parts.tolist() for byte in raw[offset : offset + size]]
    assert got == [byte for i in ids.tolist() for byte in rows[i]]
    assert row_runs(held, np.append(ids, 41)) is None
    even = byte_stretches(runs, None, 4).reshape(-1, 2)
    assert even[:, 1].sum() == 4 * len(ids)


def test_rows_in_order_are_one_stretch() -> None:
    runs = row_runs(np.array([4, 5, 6, 9]), np.array([5, 6, 9]))

    assert runs is not None
    assert runs.tolist() == [[1, 3]]
