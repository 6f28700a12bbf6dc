"""`Placed`: a placement with its strategies and predicted seconds, as `placement:` accepts it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from spmdflow.mapping.estimate import Estimate
from spmdflow.mapping.strategy import Strategy


@dataclass(frozen=True)
class PlacedPool:
    """One pool: who shares it, how each is cut, what each call takes."""

    roles: tuple[str, ...]
    num_ranks: int
    ranks: tuple[int, ...]
    """Global ranks, ascending."""
    strategies: Mapping[str, Strategy]
    stage_seconds: Mapping[str, float]
    """Sum of the pool's calls of each stage."""
    memory_bytes: float
    """Most that a rank holds at any time."""
    estimates: Mapping[int, Estimate]
    """By the call's number in the dataflow; a generation includes the transition before it."""
    kv_bytes: float = 0.0
    """KV cache of a rank while a model of the pool generates."""

    def __str__(self) -> str:
        return f"{{{', '.join(self.roles)}}}@{self.num_ranks}"


@dataclass(frozen=True)
class Placed:
    """A placement of every model, and its predicted seconds of one step."""

    pools: tuple[PlacedPool, ...]
    seconds: float
    stage_seconds: Mapping[str, float]
    """Of the slowest pool of each stage."""
    titles: Mapping[int, str]
    """`model.method` of each call."""
    stages: Mapping[int, str]
    """Stage of each call."""
    generators: Mapping[str, str]
    """Models that only generate -> the trained model whose settings and weights they have."""

    @property
    def limit(self) -> tuple[str, str, str, str]:
        """(stage, pool, call, cause): the largest part of the slowest stage's slowest pool."""
        stage = max(self.stage_seconds, key=lambda name: self.stage_seconds[name])
        pool = max(self.pools, key=lambda one: one.stage_seconds.get(stage, 0.0))
        calls = {n: e for n, e in pool.estimates.items() if self.stages[n] == stage}
        number = max(calls, key=lambda n: calls[n].seconds)
        return stage, str(pool), self.titles[number], calls[number].limit

    @property
    def title(self) -> str:
        """Such as {actor, reference}@48 | {critic, reward}@48."""
        return " | ".join(map(str, self.pools))

    def pool_of(self, role: str) -> PlacedPool:
        """The pool that a role lives in."""
        return next(pool for pool in self.pools if role in pool.roles)

    def to_config(self) -> dict[str, dict[str, list[Any]]]:
        """What the setting `placement` accepts: pool name -> roles and ranks."""
        return {
            "+".join(pool.roles): {"roles": list(pool.roles), "ranks": list(pool.ranks)}
            for pool in self.pools
        }

    def engine_overrides(self) -> dict[str, str]:
        """Settings that give every role its layout, such as actor.engine.layout=t2p1."""
        found = {}
        for pool in self.pools:
            for role, strategy in pool.strategies.items():
                generation = f"t{strategy.gen_tp}p{strategy.gen_pp}"
                if role in self.generators:
                    found[f"{self.generators[role]}.rollout.layout"] = generation
                    continue
                found[f"{role}.engine.layout"] = f"t{strategy.tp}p{strategy.pp}"
                if strategy.gen_tp:
                    found[f"{role}.rollout.layout"] = generation
                if strategy.recompute:
                    found[f"{role}.engine.options"] = "[recompute]"
        return found
