"""Another turn of a response: it contains the text of a tool, which is never learned.

Pure functions on token ids; knows no tokenizer, generator or rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from spmdflow.data.ragged import ragged_from_rows, rows_of
from spmdflow.router import ROUTES

RESPONSE = ("responses", "response_mask", "rollout_log_probs")
"""Columns of a response, an entry for each token."""
_TOOL_ENTRIES = (0, False, 0.0)
"""Entries of a token that the policy did not sample, except for its id."""


def replays_routes(settings: Any) -> bool:
    """Whether the policy's forwards use the experts of the generator (actor.update.router)."""
    return getattr(getattr(settings, "update", None), "router", "own") == "replay"


def written_routes(settings: Any) -> tuple[str, ...]:
    """The column of routed experts, which generation writes if the settings replay it."""
    return (ROUTES,) if replays_routes(settings) else ()


@dataclass(frozen=True)
class ContinuedRows:
    """The rows of a batch whose responses continue, and the columns of all rows."""

    rows: list[int]
    """Indices of the rows that continue."""
    prompts: Tensor
    """Ragged int64: prompt, response and tool text of these rows, as the model reads them."""
    tool_ids: Tensor
    """Ragged int64: the tool text of each of these rows."""
    room: list[int]
    """Maximum number of further tokens of each of these rows, at least 1."""
    before: TensorDict
    """The columns of `RESPONSE` of all rows."""

    @classmethod
    def of(cls, batch: TensorDict, texts: Sequence[Sequence[int]], *, most: int) -> ContinuedRows:
        """Select the rows whose response continues, and build their sequences for the model.

        A row continues if len(response) + len(tool text) < most, so that at least one more token
        fits. Other rows stay as they are. texts: token ids of each row's tool text. most: maximum
        number of tokens of a response.
        """
        responses = rows_of(batch["responses"])
        room = []
        for response, ids in zip(responses, texts, strict=True):
            room.append(most - len(response) - len(ids))
        continued = []
        for row, rest in enumerate(room):
            if rest > 0:
                continued.append(row)
        new_ids = []
        for row in continued:
            new_ids.append(torch.tensor(texts[row], dtype=torch.int64))
        prompts = rows_of(batch["prompts"])
        sequences = []
        for i, ids_of_row in zip(continued, new_ids):
            sequences.append(torch.cat([prompts[i], responses[i], ids_of_row]))
        names = list(RESPONSE)
        if ROUTES in batch.keys():
            names.append(ROUTES)
        return cls(
            continued,
            ragged_from_rows(sequences, dtype=torch.int64),
            ragged_from_rows(new_ids, dtype=torch.int64),
            [room[row] for row in continued],
            batch.select(*names),
        )

    def close(self, sampled: TensorDict) -> TensorDict:
        """Return the columns of `RESPONSE` of all rows, extended in the rows that continue.

        A continued row is its earlier response, then its tool text (mask False, log-probability 0),
        then the newly sampled tokens. Other rows do not change. sampled: the same columns of the
        continued rows alone, in order.
        """
        tool_ids = rows_of(self.tool_ids)
        columns = TensorDict({}, batch_size=self.before.batch_size)
        for name, entry in zip(RESPONSE, _TOOL_ENTRIES, strict=True):
            rows = rows_of(self.before[name])
            sampled_rows = rows_of(sampled[name].cpu())
            for row, ids_of_row, new_entries in zip(self.rows, tool_ids, sampled_rows, strict=True):
                inserted = (
                    ids_of_row if name == "responses" else torch.full(ids_of_row.shape, entry)
                )
                rows[row] = torch.cat([rows[row], inserted, new_entries])
            columns[name] = ragged_from_rows(rows, dtype=self.before[name].dtype)
        if ROUTES in sampled.keys():  # the generator read the continued rows from their beginning
            routes = rows_of(self.before[ROUTES])
            for row, routes_of_row in zip(self.rows, rows_of(sampled[ROUTES].cpu()), strict=True):
                routes[row] = routes_of_row
            columns[ROUTES] = ragged_from_rows(routes)
        return columns
