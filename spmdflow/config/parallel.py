"""Who shares a model and a batch: layouts, the batch algebra, and both as the first lines of a run.

"t2p2" is tensor-parallel size 2 and pipeline-parallel size 2; what is left of a pool's ranks is
data-parallel. Pure: text and integers, no process groups.

samples         = prompts_per_step * samples_per_prompt        (one step)
mini-batches    = samples / mini_batch_size                    (must divide)
optimizer steps = mini-batches * num_epochs                    (per step)
rows per rank   = ceil or floor of mini_batch_size / ranks     (may be uneven)
micro-batches   = ceil(most rows of a rank / rows of engine.micro_batch)
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from spmdflow.config.model_folder import ModelFacts
from spmdflow.config.placement import pools_of
from spmdflow.config.schema import DataSettings, EngineConfig, UpdateConfig
from spmdflow.errors import ConfigError
from spmdflow.kind.engine import engine_kind, engines_that_cut
from spmdflow.kind.generator import generator_kind, generators_that_cut

_AXES = {"tp": "tensor-parallel", "pp": "pipeline-parallel"}
_LAYOUT = re.compile(r"(?=.)(?:t(?P<tp>\d+))?(?:p(?P<pp>\d+))?")


class Sizes(NamedTuple):
    """Tensor- and pipeline-parallel size."""

    tp: int = 1
    pp: int = 1

    @property
    def replica(self) -> int:
        """Ranks that hold one copy."""
        return self.tp * self.pp

    def __str__(self) -> str:
        return f"t{self.tp}p{self.pp}"


def sizes_of(key: str, text: str) -> Sizes:
    """Sizes that a layout names; what it leaves out is 1. ConfigError naming the setting `key`."""
    match = _LAYOUT.fullmatch(text)
    sizes = Sizes(*(int(match[axis] or 1) for axis in ("tp", "pp"))) if match else Sizes(0, 0)
    if min(sizes) < 1:
        raise ConfigError(
            f"{key}: got {text!r}, expected sizes such as t2, p2 or t4p2; "
            f"correct it (data parallelism takes the other ranks)"
        )
    return sizes


def training_sizes(role: str, engine: Any) -> Sizes:
    """Sizes of a role's engine settings."""
    return sizes_of(f"{role}.engine.layout", engine.layout)


def generation_sizes(role: str, part: Any) -> Sizes:
    """Sizes while a role generates: rollout.layout, or what auto means."""
    rollout, training = part.rollout, training_sizes(role, part.engine)
    if rollout.layout == "auto":
        generator = generator_kind(rollout.engine, key=f"{role}.rollout.engine")
        return Sizes(training.tp) if generator.cuts_model else Sizes()
    return sizes_of(f"{role}.rollout.layout", rollout.layout)


def check_training_sizes(role: str, engine: Any, *, num_ranks: int) -> Sizes:
    """The engine can have these sizes on so many ranks (ConfigError)."""
    sizes = training_sizes(role, engine)
    if sizes.replica > 1 and not engine_kind(engine.kind).cuts_model:
        raise ConfigError(
            f"{role}.engine.layout: got {engine.layout} with engine.kind={engine.kind}, expected "
            f"none, as that engine is data-parallel; set {role}.engine.kind="
            f"{' or '.join(engines_that_cut())}"
        )
    _check_ranks(f"{role}.engine.layout", sizes, num_ranks)
    _check_options(role, engine, sizes)
    return sizes


def check_generation_sizes(role: str, part: Any, *, num_ranks: int) -> Sizes:
    """The generator can have these sizes on so many ranks (ConfigError)."""
    sizes = generation_sizes(role, part)
    key = f"{role}.rollout.layout"
    if sizes.replica > 1 and not generator_kind(part.rollout.engine).cuts_model:
        raise ConfigError(
            f"{key}: got {part.rollout.layout} with rollout.engine={part.rollout.engine}, "
            f"expected t1, as it generates on single ranks; set {role}.rollout.engine="
            f"{' or '.join(generators_that_cut())}"
        )
    _check_ranks(key, sizes, num_ranks)
    return sizes


def check_model_sizes(key: str, facts: ModelFacts, sizes: Sizes) -> None:
    """The sizes fit the model: tp divides its heads, no stage is without a layer."""
    arch = facts.arch
    if arch.num_heads % sizes.tp:
        raise ConfigError(
            f"{key}: got tensor-parallel size {sizes.tp} for {arch.num_heads} attention heads "
            f"({facts.path}), expected a divisor; choose one of {_divisors(arch.num_heads)}"
        )
    kv_heads = arch.num_kv_heads
    if kv_heads and kv_heads % sizes.tp and sizes.tp % kv_heads:
        raise ConfigError(
            f"{key}: got tensor-parallel size {sizes.tp} for {kv_heads} key-value heads "
            f"({facts.path}), expected a divisor or a multiple; choose another size"
        )
    if 0 < arch.num_layers < sizes.pp:
        raise ConfigError(
            f"{key}: got {sizes.pp} pipeline stages for {arch.num_layers} layers ({facts.path}), "
            f"expected at most one stage a layer; choose p{arch.num_layers} or less"
        )


def _check_ranks(key: str, sizes: Sizes, num_ranks: int) -> None:
    if num_ranks % sizes.replica:
        raise ConfigError(
            f"{key}: got {sizes} = {sizes.replica} ranks a replica on a pool of {num_ranks}, "
            f"expected a divisor of the pool's size; choose a product among "
            f"{_divisors(num_ranks)}"
        )


def _check_options(role: str, engine: Any, sizes: Sizes) -> None:
    allowed = engine_kind(engine.kind, key=f"{role}.engine.kind").options
    wrong = [option for option in engine.options if option not in allowed]
    if wrong:
        raise ConfigError(
            f"{role}.engine.options: got {wrong[0]} with engine.kind={engine.kind}, expected some "
            f"of {', '.join(allowed) or 'none'}; leave it out or choose another engine"
        )
    for option in engine.options:
        axis = allowed[option].needs
        if axis and getattr(sizes, axis) == 1:
            raise ConfigError(
                f"{role}.engine.options: got {option} with {_AXES[axis]} size 1, expected "
                f"at least 2; leave it out or set {role}.engine.layout={axis[0]}2"
            )


def _divisors(number: int) -> list[int]:
    return [small for small in range(1, number + 1) if number % small == 0]


@dataclass(frozen=True)
class Algebra:
    """One role's way from samples to optimizer steps."""

    samples: int
    mini_batch_size: int
    mini_batches: int
    num_epochs: int
    rows_per_rank: tuple[int, int]
    """Fewest and most rows of a mini-batch on one rank."""
    micro_batches: int
    """Forward passes of a mini-batch on every rank, cut by rows."""

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps of one step of the run."""
        return self.mini_batches * self.num_epochs


def batch_algebra_of(
    role: str, data: DataSettings, update: UpdateConfig, engine: EngineConfig, *, num_ranks: int
) -> Algebra:
    """The algebra of one trained role on `num_ranks` data-parallel ranks.

    ConfigError unless mini-batches divide the samples and keep the samples of a prompt together;
    rows over ranks may be uneven.
    """
    samples = data.prompts_per_step * data.samples_per_prompt
    size, group = update.mini_batch_size, data.samples_per_prompt
    if samples % size or size % group:
        groups = f" that is a multiple of {group}" if group > 1 else ""
        raise ConfigError(
            f"{role}.update.mini_batch_size: got {size}, expected a divisor of the {samples} "
            f"samples of a step ({data.prompts_per_step} prompts x {group}){groups}; "
            f"choose {_nearest_sizes(samples, group, size)}"
        )
    most = -(-size // num_ranks)
    return Algebra(
        samples=samples,
        mini_batch_size=size,
        mini_batches=samples // size,
        num_epochs=update.num_epochs,
        rows_per_rank=(size // num_ranks, most),
        micro_batches=-(-most // engine.micro_batch_size_per_rank),
    )


def _nearest_sizes(samples: int, group: int, size: int) -> str:
    """The allowed sizes around a refused one, at most three."""
    allowed = [group * d for d in range(1, samples // group + 1) if (samples // group) % d == 0]
    nearest = sorted(sorted(allowed, key=lambda other: abs(other - size))[:3])
    return " or ".join(map(str, nearest))


def batch_algebra(cfg: Any, world_size: int) -> str:
    """Pools and batch algebra as a few lines of text; for settings that passed `check`."""
    pools = pools_of(cfg, range(world_size))
    lines = [
        f"pool   {name}: ranks {_ranks(pool.ranks)}: {', '.join(pool.roles)}"
        for name, pool in pools.items()
    ]
    idle = set(range(world_size)) - {rank for pool in pools.values() for rank in pool.ranks}
    if idle:
        lines.append(f"pool   none: ranks {_ranks(sorted(idle))} have no work")
    lines += _batch(cfg)
    for pool in pools.values():
        for role in pool.roles:
            lines += _updates(cfg, role, len(pool.ranks))
    return "\n".join(lines)


def _batch(cfg: Any) -> Iterator[str]:
    if cfg.data.train_path is None:
        yield f"data   {cfg.data.eval_path}: {cfg.data.eval_prompts}"
        return
    prompts, group = cfg.data.prompts_per_step, cfg.data.samples_per_prompt
    yield f"batch  {_count(prompts, 'prompt')} x {_count(group, 'sample')} = {prompts * group} rows"


def _updates(cfg: Any, role: str, num_ranks: int) -> Iterator[str]:
    part: Any = getattr(cfg, role, None)
    if part is None or not hasattr(part, "update"):
        return
    num_ranks //= training_sizes(role, part.engine).replica
    algebra = batch_algebra_of(role, cfg.data, part.update, part.engine, num_ranks=num_ranks)
    steps = algebra.optimizer_steps
    yield (
        f"{role:6} {algebra.samples} rows = {_count(algebra.mini_batches, 'mini-batch')} of "
        f"{algebra.mini_batch_size}, x {_count(algebra.num_epochs, 'epoch')} = "
        f"{_count(steps, 'optimizer step')} ({_in_run(steps * cfg.total_steps, part)})"
    )
    yield f"       {_micro_batches(algebra, num_ranks, part.engine)}"


def _in_run(steps: int, part: Any) -> str:
    warmup = part.optimizer.warmup_steps if hasattr(part, "optimizer") else 0
    short = f", all of them warm-up, which takes {warmup}" if warmup > steps else ""
    return f"{steps} in the run{short}"


def _micro_batches(algebra: Algebra, num_ranks: int, engine: Any) -> str:
    fewest, most = algebra.rows_per_rank
    rows = f"{most}" if fewest == most else f"{fewest} or {most}"
    cut = f"{_count(algebra.micro_batches, 'micro-batch')} of at most "
    cut += engine.micro_batch
    if engine.max_micro_batch_tokens is not None:
        cut = f"micro-batches of at most {engine.micro_batch}"
    share = f"{_replicas(num_ranks, engine.layout)} = {rows} per rank"
    return f"{algebra.mini_batch_size} rows over {share} = {cut}"


def _replicas(number: int, layout: str) -> str:
    return _count(number, "rank") if layout == "t1" else f"{_count(number, 'replica')} of {layout}"


def _count(number: int, noun: str) -> str:
    plural = noun + ("es" if noun.endswith("batch") else "s")
    return f"{number} {noun if number == 1 else plural}"


def _ranks(ranks: Sequence[int]) -> str:
    """Ascending ranks as ranges: [0, 1, 2, 5] -> "0-2, 5"."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][-1] + 1:
            spans[-1].append(rank)
        else:
            spans.append([rank])
    return ", ".join(f"{s[0]}-{s[-1]}" if len(s) > 1 else f"{s[0]}" for s in spans)
