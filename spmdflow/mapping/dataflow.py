"""`Dataflow`: the models of an algorithm and what one step asks of them. No ranks, no hardware.

Calls of one stage that run on the same pool add; pools overlap within a stage; stages add (paper
section 6, d_cost). A script that generates one step ahead gives all its calls one stage: then its
pools overlap over the whole step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from spmdflow.errors import ConfigError
from spmdflow.kind.engine import EngineKind, Sharding, engine_kind, engines_that_cut
from spmdflow.kind.generator import GeneratorKind, generator_kind, generators_that_cut
from spmdflow.weights.architecture import Architecture

Kind = Literal["generate", "infer", "train"]
ELEMENT_BYTES = {"bfloat16": 2, "float32": 4}
"""By dtype."""


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

    def __post_init__(self) -> None:
        counts = self.num_sequences, self.prompt_tokens, self.num_updates, self.num_epochs
        assert min(counts) >= 1 and self.response_tokens >= 0, self

    @property
    def tokens(self) -> int:
        """Tokens of one sequence."""
        return self.prompt_tokens + self.response_tokens


@dataclass(frozen=True)
class Engine:
    """How a model is held and cut; sizes that are None are searched."""

    kind: str = field(default_factory=lambda: engines_that_cut()[0])
    """As engine.kind; its facts are `facts`."""
    layout: tuple[int, int] | None = None
    """(tp_size, pp_size), or None: Algorithm 2 chooses; data-parallel engines have (1, 1)."""
    layouts: tuple[tuple[int, int], ...] | None = None
    """Those among which it chooses; None: all."""
    options: tuple[str, ...] = ()
    """recompute, keep_gathered, sequence_parallel, plain_optimizer."""
    micro_batch_rows: int = 1
    micro_batch_tokens: int | None = None
    dtype: str = "bfloat16"
    offload: bool = False
    """Whether the model lives on the host between calls."""

    def __post_init__(self) -> None:
        assert self.dtype in ELEMENT_BYTES and self.facts, self

    @property
    def facts(self) -> EngineKind:
        """Of its kind; ConfigError if there is none of that name."""
        return engine_kind(self.kind)

    @property
    def sharding(self) -> Sharding:
        """What its data-parallel ranks divide and send, under its options."""
        return self.facts.sharding_with(self.options)

    @property
    def element_bytes(self) -> int:
        """Bytes of a weight in compute precision."""
        return ELEMENT_BYTES[self.dtype]

    def rows_at(self, tokens: int) -> int:
        """Rows of so many tokens in one forward pass, at most."""
        if self.micro_batch_tokens is None:
            return self.micro_batch_rows
        return max(self.micro_batch_tokens // tokens, 1)


@dataclass(frozen=True)
class Rollout:
    """How a model generates."""

    kind: str = field(default_factory=lambda: generators_that_cut()[0])
    """As rollout.engine; its facts are `facts`."""
    layout: tuple[int, int] | None = None
    """(gen_tp_size, gen_pp_size), or None: searched among those that nest in training's."""
    weights: str = "flat"
    """flat, blocks (one copy of the weights) or copy (a second one)."""
    dtype: str = "bfloat16"
    kv_cache_bytes: float | None = None
    """Of one rank; None: what the pool leaves free."""
    max_batch_size: int | None = None
    """Sequences decoded together by one replica at most."""
    min_batch_size: int = 8
    """Sequences for which the memory floor reserves cache, so that a plan does not crawl."""

    def __post_init__(self) -> None:
        assert self.weights in ("flat", "blocks", "copy"), self.weights
        assert self.dtype in ELEMENT_BYTES and self.facts, self

    @property
    def facts(self) -> GeneratorKind:
        """Of its kind; ConfigError if there is none of that name."""
        return generator_kind(self.kind)

    @property
    def element_bytes(self) -> int:
        """Bytes of a weight and of a cached key."""
        return ELEMENT_BYTES[self.dtype]


@dataclass(frozen=True)
class Model:
    """One role: its sizes, whether it is trained, how it is held and how it generates.

    ConfigError if a size is not known.
    """

    name: str
    shape: Architecture
    trained: bool = False
    engine: Engine = field(default_factory=Engine)
    rollout: Rollout | None = None
    """None: it never generates."""
    weights_from: str | None = None
    """A rollout pool of its own: this model receives that model's weights once a step."""

    def __post_init__(self) -> None:
        names = ("num_layers", "hidden_size", "num_heads", "vocab_size")
        unknown = [name for name in names if not getattr(self.shape, name)]
        if unknown:
            got = f"a config.json without {', '.join(unknown)}"
            raise ConfigError.of(self.name, got, "an integer", "give a decoder's config.json")


@dataclass(frozen=True)
class Call:
    """One method call of a step."""

    model: str
    kind: Kind
    stage: str
    workload: Workload
    name: str = ""
    """The method, for tables; empty: the kind."""
    fixed_seconds: float | None = None
    """What it takes on any pool, such as a reward function in processes; None: simulated."""

    @property
    def title(self) -> str:
        """`model.method`."""
        return f"{self.model}.{self.name or self.kind}"


@dataclass(frozen=True)
class Dataflow:
    """Models and the calls of one step; every call can be run by the model that it names."""

    models: tuple[Model, ...]
    calls: tuple[Call, ...]
    apart: tuple[tuple[str, str], ...] = ()
    """Pairs of models that may not share a pool."""

    def __post_init__(self) -> None:
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
        """By name."""
        return next(model for model in self.models if model.name == name)

    def calls_of(self, name: str) -> list[Call]:
        """A model's calls, in order."""
        return [call for call in self.calls if call.model == name]
