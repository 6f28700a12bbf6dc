"""`GeneratorKind`: what a generator states about itself, and the table of all generators."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from spmdflow.errors import ConfigError
from spmdflow.kind.engine import Class, Reference, check_name


@dataclass(frozen=True)
class GeneratorKind:
    """Facts of a generator. Its class: `rollout.generator.Generator`."""

    name: str
    """As rollout.engine names it."""
    doc: str
    axes: tuple[str, ...] = ()
    """Axes over which the ranks of a replica divide the model: tp, pp; none: single ranks."""
    fixed_cache: bool = False
    """Its KV cache has rollout.kv_cache_bytes from the start; else it is as large as the rows
    that it decodes together, rollout.max_batch_size at most."""
    shares_storage: bool = False
    """It can read weights where an engine that shares its storage trains them."""
    weight_table: Reference = "spmdflow.weights.ranks:whole_tables"
    """(architecture, layout) -> the boxes that each rank reads (weights.ranks)."""
    least_head_dim: int = 1
    """Smallest head for which it has kernels."""
    package: str = ""
    """Python package that must be installed."""
    extra: str = ""
    """Extra of spmdflow that installs it."""
    files: tuple[str, ...] = ()
    """Files of the package that may name it, besides those of its class and weight table."""
    implementation: Reference = None
    """Its class; the decorator fills it in."""

    @property
    def cuts_model(self) -> bool:
        """Whether several ranks generate together."""
        return bool(self.axes)


_GENERATORS: dict[str, GeneratorKind] = {}


def register_generator(kind: GeneratorKind) -> Callable[[Class], Class]:
    """Decorator of a generator's class, or of its "module:Class"; see `register_engine`.

    The class is called with (rollout settings, model path, device), and with the `Replica` of the
    rank too if it has axes.
    """

    def add(implementation: Class) -> Class:
        check_name("generator", kind.name, implementation, _GENERATORS)
        _GENERATORS[kind.name] = replace(kind, implementation=implementation)
        return implementation

    return add


def generator_kind(name: str, *, key: str = "rollout.engine") -> GeneratorKind:
    """The generator of that name; ConfigError naming the setting and the choices."""
    if name not in _GENERATORS:
        raise ConfigError(
            f"{key}: got {name!r}, expected one of {', '.join(_GENERATORS)}; choose one "
            f"or add yours with @register_generator(GeneratorKind({name!r}, ...))"
        )
    return _GENERATORS[name]


def generator_names() -> tuple[str, ...]:
    """Every generator, the built-in ones first; the first one is the default."""
    return tuple(_GENERATORS)


def generators_doc() -> str:
    """Every generator in words."""
    return "; ".join(f"{name}: {kind.doc}" for name, kind in _GENERATORS.items())


def generators_that_cut() -> tuple[str, ...]:
    """Those whose replicas have several ranks."""
    return tuple(name for name, kind in _GENERATORS.items() if kind.cuts_model)
