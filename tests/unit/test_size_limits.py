"""What may be large, just below and just above the largest message, which has 64 MiB."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from spmdflow.controller import prompts
from spmdflow.controller.caller import PIECE_BYTES
from spmdflow.data.column import column_of, to_message
from spmdflow.datasets.scan import ScanReport, join_reports
from spmdflow.errors import MessageError
from spmdflow.message import MAX_MESSAGE_BYTES, decode, encode
from spmdflow.runtime.call import InprocTransport
from spmdflow.runtime.executor import Operation
from spmdflow.worker_api.register import map_function
from tests.unit.toy_flow import Rank, Toy, ToyConfig, draw, rank_of_one

HEAD_BYTES = 5
"""What msgpack puts before as many bytes."""


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    with rank_of_one(tmp_path) as rank:
        yield rank


def test_message_of_the_largest_size_is_sent_and_one_byte_more_is_refused() -> None:
    value = bytes(MAX_MESSAGE_BYTES - HEAD_BYTES)

    assert decode(encode(value)) == value
    with pytest.raises(MessageError, match=f"^message: {MAX_MESSAGE_BYTES + 1} bytes; expected at"):
        encode(value + b"x")


def test_message_that_arrives_beyond_its_limit_is_refused() -> None:
    data = encode(bytes(100))

    assert decode(data, max_bytes=len(data)) == bytes(100)
    with pytest.raises(MessageError, match=f"{len(data)} bytes arrived; expected at most"):
        decode(data, max_bytes=len(data) - 1)


class WireTransport(InprocTransport):
    """One process, but each command and reply travels as the message it would be under torchrun."""

    def __init__(self, rank: Rank) -> None:
        self.reply_bytes: dict[str, list[int]] = {}
        operations = rank.state.operations()
        super().__init__({name: self._wired(name, run) for name, run in operations.items()})

    def _wired(self, name: str, run: Operation) -> Operation:
        def run_wired(plain: Mapping[str, Any], number: int) -> dict[str, Any]:
            data = encode(run(decode(encode(plain)), number))
            self.reply_bytes.setdefault(name, []).append(len(data))
            reply: dict[str, Any] = decode(data)
            return reply

        return run_wired


@map_function(reads=("number",), writes=("wide",))
def widen(batch: TensorDict, *, width: int) -> TensorDict:
    """wide: width numbers a row."""
    count = len(batch) * width
    return TensorDict({"wide": torch.arange(count).view(-1, width)}, batch_size=batch.batch_size)


@pytest.mark.parametrize(
    ("num_bytes", "num_messages"),
    [(PIECE_BYTES - (1 << 20), 1), (MAX_MESSAGE_BYTES + (8 << 20), 3)],
)
def test_column_below_and_above_the_size_of_a_message_is_fetched_as_it_is(
    rank: Rank, num_bytes: int, num_messages: int
) -> None:
    transport = WireTransport(rank)
    rank.flow.caller.transport = transport
    batch = draw(rank.flow.prompts(rank.config.data), rank.flow.spawn(Toy, ToyConfig()))
    width = num_bytes // 8 // len(batch)
    batch |= batch.map(widen, width=width)

    fetched = batch.fetch("wide")["wide"]

    assert isinstance(fetched, torch.Tensor)
    assert torch.equal(fetched, torch.arange(len(batch) * width).view(-1, width))
    assert rank.flow.caller.fetched_bytes == {"script": fetched.nbytes}
    assert len(transport.reply_bytes["fetch"]) == num_messages


@pytest.mark.parametrize("num_rows", [3, 4])
def test_rows_are_scanned_alike_in_one_message_and_in_several(
    rank: Rank, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, num_rows: int
) -> None:
    lines = [json.dumps({"prompt": f"{number}+1=", "answer": "2"}) for number in range(num_rows)]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(lines))
    monkeypatch.setattr(prompts, "ROWS_AT_ONCE", 3)
    transport = WireTransport(rank)
    rank.flow.caller.transport = transport
    data = replace(rank.config.data, train_path=str(path), prompts_per_step=num_rows)

    stream = rank.flow.prompts(data)

    assert stream.train_scan is not None
    assert stream.train_scan.rows.tolist() == list(range(num_rows))
    assert len(stream.train_scan.token_lengths) == num_rows
    assert len(transport.reply_bytes.get("scan_more", [])) == (num_rows > 3)
    assert sorted(next(stream).fetch("prompt_text")["prompt_text"])[0] == "0+1="


def test_report_of_ten_million_rows_travels_in_parts_and_is_read_without_copies() -> None:
    rows = np.arange(0, 20_000_000, 2)
    lengths = (np.arange(10_000_000) % 100).astype(np.int32)
    whole = ScanReport("p.jsonl", 1, len(rows), rows, lengths, 0, 99, [], "f")
    starts = range(0, len(rows), prompts.ROWS_AT_ONCE)
    parts = [whole.part(start, start + prompts.ROWS_AT_ONCE) for start in starts]

    joined = join_reports([decode(encode(part)) for part in parts])

    assert np.array_equal(joined.rows, rows) and np.array_equal(joined.token_lengths, lengths)
    tracemalloc.start()
    assert joined.tokens_of([2 * 1_234_567]).tolist() == [67]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20  # the whole list as numbers would be 80 MB


def test_one_row_beyond_the_size_of_a_message_is_refused_with_its_size() -> None:
    row = column_of("wide", torch.zeros(1, MAX_MESSAGE_BYTES + 8, dtype=torch.uint8), 1)

    with pytest.raises(MessageError, match="expected at most"):
        encode(to_message(row))
