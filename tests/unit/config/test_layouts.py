"""Layouts as text: any order, and a data-parallel size that is checked."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmdflow.config.parallel import Sizes, check_training_sizes, sizes_of
from spmdflow.errors import ConfigError

AXES = {"t": "tp", "p": "pp", "v": "virtual", "s": "shard", "d": "dp"}


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
    with pytest.raises(ConfigError, match="expected sizes such as t2, p2, t4p2, t2d4 or s8"):
        sizes_of("layout", text)


def engine(layout: str) -> Any:
    """Settings of a Megatron engine."""
    return SimpleNamespace(kind="megatron", layout=layout, options=[])


def test_stated_data_parallel_size_must_be_what_remains() -> None:
    assert check_training_sizes("actor", engine("d4t2"), num_ranks=8).tp == 2

    with pytest.raises(ConfigError, match=r"got d2 with t2p1 on a pool of 8, expected d4"):
        check_training_sizes("actor", engine("d2t2"), num_ranks=8)
