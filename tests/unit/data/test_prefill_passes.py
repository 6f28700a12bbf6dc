"""Which prompts the built-in generator computes together."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from spmdflow.data.shared_prompt import prefill_passes


def passes(sizes: list[int], max_tokens: int) -> list[list[int]]:
    """The sizes of each pass."""
    return [sizes[part] for part in prefill_passes(sizes, max_tokens)]


def test_a_prompt_longer_than_a_pass_is_alone() -> None:
    assert passes([3, 50, 3, 3], 8) == [[3], [50], [3, 3]]


@given(st.lists(st.integers(1, 40), max_size=20), st.integers(1, 30))
def test_every_prompt_is_in_one_pass_and_none_is_padded_to_a_long_one(
    sizes: list[int], max_tokens: int
) -> None:
    found = passes(sizes, max_tokens)

    assert [size for part in found for size in part] == sizes
    for part in found:
        assert part and (len(part) == 1 or max(part) <= max_tokens)
        assert len(part) * max(part[:-1], default=0) <= max_tokens or len(part) == 1
