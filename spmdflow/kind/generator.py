"""`GeneratorKind`: what a generator states about itself, and the table of all generators."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

from spmdflow.kind.engine import Backend, Kinds

PREFILL_TOKENS = 8192
"""Tokens that one pass takes at most: what vLLM is told on a device, and what a plan counts."""


@dataclass(frozen=True)
class GeneratorKind(Backend):
    """Facts of a generator. Its class: `rollout.generator.Generator`."""

    _: KW_ONLY
    fixed_cache: bool = False
    """Its KV cache has rollout.kv_cache from the start; else it is as large as the rows
    that it decodes together, rollout.max_batch_size at most."""
    adapters: bool = False
    """It computes with adapters beside its weights (rollout.weights=adapter)."""
    least_head_dim: int = 1
    """Smallest head for which it has kernels."""
    package: str = ""
    """Python package that must be installed."""
    extra: str = ""
    """Extra of spmdflow that installs it; of several, with commas, one does."""


_GENERATORS: Kinds[GeneratorKind] = Kinds(
    "generator", "rollout.engine", decorator="register_generator(GeneratorKind({name!r}, ...))"
)
register_generator = _GENERATORS.register_kind
"""`@register_generator(GeneratorKind("name", ...))` on a `Generator`; then `rollout.engine=name`.

The class is called with (rollout settings, model path, device), and with the `Replica` of the
rank too if it has axes.
"""
generator_names = _GENERATORS.names
generators_that_cut = _GENERATORS.that_cut
generator_kind = _GENERATORS.find
"""The generator of that name; ConfigError naming the setting and the choices."""


def generators_with_adapters() -> tuple[str, ...]:
    """Names of the generators that compute with adapters."""
    return tuple(name for name, kind in _GENERATORS.items() if kind.adapters)


def generators_doc() -> str:
    """Every generator in words."""
    return "; ".join(f"{name}: {kind.doc}" for name, kind in _GENERATORS.items())
