"""`Strategy`: how one model is cut on its pool, and which strategies there are. Integers only.

Algorithm 2 as printed tries every t up to the machine's U and every p up to N/U, also those whose
product does not divide the pool, and no p at all where N < U. Here tp*pp*dp is the pool's size, tp
divides the heads and stays inside a node, pp is at most max(N/U, 1) and may leave stages uneven
(the busiest one counts), gen_tp divides tp, and gen_pp is pp or 1. Sizes that a user fixes are
taken as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from spmdflow.errors import ConfigError
from spmdflow.mapping.dataflow import Model
from spmdflow.mapping.hardware import Hardware
from spmdflow.parallel.layout import Layout, divisors

Array = np.ndarray
"""float64, one entry a strategy."""


@dataclass(frozen=True, order=True)
class Strategy:
    """Sizes of one model on one pool."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    gen_tp: int = 0
    """0: the model does not generate."""
    gen_pp: int = 0
    recompute: bool = False

    @classmethod
    def of_layout(cls, layout: Layout, *, generates: bool, recompute: bool) -> Strategy:
        """A pool's layout, with its generation sizes if the model generates."""
        generation = (layout.gen_tp_size, layout.gen_pp_size) if generates else (0, 0)
        sizes = layout.tp_size, layout.pp_size, layout.dp_size
        return cls(*sizes, *generation, recompute=recompute)

    @property
    def num_ranks(self) -> int:
        """Ranks of the pool."""
        return self.tp * self.pp * self.dp

    def __str__(self) -> str:
        """Such as t8p1d2-g(t2p1), with -recompute."""
        name = f"t{self.tp}p{self.pp}d{self.dp}"
        name += f"-g(t{self.gen_tp}p{self.gen_pp})" if self.gen_tp else ""
        return name + "-recompute" * self.recompute


@dataclass(frozen=True)
class Strategies:
    """Many strategies of one model at once: arrays of the same length."""

    tp: Array
    pp: Array
    dp: Array
    gen_tp: Array
    """1 where the model does not generate, as gen_pp."""
    gen_pp: Array
    recompute: Array
    """1 where activations are recomputed, else 0."""

    @classmethod
    def of(cls, strategies: Sequence[Strategy]) -> Strategies:
        """The strategies in their order."""

        def column(name: str, least: int = 0) -> Array:
            return np.array([max(getattr(s, name), least) for s in strategies], dtype=np.float64)

        return cls(
            tp=column("tp"),
            pp=column("pp"),
            dp=column("dp"),
            gen_tp=column("gen_tp", 1),
            gen_pp=column("gen_pp", 1),
            recompute=column("recompute"),
        )

    def take(self, index: Array) -> Strategies:
        """Some of them."""
        return Strategies(*(getattr(self, name)[index] for name in self.__dataclass_fields__))

    def one(self, index: int, *, generates: bool) -> Strategy:
        """One of them."""
        return Strategy(
            tp=int(self.tp[index]),
            pp=int(self.pp[index]),
            dp=int(self.dp[index]),
            gen_tp=int(self.gen_tp[index]) * generates,
            gen_pp=int(self.gen_pp[index]) * generates,
            recompute=bool(self.recompute[index]),
        )

    def __len__(self) -> int:
        return len(self.tp)


def strategies_on(
    model: Model, pool_sizes: Sequence[int], hardware: Hardware
) -> tuple[Array, Strategies]:
    """(pool size of each, all strategies) of a model on pools of these sizes, by size."""
    wanted = np.asarray(sorted(pool_sizes), dtype=np.int64)
    sizes, replicas = [wanted[:0]], [Strategy()]
    for tp, pp in _training_sizes(model, hardware):
        fitting = wanted[wanted % (tp * pp) == 0]
        if model.engine.layout is None:
            fitting = fitting[pp <= np.maximum(fitting // hardware.gpus_per_node, 1)]
        for gen_tp, gen_pp in _generation_sizes(model, tp, pp, hardware):
            fits = fitting[fitting % (gen_tp * gen_pp) == 0]
            for recompute in _recompute(model):
                sizes.append(fits)
                replicas.append(Strategy(tp, pp, 1, gen_tp, gen_pp, bool(recompute)))
    count = np.concatenate(sizes)
    order = np.argsort(count, kind="stable")
    which = np.repeat(np.arange(len(sizes)), [len(fits) for fits in sizes])
    found = Strategies.of(replicas).take(which[order])
    return count[order], replace(found, dp=count[order] / (found.tp * found.pp))


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
    if rollout is None or not rollout.facts.cuts_model:
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
