"""A sequence of pre-tokenized rows is cut into its prompt and its answer before its first label."""

from __future__ import annotations

import pytest
import torch

from spmdflow.errors import RowError
from spmdflow.models.rows import _cut


def test_sequence_is_cut_before_its_first_token_to_learn() -> None:
    ids = torch.tensor([5, 6, 7, 8])

    prompt, response, mask = _cut(ids, torch.tensor([0, 0, 1, 0]))

    assert (prompt.tolist(), response.tolist(), mask.tolist()) == ([5, 6], [7, 8], [1, 0])


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        ([1, 1, 0], "learnt from its first token on"),
        ([0, 0, 0], "no token to learn"),
        ([], "no tok"),
    ],
)
def test_sequence_without_a_prompt_or_an_answer_is_an_error(mask: list[int], message: str) -> None:
    with pytest.raises(RowError, match=message):
        _cut(torch.arange(len(mask)), torch.tensor(mask, dtype=torch.int64))
