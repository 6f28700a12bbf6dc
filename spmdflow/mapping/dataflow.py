"""`Dataflow`: models and the calls of one step; `Strategy`: how one model is divided over ranks.

Seconds of one stage's calls add up on a pool. Pools overlap within a stage. Stages add up (paper
section 6, d_cost). A script that generates one step ahead gives all its calls one stage, so that
its pools overlap over the whole step.

Algorithm 2 as printed tries every t up to the node's U and every p up to N/U, including those whose
product does not divide the pool, and no p at all if N < U. Here tp*pp*dp is the pool's size, tp
divides the heads and stays inside a node, pp is at most max(N/U, 1) and may leave stages uneven
(the busiest one counts), gen_tp divides tp, and gen_pp is pp or 1. Sizes that the user fixes are
used as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, Literal

import numpy as np

from spmdflow.errors import ConfigError
from spmdflow.kind.engine import EngineKind, Sharding, engine_kind, engines_that_cut
from spmdflow.kind.generator import GeneratorKind, generator_kind, generators_that_cut
from spmdflow.mapping.hardware import Hardware
from spmdflow.parallel.layout import Layout, divisors
from spmdflow.weights.architecture import Architecture

Kind = Literal["generate", "infer", "train"]
_ELEMENT_BYTES = {"bfloat16": 2, "float32": 4}
Array = Any
"""A number for one strategy; for many, a float64 array with one entry per strategy."""


@dataclass(frozen=True)
class Workload:
    """Rows of one call: `num_sequences` of `prompt_tokens` + `response_tokens`."""

    num_sequences: int
    prompt_tokens: int
    response_tokens: int
    num_updates: int = 1
    """Optimizer steps of a training call, over all its epochs."""
    num_epochs: int = 1
    """Passes over the rows of a training call."""
    num_forwards: int = 0
    """Forwards without gradient over the rows of each optimizer step, before it."""
    rows_per_prompt: int = 1
    """Neighbouring rows that share a prompt, such as the samples of GRPO. 1: each has its own."""

    def __post_init__(self) -> None:
        counts = self.num_sequences, self.prompt_tokens, self.num_updates, self.num_epochs
        assert min(*counts, self.rows_per_prompt) >= 1 and self.response_tokens >= 0, self

    @property
    def tokens(self) -> int:
        """Tokens of one sequence."""
        return self.prompt_tokens + self.response_tokens


class Precision:
    """Base class of `Engine` and `Rollout`, which store weights in one dtype."""

    dtype: str

    @property
    def element_bytes(self) -> int:
        """Bytes of a weight in compute precision, or of a value in the KV cache."""
        return _ELEMENT_BYTES[self.dtype]


@dataclass(frozen=True)
class Engine(Precision):
    """How a model is stored and divided; sizes that are None are searched."""

    kind: str = field(default_factory=lambda: engines_that_cut()[0])
    """Value of engine.kind; `facts` has its facts."""
    layout: tuple[int, int] | None = None
    """(tp_size, pp_size); None: Algorithm 2 chooses it. Data-parallel engines have (1, 1)."""
    shard_size: int = 0
    """Ranks that share one copy of sharded state; 0: all data-parallel ranks."""
    virtual_size: int = 1
    """Model chunks on each pipeline stage (interleaved schedule)."""
    context_size: int = 1
    """Ranks that divide rows; 0: searched."""
    context_attention: str = "auto"
    """See the setting of this name."""
    expert_size: int = 1
    """Data-parallel ranks that divide the experts; 0: searched."""
    layouts: tuple[tuple[int, int], ...] | None = None
    """(tp_size, pp_size) pairs that the search may choose; None: all."""
    options: tuple[str, ...] = ()
    """Value of engine.options."""
    micro_batch_rows: int = 1
    micro_batch_tokens: int | None = None
    dtype: str = "bfloat16"
    moved: tuple[str, ...] = ()
    """Parts that are in host memory between calls: of parameters, gradients, optimizer."""
    may_move: bool = False
    """Whether more parts may be offloaded if a pool does not fit otherwise."""
    moments: int = 2
    """Float32 values that the optimizer keeps for each weight: 2 for Adam."""
    step_copies: int = 0
    """Temporary float32 values for each weight in the optimizer step; 0 if it is fused."""
    own_kernels: bool = False
    """Whether a pass on a device also takes the memory traffic of this project's kernels besides
    matrix products (`seconds.elementwise_bytes`). False: another system, such as the paper's."""

    def __post_init__(self) -> None:
        assert self.dtype in _ELEMENT_BYTES and self.facts, self

    @property
    def facts(self) -> EngineKind:
        """The `EngineKind` named by `kind`; ConfigError if there is none."""
        return engine_kind(self.kind)

    @property
    def sharding(self) -> Sharding:
        """What its data-parallel ranks shard and send, under its options."""
        return self.facts.sharding_with(self.options)

    def is_plain(self, cut: Strategy) -> Array:
        """See `EngineKind.is_plain`."""
        one = self.facts.is_plain(1, self.dtype)
        several = self.facts.is_plain(2, self.dtype)
        return np.where(cut.num_ranks == 1, one, several)


@dataclass(frozen=True)
class Rollout(Precision):
    """How a model generates."""

    kind: str = field(default_factory=lambda: generators_that_cut()[0])
    """Value of rollout.engine; `facts` has its facts."""
    layout: tuple[int, int] | None = None
    """(gen_tp_size, gen_pp_size); None: searched among sizes that divide the training layout."""
    weights: str = "flat"
    """flat, blocks (one copy of the weights), copy (a second one) or adapter (a fixed one)."""
    eager: bool = False
    """Whether it runs without CUDA graphs, as layers that use the trainer's weights must."""
    dtype: str = "bfloat16"
    kv_cache_bytes: float | None = None
    """KV cache of one rank; None: the memory that the pool leaves free."""
    max_batch_size: int | None = None
    """Most sequences that one replica decodes together."""
    min_batch_size: int = 8
    """A placement fits only if a replica's cache holds this many sequences (or all, if fewer)."""
    overlaps_host: bool = False
    """Whether the host prepares a decode step while the device computes the one before. False: as
    vLLM before asynchronous scheduling, which the paper's cluster ran."""
    checks_per_sync: float = 1.0
    """Part of the weight syncs that compare checksums."""
    frozen_bytes: float = 0.0
    """Weights of other models that episodes call, on the first rank of a replica."""

    def __post_init__(self) -> None:
        assert self.weights in ("flat", "blocks", "copy", "adapter"), self.weights
        assert self.dtype in _ELEMENT_BYTES and self.facts, self

    @property
    def facts(self) -> GeneratorKind:
        """The `GeneratorKind` named by `kind`; ConfigError if there is none."""
        return generator_kind(self.kind)


@dataclass(frozen=True)
class Model:
    """One role: its sizes, whether it is trained, how it is stored and how it generates.

    ConfigError if a size is missing.
    """

    name: str
    shape: Architecture
    trained: bool = False
    engine: Engine = field(default_factory=Engine)
    rollout: Rollout | None = None
    """None: it never generates."""
    weights_from: str | None = None
    """For a separate generator: the model whose weights it receives once a step."""
    adapters: int = 0
    """Number of weights that are trained with adapters: theirs, and those of modules to save; 0: it
    has no adapters."""
    divided_adapters: int = 0
    """Those of them that tensor-parallel ranks divide. Each rank has all others."""
    shares: str = ""
    """The model on the same ranks whose weights it uses; empty: it has its own."""

    @property
    def packs(self) -> bool:
        """Whether its engine packs the rows of a micro-batch end to end."""
        return self.engine.facts.packs_with(self.engine.options) and self.shape.packs

    @property
    def shares_prompts(self) -> bool:
        """Whether its engine computes a prompt that rows of a micro-batch share once."""
        return self.packs and self.engine.facts.shares_prompts

    @property
    def caches_prompts_once(self) -> bool:
        """Whether its generator keeps keys and values of a prompt once for all rows with it."""
        if self.rollout is None:
            return False
        return self.rollout.facts.shares_prompts and self.shape.is_dense_with_table

    def rows_at(self, tokens: int) -> float:
        """Return the most rows of `tokens` tokens in one forward pass, at least 1.

        This is micro_batch_tokens / tokens, rounded down unless rows are packed. For packed rows it
        can be fractional, as tokens is a mean and packing fills the pass. It is micro_batch_rows if
        micro_batch_tokens is None.
        """
        limit = self.engine.micro_batch_tokens
        if limit is None:
            return self.engine.micro_batch_rows
        return max(limit / tokens if self.packs else limit // tokens, 1)

    def __post_init__(self) -> None:
        """Check that all sizes are known."""
        names = ("num_layers", "hidden_size", "num_heads", "vocab_size")
        unknown = []
        for name in names:
            if not getattr(self.shape, name):
                unknown.append(name)
        if unknown:
            got = f"a config.json without {', '.join(unknown)}"
            raise ConfigError.of(self.name, got, "an integer", "give a decoder's config.json")


@dataclass(frozen=True)
class ModelCall:
    """One method call of a step."""

    model: str
    kind: Kind
    stage: str
    workload: Workload
    name: str = ""
    """The method, for tables; empty: the kind."""
    fixed_seconds: float | None = None
    """Seconds on any pool, such as of a reward function in processes; None: simulated."""

    @property
    def title(self) -> str:
        """`model.method`."""
        return f"{self.model}.{self.name or self.kind}"


@dataclass(frozen=True)
class Dataflow:
    """Models and the calls of one step; each call belongs to a model that supports it."""

    models: tuple[Model, ...]
    calls: tuple[ModelCall, ...]
    apart: tuple[tuple[str, str], ...] = ()
    """Pairs of models that may not share a pool."""

    def __post_init__(self) -> None:
        """Check that names are unique and known, and that models support their calls."""
        names = {model.name for model in self.models}
        assert names and len(names) == len(self.models), self.models
        assert names >= {name for pair in self.apart for name in pair}, self.apart
        assert names >= {m.weights_from for m in self.models} - {None}, self.models
        for call in self.calls:
            model = self.model(call.model)
            assert call.kind != "generate" or model.rollout is not None, call.title
            assert call.kind != "train" or model.trained, call.title

    @property
    def stages(self) -> tuple[str, ...]:
        """Names of the stages, in the order of their first call."""
        return tuple(dict.fromkeys(call.stage for call in self.calls))

    def model(self, name: str) -> Model:
        """The model of that name."""
        return next(model for model in self.models if model.name == name)

    def calls_of(self, name: str) -> list[ModelCall]:
        """A model's calls, in order."""
        calls = []
        for call in self.calls:
            if call.model == name:
                calls.append(call)
        return calls


@dataclass(frozen=True)
class Strategy:
    """Parallel sizes of one model on one pool; arrays for many strategies at once."""

    tp: Array = 1
    pp: Array = 1
    dp: Array = 1
    gen_tp: Array = 0
    """0: the model does not generate."""
    gen_pp: Array = 0
    recompute: Array = False
    ep: Array = 1
    """Ranks of dp and cp that divide the experts among them; a divisor of dp * cp."""
    cp: Array = 1
    """Ranks that divide the tokens of each row."""

    @classmethod
    def of_layout(cls, layout: Layout, *, generates: bool, recompute: bool) -> Strategy:
        """The strategy of a pool's layout, with generation sizes if the model generates."""
        gen_tp, gen_pp = (layout.gen_tp_size, layout.gen_pp_size) if generates else (0, 0)
        return cls(
            layout.tp_size,
            layout.pp_size,
            layout.dp_size,
            gen_tp,
            gen_pp,
            recompute,
            layout.expert_size,
            layout.cp_size,
        )

    @property
    def num_ranks(self) -> int:
        """Ranks of the pool."""
        return self.tp * self.pp * self.weight_ranks

    @property
    def weight_ranks(self) -> Array:
        """Ranks of a stage, over dp and cp, that divide its weights."""
        return self.dp * self.cp

    def take(self, index: np.ndarray) -> Strategy:
        """The strategies at these indices, as arrays."""
        return Strategy(*(sizes[index] for sizes in vars(self).values()))

    def one(self, index: int) -> Strategy:
        """Strategy number `index` of many, as integers."""
        sizes = Strategy(*(int(sizes[index]) for sizes in vars(self).values()))
        return replace(sizes, recompute=bool(sizes.recompute))

    def __str__(self) -> str:
        """Such as t8p1d2-g(t2p1) or t1p1d8e8, with -recompute."""
        name = f"t{self.tp}p{self.pp}d{self.dp}"
        name += f"c{self.cp}" if self.cp > 1 else ""
        name += f"e{self.ep}" if self.ep > 1 else ""
        name += f"-g(t{self.gen_tp}p{self.gen_pp})" if self.gen_tp else ""
        return name + "-recompute" * self.recompute


def strategies_on(
    model: Model, pool_sizes: Sequence[int], hardware: Hardware
) -> tuple[np.ndarray, Strategy]:
    """Return all strategies of a model on these pools, as (pool sizes (V,), arrays (V,)).

    They are sorted by pool size. tp * pp * cp (and shard_size, if set) and gen_tp * gen_pp divide
    the size, dp is size / (tp * pp * cp), and ep divides dp * cp. If the layout is searched, pp is
    at most the pool's number of nodes; a trained model of an engine that divides models is then
    tried with and without recomputation, unless its options choose one.
    """
    wanted = np.asarray(sorted(pool_sizes), dtype=np.int64)
    engine = model.engine
    recomputes: tuple[int, ...] = (int(model.trained and "recompute" in engine.options),)
    free = engine.layout is None and "selective_recompute" not in engine.options
    if recomputes == (0,) and model.trained and free and engine.facts.cuts_model:
        recomputes = (0, 1)
    sizes = [wanted[:0]]
    replicas = [(1, 1, 0, 0, 0, 1, 1)]
    for tp, pp in _training_sizes(model, hardware):
        fitting = wanted[wanted % (tp * pp * max(engine.shard_size, 1)) == 0]
        if model.engine.layout is None:
            fitting = fitting[pp <= np.maximum(fitting // hardware.gpus_per_node, 1)]
        if not len(fitting):
            continue
        for gen_tp, gen_pp in _generation_sizes(model, tp, pp, hardware):
            fits = fitting[fitting % max(gen_tp * gen_pp, 1) == 0]
            for ep, cp in product(expert_sizes(model), context_sizes(model, hardware, tp)):
                holding = fits[(fits % (tp * pp * ep) == 0) & (fits % (tp * pp * cp) == 0)]
                for recompute in recomputes:
                    sizes.append(holding)
                    replicas.append((tp, pp, gen_tp, gen_pp, recompute, ep, cp))
    count = np.concatenate(sizes)
    order = np.argsort(count, kind="stable")
    which = np.repeat(np.arange(len(sizes)), [len(fits) for fits in sizes])[order]
    tp, pp, gen_tp, gen_pp, recompute, ep, cp = np.array(replicas, dtype=np.float64)[which].T
    dp = count[order] / (tp * pp * cp)
    return count[order], Strategy(tp, pp, dp, gen_tp, gen_pp, recompute, ep, cp)


def expert_sizes(model: Model) -> list[int]:
    """Return the expert-parallel sizes that a model may train with, ascending.

    [1] for a dense model and for an engine that cannot divide experts or shards over a part of the
    ranks, the size of its settings if that is fixed, otherwise all divisors of the number of
    experts.
    """
    engine = model.engine
    if engine.expert_size:
        return [engine.expert_size]
    if engine.shard_size or "ep" not in engine.facts.axes or not model.shape.num_experts:
        return [1]
    return divisors(model.shape.num_experts)


def context_sizes(model: Model, hardware: Hardware, tp: int) -> list[int]:
    """Return the sizes of context parallelism that a model may train with, ascending.

    [1] for an engine or a family whose rows are not divided, the size of its settings if that is
    fixed, otherwise the divisors of a tensor-parallel rank's heads with which tp * cp ranks fit a
    node.
    """
    engine = model.engine
    if engine.context_size:
        return [engine.context_size]
    if "cp" not in engine.facts.axes or not model.shape.packs:
        return [1]
    most = hardware.gpus_per_node // tp
    return [size for size in divisors(model.shape.num_heads // tp) if size <= most]


def tensor_sizes(model: Model, hardware: Hardware) -> list[int]:
    """Return the tensor-parallel sizes that a model allows inside a node, ascending.

    They divide the attention heads, are at most gpus_per_node, and divide the kv heads or are a
    multiple of them.
    """
    heads = model.shape.num_heads
    kv_heads = model.shape.num_kv_heads
    result = []
    for size in divisors(heads):
        if size <= hardware.gpus_per_node and (kv_heads % size == 0 or size % kv_heads == 0):
            result.append(size)
    return result


def pipeline_sizes(num_layers: int) -> list[int]:
    """Return the useful numbers of stages, ascending: 1, and each that shrinks the busiest stage.

    The busiest stage has ceil(num_layers / stages) layers: for 5 layers [1, 2, 3, 5].
    """
    layers = []
    for stages in range(1, num_layers + 1):
        layers.append(-(-num_layers // stages))
    return [1, *(s for s in range(2, num_layers + 1) if layers[s - 1] < layers[s - 2])]


def _training_sizes(model: Model, hardware: Hardware) -> Iterator[tuple[int, int]]:
    """Yield the (tp, pp) pairs that a model may train with.

    (1, 1) for a data-parallel engine; the layout if it is fixed; otherwise all pairs of
    `tensor_sizes` and `pipeline_sizes` that `layouts` allows. A model with adapters has one stage.
    Raises ConfigError for a fixed tp that does not divide the heads, or for more stages than
    layers.
    """
    engine = model.engine
    if not engine.facts.cuts_model:
        yield 1, 1
    elif engine.layout is not None:
        tp, pp = engine.layout
        heads = model.shape.num_heads
        layers = model.shape.num_layers
        if heads % tp or not 1 <= pp <= layers:
            got = f"layout t{tp}p{pp} for {heads} attention heads and {layers} layers"
            expected = "a divisor of the heads and at most a stage a layer"
            raise ConfigError.of(model.name, got, expected, f"choose t among {divisors(heads)}")
        yield engine.layout
    else:
        for tp in tensor_sizes(model, hardware):
            for pp in pipeline_sizes(model.shape.num_layers):
                if model.adapters and (pp > 1 or model.shape.num_kv_heads % tp):
                    continue  # config.adapter refuses them
                if engine.layouts is None or (tp, pp) in engine.layouts:
                    yield tp, pp


def _generation_sizes(
    model: Model, tp: int, pp: int, hardware: Hardware
) -> Iterator[tuple[int, int]]:
    """Yield the (gen_tp, gen_pp) pairs that a model may generate with if it trains with tp and pp.

    (0, 0) without a rollout, (1, 1) for a generator that does not divide models, the layout if it
    is fixed, and (tp, pp) for a separate generator. With a data-parallel engine, every tensor size
    with one stage. Otherwise gen_tp divides tp, and gen_pp is 1 or pp.
    """
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
