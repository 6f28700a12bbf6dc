"""Scripts x engines x placements x generators x world sizes: which fit together, and a few of them
that cover all pairs. Integers and names only.

Thirteen scripts and three placements are 39 pairs, more than 14 runs can have. So the covering set
has every pair of the four settings below, each with some script that allows it, and every script
at least once. The full matrix has every combination that is allowed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import combinations, product
from typing import NamedTuple

from spmdflow.config.placement import resolve_placement

NONE = "none"
ENGINES = {
    "fsdp": ("fsdp", "t1"),
    "zero1": ("zero1", "t1"),
    "zero2": ("zero2", "t1"),
    "zero3": ("zero3", "t1"),
    "megatron-t1": ("megatron", "t1"),
    "megatron-t2": ("megatron", "t2"),
}
"""Name -> engine.kind and engine.layout."""
PLACEMENTS = ("colocate", "split", "standalone")
ROLLOUTS = ("builtin", "vllm")
WORLDS = (1, 2, 4)
ROLES = {
    "ppo": ("actor", "critic", "reference", "reward"),
    "remax": ("actor", "reference", "reward"),
    "safe_rlhf": ("actor", "critic", "reference", "reward", "cost", "cost_critic"),
    "grpo": ("actor", "reference", "reward"),
    "grpo_async": ("actor", "reference", "reward", "generator"),
    "rloo": ("actor", "reference", "reward"),
    "reinforce_pp": ("actor", "reference", "reward"),
    "dapo": ("actor", "reward"),
    "distill": ("actor", "reward", "teacher"),
    "sft": ("actor",),
    "reward_model": ("reward_model",),
    "dpo": ("actor", "reference"),
    "evaluate": ("reward", "generator"),
}
"""Script -> its models, in the order of its settings."""
WITHOUT_GENERATION = ("sft", "reward_model", "dpo")
WITHOUT_TRAINING = ("evaluate",)
_JUDGES = ("reward", "cost")  # functions here: they have no engine


class Combination(NamedTuple):
    """One run."""

    script: str
    engine: str
    placement: str
    rollout: str
    world: int

    def __str__(self) -> str:
        return "-".join(map(str, self))


def reason_against(run: Combination) -> str | None:
    """Why a combination does not apply; None if it does."""
    roles = ROLES[run.script]
    if (run.rollout == NONE) != (run.script in WITHOUT_GENERATION):
        return "the script generates nothing"
    if (run.engine == NONE) != (run.script in WITHOUT_TRAINING):
        return "the script trains nothing"
    if run.placement != "colocate" and len(roles) == 1:
        return "one model has one placement"
    if run.placement == "split" and run.script == "dpo":
        return "split keeps the policy beside its reference: nothing is left for the other side"
    if run.placement == "colocate" and run.script == "grpo_async":
        return "the generator works while the policy learns: each has ranks of its own"
    pools = len(roles) if run.placement == "standalone" else 1 + (run.placement == "split")
    if run.world < pools:
        return f"{run.placement} needs a rank for each of {pools} pools"
    if run.engine == "megatron-t2" and ranks_of(run, trained_by(run.script)) % 2:
        return "t2 needs an even number of ranks for the model that is trained"
    return None


def trained_by(script: str) -> str:
    """The model that a script is about."""
    return "reward_model" if script == "reward_model" else "actor"


def ranks_of(run: Combination, role: str) -> int:
    """Number of ranks that a model of the run has."""
    pools = resolve_placement(run.placement, ROLES[run.script], run.world).values()
    return next(len(pool.ranks) for pool in pools if role in pool.roles)


def full_matrix() -> list[Combination]:
    """Every combination that applies."""
    engines = (*ENGINES, NONE)
    rollouts = (*ROLLOUTS, NONE)
    runs = map(Combination._make, product(ROLES, engines, PLACEMENTS, rollouts, WORLDS))
    return [run for run in runs if reason_against(run) is None]


def pairs_of(run: Combination) -> set[tuple[str, ...]]:
    """What a run covers: its script, and each pair of its settings; the ZeRO stages count as one.

    Pairs with a setting that the script does not have are none.
    """
    engine = "zero" if run.engine.startswith("zero") else run.engine
    settings = (engine, run.placement, run.rollout, f"{run.world} ranks")
    pairs = {pair for pair in combinations(settings, 2) if NONE not in pair}
    return {(run.script,), *pairs}


def covering_set(runs: Sequence[Combination], seed: int) -> list[Combination]:
    """A few of the runs that cover what all of them cover: greedy, ties drawn by the seed.

    Of the ZeRO stages, the one taken least so far goes first.
    """
    draw = random.Random(seed)
    missing: set[tuple[str, ...]] = set().union(*map(pairs_of, runs))
    chosen: list[Combination] = []
    while missing:
        order = draw.sample(runs, len(runs))

        def worth(run: Combination) -> tuple[int, int]:
            taken = sum(run.engine == other.engine for other in chosen)  # noqa: B023
            return len(pairs_of(run) & missing), -taken  # noqa: B023

        chosen.append(max(order, key=worth))
        missing -= pairs_of(chosen[-1])
    return chosen


def settings_of(run: Combination, run_dir: str) -> Iterator[str]:
    """The settings that make it a small run of two steps; the script itself is as it is."""
    yield f"run.dir={run_dir}"
    yield f"placement={run.placement}"
    yield from _SMALL[run.script]
    if run.script not in WITHOUT_TRAINING:
        yield from (
            "total_steps=2",
            "eval_every=0",
            "save_every=0",
            "run.save_last=false",
            "data.prompts_per_step=8",
        )
        yield from _engines(run)
    if run.rollout != NONE:
        yield f"actor.rollout.engine={run.rollout}"
        yield "actor.rollout.layout=" + _generation_layout(run)


def _engines(run: Combination) -> Iterator[str]:
    kind, layout = ENGINES[run.engine]
    for role in ROLES[run.script]:
        if role in (*_JUDGES, "generator"):
            continue
        yield f"{role}.engine.kind={kind}"
        fits = role == trained_by(run.script) or ranks_of(run, role) % 2 == 0
        yield f"{role}.engine.layout={layout if fits else 't1'}"
        yield f"{role}.engine.micro_batch_rows=3"
        if role not in ("reference", "teacher"):
            yield f"{role}.update.mini_batch_size={_ROWS.get(run.script, 8)}"
            yield f"{role}.optimizer.schedule=constant"
            yield f"{role}.optimizer.warmup_steps=0"


def _generation_layout(run: Combination) -> str:
    generating = "generator" if "generator" in ROLES[run.script] else "actor"
    odd = ranks_of(run, generating) % 2
    return "t1" if odd or run.rollout == "builtin" else "auto"


_GROUP = ("data.samples_per_prompt=4", "actor.rollout.temperature=2.5")
_SMALL: dict[str, tuple[str, ...]] = {
    "ppo": (),
    "remax": (),
    "safe_rlhf": ("pretrain.prompts_per_step=8",),
    "grpo": _GROUP,
    "grpo_async": _GROUP,
    "rloo": _GROUP,
    "reinforce_pp": (),
    "dapo": _GROUP,
    "distill": ("actor.rollout.temperature=2.5",),
    "sft": (),
    "reward_model": (),
    "dpo": (),
    "evaluate": (
        "data.eval_prompts=16",
        "data.eval_samples=2",
    ),
}
_ROWS = {script: 32 for script, settings in _SMALL.items() if settings is _GROUP}
"""Rows of a step where a prompt has several samples."""
