"""Layouts as users write them: "t2p2" is tensor-parallel size 2 and pipeline-parallel size 2.

What is left of a pool's ranks is data-parallel. Pure: text and integers, no process groups.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from spmdflow.config.model_folder import ModelFacts
from spmdflow.errors import ConfigError

MEGATRON = "megatron"
"""The engine that shards over tp and pp."""

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
        return Sizes() if rollout.engine == "builtin" else Sizes(training.tp)
    return sizes_of(f"{role}.rollout.layout", rollout.layout)


def check_training_sizes(role: str, engine: Any, *, num_ranks: int) -> Sizes:
    """The engine can have these sizes on so many ranks (ConfigError)."""
    sizes = training_sizes(role, engine)
    if engine.kind != MEGATRON and sizes.replica > 1:
        raise ConfigError(
            f"{role}.engine.layout: got {engine.layout} with engine.kind={engine.kind}, expected "
            f"none, as that engine is data-parallel; set {role}.engine.kind=megatron"
        )
    _check_ranks(f"{role}.engine.layout", sizes, num_ranks)
    _check_options(role, engine, sizes)
    return sizes


def check_generation_sizes(role: str, part: Any, *, num_ranks: int) -> Sizes:
    """The generator can have these sizes on so many ranks (ConfigError)."""
    sizes = generation_sizes(role, part)
    key = f"{role}.rollout.layout"
    if part.rollout.engine == "builtin" and sizes.replica > 1:
        raise ConfigError(
            f"{key}: got {part.rollout.layout} with rollout.engine=builtin, expected t1, as it "
            f"generates on single ranks; set {role}.rollout.engine=vllm"
        )
    _check_ranks(key, sizes, num_ranks)
    return sizes


def check_model_sizes(key: str, facts: ModelFacts, sizes: Sizes) -> None:
    """The sizes fit the model: tp divides its heads, no stage is without a layer."""
    if facts.num_heads is not None and facts.num_heads % sizes.tp:
        raise ConfigError(
            f"{key}: got tensor-parallel size {sizes.tp} for {facts.num_heads} attention heads "
            f"({facts.path}), expected a divisor; choose one of {_divisors(facts.num_heads)}"
        )
    kv_heads = facts.num_kv_heads
    if kv_heads and kv_heads % sizes.tp and sizes.tp % kv_heads:
        raise ConfigError(
            f"{key}: got tensor-parallel size {sizes.tp} for {kv_heads} key-value heads "
            f"({facts.path}), expected a divisor or a multiple; choose another size"
        )
    if facts.num_layers is not None and facts.num_layers < sizes.pp:
        raise ConfigError(
            f"{key}: got {sizes.pp} pipeline stages for {facts.num_layers} layers ({facts.path}), "
            f"expected at most one stage a layer; choose p{facts.num_layers} or less"
        )


def _check_ranks(key: str, sizes: Sizes, num_ranks: int) -> None:
    if num_ranks % sizes.replica:
        raise ConfigError(
            f"{key}: got {sizes} = {sizes.replica} ranks a replica on a pool of {num_ranks}, "
            f"expected a divisor of the pool's size; choose a product among "
            f"{_divisors(num_ranks)}"
        )


def _check_options(role: str, engine: Any, sizes: Sizes) -> None:
    allowed = {
        "fsdp": ("recompute", "keep_gathered"),
        MEGATRON: ("recompute", "sequence_parallel", "plain_optimizer"),
    }.get(engine.kind, ("recompute",))
    wrong = [option for option in engine.options if option not in allowed]
    if wrong:
        raise ConfigError(
            f"{role}.engine.options: got {wrong[0]} with engine.kind={engine.kind}, expected some "
            f"of {', '.join(allowed)}; leave it out or choose another engine"
        )
    if "sequence_parallel" in engine.options and sizes.tp == 1:
        raise ConfigError(
            f"{role}.engine.options: got sequence_parallel with tensor-parallel size 1, expected "
            f"at least 2; leave it out or set {role}.engine.layout=t2"
        )


def _divisors(number: int) -> list[int]:
    return [small for small in range(1, number + 1) if number % small == 0]
