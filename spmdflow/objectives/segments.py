"""Rows of an episode's segments: columns that `run_episodes` writes, cut into a row for each.

A segment is a conversation that only grows; an episode may have several. A row of `run_episodes`
is an episode and has all of its segments, one after another, in the columns `SEGMENTS`.
`Batch.segments` repeats the row for each segment, and the functions here take the segment's part,
where the rows live.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from spmdflow.data.ragged import ROW_WEIGHTS, lengths_of, ragged_from_rows, rows_of
from spmdflow.data.row_id import RowGroups
from spmdflow.router import ROUTES
from spmdflow.worker_api.register import map_function

LENGTHS = "segment_lengths"
"""Ragged int64: tokens of each segment behind its prompt."""
NAMES = "segment_names"
"""Ragged int64: a number for the name of each segment; equal names have equal numbers."""
SEGMENT_ROUTES = "segment_routes"
VERSIONS = "segment_versions"
SEGMENTS = (
    "segment_prompt_lengths",
    LENGTHS,
    "segment_tokens",
    "segment_mask",
    "segment_log_probs",
    "segment_rewards",
    "segment_scores",
    "segment_weights",
    "segment_turns",
    "segment_texts",
)
"""Columns of `run_episodes` with all segments of an episode. Those of tokens are ragged: prompt and
response of each segment in segment_tokens, and its response in the others."""
OF_A_SEGMENT = (
    "prompts",
    "prompt_text",
    "responses",
    "response_text",
    "response_mask",
    "rollout_log_probs",
    "scores",
    "token_level_rewards",
    "valid",
    "num_turns",
    "tool_calls",
    "weights_version",
)
"""Columns of `run_episodes` that a segment has of its own."""


class _Parts:
    """Which part of each row's columns belongs to its segment."""

    def __init__(self, batch: TensorDict, groups: RowGroups) -> None:
        """groups: the rows of an episode are a group, and row i of it takes segment i."""
        assert groups.position is not None, "map functions get the positions"
        self.segment: list[int] = groups.position.tolist()
        self.prompt_lengths = [row.tolist() for row in rows_of(batch["segment_prompt_lengths"])]
        self.lengths = [row.tolist() for row in rows_of(batch[LENGTHS])]

    def of_tokens(self, column: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Prompt and response of each row's segment, from a column over all tokens."""
        prompts = []
        responses = []
        for row, index, before, after in zip(
            rows_of(column), self.segment, self.prompt_lengths, self.lengths, strict=True
        ):
            start = sum(before[:index]) + sum(after[:index])
            middle = start + before[index]
            prompts.append(row[start:middle])
            responses.append(row[middle : middle + after[index]])
        return prompts, responses

    def of_responses(self, column: Tensor) -> Tensor:
        """The part of each row's segment, from a column over the tokens of all responses."""
        result = []
        for row, index, lengths in zip(rows_of(column), self.segment, self.lengths, strict=True):
            start = sum(lengths[:index])
            result.append(row[start : start + lengths[index]])
        return ragged_from_rows(result, dtype=column.dtype)

    def of_segments(self, column: Tensor) -> Tensor:
        """(B,): the item of each row's segment, from a column with an item for each segment."""
        starts = lengths_of(column).cumsum(0) - lengths_of(column)
        index = starts + torch.tensor(self.segment, device=starts.device)
        return column.values()[index]


@map_function(
    reads=(*SEGMENTS, "valid", "weights_version"),
    writes=(*OF_A_SEGMENT, ROW_WEIGHTS),
    groups=True,
)
def take_segments(batch: TensorDict, *, groups: RowGroups) -> TensorDict:
    """Return the columns of one segment for each row: row i of an episode takes segment i.

    Rows (B,) of an episode are a group of `groups`. valid is also False for a segment without a
    token to learn. row_weights (B,) float32: how much it counts (rollout.episode.credit).
    """
    parts = _Parts(batch, groups)
    prompts, responses = parts.of_tokens(batch["segment_tokens"])
    mask = parts.of_responses(batch["segment_mask"])
    learns = torch.stack([row.any() for row in rows_of(mask)]) if len(prompts) else batch["valid"]
    columns = TensorDict(
        {
            "prompts": ragged_from_rows(prompts, dtype=torch.int64),
            "responses": ragged_from_rows(responses, dtype=torch.int64),
            "response_mask": mask,
            "rollout_log_probs": parts.of_responses(batch["segment_log_probs"]),
            "token_level_rewards": parts.of_responses(batch["segment_rewards"]),
            "scores": parts.of_segments(batch["segment_scores"]),
            "valid": batch["valid"] & learns,
            "num_turns": parts.of_segments(batch["segment_turns"]),
            "weights_version": batch["weights_version"],
            ROW_WEIGHTS: parts.of_segments(batch["segment_weights"]),
        },
        batch_size=batch.batch_size,
    )
    texts: list[list[str]] = []
    for all_texts, index in zip(batch["segment_texts"], parts.segment, strict=True):
        texts.append(json.loads(all_texts)[index])
    for number, name in enumerate(("prompt_text", "response_text", "tool_calls")):
        columns.set_non_tensor(name, [each[number] for each in texts])
    return columns


@map_function(
    reads=("segment_prompt_lengths", LENGTHS, VERSIONS), writes=("token_versions",), groups=True
)
def take_segment_versions(batch: TensorDict, *, groups: RowGroups) -> TensorDict:
    """Return token_versions (ragged int32) of one segment for each row; see `take_segments`."""
    versions = _Parts(batch, groups).of_responses(batch[VERSIONS])
    return TensorDict({"token_versions": versions}, batch_size=batch.batch_size)


@map_function(
    reads=("segment_prompt_lengths", LENGTHS, SEGMENT_ROUTES), writes=(ROUTES,), groups=True
)
def take_segment_routes(batch: TensorDict, *, groups: RowGroups) -> TensorDict:
    """Return the routed experts of one segment's tokens for each row; see `take_segments`."""
    parts = _Parts(batch, groups)
    prompts, responses = parts.of_tokens(batch[SEGMENT_ROUTES])
    rows: list[Any] = []
    for prompt, response in zip(prompts, responses, strict=True):
        rows.append(torch.cat([prompt, response]))
    return TensorDict({ROUTES: ragged_from_rows(rows)}, batch_size=batch.batch_size)
