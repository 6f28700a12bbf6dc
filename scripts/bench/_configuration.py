"""Configurations of one PPO run, drawn by seed: ranks, placement, engine of each model, generator.

Names and settings only: whether a configuration is valid is for `spmdflow.plan` to say.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

ENGINES = {
    "fsdp": ("fsdp", "t1"),
    "zero1": ("zero1", "t1"),
    "zero2": ("zero2", "t1"),
    "zero3": ("zero3", "t1"),
    "megatron-t1": ("megatron", "t1"),
    "megatron-t2": ("megatron", "t2"),
    "megatron-p2": ("megatron", "p2"),
}
"""Name -> engine.kind and engine.layout."""
GENERATORS = ("builtin", "vllm")
WEIGHTS = {1: 1, 2: 3, 4: 4}
"""Ranks -> how often they are drawn; one rank allows little that differs."""


def _pools(*pools: tuple[str, str]) -> str:
    """("actor", "0, 1"), ... as a placement in one line."""
    named = zip("abcd", pools)
    words = [f"{n}: {{roles: [{roles}], ranks: [{ranks}]}}" for n, (roles, ranks) in named]
    return "{" + ", ".join(words) + "}"


PLACEMENTS: dict[int, dict[str, str]] = {
    1: {"colocate": "colocate"},
    2: {
        "colocate": "colocate",
        "split": "split",
        "actor|rest": _pools(("actor", "0"), ("critic, reference, reward", "1")),
        "critic|rest": _pools(("actor, reference, reward", "0"), ("critic", "1")),
        "scores|trained": _pools(("actor, critic", "0"), ("reference, reward", "1")),
    },
    4: {
        "colocate": "colocate",
        "split": "split",
        "standalone": "standalone",
        "actor|rest": _pools(("actor", "0, 1"), ("critic, reference, reward", "2, 3")),
        "actor3|rest": _pools(("actor, reference", "0, 1, 2"), ("critic, reward", "3")),
        "actor2|critic|rest": _pools(
            ("actor", "0, 1"), ("critic", "2"), ("reference, reward", "3")
        ),
        "trained3|scores": _pools(("actor, critic", "0, 1, 2"), ("reference, reward", "3")),
    },
}
"""Ranks -> name -> the setting `placement`."""


@dataclass(frozen=True)
class Configuration:
    """One way to run the workload."""

    num_ranks: int
    placement: str
    actor: str
    critic: str
    reference: str
    generator: str

    @property
    def title(self) -> str:
        """All of it in a line; no two drawn configurations share it."""
        engines = "/".join((self.actor, self.critic, self.reference))
        return f"{self.num_ranks} {self.placement} {engines} {self.generator}"

    @property
    def settings(self) -> list[str]:
        """As overrides of ppo.yaml."""
        words = [f"placement={PLACEMENTS[self.num_ranks][self.placement]}"]
        for role in ("actor", "critic", "reference"):
            kind, layout = ENGINES[getattr(self, role)]
            words += [f"{role}.engine.kind={kind}", f"{role}.engine.layout={layout}"]
        return [*words, f"actor.rollout.engine={self.generator}"]


def drawn(seed: int) -> Iterator[Configuration]:
    """Different configurations, until 10,000 draws in a row bring no new one."""
    rng = random.Random(seed)
    known: set[Configuration] = set()
    misses = 0
    while misses < 10_000:
        num_ranks = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        found = Configuration(
            num_ranks=num_ranks,
            placement=rng.choice(list(PLACEMENTS[num_ranks])),
            actor=rng.choice(list(ENGINES)),
            critic=rng.choice(list(ENGINES)),
            reference=rng.choice(list(ENGINES)),
            generator=rng.choice(GENERATORS),
        )
        misses = misses + 1 if found in known else 0
        if not misses:
            known.add(found)
            yield found
