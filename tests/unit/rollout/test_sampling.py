"""The draw: its distribution, its independence of the batch, truncation, recorded log-probs."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from spmdflow.config.schema import RolloutConfig
from spmdflow.data.row_id import seed_of
from spmdflow.errors import ConfigError
from spmdflow.rollout.sampling import Sampling, draw, invert, truncate, uniform

NUM_DRAWS = 10_000


def _seeds(count: int) -> Tensor:
    return torch.tensor([seed_of(0, "test", row) for row in range(count)])


def _zeros(count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.int64)


def _assert_drawn_from(counts: Tensor, probs: Tensor) -> None:
    """Pearson's chi-square within 5 standard deviations of its mean; nothing impossible drawn."""
    possible = probs > 0
    assert counts[~possible].sum() == 0
    expected = probs[possible] * counts.sum()
    chi_square = float(((counts[possible] - expected) ** 2 / expected).sum())
    freedom = int(possible.sum()) - 1
    assert chi_square < freedom + 5 * math.sqrt(2 * freedom) + 5, (chi_square, freedom)


LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, -2.0, -4.0, -7.0])


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(1),
        Sampling(1, temperature=0.5),
        Sampling(1, temperature=2.0),
        Sampling(1, top_k=4),
        Sampling(1, top_p=0.8),
        Sampling(1, temperature=1.5, top_k=6, top_p=0.9),
    ],
)
@pytest.mark.parametrize("vary", ["seed", "position", "small seed"])
def test_draws_follow_the_truncated_softmax(sampling: Sampling, vary: str) -> None:
    counter = torch.arange(NUM_DRAWS)
    seeds = {"seed": _seeds(NUM_DRAWS), "position": _zeros(NUM_DRAWS) + 7, "small seed": counter}
    positions = counter if vary == "position" else _zeros(NUM_DRAWS)

    tokens, _ = draw(LOGITS.expand(NUM_DRAWS, -1), sampling, seeds[vary], positions)

    kept = truncate(LOGITS[None] / sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p)
    _assert_drawn_from(tokens.bincount(minlength=len(LOGITS)).double(), kept[0].double().softmax(0))


def test_draws_at_neighbouring_positions_and_seeds_are_independent() -> None:
    logits = LOGITS.expand(NUM_DRAWS, -1)
    probs = LOGITS.double().softmax(0)
    counter = torch.arange(NUM_DRAWS)
    zeros = _zeros(NUM_DRAWS)
    first = draw(logits, Sampling(1), counter, zeros)[0]

    for seeds, positions in ((counter, zeros + 1), (counter + 1, zeros), (counter, zeros + 2**20)):
        second = draw(logits, Sampling(1), seeds, positions)[0]
        pairs = (first * len(LOGITS) + second).bincount(minlength=len(LOGITS) ** 2).double()
        joint = (probs[:, None] * probs).flatten()
        _assert_drawn_from(_merge_rare(pairs, joint), _merge_rare(joint, joint))


def _merge_rare(values: Tensor, probs: Tensor) -> Tensor:
    """Cells expected less than 5 times become one: chi-square needs that."""
    rare = probs * NUM_DRAWS < 5
    return torch.cat([values[~rare], values[rare].sum()[None]])


@pytest.mark.parametrize("size", [9, 256, 700, 1024])
def test_draw_is_the_inverse_of_the_plain_cumulative_sum(size: int) -> None:
    logits = 3 * torch.randn(4000, size, generator=torch.Generator().manual_seed(size))
    logits[:, size // 3 :: 5] = -math.inf
    seeds = _seeds(4000)
    positions = torch.arange(4000) % 11

    tokens, log_probs = draw(logits, Sampling(1), seeds, positions)

    ends = logits.double().softmax(-1).cumsum(-1)
    u = uniform(seeds, positions)[:, None]
    expected = torch.searchsorted(ends, u, right=True)[:, 0]
    clear = (ends - u).abs().amin(-1) > 1e-6  # float32 probabilities
    assert int(clear.sum()) > 3900
    assert torch.equal(tokens[clear], expected[clear])
    chosen = logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
    torch.testing.assert_close(log_probs, chosen, atol=2e-6, rtol=0)


def test_tokens_of_probability_zero_are_never_drawn_even_at_the_ends_of_the_range() -> None:
    probs = torch.zeros(4, 1000)
    probs[0, 300] = 1.0
    probs[1, 999] = 1e-30
    probs[2, 0] = 1.0
    probs[3, 511:513] = 0.5
    for u in (2.0**-49, 0.5, 1 - 2.0**-49):
        tokens, total = invert(probs, torch.full((4,), u, dtype=torch.float64))
        assert tokens[:3].tolist() == [300, 999, 0]
        assert int(tokens[3]) in (511, 512)
        assert float(total[1]) == pytest.approx(1e-30)


def test_rare_tokens_of_a_large_vocabulary_are_drawn_as_often_as_they_should() -> None:
    """Nearly all probability on the first token: the rest share 1e-3 over 150,000 tokens."""
    logits = torch.zeros(150_000)
    logits[0] = math.log(999 * 149_999)
    tokens = torch.cat(
        [
            draw(logits.expand(50, -1), Sampling(1), _seeds(50) + part, _zeros(50))[0]
            for part in range(200)
        ]
    )

    rare = tokens[tokens > 0]
    assert 0 < len(rare) < 30  # 10 expected of 10,000
    assert len(rare.unique()) == len(rare)


def test_number_of_a_draw_equals_splitmix64_in_plain_integers() -> None:
    seeds = [2**62 + 1, 0, 12345]
    positions = [0, 5, 10**6]

    found = uniform(torch.tensor(seeds), torch.tensor(positions)).tolist()

    for u, seed, position in zip(found, seeds, positions, strict=True):
        bits = _splitmix_mix(_splitmix_mix(seed) + (position + 1) * _GAMMA) % 2**48
        assert u == (bits + 0.5) / 2**48


_GAMMA = 0x9E3779B97F4A7C15


def _splitmix_mix(bits: int) -> int:
    bits %= 2**64
    bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    bits = (bits ^ bits >> 27) * 0x94D049BB133111EB % 2**64
    return bits ^ bits >> 31


def test_row_draws_the_same_token_in_any_batch() -> None:
    logits = torch.randn(64, 50, generator=torch.Generator().manual_seed(0))
    seeds = _seeds(64)
    positions = torch.arange(64) % 7
    order = torch.randperm(64)
    sampling = Sampling(1, temperature=0.9, top_k=20, top_p=0.95)

    tokens, log_probs = draw(logits, sampling, seeds, positions)
    shuffled = draw(logits[order], sampling, seeds[order], positions[order])
    rows = [slice(row, row + 1) for row in range(64)]
    alone = [draw(logits[row], sampling, seeds[row], positions[row]) for row in rows]

    assert torch.equal(tokens[order], shuffled[0])
    assert torch.equal(log_probs[order], shuffled[1])
    assert tokens.tolist() == [int(token) for token, _ in alone]
    assert len(set(tokens.tolist())) > 20


def test_draw_leaves_the_process_random_state_alone() -> None:
    before = torch.get_rng_state()

    draw(LOGITS[None], Sampling(1), _seeds(1), _zeros(1))

    assert torch.equal(before, torch.get_rng_state())


@settings(max_examples=100, deadline=None)
@given(
    logits=st.lists(st.integers(-300, 300), min_size=1, max_size=12, unique=True),
    top_k=st.integers(0, 14),
    top_p=st.floats(0.01, 1.0),
)
def test_truncation_keeps_what_a_naive_reference_keeps(
    logits: list[int], top_k: int, top_p: float
) -> None:
    scaled = torch.tensor([logits]).float() / 50

    kept = truncate(scaled, top_k=top_k, top_p=top_p)[0]

    ranked = sorted(range(len(logits)), key=lambda token: -logits[token])[: top_k or None]
    weights = [math.exp(logits[token] / 50) for token in ranked]
    mass = 0.0
    nucleus = set()
    for token, weight in zip(ranked, weights, strict=True):
        if mass / sum(weights) >= top_p - 1e-6 and mass > 0:
            break
        nucleus.add(token)
        mass += weight
    found = {token for token in range(len(logits)) if kept[token] > -math.inf}
    borderline = abs(mass / sum(weights) - top_p) < 1e-5
    assert found == nucleus or borderline
    assert torch.equal(kept[list(found)], scaled[0, list(found)])


def test_only_candidate_is_always_drawn() -> None:
    logits = torch.randn(5000, 40, generator=torch.Generator().manual_seed(1))

    for sampling in (Sampling(1, top_k=1), Sampling(1, top_p=1e-9)):
        tokens, _ = draw(logits, sampling, _seeds(5000), _zeros(5000))
        assert torch.equal(tokens, logits.argmax(-1))


def test_greedy_takes_the_likeliest_token_whatever_the_seed() -> None:
    logits = torch.randn(100, 40, generator=torch.Generator().manual_seed(2))
    greedy = Sampling(1, temperature=0.7, top_k=3, greedy=True)

    tokens, log_probs = draw(logits, greedy, _seeds(100), _zeros(100))

    assert torch.equal(tokens, logits.argmax(-1))
    torch.testing.assert_close(log_probs, (logits / 0.7).log_softmax(-1).amax(-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_prob_is_of_logits_over_temperature_before_truncation(dtype: torch.dtype) -> None:
    logits = torch.randn(300, 40, generator=torch.Generator().manual_seed(3)).to(dtype)
    sampling = Sampling(1, temperature=1.7, top_k=5, top_p=0.6)

    tokens, log_probs = draw(logits, sampling, _seeds(300), _zeros(300))

    expected = (logits.float() / 1.7).log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
    assert log_probs.dtype == torch.float32
    torch.testing.assert_close(log_probs, expected, atol=2e-6, rtol=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": 0.0}, r"temperature: got 0, expected more than 0; set greedy=True"),
        ({"top_p": 1.5}, r"top_p: got 1.5, expected at most 1"),
        ({"top_k": -1}, r"top_k: got -1, expected at least 0"),
        ({"max_new_tokens": 0}, r"max_new_tokens: got 0, expected at least 1"),
    ],
)
def test_impossible_setting_is_refused_with_what_was_expected(changes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Sampling.from_config(RolloutConfig(**changes))


def test_seed_depends_on_every_argument_and_never_changes_between_versions() -> None:
    base = seed_of(1, "generate", 2, 3)
    others = [
        seed_of(0, "generate", 2, 3),
        seed_of(1, "shuffle", 2, 3),
        seed_of(1, "generate", 3, 2),
    ]
    others += [
        seed_of(1, "generate", 2),
        seed_of(1, "generate", 2, 3, 0),
        seed_of(1, "generate", 23),
    ]

    assert base == 3146810137944545842
    assert len({base, *others}) == 7
    assert all(0 <= seed < 2**63 for seed in others)
