"""`GeneratorKind`: the facts of a generator, and the registry of all generators."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field

from spmdflow.kind.engine import Backend, Kinds
from spmdflow.kind.registry import Reference

PREFILL_TOKENS = 8192
"""Most tokens of one prefill pass: vLLM's limit on a device, the built-in generator's (padding
included), and the value that plans assume."""
CPU_BLOCK_TOKENS = 32
"""Tokens of a block of vLLM's KV cache on a CPU. vLLM's own default there is 128: a short sequence
then wastes most of its block, and no prompt below it is found in the cache again."""
REFILL = 8
"""The built-in generator admits new rows once 1/8 of its rows are free: a prefill costs about as
much as a decode step."""


@dataclass(frozen=True)
class GeneratorKind(Backend):
    """Facts of a generator. Its class: `rollout.generator.Generator`."""

    _: KW_ONLY
    fixed_cache: bool = False
    """Its KV cache has the size rollout.kv_cache_gib from the start. Otherwise it grows with the
    rows that are decoded together, at most rollout.max_batch_size."""
    cache_block_tokens: int = 1
    """Tokens of a block of its KV cache. A sequence has whole blocks."""
    adapters: bool = False
    """It can compute with unmerged adapters (rollout.weights=adapter)."""
    least_head_dim: int = 1
    """Smallest head dimension for which it has kernels."""
    refused_families: Mapping[str, str] = field(default_factory=dict, hash=False)
    """model_type of a family that it must not generate with -> what is wrong."""
    has_table: Reference = None
    """(architecture) -> whether `weight_table` has all its tensors. None: if the architecture has
    a table of tensors itself."""
    derived_table: Reference = None
    """(model path) -> the `ShardTable` of one rank that generates alone, for an architecture that
    `weight_table` does not have. None: it has the tensors of transformers' module."""
    returns_experts: bool = False
    """It can return which experts of a mixture each token used (actor.update.router=replay)."""
    overlaps_host: bool = False
    """On a device, the host prepares the next decode step while the device computes this one. Only
    with one generation stage."""
    layer_operators: int = 0
    """Torch operators (without views) that Python calls for one decoder layer in a decode step. 0:
    its layers are compiled or captured in a graph, and its host time goes into scheduling."""
    step_operators: int = 0
    """Those that a decode step calls besides: embedding, mask, head, sampling."""
    shares_prompts: bool = False
    """It computes a prompt once for all rows that it admits together. A dense model with a table of
    weights (`Architecture.is_dense_with_table`) also keeps its keys and values once, and a decode
    step reads them once."""
    refill: int = 0
    """New rows join once 1/refill of rollout.max_batch_size is free, or if no row is decoded. 0: as
    soon as a row has ended."""
    is_served: bool = False
    """It generates on servers (rollout.server). Its class also gets the run's folder."""
    takes_expandable_segments: Reference = None
    """(tp_size) -> whether it works in a process with expandable segments of device memory
    (`parallel.allocator`), on tp_size ranks that hold one model. None: always."""


_GENERATORS: Kinds[GeneratorKind] = Kinds(
    "generator", "rollout.engine", decorator="register_generator(GeneratorKind({name!r}, ...))"
)
register_generator = _GENERATORS.register_kind
"""`@register_generator(GeneratorKind("name", ...))` on a `Generator`; then `rollout.engine=name`.

The class is called with (rollout settings, model path, device). A kind with axes gets the rank's
`Replica` as a fourth argument.
"""
generator_names = _GENERATORS.names
generators_that_cut = _GENERATORS.that_cut
generator_kind = _GENERATORS.find
"""The generator of that name; ConfigError naming the setting and the choices."""


def generators_with_adapters() -> tuple[str, ...]:
    """Names of the generators that compute with adapters."""
    return tuple(name for name, kind in _GENERATORS.items() if kind.adapters)


def generators_with_experts() -> tuple[str, ...]:
    """Names of the generators that return the experts of their tokens."""
    return tuple(name for name, kind in _GENERATORS.items() if kind.returns_experts)


def generators_doc() -> str:
    """Help text: every generator and its description."""
    return "; ".join(f"{name}: {kind.doc}" for name, kind in _GENERATORS.items())
