"""Marks the tokens that reduce the entropy most: those of large covariance (Cui et al. 2025).

"The entropy mechanism of reinforcement learning for reasoning language models", arXiv 2505.22617:
the entropy falls with the covariance of log-probability and advantage, which a few tokens dominate.
`mark_covariant_tokens` marks these tokens for the losses `kl_cov` and `clip_cov`.

Departure from the paper, so that every layout marks the same tokens: tokens are marked once for the
whole batch, from old_log_probs, before the update cuts it into mini-batches. The authors mark them
in each micro-batch, from the policy's log-probabilities there, which are the same at the first
optimizer step.
"""

from __future__ import annotations

import torch
from tensordict import TensorDict
from torch import Tensor

from spmdflow.config.objective import PolicyLossConfig
from spmdflow.data.ragged import VALID, lengths_of, pad, ragged_from_padded, sampled_mask
from spmdflow.data.row_id import RowGroups
from spmdflow.objectives.loss import Reduce, Report, zero_outside
from spmdflow.worker_api.register import map_function


@map_function(
    reads=("response_mask", "old_log_probs", "advantages"),
    optional=VALID,
    writes=("covariant",),
    groups=True,
)
def mark_covariant_tokens(
    batch: TensorDict,
    *,
    cfg: PolicyLossConfig,
    seed: int,
    groups: RowGroups,
    reduce: Reduce,
    report: Report,
) -> TensorDict:
    """Return the column covariant (ragged bool), which marks k of the batch's N policy tokens.

    k = max(1, covariance_share * N). C_t = (log pi(y_t) - mean log pi) (A_t - mean A), with means
    over these N tokens of all ranks. For surrogate clip_cov, k random tokens among those with C_t
    between covariance_bounds are marked (all of them, if there are fewer than k). They are drawn
    from seed, such as step.number. Otherwise the k tokens with the largest C_t are marked, and
    tokens that tie with the last of them too. Failed rows have no policy tokens. Reports
    actor/covariant_share and actor/covariance, the mean of C_t.
    """
    mask = sampled_mask(batch)
    log_probs, advantages = (pad(batch[name]).double() for name in ("old_log_probs", "advantages"))
    sums = []
    for masked in (mask.double(), zero_outside(log_probs, mask)):
        sums.append(masked.sum())
    tokens, log_prob, advantage = reduce(torch.stack([*sums, zero_outside(advantages, mask).sum()]))
    tokens = tokens.clamp(min=1)
    covariance = (log_probs - log_prob / tokens) * (advantages - advantage / tokens)
    covariance = zero_outside(covariance, mask)
    count = max(1, int(cfg.covariance_share * float(tokens)))
    if cfg.surrogate == "clip_cov":
        low, high = cfg.covariance_bounds
        mask = mask & (covariance > low) & (covariance < high)
        drawn = _draw(groups, mask.shape[1], seed).to(mask.device)
        marked = _mark_largest(drawn, mask, count, reduce)
    else:
        marked = _mark_largest(covariance, mask, count, reduce)
    total, number = reduce(torch.stack([covariance.sum(), marked.sum().double()]))
    report(
        {
            "actor/covariance": float(total / tokens),
            "actor/covariant_share": float(number / tokens),
        }
    )
    column = ragged_from_padded(marked, lengths_of(batch["response_mask"]))
    return TensorDict({"covariant": column}, batch_size=batch.batch_size)


def _mark_largest(x: Tensor, mask: Tensor, count: int, reduce: Reduce) -> Tensor:
    """Mark the `count` largest x inside the mask over all ranks: (B, R) bool.

    Entries that tie with the last of them are marked too. If the mask has fewer entries, all are
    marked. Compares as float32. The bits of the count-th largest number are found byte by byte from
    histograms summed over the ranks (four calls of reduce): with the sign bit flipped, numbers sort
    like their bits.
    """
    bits = x.float().view(torch.int32).long() & 0xFFFFFFFF
    keys = torch.where(bits >= 1 << 31, 0xFFFFFFFF - bits, bits + (1 << 31))
    threshold = 0
    alike = mask
    for shift in (24, 16, 8, 0):
        bytes_ = keys >> shift & 0xFF
        sizes = reduce(torch.bincount(bytes_[alike], minlength=256).double())
        from_above = sizes.flip(0).cumsum(0).flip(0)  # of a byte and those above it
        byte = max(int((from_above >= count).sum()) - 1, 0)  # 0: there are fewer in all
        count -= int(from_above[byte] - sizes[byte])
        threshold = threshold | byte << shift
        alike = alike & (bytes_ == byte)
    return mask & (keys >= threshold)


def _draw(groups: RowGroups, width: int, seed: int) -> Tensor:
    """Return pseudo-random numbers in [0, 1), (B, width) float32.

    A number is a hash of seed, group, row in the group and token position (splitmix64), so it is
    the same on every layout.
    """
    assert groups.position is not None, "these groups do not know the rows' positions in them"
    x = torch.full((len(groups.index), width), seed, dtype=torch.int64)
    columns = (groups.index[:, None], groups.position[:, None], torch.arange(width)[None])
    for column in columns:  # splitmix64 (Steele et al. 2014), whose products wrap around
        x = x + (column.cpu() + 1) * -7046029254386353131
        x = (x ^ (x >> 30 & (1 << 34) - 1)) * -4658895280553007687
        x = (x ^ (x >> 27 & (1 << 37) - 1)) * -7723592293110705685
        x = x ^ (x >> 31 & (1 << 33) - 1)
    return ((x >> 40 & (1 << 24) - 1).double() / (1 << 24)).float()
