"""`EngineKind`: what a train engine states about itself, and the table of all engines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any, TypeVar

from spmdflow.errors import ConfigError

Class = TypeVar("Class", bound="type | str")
Reference = Any
"""An object, or "module:name" of one that is imported when it is needed."""


@dataclass(frozen=True)
class Sharding:
    """What data-parallel ranks divide among themselves, and what they send in an optimizer step.

    A gather sends all weights, a reduction all gradients; an all-reduce counts as two reductions.
    """

    parameters: bool = False
    """Each rank has 1/n of the weights, and of the gradients after their reduction."""
    optimizer: bool = True
    """Each rank has 1/n of the moments."""
    gathers: int = 0
    reductions: int = 0
    micro_batch_gathers: int = 0
    """Besides, for each micro-batch: what is gathered is freed after the pass."""
    micro_batch_reductions: int = 0

    @property
    def frees_gathered(self) -> bool:
        """Whether a forward pass frees the weights that it gathered."""
        return self.micro_batch_gathers > 0


@dataclass(frozen=True)
class EngineOption:
    """What engine.options may ask of an engine."""

    doc: str
    needs: str = ""
    """Axis that must be larger than 1."""
    sharding: Sharding | None = None
    """In place of the kind's own."""


RECOMPUTE = {"recompute": EngineOption("compute activations again in backward")}
"""The option that every built-in engine has."""


@dataclass(frozen=True)
class EngineKind:
    """Facts of a train engine. Its class: `workers.engine.TrainEngine`."""

    name: str
    """As engine.kind names it."""
    doc: str
    sharding: Sharding
    axes: tuple[str, ...] = ()
    """Axes besides dp over which it cuts a model: tp, pp."""
    options: Mapping[str, EngineOption] = field(default_factory=dict)
    float32_weights: bool = True
    """Trained weights are stored in float32 and rounded when they are gathered. Else they are
    stored in compute precision, and the optimizer has float32 copies."""
    keeps_gradients: bool = False
    """Its gradient buffer stays between steps."""
    reads_folder: bool = False
    """It is built from a `ModelSource`, which it reads box by box; else from a `LoadedModel`."""
    shares_storage: bool = False
    """It can be built with `adopt`: a generator then reads the trained weights where they are."""
    weight_table: Reference = "spmdflow.weights.ranks:whole_tables"
    """(architecture, layout) -> the boxes that each rank has (weights.ranks)."""
    worker_class: str = ""
    """Base class of roles that are bound to engines of this family."""
    files: tuple[str, ...] = ()
    """Files of the package that may name it, besides those of its class and weight table."""
    implementation: Reference = None
    """Its class; the decorator fills it in."""

    @property
    def cuts_model(self) -> bool:
        """Whether it divides a model over tp or pp."""
        return bool(self.axes)

    def sharding_with(self, options: Iterable[str]) -> Sharding:
        """What is divided under these options."""
        found = (self.options[name].sharding for name in options if name in self.options)
        return next((sharding for sharding in found if sharding is not None), self.sharding)


_ENGINES: dict[str, EngineKind] = {}


def register_engine(kind: EngineKind) -> Callable[[Class], Class]:
    """Decorator of an engine's class, or of its "module:Class".

    Every rank runs it when it imports the script. A module may register its own name again;
    ConfigError if the name belongs to another module.
    """

    def add(implementation: Class) -> Class:
        check_name("engine", kind.name, implementation, _ENGINES)
        _ENGINES[kind.name] = replace(kind, implementation=implementation)
        return implementation

    return add


def engine_kind(name: str, *, key: str = "engine.kind") -> EngineKind:
    """The engine of that name; ConfigError naming the setting and the choices."""
    if name not in _ENGINES:
        raise ConfigError(
            f"{key}: got {name!r}, expected one of {', '.join(_ENGINES)}; choose one or add "
            f"yours with @register_engine(EngineKind({name!r}, ...))"
        )
    return _ENGINES[name]


def engine_names() -> tuple[str, ...]:
    """Every engine, the built-in ones first; the first one is the default."""
    return tuple(_ENGINES)


def engines_that_cut() -> tuple[str, ...]:
    """Those that divide a model over tp and pp."""
    return tuple(name for name, kind in _ENGINES.items() if kind.cuts_model)


def engines_of(worker_class: str) -> tuple[str, ...]:
    """Those of one family; its default, the one that was registered last, comes first."""
    found = [name for name, kind in _ENGINES.items() if kind.worker_class == worker_class]
    return tuple(reversed(found))


def option_names() -> tuple[str, ...]:
    """What any engine knows as an option."""
    return tuple(dict.fromkeys(name for kind in _ENGINES.values() for name in kind.options))


def options_doc() -> str:
    """Every option in words, with the built-in engines that have it, unless all do."""
    known: dict[str, list[str]] = {}
    words: dict[str, str] = {}
    for kind in _ENGINES.values():
        for name, option in kind.options.items():
            known.setdefault(name, []).append(kind.name)
            words[name] = option.doc
    return "; ".join(
        f"{name}: {words[name]}" + f" ({', '.join(kinds)})" * (len(kinds) < len(_ENGINES))
        for name, kinds in known.items()
    )


def load(reference: Reference) -> Any:
    """The object; its module is imported if it was named."""
    if not isinstance(reference, str):
        return reference
    module, _, name = reference.partition(":")
    return getattr(import_module(module), name)


def check_name(what: str, name: str, implementation: Reference, table: Mapping[str, Any]) -> None:
    """ConfigError if another module has registered this name."""
    taken = home_of(table[name].implementation) if name in table else None
    if taken not in (None, home_of(implementation)):
        raise ConfigError(
            f"{what} {name!r}: got a definition in {home_of(implementation)}, expected a name that "
            f"is not taken by {taken}; choose another"
        )


def home_of(reference: Reference) -> str:
    """The module of an object, or of what is named."""
    if isinstance(reference, str):
        return reference.partition(":")[0]
    return str(reference.__module__)
