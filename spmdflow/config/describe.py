"""Settings as text: YAML, and the first lines of a run (who lives where, the batch algebra)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import yaml

from spmdflow.config.algebra import Algebra, batch_algebra_of
from spmdflow.config.location import named
from spmdflow.config.parallel import training_sizes
from spmdflow.config.placement import pools_of


def to_yaml(cfg: Any) -> str:
    """A settings object as YAML; `load` with this file gives an equal object.

    Models and data sets of the hub's cache are named, with their commit.
    """
    return yaml.safe_dump(named(asdict(cfg)), sort_keys=False, default_flow_style=False)


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
