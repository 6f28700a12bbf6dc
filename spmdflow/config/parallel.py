"""How ranks share a model and a batch: layouts, batch sizes, and the lines about both at the start.

"t2p2" is tensor-parallel size 2 and pipeline-parallel size 2; the remaining ranks of a pool are
data-parallel. Axes may be in any order, and "t2p2d4" says how many data-parallel ranks remain,
which is checked. "p4v2" gives each of 4 pipeline stages two parts of the model (interleaved 1F1B);
"s8" shards over groups of 8 neighbouring ranks and replicates over the groups (hybrid sharding);
"c2" divides the tokens of each row over 2 ranks (context parallelism); "e4" divides the experts of
a mixture over 4 of the data-parallel ranks of a stage.
Pure: text and integers, no process groups.

samples         = prompts_per_step * samples_per_prompt        (one step)
mini-batches    = samples / mini_batch_size                    (must divide)
optimizer steps = mini-batches * num_epochs                    (per step)
rows per rank   = ceil or floor of mini_batch_size / ranks     (may be uneven)
micro-batches   = ceil(largest rows per rank / engine.micro_batch_rows)
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

from spmdflow.config.model_folder import ModelFacts
from spmdflow.config.placement import pools_of
from spmdflow.config.schema import DataSettings, EngineConfig, UpdateConfig
from spmdflow.errors import ConfigError
from spmdflow.kind.engine import (
    engine_kind,
    engines_that_cut,
    engines_that_divide_experts,
    engines_that_divide_rows,
    engines_that_shard,
)
from spmdflow.kind.generator import generator_kind, generators_that_cut
from spmdflow.parallel.layout import divisors

_AXES = {"tp": "tensor-parallel", "pp": "pipeline-parallel", "cp": "context-parallel"}
_LAYOUT = re.compile(r"([tpvsedc][1-9]\d*)+")
_AXIS = re.compile(r"([tpvsedc])(\d+)")


class Sizes(NamedTuple):
    """Tensor- and pipeline-parallel size, and what else a layout names."""

    tp: int = 1
    pp: int = 1
    virtual: int = 1
    """Parts of the model on each pipeline stage."""
    shard: int = 0
    """Ranks over which one copy is sharded; 0: all ranks of d and c."""
    dp: int = 0
    """Data-parallel size; 0: whatever remains."""
    ep: int = 1
    """Ranks of d and c that divide the experts of a layer among them."""
    cp: int = 1
    """Ranks that divide the tokens of each row."""

    @property
    def replica(self) -> int:
        """Ranks that have the same rows: those of t, c and p."""
        return self.tp * self.pp * self.cp

    def __str__(self) -> str:
        context = f"c{self.cp}" if self.cp > 1 else ""
        return f"t{self.tp}p{self.pp}{context}"


def sizes_of(key: str, text: str) -> Sizes:
    """Return the sizes that a layout such as "t4p2" names, in any order; omitted ones are 1.

    s and d are 0 if they are omitted. ConfigError, naming the setting `key`, for any other text, or
    if an axis is named twice.
    """
    parts = _AXIS.findall(text)
    sizes = {axis: int(size) for axis, size in parts}
    if _LAYOUT.fullmatch(text) is None or len(sizes) < len(parts):
        do = "write one of these (data parallelism takes the other ranks)"
        raise ConfigError.of(key, repr(text), "sizes such as t2, p2, t4p2, t2d4, t2e2 or s8", do)
    return Sizes(
        tp=sizes.get("t", 1),
        pp=sizes.get("p", 1),
        virtual=sizes.get("v", 1),
        shard=sizes.get("s", 0),
        dp=sizes.get("d", 0),
        ep=sizes.get("e", 1),
        cp=sizes.get("c", 1),
    )


def training_sizes(role: str, engine: Any) -> Sizes:
    """Sizes of a role's engine settings."""
    return sizes_of(f"{role}.engine.layout", engine.layout)


def generation_sizes(role: str, part: Any) -> Sizes:
    """Return the tensor- and pipeline-parallel size while a role generates, from rollout.layout.

    auto means the training's tensor-parallel size without pipeline if the generator can split a
    model, otherwise 1. ConfigError for a layout with v, s or c, which only training has, or an e
    other than t: while generating, e says that the ranks of t divide whole experts.
    """
    rollout = part.rollout
    training = training_sizes(role, part.engine)
    if rollout.layout == "auto":
        generator = generator_kind(rollout.generator, key=f"{role}.rollout.engine")
        if generator.cuts_model:
            return Sizes(training.tp)
        return Sizes()
    sizes = sizes_of(f"{role}.rollout.layout", rollout.layout)
    if sizes.virtual > 1 or sizes.shard or sizes.cp > 1:
        expected = "t, p, d and e alone, as the other sizes are of training"
        raise ConfigError.of(f"{role}.rollout.layout", rollout.layout, expected, f"write {sizes}")
    if sizes.ep not in (1, sizes.tp):
        expected = "no e, or as many as t: the tensor-parallel ranks then divide whole experts"
        do = f"write {sizes} or {sizes}e{sizes.tp}"
        raise ConfigError.of(f"{role}.rollout.layout", rollout.layout, expected, do)
    return sizes


def check_training_sizes(role: str, engine: Any, *, num_ranks: int) -> Sizes:
    """Return the training sizes of a role; ConfigError if they do not work on num_ranks ranks.

    Only some engine kinds split a model (t, p, e), divide rows (c) or shard over part of the ranks
    (s). t * p * c and s must divide num_ranks, e the ranks of d and c, v needs p3 or more, and
    options must be known and fit the sizes.
    """
    sizes = training_sizes(role, engine)
    _check_axes(role, engine, sizes)
    check_ranks(f"{role}.engine.layout", sizes, num_ranks)
    if num_ranks % (sizes.shard or 1):
        got = f"s{sizes.shard} on a pool of {num_ranks}"
        expected = "a divisor of the pool's size"
        do = f"choose one of {divisors(num_ranks)}"
        raise ConfigError.of(f"{role}.engine.layout", got, expected, do)
    weight_ranks = num_ranks // sizes.replica * sizes.cp
    if weight_ranks % sizes.ep:
        got = f"e{sizes.ep} with {weight_ranks} data-parallel ranks"
        do = f"choose one of {divisors(weight_ranks)}"
        raise ConfigError.of(f"{role}.engine.layout", got, "a divisor of their number", do)
    if sizes.virtual > 1 and sizes.pp < 3:
        got = engine.layout
        expected = "p3 or more with v, so that a stage has two neighbours"
        do = "remove v or raise p"
        raise ConfigError.of(f"{role}.engine.layout", got, expected, do)
    _check_options(role, engine, sizes)
    return sizes


def _check_axes(role: str, engine: Any, sizes: Sizes) -> None:
    """Raise ConfigError for an axis that the engine does not have, or that another one excludes."""
    kind = engine_kind(engine.kind)
    if sizes.shard and not kind.sharding.parameters:
        got = f"{engine.layout} with engine.kind={engine.kind}"
        expected = "no s, as that engine does not shard parameters over data-parallel ranks"
        do = f"remove it or set {role}.engine.kind={' or '.join(engines_that_shard())}"
        raise ConfigError.of(f"{role}.engine.layout", got, expected, do)
    if sizes.ep > 1 and "ep" not in kind.axes:
        got = f"{engine.layout} with engine.kind={engine.kind}"
        expected = "no e, as that engine does not divide experts"
        do = f"remove it or set {role}.engine.kind={' or '.join(engines_that_divide_experts())}"
        raise ConfigError.of(f"{role}.engine.layout", got, expected, do)
    if sizes.ep > 1 and sizes.shard and not kind.cuts_model:
        expected = "e or s: experts are divided where parameters are sharded over all ranks"
        raise ConfigError.of(f"{role}.engine.layout", engine.layout, expected, "remove one of them")
    if sizes.tp * sizes.pp > 1 and not kind.cuts_model:
        raise ConfigError(
            f"{role}.engine.layout: got {engine.layout} with engine.kind={engine.kind}, expected "
            f"none, as that engine is data-parallel; set {role}.engine.kind="
            f"{' or '.join(engines_that_cut())}"
        )
    if sizes.cp > 1 and "cp" not in kind.axes:
        got = f"{engine.layout} with engine.kind={engine.kind}"
        expected = "no c, as that engine does not divide rows"
        do = f"remove it or set {role}.engine.kind={' or '.join(engines_that_divide_rows())}"
        raise ConfigError.of(f"{role}.engine.layout", got, expected, do)


def check_generation_sizes(role: str, part: Any, *, num_ranks: int) -> Sizes:
    """Return the generation sizes of a role; ConfigError if they do not work on num_ranks ranks.

    t * p must divide num_ranks, and be 1 if the generator cannot split a model. Only some
    generators divide experts (e).
    """
    sizes = generation_sizes(role, part)
    key = f"{role}.rollout.layout"
    if sizes.replica > 1 and not generator_kind(part.rollout.generator).cuts_model:
        got = f"{part.rollout.layout} with rollout.engine={part.rollout.generator}"
        do = f"set {role}.rollout.engine={' or '.join(generators_that_cut())}"
        raise ConfigError.of(key, got, "t1, as it generates on single ranks", do)
    if sizes.ep > 1 and "ep" not in generator_kind(part.rollout.generator).axes:
        got = f"{part.rollout.layout} with rollout.engine={part.rollout.generator}"
        raise ConfigError.of(key, got, "no e, as that generator divides no experts", "remove it")
    check_ranks(key, sizes, num_ranks)
    return sizes


def check_model_sizes(key: str, facts: ModelFacts, sizes: Sizes) -> None:
    """Raise ConfigError unless a model can be split into these sizes.

    tp divides the attention heads; tp divides the key-value heads or is a multiple of them; there
    is a layer for each of the pp * virtual parts; ep divides the experts. Counts that are 0
    (unknown) pass, but a model without experts has no ep.
    key: the setting of the layout, for messages.
    """
    arch = facts.arch
    if arch.num_heads % sizes.tp:
        raise ConfigError(
            f"{key}: got tensor-parallel size {sizes.tp} for {arch.num_heads} attention heads "
            f"({facts.path}), expected a divisor; choose one of {divisors(arch.num_heads)}"
        )
    kv_heads = arch.num_kv_heads
    if kv_heads and kv_heads % sizes.tp and sizes.tp % kv_heads:
        got = f"tensor-parallel size {sizes.tp} for {kv_heads} key-value heads "
        got += f"({facts.path})"
        raise ConfigError.of(key, got, "a divisor or a multiple", "choose another size")
    if 0 < arch.num_layers < sizes.pp * sizes.virtual:
        several = f" of {sizes.virtual} parts" if sizes.virtual > 1 else ""
        most = arch.num_layers // sizes.virtual
        got = f"{sizes.pp} pipeline stages{several} for {arch.num_layers} layers "
        got += f"({facts.path})"
        expected = f"at most one {'part' if several else 'stage'} a layer"
        raise ConfigError.of(key, got, expected, f"choose p{most} or less")
    if sizes.ep > 1 and (not arch.num_experts or arch.num_experts % sizes.ep):
        got = f"e{sizes.ep} for {count_of(arch.num_experts, 'expert')} ({facts.path})"
        do = f"choose one of {divisors(arch.num_experts)}" if arch.num_experts else "remove e"
        raise ConfigError.of(key, got, "a divisor of the number of experts", do)


def check_context(role: str, engine: Any, facts: ModelFacts, sizes: Sizes) -> None:
    """Raise ConfigError unless c ranks can divide a model's rows with engine.context_attention.

    Families whose rows are not packed have layers with a state, which would have to travel from
    rank to rank, or attention that is not ours. ulysses gives each rank 1/c of the heads.
    """
    arch = facts.arch
    if sizes.cp == 1:
        return
    if not arch.packs:
        family = facts.config.get("model_type", "")
        got = f"c{sizes.cp} for the family {family} ({facts.path})"
        expected = "no c, as its attention is not this project's, or its layers have a state"
        raise ConfigError.of(f"{role}.engine.layout", got, expected, "remove c")
    heads = arch.num_heads // sizes.tp
    if engine.context_attention == "ulysses" and heads % sizes.cp:
        of_rank = f" of each of {sizes.tp} ranks" if sizes.tp > 1 else ""
        got = f"ulysses with c{sizes.cp} for {heads} attention heads{of_rank} ({facts.path})"
        do = f"set it to auto, or choose c among {divisors(heads)}"
        expected = "a c that divides the heads"
        raise ConfigError.of(f"{role}.engine.context_attention", got, expected, do)


def obstacle_to_shared_weights(part: Any, *, has_virtual_stages: bool, nests: bool) -> str | None:
    """Return why a role's trainer and generator cannot share the storage of weights, or None.

    part: the role's settings. nests: whether every generation replica is inside one training
    replica.
    """
    if getattr(part.model, "lora", None) is not None:
        return "adapters are merged into copies of the weights"
    if not engine_kind(part.engine.kind).shares_storage:
        return f"engine.kind={part.engine.kind} stores weights in another layout than generation"
    if not generator_kind(part.rollout.generator).shares_storage:
        return f"rollout.engine={part.rollout.generator} has its own weights"
    if (rollout := part.rollout.precision) != (training := part.model.precision):
        return f"rollout.dtype {rollout} is not model.dtype {training}"
    if has_virtual_stages:
        return "stages have several parts of the model (v)"
    if not nests:
        return "generation replicas lie across training replicas"
    return None


def check_shared_weights(role: str, part: Any) -> None:
    """Raise ConfigError for a rollout.weights that shares storage, with sizes that cannot."""
    if part.rollout.weights not in ("blocks", "flat"):
        return
    training = training_sizes(role, part.engine)
    generation = generation_sizes(role, part)
    nests = training.tp % generation.tp == 0 and training.pp % generation.pp == 0
    obstacle = obstacle_to_shared_weights(
        part, has_virtual_stages=training.virtual > 1, nests=nests
    )
    if obstacle is not None:
        raise shared_weights_error(role, part.rollout.weights, obstacle)


def shared_weights_error(role: str, setting: str, obstacle: str) -> ConfigError:
    """Return the error of a rollout.weights that shares storage, if there is an obstacle to it."""
    expected = f"copy here, because {obstacle}"
    do = f"set {role}.rollout.weights=auto"
    return ConfigError.of(f"{role}.rollout.weights", setting, expected, do)


def check_ranks(key: str, sizes: Sizes, num_ranks: int) -> None:
    """Raise ConfigError unless tp * pp divides the number of ranks of the pool, and dp is right."""
    if num_ranks % sizes.replica:
        got = f"{sizes} = {sizes.replica} ranks a replica on a pool of {num_ranks}"
        do = f"choose a product among {divisors(num_ranks)}"
        raise ConfigError.of(key, got, "a divisor of the pool's size", do)
    remaining = num_ranks // sizes.replica
    if sizes.dp not in (0, remaining):
        got = f"d{sizes.dp} with {sizes} on a pool of {num_ranks}"
        raise ConfigError.of(key, got, f"d{remaining}", "write that, or omit d")


def _check_options(role: str, engine: Any, sizes: Sizes) -> None:
    """Raise ConfigError for an engine option that does not exist or does not fit.

    An option does not fit if it excludes another one that is set, if it needs an axis (tp or pp)
    whose size is 1, or if it excludes an axis (cp) whose size is not.
    """
    allowed = engine_kind(engine.kind, key=f"{role}.engine.kind").options
    wrong = []
    for option in engine.options:
        if option not in allowed:
            wrong.append(option)
    if wrong:
        raise ConfigError(
            f"{role}.engine.options: got {wrong[0]} with engine.kind={engine.kind}, expected some "
            f"of {', '.join(allowed) or 'none'}; remove it or choose another engine"
        )
    for option in engine.options:
        axis = allowed[option].needs
        other = allowed[option].excludes
        if other in engine.options:
            got = f"{option} with {other}"
            expected = "one of them"
            raise ConfigError.of(f"{role}.engine.options", got, expected, "remove one")
        if axis and getattr(sizes, axis) == 1:
            raise ConfigError(
                f"{role}.engine.options: got {option} with {_AXES[axis]} size 1, expected "
                f"at least 2; remove it or set {role}.engine.layout={axis[0]}2"
            )
        excluded = allowed[option].excludes_axis
        if excluded and getattr(sizes, excluded) > 1:
            got = f"{option} with {_AXES[excluded]} size {getattr(sizes, excluded)}"
            expected = f"1 under engine.kind={engine.kind}"
            do = f"remove it or {excluded[0]} from {role}.engine.layout"
            raise ConfigError.of(f"{role}.engine.options", got, expected, do)


@dataclass(frozen=True)
class Algebra:
    """How the samples of a step become optimizer steps of one role."""

    samples: int
    mini_batches: int
    optimizer_steps: int
    """In one step of the run, over all epochs."""
    rows_per_rank: tuple[int, int]
    """Fewest and most rows of a mini-batch on one rank."""
    micro_batches: int
    """Forward passes of a mini-batch on every rank, if engine.micro_batch_rows is set."""


def batch_algebra_of(
    role: str, data: DataSettings, update: UpdateConfig, engine: EngineConfig, *, num_ranks: int
) -> Algebra:
    """Return how the samples of a step become the optimizer steps of one role.

    num_ranks: data-parallel replicas. ConfigError unless mini_batch_size divides the samples of a
    step and is a multiple of samples_per_prompt. Rows per rank may be uneven: the floor and the
    ceiling of mini_batch_size / num_ranks.
    """
    samples = data.samples_per_step
    group = data.samples_per_prompt
    size = update.mini_batch_size
    if samples % size or size % group:
        groups = f" that is a multiple of {group}" if group > 1 else ""
        allowed = []
        for prompts in divisors(samples // group):
            allowed.append(group * prompts)
        nearest = sorted(sorted(allowed, key=lambda other: abs(other - size))[:3])
        expected = f"a divisor of the {samples} samples of a step "
        expected += f"({data.prompts_per_step} prompts x {group}){groups}"
        do = f"choose {' or '.join(map(str, nearest))}"
        raise ConfigError.of(f"{role}.update.mini_batch_size", size, expected, do)
    most = -(-size // num_ranks)
    return Algebra(
        samples=samples,
        mini_batches=samples // size,
        optimizer_steps=samples // size * update.num_epochs,
        rows_per_rank=(size // num_ranks, most),
        micro_batches=-(-most // engine.micro_batch_size_per_rank),
    )


def batch_algebra(cfg: Any, world_size: int) -> str:
    """Return the lines about pools, batch and each role's updates that a run prints at its start.

    For settings that passed `check`. Idle ranks are listed too. Without data.train_path, a line
    says what is evaluated.
    """
    pools = pools_of(cfg, range(world_size))
    data = cfg.data
    lines = []
    for name, pool in pools.items():
        lines.append(f"pool   {name}: ranks {spans(pool.ranks)}: {', '.join(pool.roles)}")
    idle = set(range(world_size)) - {rank for pool in pools.values() for rank in pool.ranks}
    if idle:
        lines.append(f"pool   none: ranks {spans(sorted(idle))} have no work")
    if data.train_path is None:
        lines.append(f"data   {data.eval_path}: {_evaluation_text(data)}")
    else:
        prompts = count_of(data.prompts_per_step, "prompt")
        samples = count_of(data.samples_per_prompt, "sample")
        lines.append(f"batch  {prompts} x {samples} = {data.samples_per_step} rows")
    for pool in pools.values():
        for role in pool.roles:
            if hasattr(getattr(cfg, role, None), "update"):
                lines += _updates(cfg, role, len(pool.ranks))
    return "\n".join(lines)


def _evaluation_text(data: DataSettings) -> str:
    """Return what an evaluation generates: "all prompts", "512 prompts x 8 samples", ..."""
    text = "all prompts" if data.eval_prompts is None else count_of(data.eval_prompts, "prompt")
    if data.eval_samples:
        text += f" x {count_of(data.eval_samples, 'sample')}"
    return text


def _updates(cfg: Any, role: str, num_ranks: int) -> Iterator[str]:
    """Yield two lines: the optimizer steps of a role's update, and its micro-batches.

    The first adds a note if the warm-up is longer than the run, and the end of a learning-rate
    schedule.
    num_ranks: ranks of the role's pool.
    """
    part: Any = getattr(cfg, role)
    update = part.update
    engine = part.engine
    num_ranks //= training_sizes(role, engine).replica
    algebra = batch_algebra_of(role, cfg.data, update, engine, num_ranks=num_ranks)
    steps = algebra.optimizer_steps * cfg.total_steps
    warmup = part.optimizer.warmup_steps if hasattr(part, "optimizer") else 0
    if warmup > steps:
        short = f", all of them warm-up, which takes {warmup}"
    else:
        short = ""
    last = part.optimizer.total_steps if hasattr(part, "optimizer") else 0
    ends = f"; the learning rate's schedule takes {last}" if last else ""
    yield (
        f"{role:6} {algebra.samples} rows = {count_of(algebra.mini_batches, 'mini-batch')} of "
        f"{update.mini_batch_size}, x {count_of(update.num_epochs, 'epoch')} = "
        f"{count_of(algebra.optimizer_steps, 'optimizer step')} ({steps} in the run{short}{ends})"
    )
    replicas = f"{count_of(num_ranks, 'replica')} of {engine.layout}"
    rows = " or ".join(map(str, dict.fromkeys(algebra.rows_per_rank)))
    by_rows = engine.max_micro_batch_tokens is None
    if by_rows:
        cut = count_of(algebra.micro_batches, "micro-batch")
        most = count_of(engine.micro_batch_size_per_rank, "row")
    else:
        cut = "micro-batches"
        most = count_of(engine.micro_batch_tokens, "token")
    yield (
        f"       {update.mini_batch_size} rows over "
        f"{count_of(num_ranks, 'rank') if engine.layout == 't1' else replicas} = {rows} per rank = "
        f"{cut} of at most {most}"
    )


def count_of(number: int, noun: str) -> str:
    """ "1 rank", "2 ranks", "2 batches"."""
    plural = noun + ("es" if noun.endswith("batch") else "s")
    return f"{number} {noun if number == 1 else plural}"


def ranges_of(ranks: Sequence[int]) -> list[tuple[int, int]]:
    """Return (first, last) of each run of consecutive numbers: [0, 1, 2, 5] -> [(0, 2), (5, 5)]."""
    ranges = []
    for _, run in groupby(enumerate(ranks), key=lambda item: item[1] - item[0]):
        consecutive = [rank for _, rank in run]
        ranges.append((consecutive[0], consecutive[-1]))
    return ranges


def spans(ranks: Sequence[int]) -> str:
    """Return ascending ranks as ranges in text: [0, 1, 2, 5] -> "0-2, 5".

    Of more than four ranges only the first two and the last are shown, with the number of ranks.
    """
    parts = []
    for first, last in ranges_of(ranks):
        parts.append(f"{first}-{last}" if last > first else f"{first}")
    if len(parts) > 4:
        parts = [*parts[:2], f"... {parts[-1]} ({len(ranks)} ranks)"]
    return ", ".join(parts)
