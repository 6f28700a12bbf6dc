"""Advantage estimators by name: `@advantage("name")` registers one.

An estimator is a function `(samples, cfg) -> (advantages, returns)`, both (B, R), in float64. A
script adds its own with the decorator at module level; every rank imports the script, so the name
is known everywhere.

`gae` uses a critic's values. The others have a baseline from other samples, or none. s_i is
the sum of row i's token-level rewards, G the rows that are samples of the same prompt (n of them).
Every token of a row gets the same advantage unless the formula has a t. A prompt with one sample
has no group to compare with, so estimators with a group baseline give it A = s. Rows that failed
are in no baseline (`Samples.groups` excludes them). If all other rows of a group failed,
`compute_advantages` gives the remaining row an advantage of 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import comb

import torch
from torch import Tensor

from spmdflow.config.objective import AdvantageConfig
from spmdflow.data.row_id import RowGroups
from spmdflow.kind.registry import Registry
from spmdflow.objectives.loss import Reduce


@dataclass(frozen=True)
class Samples:
    """Input of an estimator: the rows of one rank."""

    columns: Mapping[str, Tensor]
    """Columns by name: response-shaped (B, R), padded with 0, or dense (B, ...). Floats are
    float64. A row that failed has zeros."""
    mask: Tensor
    """(B, R) bool: True where the policy chose the token; all False for a row that failed."""
    groups: RowGroups
    """Which rows are samples of one prompt. Sums over them include other ranks' rows and exclude
    rows that failed."""
    reduce: Reduce
    """Sums over the ranks."""

    @property
    def rewards(self) -> Tensor:
        """(B, R) token-level rewards, minus kl_coef times the KL to the reference."""
        return self.columns["token_level_rewards"]

    @property
    def scores(self) -> Tensor:
        """(B,) sum of each row's rewards, also at tokens that the policy did not choose."""
        return self.rewards.sum(-1)

    def spread(self, x: Tensor) -> Tensor:
        """(B,) -> (B, R): each row's number at every token that the policy chose, 0 elsewhere."""
        return x[:, None] * self.mask


Estimates = tuple[Tensor, Tensor]
"""Advantages and returns."""
EstimatorFunction = Callable[[Samples, AdvantageConfig], Estimates]


@dataclass(frozen=True)
class Estimator:
    """A registered advantage estimator."""

    estimate: EstimatorFunction
    reads: tuple[str, ...]
    """Columns it needs besides token_level_rewards and response_mask."""
    groups: bool
    """Whether a row is compared with the other samples of its prompt."""


ESTIMATORS: Registry[Estimator] = Registry(
    "advantage estimator", "advantage.estimator", decorator="advantage({name!r})"
)


def advantage(
    name: str, *, reads: Iterable[str] = (), groups: bool = False
) -> Callable[[EstimatorFunction], EstimatorFunction]:
    """Decorator that registers an estimator by name. The same module may register it again.

    reads: columns that it needs in addition to token_level_rewards and response_mask. groups: the
    estimator compares a row with the other samples of its prompt; if all of these failed, the row's
    advantage is 0. Raises ConfigError if a function of another module already has the name.
    """

    def add(estimate: EstimatorFunction) -> EstimatorFunction:
        ESTIMATORS.add(name, Estimator(estimate, tuple(reads), groups), estimate)
        return estimate

    return add


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al. 2016, eq. 16): (advantages, returns).

    delta_t = r_t + gamma V_{t+1} - V_t;  A_t = delta_t + gamma lam A_{t+1};  R_t = A_t + V_t, with
    V = A = 0 after the last token. Positions outside the mask (observations between the policy's
    tokens) are no time steps: the next value and advantage skip them undiscounted, and a reward
    there counts for the policy's previous token. All tensors are (B, R), and the results are 0
    outside the mask.
    """
    advantages = torch.zeros_like(values)
    next_value = next_advantage = pending = values.new_zeros(len(values))
    for t in reversed(range(values.shape[1])):
        chosen = mask[:, t]
        reward = rewards[:, t] + pending
        delta = reward + gamma * next_value - values[:, t]
        advantage = delta + gamma * lam * next_advantage
        advantages[:, t] = torch.where(chosen, advantage, 0.0)
        next_value = torch.where(chosen, values[:, t], next_value)
        next_advantage = torch.where(chosen, advantage, next_advantage)
        pending = torch.where(chosen, 0.0, reward)
    return advantages, torch.where(mask, advantages + values, 0.0)


@advantage("gae", reads=("values",))
def _gae(samples: Samples, cfg: AdvantageConfig) -> tuple[Tensor, Tensor]:
    return gae(samples.rewards, samples.columns["values"], samples.mask, cfg.gamma, cfg.lam)


@advantage("grpo", groups=True)
def grpo(samples: Samples, cfg: AdvantageConfig) -> Estimates:
    """A_i = (s_i - mean_G s) / (std_G s + 1e-6), std unbiased (Shao et al. 2024, section 4.1.2).

    s_i: summed rewards of row i. G: the samples of its prompt. A prompt with one sample has A_i =
    s_i.
    """
    scores = samples.scores
    groups = samples.groups
    normalised = (scores - groups.means(scores)) / (_group_deviation(samples) + 1e-6)
    return _repeat_per_token(samples, torch.where(groups.sizes() > 1, normalised, scores))


@advantage("dr_grpo", groups=True)
@advantage("reinforce_pp_baseline", groups=True)
def dr_grpo(samples: Samples, cfg: AdvantageConfig) -> Estimates:
    """A_i = s_i - mean_G s: no division by std_G, which favours very easy and very hard prompts.

    Liu et al. 2025, "Understanding R1-Zero-like training"; its loss sums over tokens and divides
    by a constant (loss.aggregation: sequence-mean-token-sum-by-budget). REINFORCE++-baseline (Hu
    2025) is whitened over the global batch; its KL belongs in the loss (loss.kl_coef, k2).
    """
    return _repeat_per_token(samples, _subtract_group_mean(samples))


@advantage("rloo", groups=True)
def rloo(samples: Samples, cfg: AdvantageConfig) -> Estimates:
    """A_i = s_i - mean_{j in G, j != i} s_j = n / (n - 1) (s_i - mean_G s).

    s_i: summed rewards of row i. G: the n samples of its prompt; with n = 1, A_i = s_i. REINFORCE
    leave-one-out (Kool et al. 2019; Ahmadian et al. 2024, eq. 6).
    """
    sizes = samples.groups.sizes()
    scale = torch.where(sizes > 1, sizes / (sizes - 1).clamp(min=1), 1.0)
    return _repeat_per_token(samples, scale * _subtract_group_mean(samples))


@advantage("opo", groups=True)
def opo(samples: Samples, cfg: AdvantageConfig) -> Estimates:
    """A_i = s_i - sum_G l_j s_j / sum_G l_j, l the number of the policy's tokens of a row.

    s_i: summed rewards of row i. G: the samples of its prompt; with one sample, A_i = s_i. This is
    the baseline of least variance if a row's squared gradient grows with its length (Hao et al.
    2025, "On-policy RL with optimal reward baseline", eq. 7).
    """
    scores = samples.scores
    groups = samples.groups
    lengths = samples.mask.sum(-1).double()
    baseline = groups.sums(lengths * scores) / groups.sums(lengths).clamp(min=1)
    return _repeat_per_token(samples, torch.where(groups.sizes() > 1, scores - baseline, scores))


@advantage("pass_at_k", groups=True)
def pass_at_k(samples: Samples, cfg: AdvantageConfig) -> Estimates:
    """A_i = mean over S of (max_S s - max_{S without i} s), S all sets of k rows of G with row i.

    What a sample adds to the best of k. k times the mean of A_i grad log pi(y_i) is an unbiased
    estimate of the gradient of E[max of k scores], for scores of 0 and 1 of pass@k (PKPO, Walder
    and Karkhanis 2025, each set with its leave-one-out baseline; k = n: Tang et al. 2025). Only
    rows that beat others have an advantage: with scores in ascending order and C the binomial

    A_i = sum_{j: s_j < s_i} (s_i - s_j) C(j, k - 2) / C(n - 1, k - 1),  j = 0, 1, ...

    k is advantage.best_of, at most n and at least 2.
    """
    return _repeat_per_token(samples, _gain_over_best(samples, cfg))


@advantage("pass_at_k_std", groups=True)
def pass_at_k_std(samples: Samples, cfg: AdvantageConfig) -> Estimates:
    """Return the advantage of `pass_at_k` / (std_G + 1e-6), std unbiased, as GRPO divides.

    A prompt with one sample is not divided: A_i = s_i. With k = n only the best row has an
    advantage: (max - second) / (std + 1e-6) (Tang et al. 2025, arXiv 2503.19595, in the form of the
    public implementation).
    """
    gains = _gain_over_best(samples, cfg)
    several = samples.groups.sizes() > 1
    divided = gains / (_group_deviation(samples) + 1e-6)
    return _repeat_per_token(samples, torch.where(several, divided, gains))


@advantage("gpg", groups=True)
def gpg(samples: Samples, cfg: AdvantageConfig) -> Estimates:
    """A_i = alpha (s_i - mean_G s) / F, F = 1; alpha = B / (B - M) over the global batch.

    M of the B rows are in groups whose scores are all equal: they have no gradient, and alpha keeps
    the scale of the others (GPG, Chu et al. 2025, arXiv 2504.02546). A row alone in its group has
    A_i = alpha s_i and is not among the M. Rows without policy tokens are in neither count. Its
    loss is `plain` with token-mean.
    """
    sizes = samples.groups.sizes()
    counted = samples.mask.any(-1)
    no_gradient = (_group_deviation(samples) < 1e-8) & (sizes > 1)
    rows, idle = samples.reduce(
        torch.stack([counted.sum(), (counted & no_gradient).sum()]).double()
    )
    alpha = rows / (rows - idle).clamp(min=1)
    return _repeat_per_token(samples, alpha * _subtract_group_mean(samples))


@advantage("optimal_token_baseline", reads=("old_log_probs", "squared_probs"), groups=True)
def optimal_token_baseline(samples: Samples, cfg: AdvantageConfig) -> Estimates:
    """A_t = G_t - sum_G W_t G_t / sum_G W_t: a separate baseline for each of the policy's tokens.

    G_t = sum_{u >= t} r_u (the returns); W_t = sum_{u <= t} w_u, w = 1 - 2 pi(y) + sum_v pi(v)^2,
    the squared norm of the gradient of log pi(y) by the logits (squared_probs is sum_v pi(v)^2, by
    `compute_squared_probs`). With rollout_weights w is multiplied by their square. t counts the
    policy's tokens. Where no other row of the group has a token t, A_t = G_t, because with the
    row's own return as its baseline the advantage would be 0 (Li et al. 2026, arXiv 2602.07078).
    """
    mask = samples.mask
    columns = samples.columns
    to_go = reward_to_go(samples.rewards, mask, 1.0)
    weights = 1 - 2 * columns["old_log_probs"].exp() + columns["squared_probs"]
    weights = weights * columns.get("rollout_weights", torch.ones_like(weights)).square()
    energy = torch.where(mask, weights, 0.0).cumsum(-1)
    width = _common_width(mask, samples.reduce)
    order = (mask.cumsum(-1) - 1).clamp(min=0)  # (B, R): which of the policy's tokens
    parts = torch.stack([mask.double(), energy * mask, energy * to_go * mask], -1)  # (B, R, 3)
    table = parts.new_zeros(len(mask), width, 3)
    table.scatter_add_(1, order[..., None].expand_as(parts), parts)
    sums = samples.groups.sums(table).gather(1, order[..., None].expand_as(parts))
    rows, energies, returns = sums.unbind(-1)
    baseline = torch.where(rows > 1, returns / (energies + 1e-8), 0.0)
    return torch.where(mask, to_go - baseline, 0.0), to_go


def _common_width(mask: Tensor, reduce: Reduce) -> int:
    """Return a power of 2 above the largest number of policy tokens in a row, over all ranks.

    All ranks call it together, and it is the same on each.
    """
    most = int(mask.sum(-1).max()) if len(mask) else 0
    needed = torch.zeros(32, dtype=torch.float64, device=mask.device)
    needed[most.bit_length()] = 1.0
    return 1 << int(reduce(needed).nonzero().max())


@advantage("remax", reads=("baseline_scores",))
def remax(samples: Samples, cfg: AdvantageConfig) -> Estimates:
    """A_t = sum_{u >= t} r_u - b, b the score of the greedy response to the same prompt.

    Li et al. 2024, algorithm 1. baseline_scores: (B,), the greedy response's score for each row.
    """
    to_go = reward_to_go(samples.rewards, samples.mask, 1.0)
    baseline = samples.spread(samples.columns["baseline_scores"])
    return to_go - baseline, to_go


@advantage("reinforce_pp")
def reinforce_pp(samples: Samples, cfg: AdvantageConfig) -> Estimates:
    """A_t = sum_{u >= t} gamma^(u - t) r_u, to be whitened over the global batch.

    REINFORCE++ (Hu 2025): the KL is in the rewards (advantage.kl_coef), whitening is the baseline
    (advantage.whiten). With gamma 0 a token has its own reward alone (algos/distill.py).
    """
    to_go = reward_to_go(samples.rewards, samples.mask, cfg.gamma)
    return to_go, to_go


def reward_to_go(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """R_t = r_t + gamma R_{t+1} over the policy's tokens, (B, R); 0 outside the mask.

    Tokens that the policy did not choose are no time steps: a reward at one counts for the policy's
    previous token.
    """
    return gae(rewards, torch.zeros_like(rewards), mask, gamma, 1.0)[0]


def _gain_over_best(samples: Samples, cfg: AdvantageConfig) -> Tensor:
    """Return the advantages of `pass_at_k`, (B,); s_i where a prompt has only one sample.

    k is cfg.best_of, or n if that is 0, limited to 2 .. n. All ranks call it together.
    """
    scores = samples.scores
    groups = samples.groups
    sizes = groups.sizes()
    ordered = groups.members(scores).sort(-1).values  # nan comes last
    weights = torch.zeros_like(ordered)
    for n in set(sizes.int().tolist()):
        weights[sizes == n] = _weigh_ranks(n, ordered.shape[1], cfg.best_of).to(weights)
    beaten = (scores[:, None] - ordered.nan_to_num(torch.inf)).clamp(min=0)
    gains = (beaten * weights).sum(-1)
    return torch.where(sizes > 1, gains, scores)


def _weigh_ranks(n: int, width: int, best_of: int) -> Tensor:
    """Return C(j, k - 2) / C(n - 1, k - 1) for rank j of n scores in ascending order.

    (width,) float64, 0 from j = n - 1 on. k is best_of, or n if that is 0, limited to 2 .. n.
    """
    k = max(2, min(best_of or n, n))
    table = []
    for j in range(width):
        table.append(comb(j, k - 2) / comb(n - 1, k - 1) if j < n - 1 else 0.0)
    return torch.tensor(table, dtype=torch.float64)


def _group_deviation(samples: Samples) -> Tensor:
    """Return the unbiased standard deviation of the scores of each row's group, (B,).

    0 for a group of one row or of equal scores. All ranks call it together.
    """
    scores = samples.scores
    groups = samples.groups
    centred = scores - groups.means(scores)
    return (groups.sums(centred.square()) / (groups.sizes() - 1).clamp(min=1)).sqrt()


def _subtract_group_mean(samples: Samples) -> Tensor:
    """(B,) s_i - mean_G s; s_i where a prompt has only one sample."""
    scores = samples.scores
    groups = samples.groups
    return torch.where(groups.sizes() > 1, scores - groups.means(scores), scores)


def _repeat_per_token(samples: Samples, advantages: Tensor) -> Estimates:
    """(advantages, returns), which are equal without a critic: each row's number at its tokens."""
    spread = samples.spread(advantages)
    return spread, spread
