"""Seconds of the matrix products of one GRPO step, with the threads of the work: `products(work)`.

Those that no trainer can do without, on this machine's torch, each into memory that is there
already: a prefill of every prompt once, decoding all samples together, one forward of the
reference, forward and backward of the update, the head at response positions only, and attention
by rows, with half of its keys, as it is causal. No norms, no softmax, no sampling, no optimizer.
With `shares_prompts`, the reference and the update also compute each prompt once. A product is
taken from PyTorch (`mm`) or from oneDNN, which is part of it, whichever is faster for its shape.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import torch

from bench._trl_work import Work

BODY_TOKENS = 4096
HEAD_TOKENS = 1024
"""Of one product."""


class Products:
    """Runs products of given sizes and adds up their seconds."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.seconds = 0.0
        self.flops = 0.0
        self._memory = torch.ones(1 << 20, dtype=dtype)
        self._fastest: dict[tuple[tuple[int, ...], tuple[int, ...]], Multiply] = {}

    def linear(self, tokens: int, inner: int, outer: int, *, backward: bool = False) -> None:
        """(tokens, inner) @ (inner, outer); backward: also both of its gradients."""
        self._run((tokens, inner), (inner, outer))
        if backward:
            self._run((tokens, outer), (outer, inner))
            self._run((inner, tokens), (tokens, outer))

    def attend(self, heads: int, queries: int, keys: int, size: int, *, backward: bool) -> None:
        """Scores and values of `heads` heads; backward: twice as many more."""
        for _ in range(3 if backward else 1):
            self._run((heads, queries, size), (heads, size, keys))
            self._run((heads, queries, keys), (heads, keys, size))

    def _run(self, left: tuple[int, ...], right: tuple[int, ...]) -> None:
        out = (*left[:-1], right[-1])
        sizes = [torch.Size(shape).numel() for shape in (left, right, out)]
        if sum(sizes) > len(self._memory):
            self._memory = torch.ones(sum(sizes), dtype=self._memory.dtype)
        x, y, z = self._memory[: sum(sizes)].split(sizes)
        views = (x.view(left), y.view(right), z.view(out))
        if (left, right) not in self._fastest:
            ways = [_by_pytorch]
            if len(left) == 2 and hasattr(torch.ops.mkldnn, "_linear_pointwise"):
                ways.append(_by_onednn)
            self._fastest[left, right] = min(ways, key=lambda way: _seconds_of(way, views))
        self.seconds += _seconds(self._fastest[left, right], views)
        self.flops += 2.0 * z.numel() * left[-1]


Views = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Multiply = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]


def _by_pytorch(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> object:
    """x @ y into z."""
    product = torch.mm if x.ndim == 2 else torch.bmm
    return product(x, y, out=z)


def _by_onednn(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> object:
    """x @ y as a new tensor."""
    return torch.ops.mkldnn._linear_pointwise(x, y.T, None, "none", [], "")


def _seconds(way: Multiply, views: Views) -> float:
    started = time.perf_counter()
    way(*views)
    return time.perf_counter() - started


def _seconds_of(way: Multiply, views: Views) -> float:
    """The least of three calls, after one that compiles."""
    way(*views)
    return min(_seconds(way, views) for _ in range(3))


def products(work: Work, *, shares_prompts: bool = False) -> Products:
    """The products of one step with the lengths of the work's first one, and their seconds."""
    torch.set_num_threads(work.threads)
    config = json.loads((Path(work.model) / "config.json").read_text())
    model = Model(config)
    prompts = work.prompt_tokens()[0]
    rows = [length + work.new_tokens for length in prompts for _ in range(work.num_samples)]
    run = Products(getattr(torch, work.dtype))
    # generation
    model.body(run, sum(prompts), prompts)
    model.head(run, len(prompts))
    mean = sum(prompts) // len(prompts)
    for place in range(1, work.new_tokens):
        model.linears(run, work.rows)
        model.attention(run, work.rows * model.heads, 1, mean + place)
        model.head(run, work.rows)
    # the reference, then the update
    passes = [False, True] if work.kl_coef else [True]  # backward
    for backward in passes:
        if shares_prompts:
            model.body(run, sum(prompts), prompts, backward=backward)
            model.linears(run, work.rows * work.new_tokens, backward=backward)
            for prompt in prompts:
                for _ in range(work.num_samples):
                    keys = prompt + work.new_tokens // 2
                    model.attention(run, model.heads, work.new_tokens, keys, backward=backward)
        else:
            model.body(run, sum(rows), rows, backward=backward)
        model.head(run, work.rows * work.new_tokens, backward=backward)
    return run


class Model:
    """A Llama's products, by its config.json."""

    def __init__(self, config: dict[str, int]) -> None:
        self.hidden = config["hidden_size"]
        self.vocabulary = config["vocab_size"]
        self.layers = config["num_hidden_layers"]
        self.heads = config["num_attention_heads"]
        self.size = config.get("head_dim") or self.hidden // self.heads
        kv = config["num_key_value_heads"] * self.size
        inner = config["intermediate_size"]
        own = self.heads * self.size
        self._linears = [(self.hidden, width) for width in (own, kv, kv, inner, inner)]
        self._linears += [(own, self.hidden), (inner, self.hidden)]

    def body(self, run: Products, tokens: int, rows: list[int], *, backward: bool = False) -> None:
        """All layers on packed rows."""
        self.linears(run, tokens, backward=backward)
        for length in rows:
            self.attention(run, self.heads, length, -(-length // 2), backward=backward)

    def linears(self, run: Products, tokens: int, *, backward: bool = False) -> None:
        """The weights of all layers, for so many tokens."""
        for count in _cut(tokens, BODY_TOKENS):
            for _ in range(self.layers):
                for inner, outer in self._linears:
                    run.linear(count, inner, outer, backward=backward)

    def attention(
        self, run: Products, heads: int, queries: int, keys: int, *, backward: bool = False
    ) -> None:
        """Of all layers."""
        for _ in range(self.layers):
            run.attend(heads, queries, keys, self.size, backward=backward)

    def head(self, run: Products, tokens: int, *, backward: bool = False) -> None:
        """Logits of so many positions."""
        for count in _cut(tokens, HEAD_TOKENS):
            run.linear(count, self.hidden, self.vocabulary, backward=backward)


def _cut(total: int, most: int) -> list[int]:
    return [most] * (total // most) + [total % most] * (total % most > 0)
