"""`GeneratorKind`: what a generator states about itself, and the table of all generators."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, replace

from spmdflow.kind.engine import Backend, Class
from spmdflow.kind.registry import Registry

PREFILL_TOKENS = 8192
"""Tokens that one pass takes at most: what vLLM is told on a device, and what a plan counts."""


@dataclass(frozen=True)
class GeneratorKind(Backend):
    """Facts of a generator. Its class: `rollout.generator.Generator`."""

    _: KW_ONLY
    fixed_cache: bool = False
    """Its KV cache has rollout.kv_cache from the start; else it is as large as the rows
    that it decodes together, rollout.max_batch_size at most."""
    least_head_dim: int = 1
    """Smallest head for which it has kernels."""
    package: str = ""
    """Python package that must be installed."""
    extra: str = ""
    """Extra of spmdflow that installs it."""


_GENERATORS: Registry[GeneratorKind] = Registry(
    "generator", "rollout.engine", decorator="register_generator(GeneratorKind({name!r}, ...))"
)
generator_kind = _GENERATORS.find
"""The generator of that name; ConfigError naming the setting and the choices."""


def register_generator(kind: GeneratorKind) -> Callable[[Class], Class]:
    """Decorator of a generator's class, or of its "module:Class"; see `register_engine`.

    The class is called with (rollout settings, model path, device), and with the `Replica` of the
    rank too if it has axes.
    """

    def add(implementation: Class) -> Class:
        _GENERATORS.add(kind.name, replace(kind, implementation=implementation), implementation)
        return implementation

    return add


def generator_names() -> tuple[str, ...]:
    """Every generator, the built-in ones first; the first one is the default."""
    return tuple(_GENERATORS)


def generators_doc() -> str:
    """Every generator in words."""
    return "; ".join(f"{name}: {kind.doc}" for name, kind in _GENERATORS.items())


def generators_that_cut() -> tuple[str, ...]:
    """Those whose replicas have several ranks."""
    return tuple(name for name, kind in _GENERATORS.items() if kind.cuts_model)
