"""Which rows are computed with one copy of the prompt that they share. Integers only.

An engine packs the prompt of several rows of a micro-batch once if that saves enough
(`shared_groups`). The built-in generator runs a prompt once for all rows that it admits together,
in passes of limited size (`prefill_passes`). The planner counts tokens with the same functions.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

SHARED_FROM = 8
"""A shared prompt is computed once if that saves at least 1/8 of its rows' tokens. A short prompt
costs more in attention, which then needs a mask, than it saves."""


def shared_groups(
    keys: Sequence[Hashable], prompts: Sequence[int], totals: Sequence[int]
) -> list[list[int]]:
    """Return groups of rows with an equal prompt that is worth computing once; short prompts first.

    That is if prompt tokens * (rows - 1) is at least 1/8 (`SHARED_FROM`) of the rows' tokens.
    keys: of the rows of one micro-batch; rows with equal keys have equal prompts. prompts, totals:
    tokens of each row's prompt, and of its prompt and response.
    """
    groups: dict[Hashable, list[int]] = {}
    for row, key in enumerate(keys):
        groups.setdefault(key, []).append(row)

    def pays(group: list[int]) -> bool:
        saved = prompts[group[0]] * (len(group) - 1)
        return saved * SHARED_FROM >= sum(totals[row] for row in group)

    return sorted(filter(pays, groups.values()), key=lambda group: prompts[group[0]])


def prefill_passes(sizes: Sequence[int], max_tokens: int) -> Iterator[slice]:
    """Yield slices of consecutive prompts, each of about max_tokens tokens including padding.

    sizes: tokens of each prompt. A slice has at least one prompt. A prompt is added as long as the
    slice's longest prompt before it, times the number of prompts with it, is at most max_tokens. A
    prompt of more than max_tokens is alone: others would be padded to it.
    """
    start = 0
    while start < len(sizes):
        longest = sizes[start]
        end = start + 1
        while end < len(sizes) and (end - start + 1) * longest <= max_tokens:
            if sizes[end] > max_tokens:
                break
            longest = max(longest, sizes[end])
            end += 1
        yield slice(start, end)
        start = end
