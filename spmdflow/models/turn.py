"""Another turn of a response: what a tool has said stands in it, and is never learnt.

Pure functions of token ids; knows no tokenizer, generator or rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from tensordict import TensorDict
from torch import Tensor

from spmdflow.data.ragged import ragged_from_rows, rows_of

RESPONSE = ("responses", "response_mask", "rollout_log_probs")
"""Columns of a response, an entry for each token."""
_HEARD = (0, False, 0.0)
"""Entries of a token that the policy did not choose, but for its id."""


@dataclass(frozen=True)
class Turn:
    """Rows of a batch that go on, and the others."""

    places: list[int]
    """Of the batch's rows that go on."""
    prompts: Tensor
    """Ragged int64, of these rows: prompt, response and what was said, as the model reads them."""
    heard: Tensor
    """Ragged int64: what was said to each of them."""
    room: list[int]
    """Most tokens that each of them may have more, at least 1."""
    before: TensorDict
    """The columns of `RESPONSE` of all rows."""

    @classmethod
    def of(cls, batch: TensorDict, said: Sequence[Sequence[int]], *, most: int) -> Turn:
        """Rows with a response, and what is said behind it, as ids; most: tokens of a response."""
        responses = rows_of(batch["responses"])
        room = []
        for row, ids in zip(responses, said, strict=True):
            room.append(most - len(row) - len(ids))
        places = []
        for place, left in enumerate(room):
            if left > 0:
                places.append(place)
        heard = []
        for place in places:
            heard.append(torch.tensor(said[place], dtype=torch.int64))
        prompts = rows_of(batch["prompts"])
        whole = []
        for i, added in zip(places, heard):
            whole.append(torch.cat([prompts[i], responses[i], added]))
        return cls(
            places,
            ragged_from_rows(whole, dtype=torch.int64),
            ragged_from_rows(heard, dtype=torch.int64),
            [room[place] for place in places],
            batch.select(*RESPONSE),
        )

    def close(self, sampled: TensorDict) -> TensorDict:
        """All rows: those that go on with what was said, then sampled (columns of `RESPONSE`)."""
        heard = rows_of(self.heard)
        made = TensorDict({}, batch_size=self.before.batch_size)
        for name, entry in zip(RESPONSE, _HEARD, strict=True):
            rows = rows_of(self.before[name])
            more = rows_of(sampled[name].cpu())
            for place, ids, new in zip(self.places, heard, more, strict=True):
                said = ids if name == "responses" else torch.full(ids.shape, entry)
                rows[place] = torch.cat([rows[place], said, new])
            made[name] = ragged_from_rows(rows, dtype=self.before[name].dtype)
        return made
