"""`EngineKind`: the facts of a train engine, and the registry of all engines."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import TypeVar

from spmdflow.kind.registry import Reference, Registry

Class = TypeVar("Class", bound="type | str")
Kind = TypeVar("Kind", bound="Backend")


@dataclass(frozen=True)
class Backend:
    """Facts that both train engines and generators have."""

    name: str
    """Value of the setting engine.kind or rollout.engine."""
    doc: str
    _: KW_ONLY
    axes: tuple[str, ...] = ()
    """Axes besides dp over which it divides a model: tp, pp, cp for the tokens of rows, and ep for
    experts. For a generator, within a replica."""
    weight_table: Reference = "spmdflow.weights.ranks:whole_tables"
    """(architecture, layout) -> the boxes that each rank holds or reads (weights.ranks)."""
    shares_storage: bool = False
    """A generator can read the weights in the engine's storage. The engine's constructor then takes
    `adopt`."""
    package: str = ""
    """Python package that must be installed."""
    extra: str = ""
    """Extra of spmdflow that installs the package. Of several (with commas), one is enough."""
    files: tuple[str, ...] = ()
    """Files of the package that may mention it, besides those of its class and weight table."""
    implementation: Reference = None
    """Its class, set by the decorator."""

    @property
    def cuts_model(self) -> bool:
        """Whether several ranks hold one model together, besides experts."""
        return "tp" in self.axes or "pp" in self.axes


@dataclass(frozen=True)
class Sharding:
    """What data-parallel ranks shard, and how often they communicate in an optimizer step.

    A gather sends all weights, a reduction all gradients; an all-reduce counts as two reductions.
    """

    parameters: bool = False
    """Each rank has 1/n of the weights, and of the gradients after their reduction."""
    optimizer: bool = True
    """Each rank has 1/n of the optimizer's moments."""
    gathers: int = 0
    reductions: int = 0
    micro_batch_gathers: int = 0
    """In addition, for each micro-batch: gathered weights are freed after the pass."""
    micro_batch_reductions: int = 0

    @property
    def frees_gathered(self) -> bool:
        """Whether a forward pass frees the weights that it gathered."""
        return self.micro_batch_gathers > 0


@dataclass(frozen=True)
class EngineOption:
    """An option of an engine that engine.options can set."""

    doc: str
    needs: str = ""
    """Axis that must be larger than 1."""
    excludes_axis: str = ""
    """Axis that must be 1."""
    excludes: str = ""
    """Option that cannot be set together with it."""
    sharding: Sharding | None = None
    """Replaces the kind's sharding."""
    chosen: str = ""
    """When it is on by default. memory: if the plan has memory left; device: on all but CPUs."""
    unless: str = ""
    """Option that turns the default off."""


@dataclass(frozen=True)
class EngineKind(Backend):
    """Facts of a train engine. Its class: `workers.engine.TrainEngine`."""

    sharding: Sharding
    _: KW_ONLY
    options: Mapping[str, EngineOption] = field(default_factory=dict)
    float32_weights: bool = True
    """Trained weights are stored in float32 and rounded when they are gathered. Otherwise
    they are stored in compute precision, and the optimizer has float32 copies."""
    keeps_gradients: bool = False
    """Its gradient buffer stays allocated between steps."""
    attention_copies: int = 2
    """Copies of a token's queries, keys and values that a layer keeps for its backward pass."""
    ffn_copies: int = 4
    """Copies of a token's activations as wide as the gated feed-forward network, likewise."""
    ffn_forward_copies: int = 3
    """Those that exist at the same time in a forward pass without a backward pass."""
    routed_copies: int = 2
    """Copies of a token's hidden state for each of its experts that a layer keeps for its backward
    pass: what the experts read, and what they return."""
    separate_kernels: bool = False
    """Norms, rotations, activation functions and residual sums are kernels of their own on a
    device, as in transformers' layers. Otherwise they are fused."""
    packs: bool = False
    """It takes micro-batches of concatenated rows without padding, for the model families whose
    attention supports that (`Architecture.packs`)."""
    reads_folder: bool = False
    """Built from a `ModelSource`, which it reads box by box; otherwise from a `LoadedModel`."""
    adapters: bool = False
    """It can train adapters instead of the weights (actor.model.lora)."""
    worker_class: str = ""
    """Base class of the roles that require an engine of this family."""

    @property
    def shares_prompts(self) -> bool:
        """Whether it computes a prompt that packed rows share once, as the module of a
        `LoadedModel` can."""
        return self.packs and not self.reads_folder

    def packs_with(self, options: Iterable[str]) -> bool:
        """Whether it packs rows under these options."""
        return self.packs and "padded" not in options

    def is_plain(self, num_ranks: int, dtype: str) -> bool:
        """Whether a rank has all weights in the precision of the computation, and gathers none.

        So it is in float32 on one rank, and on several under ZeRO stage 1, which only sum their
        gradients. dtype: of the computation, such as float32.
        """
        has_all_weights = num_ranks == 1 or not self.sharding.parameters
        return self.float32_weights and has_all_weights and dtype == "float32"

    def chosen_options(self, why: str, options: Collection[str]) -> tuple[str, ...]:
        """Options that are on by default for this reason (`EngineOption.chosen`).

        options: those of the settings, which are omitted and may turn a default off.
        """
        return tuple(
            name
            for name, option in self.options.items()
            if option.chosen == why and not {name, option.unless} & set(options)
        )

    def sharding_with(self, options: Iterable[str]) -> Sharding:
        """What data-parallel ranks shard and send under these options."""
        shardings = (self.options[name].sharding for name in options if name in self.options)
        return next((sharding for sharding in shardings if sharding is not None), self.sharding)


class Kinds(Registry[Kind]):
    """Kinds by name, the built-in ones first. The first one is the default."""

    def register_kind(self, kind: Kind) -> Callable[[Class], Class]:
        """Return a decorator that registers a kind's class, or its "module:Class", under kind.name.

        The decorator returns what it was given. The registered kind is a copy with `implementation`
        set. Every rank runs it when it imports the script. A module may register its own name
        again; ConfigError if the name belongs to another module.
        """

        def add(implementation: Class) -> Class:
            self.add(kind.name, replace(kind, implementation=implementation), implementation)
            return implementation

        return add

    def names(self) -> tuple[str, ...]:
        """All names, in the order of registration."""
        return tuple(self)

    def that_cut(self) -> tuple[str, ...]:
        """Names of the kinds that divide one model over several ranks."""
        return tuple(name for name, kind in self.items() if kind.cuts_model)


_ENGINES: Kinds[EngineKind] = Kinds(
    "engine", "engine.kind", decorator="register_engine(EngineKind({name!r}, ...))"
)
register_engine = _ENGINES.register_kind
"""`@register_engine(EngineKind("name", ...))` on a `TrainEngine`; then `engine.kind=name`."""
engine_names = _ENGINES.names
engines_that_cut = _ENGINES.that_cut
engine_kind = _ENGINES.find
"""The engine of that name; ConfigError naming the setting and the choices."""


def engines_that_shard() -> tuple[str, ...]:
    """Names of the engines whose data-parallel ranks divide the parameters."""
    return tuple(name for name, kind in _ENGINES.items() if kind.sharding.parameters)


def engines_that_divide_experts() -> tuple[str, ...]:
    """Names of the engines that divide the experts of a mixture over data-parallel ranks."""
    return tuple(name for name, kind in _ENGINES.items() if "ep" in kind.axes)


def engines_that_divide_rows() -> tuple[str, ...]:
    """Names of the engines that divide the tokens of a row over ranks (context parallelism)."""
    return tuple(name for name, kind in _ENGINES.items() if "cp" in kind.axes)


def engines_with_adapters() -> tuple[str, ...]:
    """Names of the engines that train adapters."""
    return tuple(name for name, kind in _ENGINES.items() if kind.adapters)


def engines_of(worker_class: str) -> tuple[str, ...]:
    """Return the names of the engines whose worker_class is this, newest registration first.

    The first one is the default of the family.
    """
    names = []
    for name, kind in _ENGINES.items():
        if kind.worker_class == worker_class:
            names.append(name)
    return tuple(reversed(names))


def option_names() -> tuple[str, ...]:
    """All options of all engines, without duplicates."""
    return tuple(dict.fromkeys(name for kind in _ENGINES.values() for name in kind.options))


def options_doc() -> str:
    """Return the help text of engine.options: "NAME: DOC" of every option, joined by "; ".

    The engines that have it follow in parentheses, unless all have it. The sentence is that of the
    last engine with the option.
    """
    texts = []
    for name in option_names():
        having = []
        for kind in _ENGINES.values():
            if name in kind.options:
                having.append(kind)
        kinds = ", ".join(kind.name for kind in having)
        text = f"{name}: {having[-1].options[name].doc}"
        texts.append(text if len(having) == len(_ENGINES) else f"{text} ({kinds})")
    return "; ".join(texts)
