"""Drawing tokens: settings, the number that decides a draw, and the draw, as pure functions.

The token of a row is the inverse of the cumulative distribution softmax(logits / temperature)
(truncated by top-k, top-p) at u in (0, 1). u is a hash of (seed, position), not taken from a
stream: it does not depend on the batch, its order, the device or the engine. One u decides a
draw, so that only the softmax passes over the vocabulary.

This file does not know models or generators.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Literal

import torch
from torch import Tensor

from spmdflow.config.leaf import check_bounds, leaves, type_name
from spmdflow.config.schema import RolloutConfig
from spmdflow.errors import ConfigError

# SplitMix64 (Steele, Lea, Flood 2014), as signed 64-bit integers; torch's int64 products wrap.
_GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)
_UNIFORM_BITS = 48
_UNIFORM_MASK = (1 << _UNIFORM_BITS) - 1
"""u * total is below total in float64: a draw never lands beyond the last token."""
_BLOCK = 256
"""Tokens whose probabilities are summed in float32 before the search. Sums of so few tokens are
exact to 1e-7."""


_SETTINGS = tuple(
    leaf
    for leaf in leaves(RolloutConfig())
    if leaf.key in ("max_new_tokens", "temperature", "top_p", "top_k")
)
"""The rollout settings that a call may override, with their types and bounds."""


@dataclass(frozen=True)
class Grammar:
    """What the text of a response must match."""

    kind: Literal["json_schema", "structural_tag"]
    text: str
    """JSON: a JSON Schema, or a structural tag of xgrammar."""

    @classmethod
    def of(cls, fields: Sequence[str]) -> Grammar | None:
        """The grammar of (kind, text) as plain data; None for no fields."""
        if not fields:
            return None
        kind, text = fields
        if kind == "json_schema":
            return cls("json_schema", text)
        return cls("structural_tag", text)


@dataclass(frozen=True)
class Sampling:
    """How responses are drawn, for all rows of a call. ConfigError if a value is invalid."""

    max_new_tokens: int
    """Longest response, including the end-of-sequence token."""
    temperature: float = 1.0
    """Divides the logits that tokens are drawn from."""
    top_p: float = 1.0
    """Draw among the likeliest tokens that together reach this probability; 1: all."""
    top_k: int = 0
    """Draw among the k likeliest tokens; 0: all."""
    greedy: bool = False
    """Take the likeliest token. There is no noise; top_p and top_k have no effect."""
    policy_temperature: float | None = None
    """Divides the logits of the recorded log-probabilities; None: temperature does."""
    stop: tuple[str, ...] = ()
    """Stop strings. A response ends with the token that completes one of them in its text."""
    tokenizer_path: str = field(default="", repr=False)
    """Tokenizer folder for that text. Required with stop or a grammar; the path may differ between
    nodes."""
    grammar: Grammar | None = None
    """What the response must match; see `rollout.grammar`."""
    top_log_probs: int = 0
    """How many of the likeliest tokens are reported at each position (`TokenNotes.likeliest`)."""

    def __post_init__(self) -> None:
        """ConfigError if a setting has a wrong type or is out of bounds."""
        for leaf in _SETTINGS:
            value = getattr(self, leaf.key)
            if not _is_number(value, integer=leaf.hint is int):
                raise ConfigError(
                    f"{leaf.key}: got {value!r}, expected {type_name(leaf.hint)}; give a number"
                )
            if leaf.key == "temperature" and value == 0:
                raise ConfigError(
                    "temperature: got 0, expected more than 0; set greedy=True for the "
                    "likeliest tokens"
                )
            check_bounds(replace(leaf, value=value))
        if not isinstance(self.greedy, bool):
            raise ConfigError(
                f"greedy: got {self.greedy!r}, expected True or False; set one of them"
            )

    @property
    def of_batch(self) -> Sampling:
        """The settings that all requests generated together must share."""
        return replace(self, max_new_tokens=1, stop=(), grammar=None, top_log_probs=0)

    @classmethod
    def from_config(cls, cfg: RolloutConfig) -> Sampling:
        """The sampling settings of a rollout section."""
        return cls(
            cfg.max_new_tokens,
            cfg.temperature,
            cfg.top_p,
            cfg.top_k,
            tokenizer_path=cfg.tokenizer_path,
        )

    def for_call(
        self,
        *,
        greedy: bool = False,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        max_new_tokens: int | None = None,
        stop: Sequence[str] | None = None,
    ) -> Sampling:
        """Returns a copy with the settings of one call.

        None keeps temperature, top_p, top_k and max_new_tokens. greedy and stop are always
        replaced: None means no stop strings. The recorded log-probabilities stay those of the
        policy at the settings' temperature (policy_temperature), which the trainer recomputes and
        optimizes: a call changes how tokens are chosen, not the policy whose probabilities are
        recorded. ConfigError for an invalid value, such as an empty stop string.
        """
        is_list = isinstance(stop, list | tuple) and all(isinstance(x, str) and x for x in stop)
        if stop is not None and not is_list:
            raise ConfigError(
                f"stop: got {stop!r}, expected a list of texts that are not empty; write "
                f"stop=['</answer>']"
            )
        return replace(
            self,
            greedy=greedy,
            policy_temperature=self.temperature,
            stop=tuple(stop or ()),
            temperature=self.temperature if temperature is None else temperature,
            top_p=self.top_p if top_p is None else top_p,
            top_k=self.top_k if top_k is None else top_k,
            max_new_tokens=self.max_new_tokens if max_new_tokens is None else max_new_tokens,
        )


def draw(
    logits: Tensor, sampling: Sampling, seeds: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """Draws one token per row, and returns tokens (B,) int64 and log-probabilities (B,) float32.

    logits (B, V) any float dtype; seeds (B,) int64; positions (B,) int64, the token's position in
    its response. Inverts the cumulative distribution of softmax(logits / temperature), truncated by
    top-k and top-p, at `uniform(seed, position)`; greedy: argmax. The log-probability is log
    softmax(logits / policy_temperature) over the whole vocabulary, independent of temperature,
    top-k, top-p and greedy.
    """
    if sampling.greedy:
        tokens = logits.argmax(-1)
        return tokens, log_probs_of(logits, tokens, sampling)
    scaled = scale(logits, sampling.temperature)
    truncated = truncate(scaled, top_k=sampling.top_k, top_p=sampling.top_p)
    probs = truncated.softmax(-1)
    tokens, total = invert(probs, uniform(seeds, positions))
    if truncated is not scaled or sampling.policy_temperature not in (None, sampling.temperature):
        return tokens, log_probs_of(logits, tokens, sampling)
    chosen = probs.gather(-1, tokens[:, None]).squeeze(-1)
    return tokens, (chosen.double() / total).log().float()


def log_probs_of(logits: Tensor, tokens: Tensor, sampling: Sampling) -> Tensor:
    """Log-probabilities (B,) float32 of tokens (B,) under the policy that the trainer optimizes."""
    scaled = scale(logits, sampling.policy_temperature or sampling.temperature)
    return scaled.gather(-1, tokens[:, None]).squeeze(-1) - scaled.logsumexp(-1)


def scale(logits: Tensor, temperature: float) -> Tensor:
    """(B, V) float32: logits / temperature."""
    if temperature == 1:
        return logits.float()
    return logits.float() / temperature


def invert(probs: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Returns each row's first token with a cumulative probability above u * total, and the totals.

    probs (B, V) float32, u (B,) float64 in (0, 1) -> tokens (B,) int64, totals (B,) float64.
    Searches blocks of 256 tokens first, then within the block; sums over blocks and within a block
    are float64. A token of probability 0 is never chosen.
    """
    size = probs.shape[-1] - probs.shape[-1] % _BLOCK
    sums = probs[:, :size].unflatten(-1, (-1, _BLOCK)).sum(-1)
    if size < probs.shape[-1]:
        sums = torch.cat([sums, probs[:, size:].sum(-1, keepdim=True)], -1)
    ends = sums.double().cumsum(-1)  # (B, blocks)
    target = u[:, None] * ends[:, -1:]
    block = torch.searchsorted(ends, target, right=True).clamp_(max=ends.shape[-1] - 1)
    end = ends.gather(-1, block)
    inside = sums.gather(-1, block)
    tokens = block * _BLOCK + torch.arange(_BLOCK, device=probs.device)
    last = probs.shape[-1] - 1
    probs_in_block = (
        probs.gather(-1, tokens.clamp(max=last)).double().masked_fill_(tokens > last, 0)
    )
    steps = probs_in_block.cumsum(-1)  # (B, _BLOCK)
    fraction = (1 - (end - target) / inside).clamp_(0, 1 - 2.0**-50)
    offset = torch.searchsorted(steps, fraction * steps[:, -1:], right=True)
    return (block * _BLOCK + offset).clamp_(max=last).squeeze(-1), ends[:, -1]


def truncate(scaled: Tensor, *, top_k: int, top_p: float) -> Tensor:
    """Returns (B, V): -inf outside the k likeliest tokens, and outside the nucleus of top_p.

    The nucleus (Holtzman et al. 2020) is the shortest run of likeliest tokens that reaches top_p of
    the probability that remains after top-k. The likeliest token always stays. Returns `scaled`
    itself if there is nothing to truncate: top_p is 1, and top_k is 0 or at least V.
    """
    limited = 0 < top_k < scaled.shape[-1]
    if not limited and top_p == 1:
        return scaled
    values, index = scaled.topk(top_k, -1) if limited else scaled.sort(-1, descending=True)
    if top_p < 1:
        probs = values.softmax(-1)
        outside = probs.cumsum(-1) - probs >= top_p
        outside[:, 0] = False
        values = values.masked_fill(outside, float("-inf"))
    return torch.full_like(scaled, float("-inf")).scatter_(-1, index, values)


def _is_number(value: object, *, integer: bool) -> bool:
    """Whether value is a finite number, or an integer if `integer` is set. A bool is neither."""
    kinds = int if integer else (int, float)
    return isinstance(value, kinds) and not isinstance(value, bool) and isfinite(value)


def uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """(B,) float64 in (0, 1), a function of (seed, position) alone: SplitMix64's hash of both."""
    bits = _mix(_mix(seeds.clone()).add_((positions + 1) * _GAMMA)) & _UNIFORM_MASK
    return (bits.double() + 0.5) * 2.0**-_UNIFORM_BITS


def _mix(bits: Tensor) -> Tensor:
    """Applies SplitMix64's finaliser to `bits` (int64) in place, and returns them.

    Every input bit affects every output bit.
    """
    scratch = torch.empty_like(bits)
    for shift, factor in ((30, _MIX_1), (27, _MIX_2), (31, 1)):
        torch.bitwise_right_shift(bits, shift, out=scratch)
        bits ^= scratch.bitwise_and_((1 << (64 - shift)) - 1)  # >> repeats the sign bit
        if factor != 1:
            bits *= factor
    return bits
