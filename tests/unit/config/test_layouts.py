"""Layouts as text: any order, and a data-parallel size that is checked."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmdflow.config.model_folder import ModelFacts
from spmdflow.config.parallel import (
    Sizes,
    check_context,
    check_generation_sizes,
    check_model_sizes,
    check_training_sizes,
    sizes_of,
)
from spmdflow.errors import ConfigError
from spmdflow.weights.architecture import Architecture
from tests.unit.weight_shapes import TINY

AXES = {"t": "tp", "p": "pp", "v": "virtual", "s": "shard", "d": "dp", "e": "ep", "c": "cp"}


@given(
    st.dictionaries(st.sampled_from(sorted(AXES)), st.integers(1, 64), min_size=1),
    st.randoms(use_true_random=False),
)
def test_axes_mean_the_same_in_any_order(sizes: dict[str, int], random: Any) -> None:
    words = [f"{axis}{size}" for axis, size in sizes.items()]
    random.shuffle(words)

    found = sizes_of("layout", "".join(words))

    assert found == Sizes(**{AXES[axis]: size for axis, size in sizes.items()})


@pytest.mark.parametrize("text", ["", "t", "t0", "2", "t2t4", "t2 p2", "x2", "t2p", "tp2"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="expected sizes such as t2, p2, t4p2, t2d4, t2e2 or s8"):
        sizes_of("layout", text)


def engine(layout: str) -> Any:
    """Settings of a Megatron engine."""
    return SimpleNamespace(kind="megatron", layout=layout, options=[])


def test_stated_data_parallel_size_must_be_what_remains() -> None:
    assert check_training_sizes("actor", engine("d4t2"), num_ranks=8).tp == 2

    with pytest.raises(ConfigError, match=r"got d2 with t2p1 on a pool of 8, expected d4"):
        check_training_sizes("actor", engine("d2t2"), num_ranks=8)


def test_experts_are_divided_over_data_parallel_ranks() -> None:
    assert check_training_sizes("actor", engine("t2e2"), num_ranks=8).ep == 2

    with pytest.raises(ConfigError, match=r"got e3 with 4 data-parallel ranks, expected a divisor"):
        check_training_sizes("actor", engine("t2e3"), num_ranks=8)


def test_only_an_engine_that_divides_parameters_divides_experts() -> None:
    settings = engine("e2")
    for settings.kind in ("fsdp", "zero2", "zero3"):
        assert check_training_sizes("actor", settings, num_ranks=4).ep == 2
    settings.kind = "zero1"

    with pytest.raises(ConfigError, match=r"expected no e, as that engine does not divide experts"):
        check_training_sizes("actor", settings, num_ranks=2)


def test_experts_are_not_divided_where_shards_are_on_a_part_of_the_ranks() -> None:
    settings = engine("s2e2")
    settings.kind = "fsdp"

    with pytest.raises(ConfigError, match=r"got s2e2, expected e or s.*remove one of them"):
        check_training_sizes("actor", settings, num_ranks=4)


def generation(layout: str, generator: str) -> Any:
    """Settings of an actor that trains on t1 and generates in this layout."""
    rollout = SimpleNamespace(layout=layout, generator=generator)
    return SimpleNamespace(engine=engine("t1"), rollout=rollout)


def test_ranks_that_generate_divide_whole_experts_if_e_is_t() -> None:
    assert check_generation_sizes("actor", generation("t2e2", "vllm"), num_ranks=4).ep == 2

    with pytest.raises(ConfigError, match=r"got t4e2, expected no e, or as many as t.*t4p1e4"):
        check_generation_sizes("actor", generation("t4e2", "vllm"), num_ranks=4)
    with pytest.raises(ConfigError, match=r"got s2, expected t, p, d and e alone"):
        check_generation_sizes("actor", generation("s2", "vllm"), num_ranks=4)


def facts_of(**changes: Any) -> ModelFacts:
    """Of a model with 4 heads, or what the changes say."""
    config = TINY | {"model_type": "llama"} | changes
    architecture = Architecture.sizes_from_config(config)
    return ModelFacts("actor.model.path", Path("m"), config, architecture)


def test_ranks_divide_rows_if_engine_family_and_heads_allow_it() -> None:
    settings = engine("c2")
    settings.context_attention = "auto"
    settings.kind = "megatron"
    settings.options = ["padded"]
    with pytest.raises(ConfigError, match=r"got padded with context-parallel size 2, expected 1"):
        check_training_sizes("actor", settings, num_ranks=4)
    settings.options = []
    assert check_training_sizes("actor", settings, num_ranks=4).cp == 2
    settings.kind = "fsdp"
    sizes = check_training_sizes("actor", settings, num_ranks=4)
    assert sizes.cp == 2 and sizes.replica == 2

    check_context("actor", settings, facts_of(), sizes)
    check_context("actor", settings, facts_of(num_attention_heads=9), sizes)
    settings.context_attention = "ulysses"
    with pytest.raises(
        ConfigError, match=r"got ulysses with c2 for 9 .*choose c among \[1, 3, 9\]"
    ):
        check_context("actor", settings, facts_of(num_attention_heads=9), sizes)
    with pytest.raises(ConfigError, match=r"got ulysses with c4 for 2 .* of each of 2 ranks"):
        check_context("actor", settings, facts_of(num_attention_heads=4), sizes_of("x", "t2c4"))
    with pytest.raises(ConfigError, match=r"got c2 for the family falcon_h1 .*have a state"):
        check_context("actor", settings, facts_of(model_type="falcon_h1"), sizes)


def test_experts_must_divide_evenly_and_exist() -> None:
    config = TINY | {"model_type": "qwen3_moe", "num_experts": 6, "moe_intermediate_size": 8}
    mixture = ModelFacts("actor.model.path", Path("m"), config, Architecture.from_config(config))
    dense = TINY | {"model_type": "llama"}
    llama = ModelFacts("actor.model.path", Path("m"), dense, Architecture.from_config(dense))

    check_model_sizes("layout", mixture, Sizes(ep=3))
    with pytest.raises(ConfigError, match=r"got e4 for 6 experts .* choose one of \[1, 2, 3, 6\]"):
        check_model_sizes("layout", mixture, Sizes(ep=4))
    with pytest.raises(ConfigError, match=r"got e2 for 0 experts .* remove e"):
        check_model_sizes("layout", llama, Sizes(ep=2))
