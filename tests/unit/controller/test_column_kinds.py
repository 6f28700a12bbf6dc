"""Columns whose dtype depends on the rows of a rank, and other mistakes that only data shows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from spmdflow.config.algorithm import DynamicSamplingConfig
from spmdflow.controller.prompts import DynamicSampling
from spmdflow.controller.result import RowResult
from spmdflow.controller.transcript import read_transcript
from spmdflow.data.ragged import ragged_from_rows
from spmdflow.errors import ColumnError, DataError, RowError
from spmdflow.message import encode
from spmdflow.models.rows import example_rows


def test_column_of_other_dtypes_on_two_ranks_is_an_error_that_names_the_call_and_both_ranks() -> (
    None
):
    answer = {0: np.array([1, 2]), 3: np.array([5])}
    result = RowResult(7, "map.bonus", (0, 3), answer, {"bonus": answer}, lambda number: None)
    replies = {
        0: {"columns": {"bonus": [["dense", "int64", []], None]}},
        3: {"columns": {"bonus": [["dense", "float32", []], None]}},
    }

    with pytest.raises(ColumnError) as caught:
        result.learn(replies)

    assert str(caught.value) == (
        "map.bonus: got the column 'bonus' as dense int64 of row shape () from rank 0 and dense "
        "float32 of row shape () from rank 3, expected the same dtype and row shape on every rank, "
        "also on ranks with other rows or none; convert it where map.bonus makes it, such as "
        "bonus.float()"
    )


def test_dynamic_sampling_that_is_asked_for_its_batch_too_early_says_how_many_rows_it_has() -> None:
    sampling = DynamicSampling(8, DynamicSamplingConfig())

    with pytest.raises(RowError, match=r"got 0 rows, expected 8 rows; call add\(...\)"):
        sampling.batch()


def test_transcript_of_another_program_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "transcript.msgpack"
    path.write_bytes(encode([1, 2]))

    with pytest.raises(DataError, match="transcript.msgpack: got list instead of the records"):
        read_transcript(path)


def test_row_that_is_learnt_from_its_first_token_on_is_an_error_that_says_what_is_missing() -> None:
    rows = TensorDict({}, batch_size=[1])
    rows["prompts"] = ragged_from_rows([torch.tensor([5, 6])], dtype=torch.int64)
    rows["loss_mask"] = ragged_from_rows([torch.tensor([True, True])], dtype=torch.bool)

    with pytest.raises(RowError, match="^loss_mask: a row is learnt from its first token on"):
        example_rows(rows)
