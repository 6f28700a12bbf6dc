"""Rows stay what they were when returned: inputs written to are refused, outputs are copied."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from spmdflow.data.column import Column, column_of
from spmdflow.data.ragged import lengths_of, ragged
from spmdflow.data.store import Unchanged
from spmdflow.errors import ColumnError
from spmdflow.worker_api.register import map_function, register
from tests.unit.toy_flow import ROWS, FrozenToyConfig, Rank, Toy, rank_of_one

Write = Callable[[TensorDict], object]


def numbers_as_array(batch: TensorDict) -> Any:
    return batch["number"].numpy()


WRITES: dict[str, tuple[str, Write]] = {
    "operator": ("number", lambda b: b["number"].sub_(100)),
    "item": ("number", lambda b: b["number"].__setitem__(0, -1.0)),
    "view": ("number", lambda b: b["number"].view(2, -1)[1].fill_(7)),
    "out": ("number", lambda b: torch.add(b["number"], 1, out=b["number"])),
    "without gradient": ("number", lambda b: b["number"].detach().neg_()),
    "data": ("number", lambda b: b["number"].data.add_(1)),
    "numpy": ("number", lambda b: numbers_as_array(b).__setitem__(0, 9.0)),
    "ragged values": ("ragged", lambda b: b["ragged"].values().add_(1)),
    "row of a ragged column": ("ragged", lambda b: b["ragged"].unbind()[2].zero_()),
}


class Writer(Toy):
    """Methods that write where they should not, and methods that may."""

    def __init__(self, cfg: Any, context: Any) -> None:
        super().__init__(cfg, context)
        self.buffer = torch.zeros(ROWS)
        self.calls = 0
        self.flat = torch.zeros(2 * ROWS)
        self.weight = torch.nn.Parameter(torch.zeros(ROWS))

    @register(transfer_mode="3D_PROTO", reads=("number", "ragged"), writes=("done",))
    def write(self, batch: TensorDict, *, how: str) -> TensorDict:
        """Writes into what it was given."""
        WRITES[how][1](batch)
        return TensorDict({"done": torch.zeros(len(batch))}, batch_size=batch.batch_size)

    @register(transfer_mode="3D_PROTO", reads=("number", "text"), writes=("done",))
    def work_on_copies(self, batch: TensorDict) -> TensorDict:
        """Changes a clone, and the list of texts that it was given."""
        numbers = batch["number"].clone()
        texts = batch["text"]
        numbers -= 100
        texts[0] = "changed"
        return TensorDict({"done": numbers}, batch_size=batch.batch_size)

    @register(transfer_mode="3D_PROTO", reads=("number",), writes=("own", "tail", "kept", "same"))
    def return_own(self, batch: TensorDict) -> TensorDict:
        """A buffer, a slice of one as ragged rows, a parameter, and what it was given."""
        self.calls += 1
        self.buffer.fill_(self.calls)
        self.flat.fill_(self.calls)
        with torch.no_grad():
            self.weight.fill_(self.calls)
        tail = ragged(self.flat[ROWS:], torch.ones(ROWS, dtype=torch.int64))
        own = {"own": self.buffer, "tail": tail, "kept": self.weight, "same": batch["number"]}
        return TensorDict(own, batch_size=batch.batch_size)


@map_function(reads=("number",), writes=("half",))
def halve_in_place(batch: TensorDict, *, reduce: Any, report: Any) -> TensorDict:
    """Writes into what it was given."""
    return TensorDict({"half": batch["number"].div_(2)}, batch_size=batch.batch_size)


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    with rank_of_one(tmp_path / "run") as made:
        yield made


def started(rank: Rank) -> tuple[Any, Any]:
    """A writer and rows that it made in step 1."""
    writer = rank.flow.spawn(Writer, FrozenToyConfig())
    prompts = rank.flow.prompts(rank.config.data)
    next(rank.flow.steps(1))
    return writer, writer.make(next(prompts))


@pytest.mark.parametrize("how", WRITES)
def test_method_that_writes_into_its_input_is_refused_with_the_column(rank: Rank, how: str) -> None:
    writer, batch = started(rank)

    with pytest.raises(
        ColumnError, match=rf"toy\.write: wrote into column '{WRITES[how][0]}'.*clone\(\)"
    ):
        writer.write(batch, how=how)


def test_map_function_that_writes_into_its_input_is_refused(rank: Rank) -> None:
    _, batch = started(rank)

    with pytest.raises(ColumnError, match=r"map\.halve_in_place: wrote into column 'number'"):
        batch.map(halve_in_place)


def test_method_may_change_clones_and_lists_of_texts(rank: Rank) -> None:
    writer, batch = started(rank)
    before = batch.fetch("number", "text")

    made = writer.work_on_copies(batch).fetch("done")

    assert torch.equal(made["done"], before["number"] - 100)
    after = batch.fetch("number", "text")
    assert torch.equal(after["number"], before["number"]) and after["text"] == before["text"]


def test_returned_buffers_parameters_and_inputs_keep_the_values_of_their_call(rank: Rank) -> None:
    writer, batch = started(rank)

    first = writer.return_own(batch)
    second = writer.return_own(batch)

    for made, value in ((first, 1.0), (second, 2.0)):
        found = made.fetch("own", "tail", "kept", "same")
        assert found["own"].tolist() == found["kept"].tolist() == [value] * ROWS
        assert found["tail"].values().tolist() == [value] * ROWS
        assert found["same"].tolist() == batch.fetch("number")["number"].tolist()


def test_copied_bytes_are_those_of_the_columns_that_were_returned(rank: Rank) -> None:
    writer, batch = started(rank)
    writer.return_own(batch)
    items = int(batch.lengths("ragged").sum())

    metrics = rank.flow.step.metrics(rank.flow.caller.records)  # type: ignore[union-attr]

    of_make = ROWS * 4 + items * 8  # number and ragged; text is written anew in any case
    assert metrics["transfer/copied_bytes"] == of_make + 4 * ROWS * 4


@pytest.mark.parametrize("value", [torch.arange(7.0), torch.ones(7, 0), torch.zeros(1).expand(7)])
def test_stored_column_shares_no_memory_with_what_was_returned(value: Tensor) -> None:
    stored = column_of("x", value, 7).values

    assert torch.equal(stored, value) and stored.is_contiguous()
    assert value.numel() == 0 or stored.data_ptr() != value.data_ptr()


def test_column_keeps_only_its_rows_of_a_large_buffer() -> None:
    column = column_of("x", torch.zeros(1000)[:3], 3)

    assert column.values.untyped_storage().nbytes() == 12


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("start", [0, 1, 3])
def test_write_that_torch_does_not_count_is_seen_in_any_type_and_place(
    dtype: torch.dtype, start: int
) -> None:
    column = Column("dense", torch.zeros(21, dtype=dtype)).take(torch.arange(start, 20))
    watched = Unchanged()
    watched.remember({"x": column})
    watched.check("a.call")

    column.values.data[-1] = 1

    with pytest.raises(ColumnError, match=r"a\.call: wrote into column 'x' in place"):
        watched.check("a.call")


def test_offsets_of_a_ragged_column_are_given_out_as_copies(rank: Rank) -> None:
    column = Column("ragged", torch.arange(3), torch.tensor([1, 2]))

    value = column.to_value()
    assert isinstance(value, Tensor)
    value.offsets().zero_()  # type: ignore[attr-defined]

    again = column.to_value()
    assert isinstance(again, Tensor) and lengths_of(again).tolist() == [1, 2]
