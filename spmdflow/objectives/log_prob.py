"""Log-probabilities, entropies and scalars from a model's head, without a (tokens, V) tensor.

`CausalOutput` is what losses and the functions of `engine.forward` get from a causal LM: hidden
states at the positions that predict a response token, and the head's weight. Log-probabilities
log p(y) = z_y / tau - logsumexp(z / tau), with z = W h, and the entropy are computed in blocks of
columns of the vocabulary. They are float32 whatever the weights' dtype is, because bfloat16
log-probs would bias the ratio. Backward recomputes the logits of each block except the last ones
(`_Task.num_saved_blocks`), and computes that block's part of the weight's gradient.

Under tensor parallelism each rank has a range of the columns (`first`, `group`). Forward
all-reduces a few numbers per token. Backward all-reduces the gradient of the hidden states, which
are replicated over these ranks.

liger-kernel's fused heads do not fit: they compute the gradients of a fixed loss in its forward,
and return neither per-token log-probabilities for other losses nor the entropy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from spmdflow.cpu.product import product, write_transposed_product
from spmdflow.derivative import differentiable_once

CHUNK_ELEMENTS = 1 << 24
"""Logits of one block, over all tokens: 64 MB of float32."""
HOST_PARTS = 8
"""On a CPU blocks are smaller by this factor, to fit the caches, and this many are saved."""

_LEAST = -1e4
"""Lower bound of log-probabilities: e^-1e4 is 0, and -1e4 * 0 is not nan, unlike -inf * 0."""


@dataclass(frozen=True)
class CausalOutput:
    """A causal LM at the n positions that predict a response token (`MicroBatch.predicting`)."""

    hidden: Tensor
    """(n, H): last hidden states; logits (n, V) if there is no weight."""
    weight: Tensor | None
    """(V/t, H): rows first, first + 1, ... of the head. None: `hidden` holds logits."""
    targets: Tensor
    """(n,) int64: the response tokens at these positions."""
    first: int = 0
    vocab_size: int | None = None
    """Ids from this one on are padding and not in the softmax. None: there is no padding."""
    group: dist.ProcessGroup | None = None
    """Ranks that hold the other rows of the head; None: there are no others."""
    join: Callable[[Tensor], Tensor] | None = None
    """Where ranks divide the tokens of rows, these are a part of the n: joins the parts. All of
    these ranks call the methods together."""

    def log_probs(self, temperature: float = 1.0) -> Tensor:
        """log softmax(z / temperature) at the targets: (n,) float32."""
        return self._terms(temperature, entropy=False)[0]

    def log_probs_and_entropy(self, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        """`log_probs` and the entropy -sum_v p_v log p_v of softmax(z / temperature), each (n,)."""
        return self._terms(temperature, entropy=True)

    def _terms(self, temperature: float, *, entropy: bool) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and entropies of the targets, each (n,) float32.

        The entropies are 0 if entropy is False. Under tensor parallelism all ranks of `group` call
        it together.
        """
        assert temperature > 0, temperature
        rows = self.hidden.shape[-1] if self.weight is None else len(self.weight)
        words = rows if self.vocab_size is None else self.vocab_size - self.first
        if self.weight is None or self.hidden.is_cpu:
            hidden = self.hidden  # a CPU computes logits in float32 (cpu.product)
        else:
            hidden = self.hidden.to(self.weight.dtype)
        parts = HOST_PARTS if hidden.is_cpu else 1
        task = _Task(
            temperature,
            self.first,
            min(max(words, 0), rows),
            self.group,
            entropy,
            CHUNK_ELEMENTS // parts,
            parts if torch.is_grad_enabled() else 1,
        )
        with torch.autocast(hidden.device.type, enabled=False):
            terms: tuple[Tensor, Tensor] = _Head.apply(hidden, self.weight, self.targets, task)  # type: ignore[no-untyped-call]
        if self.join is None:
            return terms
        return self.join(terms[0]), self.join(terms[1])


class HiddenShard(Protocol):
    """Which tokens of a micro-batch a rank has (`workers.context_parallel.TokenShard`)."""

    def pick(self, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden states (k, H) at k positions among all tokens; (k,) whether this rank has each."""

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all ranks that divide the rows."""


@dataclass(frozen=True)
class ScalarOutput:
    """Output of a model with a scalar head (critic, reward); the head runs at chosen positions."""

    hidden: Tensor
    """(positions of all rows, H): last hidden states."""
    head: Callable[[Tensor], Tensor]
    """(m, H) float32 -> (m, 1)."""
    shard: HiddenShard | None = None
    """Where ranks divide the tokens of rows: which tokens `hidden` has."""

    def at(self, positions: Tensor) -> Tensor:
        """Return the head's output at these positions, (m,) float32.

        Values are at `MicroBatch.predicting`, scores at `MicroBatch.ends`.
        """
        if self.shard is None:
            hidden = self.hidden.index_select(0, positions)
            return self.head(_promote_dtype(hidden)).squeeze(-1)
        hidden, is_real = self.shard.pick(self.hidden, positions)
        values = self.head(_promote_dtype(hidden)).squeeze(-1)
        return self.shard.sum(values * is_real)


@dataclass(frozen=True)
class _Task:
    """Arguments of `_Head` that are not tensors."""

    temperature: float
    first: int
    width: int
    """Number of this rank's columns that are not padding."""
    group: dist.ProcessGroup | None
    entropy: bool
    elements: int
    """Number of logits in a block."""
    num_saved_blocks: int
    """How many of the last blocks forward saves, so that backward need not recompute them."""

    def blocks(self, hidden: Tensor) -> list[slice]:
        """Return the range of the head's columns in each block, in order, without padding columns.

        A block has about `elements` logits over all tokens, and at least one column.
        """
        size = max(1, self.elements // max(1, len(hidden)))
        if hidden.is_cpu:  # a power of 2, so that few shapes occur: see `product`
            size = 1 << (size.bit_length() - 1)
        starts = range(0, self.width, size)
        result = []
        for start in starts:
            result.append(slice(start, min(start + size, self.width)))
        return result

    def scale_logits(self, hidden: Tensor, weight: Tensor | None, columns: slice) -> Tensor:
        """(n, c): logits / temperature of a block, in float32 (float64 stays float64).

        Hidden states in float32 are not rounded to the type of the weight.
        """
        if weight is None:
            return _promote_dtype(hidden[:, columns]) / self.temperature
        block = weight[columns].to(hidden.dtype)
        return _promote_dtype(product(hidden, block.T)).div_(self.temperature)

    def locate_targets(self, targets: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
        """Return the index of each target in a block, and whether it is in the block; both (n, 1).

        The index is 0 where the target is not in the block.
        """
        index = targets[:, None] - (self.first + columns.start)
        here = (index >= 0) & (index < columns.stop - columns.start)
        return torch.where(here, index, 0), here


class _Head(torch.autograd.Function):
    """d log p(y) / dz_v = (1[v = y] - p_v) / tau;  dH / dz_v = -p_v (log p_v + H) / tau."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor | None, targets: Tensor, task: _Task
    ) -> tuple[Tensor, Tensor]:
        """Return log-probabilities of the targets and entropies, each (n,).

        Entropies are zeros unless task.entropy. Logits are computed in blocks of columns. Sums over
        them are relative to the largest logit m so far: s = sum e^(z - m) and d = sum e^(z - m) (z
        - m), so that log sum e^z = m + log s and H = log s - d / s. Saves the logits of the last
        blocks for backward. Under tensor parallelism all ranks of the group call it together.
        """
        wide = torch.promote_types(hidden.dtype, torch.float32)
        sums = hidden.new_zeros(3, len(hidden), dtype=wide)  # s, d and the target's logit
        most = hidden.new_full((len(hidden),), torch.finfo(wide).min / 2, dtype=wide)
        saved: deque[Tensor] = deque(maxlen=task.num_saved_blocks)
        for columns in task.blocks(hidden):
            if len(saved) == saved.maxlen:
                saved.popleft()  # freed before the next is allocated
            saved.append(scaled := task.scale_logits(hidden, weight, columns))
            index, here = task.locate_targets(targets, columns)
            sums[2] += torch.where(here, scaled.gather(1, index), 0.0)[:, 0]
            most = _rebase(sums, most, torch.maximum(most, scaled.amax(-1)))
            gaps = (scaled - most[:, None]).clamp_(min=_LEAST)
            powers = gaps.exp()
            sums[0] += powers.sum(-1)
            if task.entropy:
                sums[1] += gaps.mul_(powers).sum(-1)
            del gaps, powers, scaled
        if task.group is not None:
            largest = most.clone()
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=task.group)
            _rebase(sums, most, largest)
            most = largest
            dist.all_reduce(sums, group=task.group)
        log_sum = sums[0].log()
        entropy = log_sum - sums[1] / sums[0] if task.entropy else sums[1]
        ctx.save_for_backward(hidden, weight, targets, most + log_sum, entropy, *saved)
        ctx.set_materialize_grads(False)
        if not task.entropy:
            ctx.mark_non_differentiable(entropy)
        ctx.task = task
        return sums[2] - most - log_sum, entropy

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, Tensor | None, None, None]:
        """Return the gradients of hidden states and weight; targets and task have none.

        Blocks whose logits forward did not save are recomputed. Under tensor parallelism the
        gradient of the hidden states is summed over the group. Rows of the weight that are padding
        get 0.
        """
        hidden, weight, targets, normaliser, entropy, *saved = ctx.saved_tensors
        task: _Task = ctx.task
        rounded = hidden if weight is None else hidden.to(weight.dtype)
        of_log_prob, of_entropy = (x if x is None else x / task.temperature for x in grads)
        if of_log_prob is None:
            of_log_prob = torch.zeros_like(normaliser)
        to_hidden = hidden.new_zeros(hidden.shape, dtype=normaliser.dtype)
        to_weight = None
        if weight is not None and ctx.needs_input_grad[1]:
            to_weight = torch.empty_like(weight)
            to_weight[task.width :] = 0
        for columns in reversed(task.blocks(hidden)):
            scaled = saved.pop() if saved else task.scale_logits(hidden, weight, columns)
            log_probs = scaled - normaliser[:, None]
            del scaled
            if of_entropy is None:
                slope = log_probs.exp_().mul_(-of_log_prob[:, None])
            else:
                log_probs.clamp_(min=_LEAST)
                slope = log_probs.exp().neg_()
                log_probs.add_(entropy[:, None]).mul_(of_entropy[:, None])
                slope.mul_(log_probs.add_(of_log_prob[:, None]))
            del log_probs
            index, here = task.locate_targets(targets, columns)
            slope.scatter_add_(1, index, of_log_prob[:, None] * here)
            if weight is None:
                to_hidden[:, columns] = slope
                continue
            slope = slope.to(weight.dtype)
            to_hidden += product(slope, weight[columns])
            if to_weight is not None:
                write_transposed_product(slope, rounded, to_weight[columns])
        if task.group is not None:
            dist.all_reduce(to_hidden, group=task.group)
        return to_hidden.to(hidden.dtype), to_weight, None, None


def _promote_dtype(x: Tensor) -> Tensor:
    """Convert to float32. float64 stays float64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _rebase(sums: Tensor, old_max: Tensor, new_max: Tensor) -> Tensor:
    """Make s and d of sums (3, n) relative to a new maximum logit, in place, and return it.

    d += (old_max - new_max) s, then both are multiplied by e^(old_max - new_max).
    """
    gap = old_max - new_max
    sums[1] += gap * sums[0]
    sums[:2] *= gap.exp()
    return new_max
