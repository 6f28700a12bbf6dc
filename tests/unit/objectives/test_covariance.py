"""Which tokens are marked: against a sort over the whole batch, on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torch import Tensor

from spmdflow.config.algorithm import SurrogateLossConfig
from spmdflow.data.ragged import pad, ragged, rows_of
from spmdflow.data.row_id import RowGroups, positions_in_groups
from spmdflow.objectives.covariance import mark_covariant_tokens
from tests.unit.threaded_ranks import run_ranks, take

GROUPS = np.array([0, 0, 0, 1, 1, 2])


def make(seed: int) -> TensorDict:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 9, (len(GROUPS),), generator=generator)
    count = int(lengths.sum())
    mask = torch.rand(count, generator=generator) < 0.8
    columns: dict[str, Tensor] = {
        "old_log_probs": ragged(-3 * torch.rand(count, generator=generator), lengths),
        "advantages": ragged(3 * torch.randn(count, generator=generator), lengths),
        "response_mask": ragged(mask, lengths),
    }
    return TensorDict(columns, batch_size=[len(GROUPS)])


def marked_on(
    batch: TensorDict, cfg: SurrogateLossConfig, shares: list[list[int]], seed: int = 3
) -> tuple[list[list[bool]], dict[str, Any]]:
    """Marks of each row with the rows dealt out to ranks like this, and the metrics."""
    places, largest = positions_in_groups(GROUPS)
    reports: list[dict[str, Any]] = [{} for _ in shares]

    def on_rank(rank: int, reduce: Callable[[Tensor], Tensor]) -> TensorDict:
        mine = shares[rank]
        index = torch.tensor(GROUPS[mine]).long()
        place = torch.tensor(places[mine]).long()
        groups = RowGroups(index, 3, reduce, place, largest)
        given = {"cfg": cfg, "seed": seed, "groups": groups, "reduce": reduce}
        return mark_covariant_tokens(take(batch, mine), **given, report=reports[rank].update)

    found: list[list[bool]] = [[] for _ in GROUPS]
    for share, made in zip(shares, run_ranks(on_rank, len(shares)), strict=True):
        for row, marks in zip(share, rows_of(made["covariant"]), strict=True):
            found[row] = marks.tolist()
    assert all(report == reports[0] for report in reports)
    return found, reports[0]


def covariances(batch: TensorDict) -> dict[tuple[int, int], float]:
    """(row, token) -> the product of both distances from the means, for the policy's tokens."""
    mask = pad(batch["response_mask"])
    a = pad(batch["advantages"]).double()
    log_probs = pad(batch["old_log_probs"]).double()
    where = [(i, t) for i, t in mask.nonzero().tolist()]
    mean_a = sum(float(a[place]) for place in where) / max(len(where), 1)
    mean = sum(float(log_probs[place]) for place in where) / max(len(where), 1)
    return {p: (float(log_probs[p]) - mean) * (float(a[p]) - mean_a) for p in where}


ONE = [list(range(6))]
THREE = [[0, 3], [], [1, 2, 4, 5]]


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 10_000), st.floats(1e-4, 1.0))
def test_kl_cov_marks_the_largest_covariances_of_the_whole_batch(seed: int, share: float) -> None:
    batch = make(seed)
    cfg = SurrogateLossConfig(surrogate="kl_cov", covariance_share=share)

    found, metrics = marked_on(batch, cfg, ONE)

    by_size = sorted((value, place) for place, value in covariances(batch).items())
    count = max(1, int(share * len(by_size)))
    expected = {place for _, place in by_size[len(by_size) - count :]} if by_size else set()
    assert {(i, t) for i, row in enumerate(found) for t, x in enumerate(row) if x} == expected
    if by_size:
        assert metrics["actor/covariant_share"] == pytest.approx(count / len(by_size))
        mean = sum(value for value, _ in by_size) / len(by_size)
        assert metrics["actor/covariance"] == pytest.approx(mean, abs=1e-9)
    assert marked_on(batch, cfg, THREE)[0] == found


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 10_000), st.floats(1e-4, 0.5))
def test_clip_cov_draws_among_tokens_within_the_bounds(seed: int, share: float) -> None:
    batch = make(seed)
    cfg = SurrogateLossConfig(surrogate="clip_cov", covariance_share=share)
    cfg.covariance_bounds = [0.2, 2.0]

    found, _ = marked_on(batch, cfg, ONE)

    sizes = covariances(batch)
    within = {place for place, value in sizes.items() if 0.2 < value < 2.0}
    marks = {(i, t) for i, row in enumerate(found) for t, x in enumerate(row) if x}
    assert marks <= within
    assert len(marks) == min(max(1, int(share * len(sizes))), len(within))
    assert marked_on(batch, cfg, THREE)[0] == found


def test_draws_differ_by_seed_and_are_even_over_tokens() -> None:
    batch = make(1)
    cfg = SurrogateLossConfig(surrogate="clip_cov", covariance_share=0.2)
    cfg.covariance_bounds = [-1e9, 1e9]
    total = int(pad(batch["response_mask"]).sum())
    counts = np.zeros(0)

    for seed in range(50):
        found, _ = marked_on(batch, cfg, ONE, seed)
        flat = np.array([x for row in found for x in row], dtype=float)
        counts = flat if not len(counts) else counts + flat

    chosen = counts[np.concatenate([rows.numpy() for rows in rows_of(batch["response_mask"])])]
    share = int(0.2 * total) / total
    # 50 draws: the standard deviation is 3; 5 of them for the extremes of some 20 tokens
    assert abs(chosen - 50 * share).max() < 15
    assert counts.sum() == 50 * int(0.2 * total)


def test_equal_covariances_at_the_last_place_are_all_marked() -> None:
    lengths = torch.full((6,), 2)
    signs = torch.tensor([-1.0, 1.0]).repeat(6)
    columns = {
        "old_log_probs": ragged(-2 + signs, lengths),
        "advantages": ragged(signs.clone(), lengths),
        "response_mask": ragged(torch.ones(12, dtype=torch.bool), lengths),
    }
    cfg = SurrogateLossConfig(surrogate="kl_cov", covariance_share=0.25)

    found, metrics = marked_on(TensorDict(columns, batch_size=[6]), cfg, THREE)

    assert found == [[True, True]] * 6 and metrics["actor/covariant_share"] == 1
