"""Tokens that are computed, stored and read where several rows share a prompt.

Samples of one prompt lie next to each other. An engine that shares prompts packs the prompt of
such rows once in each micro-batch, if that saves enough (`data.shared_prompt`). With n rows of
prompt P and response R in one micro-batch, and one copy of the prompt:

    tokens computed           P + n R                 instead of  n (P + R)
    pairs in attention        P^2/2 + n (P R + R^2/2) instead of  n (P + R)^2 / 2
    keys and values gathered  P + n (P + R)           attention reads a copy of them for each row

How many rows of a prompt meet in a micro-batch depends on how the rows are cut: by rows, neighbours
stay together; by tokens, equally long rows are dealt out in turn, and so are the samples of a
prompt. The functions here cut rows with the workers' own code (`data.micro.cut`).

The built-in generator runs a prompt once for all rows that it admits together, keeps its keys and
values once, and reads them once in each step.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from spmdflow.data.micro import cut as cut_rows
from spmdflow.data.shared_prompt import shared_groups
from spmdflow.mapping.dataflow import Array, Model, Workload


@dataclass(frozen=True)
class PackedTokens:
    """Tokens of one micro-batch of packed rows, each shared prompt packed once."""

    computed: int
    squares: int
    """Twice the pairs of a token and a token before it that it attends to: the sum of the squared
    lengths, if no row shares a prompt."""
    gathered: int
    """Tokens whose keys and values attention reads, counted for each row that reads them."""


def count_packed(
    keys: Sequence[Hashable], prompts: Sequence[int], totals: Sequence[int]
) -> PackedTokens:
    """Return the tokens of one micro-batch of an engine that shares prompts.

    keys: of each row; rows with equal keys have the same prompt. prompts, totals: tokens of each
    row's prompt, and of its prompt and response.
    """
    computed = sum(totals)
    squares = sum(total * total for total in totals)
    gathered = computed
    for group in shared_groups(keys, prompts, totals):
        prompt = prompts[group[0]]
        computed -= prompt * (len(group) - 1)
        squares -= prompt * prompt * (len(group) - 1)
        gathered += prompt
        for row in group:  # a row without a response has no token that attends to its prompt
            gathered -= prompt * (totals[row] == prompt)
    return PackedTokens(computed, squares, gathered)


@dataclass(frozen=True)
class PackedShares:
    """What a rank computes, as shares of the same rows with a whole copy of the prompt in each."""

    tokens: Array = 1.0
    """Of the tokens of all its micro-batches."""
    squares: Array = 1.0
    """Of the squared lengths of all its rows."""
    most_tokens: Array = 1.0
    """Tokens of its heaviest micro-batch, as a share of those of its largest."""
    most_gathered: Array = 1.0
    """Keys and values that attention reads in one micro-batch, likewise."""


def packed_shares(
    model: Model, workload: Workload, num_rows: Array, num_micro: Array
) -> PackedShares:
    """Return what is computed of `num_rows` rows of equal length, cut into num_micro micro-batches.

    The first row of the rank is the first one with its prompt. All shares are 1 if rows have their
    own prompts, or if the engine computes every row whole.
    """
    if not model.shares_prompts or workload.rows_per_prompt == 1:
        return PackedShares()
    by_tokens = model.engine.micro_batch_tokens is not None
    sizes = np.stack(np.broadcast_arrays(num_rows, num_micro), -1)
    different, index = np.unique(sizes.reshape(-1, 2), axis=0, return_inverse=True)
    shares = []
    for rows, parts in different.tolist():
        shares.append(_shares_of_equal_rows(workload, int(rows), int(parts), by_tokens=by_tokens))
    of_each = np.array(shares)[index.reshape(-1)].reshape(*sizes.shape[:-1], 4)
    return PackedShares(*np.moveaxis(of_each, -1, 0))


@lru_cache(maxsize=4096)
def _shares_of_equal_rows(
    workload: Workload, num_rows: int, num_micro: int, *, by_tokens: bool
) -> tuple[float, float, float, float]:
    """Return the fields of `PackedShares` for one rank."""
    total = workload.tokens
    counts = []
    most_rows = 0
    for part in cut_rows([total] * num_rows, num_micro, by_tokens=by_tokens, packed=True):
        keys = [row // workload.rows_per_prompt for row in part]
        prompts = [workload.prompt_tokens] * len(part)
        counts.append(count_packed(keys, prompts, [total] * len(part)))
        most_rows = max(most_rows, len(part))
    computed = [count.computed for count in counts]
    return (
        sum(computed) / (num_rows * total),
        sum(count.squares for count in counts) / (num_rows * total**2),
        max(computed) / (most_rows * total),
        max(count.gathered for count in counts) / (most_rows * total),
    )


def prompts_admitted(model: Model, workload: Workload, num_rows: Array, at_once: Array) -> Array:
    """Return how many prompts a generator runs for num_rows rows, of which `at_once` run together.

    A generator that shares prompts runs each once for all rows that it admits together: at_once
    rows at first, and as many again when these have ended. So it is the number of pieces into which
    the rows are cut by the ends of prompts and by those of admissions. Otherwise it is num_rows.
    """
    assert model.rollout is not None, model.name
    size = workload.rows_per_prompt
    if not model.rollout.facts.shares_prompts or size == 1:
        return num_rows
    together = np.maximum(np.floor(at_once), 1).astype(np.int64)
    both = np.lcm(together, size)
    ends = np.ceil(num_rows / size) + np.ceil(num_rows / together)
    return ends - np.ceil(num_rows / both)


def cached_tokens(model: Model, workload: Workload, num_rows: Array) -> Array:
    """Return the most tokens whose keys and values a generator keeps for num_rows complete rows.

    The tokens of all rows; if it keeps shared prompts once, those of the responses and of the most
    prompts that so many neighbouring rows may have. The first of them may be any sample of its
    prompt, so these are ceil((n + s - gcd(n, s)) / s) for s samples of a prompt.
    """
    size = prompt_size(model, workload)
    if size == 1:
        return num_rows * sequence_tokens(model, workload)
    skipped = size - np.gcd(np.asarray(num_rows).astype(np.int64), size)
    prompts = np.ceil((num_rows + skipped) / size)
    return prompts * workload.prompt_tokens + num_rows * workload.response_tokens


def rows_within(model: Model, workload: Workload, tokens: Array) -> Array:
    """Return how many complete rows of whole prompts a generator keeps in `tokens` tokens."""
    size = prompt_size(model, workload)
    if size == 1:
        return np.floor(tokens / sequence_tokens(model, workload))
    a_prompt = workload.prompt_tokens + size * workload.response_tokens
    whole = np.floor(tokens / a_prompt)
    left = tokens - whole * a_prompt - workload.prompt_tokens
    more = np.floor(left / max(workload.response_tokens, 1))
    return whole * size + np.clip(more, 0, size - 1)


def sequence_tokens(model: Model, workload: Workload) -> int:
    """Return the tokens that the KV cache keeps free for one sequence: whole blocks."""
    assert model.rollout is not None, model.name
    block = model.rollout.facts.cache_block_tokens
    return -(-workload.tokens // block) * block


def prompt_size(model: Model, workload: Workload) -> int:
    """Rows that share one copy of their prompt in the model's KV cache; 1: each has its own."""
    if model.caches_prompts_once:
        return workload.rows_per_prompt
    return 1
