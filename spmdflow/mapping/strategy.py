"""`Strategy`: how one model is cut on its pool, and which strategies there are.

Algorithm 2 as printed tries every t up to the node's U and every p up to N/U, also those whose
product does not divide the pool, and no p at all where N < U. Here tp*pp*dp is the pool's size, tp
divides the heads and stays inside a node, pp is at most max(N/U, 1) and may leave stages uneven
(the busiest one counts), gen_tp divides tp, and gen_pp is pp or 1. Sizes that a user fixes are
taken as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from spmdflow.errors import ConfigError
from spmdflow.mapping.dataflow import Model
from spmdflow.mapping.hardware import Hardware
from spmdflow.parallel.layout import Layout, divisors

Array = Any
"""A number of one strategy; of many: a float64 array, one entry a strategy."""


@dataclass(frozen=True)
class Strategy:
    """Sizes of one model on one pool, or of many strategies at once: then arrays."""

    tp: Array = 1
    pp: Array = 1
    dp: Array = 1
    gen_tp: Array = 0
    """0: the model does not generate."""
    gen_pp: Array = 0
    recompute: Array = False

    @classmethod
    def of_layout(cls, layout: Layout, *, generates: bool, recompute: bool) -> Strategy:
        """A pool's layout, with its generation sizes if the model generates."""
        gen_tp, gen_pp = (layout.gen_tp_size, layout.gen_pp_size) if generates else (0, 0)
        return cls(layout.tp_size, layout.pp_size, layout.dp_size, gen_tp, gen_pp, recompute)

    @property
    def num_ranks(self) -> int:
        """Ranks of the pool."""
        return self.tp * self.pp * self.dp

    def take(self, index: np.ndarray) -> Strategy:
        """Some of many, as arrays."""
        return Strategy(*(sizes[index] for sizes in vars(self).values()))

    def one(self, index: int) -> Strategy:
        """One of many, as integers."""
        *sizes, recompute = (int(sizes[index]) for sizes in vars(self).values())
        return replace(Strategy(*sizes), recompute=bool(recompute))

    def __str__(self) -> str:
        """Such as t8p1d2-g(t2p1), with -recompute."""
        name = f"t{self.tp}p{self.pp}d{self.dp}"
        name += f"-g(t{self.gen_tp}p{self.gen_pp})" if self.gen_tp else ""
        return name + "-recompute" * self.recompute


def strategies_on(
    model: Model, pool_sizes: Sequence[int], hardware: Hardware
) -> tuple[np.ndarray, Strategy]:
    """(pool size of each, all strategies) of a model on pools of these sizes, by size."""
    wanted = np.asarray(sorted(pool_sizes), dtype=np.int64)
    sizes, replicas = [wanted[:0]], [(1, 1, 0, 0, 0)]
    for tp, pp in _training_sizes(model, hardware):
        fitting = wanted[wanted % (tp * pp) == 0]
        if model.engine.layout is None:
            fitting = fitting[pp <= np.maximum(fitting // hardware.gpus_per_node, 1)]
        for gen_tp, gen_pp in _generation_sizes(model, tp, pp, hardware):
            fits = fitting[fitting % max(gen_tp * gen_pp, 1) == 0]
            for recompute in _recompute(model):
                sizes.append(fits)
                replicas.append((tp, pp, gen_tp, gen_pp, recompute))
    count = np.concatenate(sizes)
    order = np.argsort(count, kind="stable")
    which = np.repeat(np.arange(len(sizes)), [len(fits) for fits in sizes])[order]
    tp, pp, gen_tp, gen_pp, recompute = np.array(replicas, dtype=np.float64)[which].T
    return count[order], Strategy(tp, pp, count[order] / (tp * pp), gen_tp, gen_pp, recompute)


def tensor_sizes(model: Model, hardware: Hardware) -> list[int]:
    """Tensor-parallel sizes that a shape allows inside a node."""
    heads, kv_heads = model.shape.num_heads, model.shape.num_kv_heads
    return [
        size
        for size in divisors(heads)
        if size <= hardware.gpus_per_node and (kv_heads % size == 0 or size % kv_heads == 0)
    ]


def pipeline_sizes(num_layers: int) -> list[int]:
    """Numbers of stages that give the busiest stage fewer layers than any smaller number does."""
    layers = [-(-num_layers // stages) for stages in range(1, num_layers + 1)]
    return [1, *(s for s in range(2, num_layers + 1) if layers[s - 1] < layers[s - 2])]


def _training_sizes(model: Model, hardware: Hardware) -> Iterator[tuple[int, int]]:
    engine = model.engine
    if not engine.facts.cuts_model:
        yield 1, 1
    elif engine.layout is not None:
        tp, pp = engine.layout
        heads, layers = model.shape.num_heads, model.shape.num_layers
        if heads % tp or not 1 <= pp <= layers:
            got = f"layout t{tp}p{pp} for {heads} attention heads and {layers} layers"
            expected = "a divisor of the heads and at most a stage a layer"
            raise ConfigError.of(model.name, got, expected, f"choose t among {divisors(heads)}")
        yield engine.layout
    else:
        for tp in tensor_sizes(model, hardware):
            for pp in pipeline_sizes(model.shape.num_layers):
                if engine.layouts is None or (tp, pp) in engine.layouts:
                    yield tp, pp


def _generation_sizes(
    model: Model, tp: int, pp: int, hardware: Hardware
) -> Iterator[tuple[int, int]]:
    rollout = model.rollout
    if rollout is None:
        yield 0, 0
    elif not rollout.facts.cuts_model:
        yield 1, 1
    elif rollout.layout is not None:
        yield rollout.layout
    elif model.weights_from is not None:
        yield tp, pp
    elif not model.engine.facts.cuts_model:
        for size in tensor_sizes(model, hardware):
            yield size, 1
    else:
        sizes = tensor_sizes(model, hardware)
        for gen_tp in (size for size in divisors(tp) if size in sizes):
            for gen_pp in sorted({1, pp}):
                yield gen_tp, gen_pp


def _recompute(model: Model) -> tuple[int, ...]:
    if not model.trained:
        return (0,)
    if "recompute" in model.engine.options:
        return (1,)
    return (0, 1) if model.engine.layout is None and model.engine.facts.cuts_model else (0,)
