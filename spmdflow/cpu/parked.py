"""Which KV-cache rows are parked until the next turn of their conversation, and how rows are
ordered.

Works on integers and token ids only. rollout.builtin decides with them, cpu.llama moves the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class ParkedRow:
    """A row that keeps its keys and values for the next request of its conversation.

    A conversation has at most one row.
    """

    conversation: int
    num_shared: int
    """Leading tokens whose keys and values are shared with other rows."""
    ids: Tensor
    """(L,) int64 on the host: the tokens whose keys and values are cached."""
    parked_at: int
    """The generator's clock when it was parked."""
    routes: Tensor | None = None
    """(L, layers, k): the experts of `ids`. None: they are not returned."""
    truncates: bool = True
    """Whether it can be continued from before its end."""

    def num_known(self, prompt: Tensor) -> int:
        """Return how many leading tokens of a prompt (P,) need not be recomputed.

        This is the length of the common prefix with the cached tokens, at most P - 1, as the last
        token's logits are needed. 0 if the row cannot be reused: the prefix is shorter than the
        row's num_shared tokens, or than all of its tokens if it cannot be truncated.
        """
        size = min(len(self.ids), len(prompt) - 1)
        equal = int((self.ids[:size] == prompt[:size]).long().cumprod(0).sum())
        needed = self.num_shared if self.truncates else len(self.ids)
        return equal if equal >= needed else 0


def find_parked(
    parked: Sequence[ParkedRow], requests: Sequence[tuple[int | None, Tensor]]
) -> dict[int, int]:
    """Return request index -> index of its conversation's parked row, where that row can be reused.

    A row can be reused if it knows at least one token of the prompt. Only the first request of a
    conversation gets its row. requests: (conversation, prompt) of each.
    """
    row_of: dict[int | None, int] = {each.conversation: row for row, each in enumerate(parked)}
    result = {}
    for index, (conversation, prompt) in enumerate(requests):
        row = row_of.pop(conversation, None)
        if row is not None and parked[row].num_known(prompt):
            result[index] = row
    return result


def newest_parked(parked: Sequence[ParkedRow], rows: Sequence[int], most: int) -> list[int]:
    """The `most` rows among these that were parked last, ascending."""
    return sorted(sorted(rows, key=lambda row: -parked[row].parked_at)[: max(0, most)])


def order_rows(first: Sequence[int], second: Sequence[int]) -> list[int]:
    """Return the rows `first`, then the rows `second`, reordered so that few rows have to move.

    Within each part, a row whose index is one of the part's positions stays there. The others fill
    the free positions in their order.
    """
    order: list[int] = []
    for rows, start in ((first, 0), (second, len(first))):
        targets = range(start, start + len(rows))
        staying = set(rows) & set(targets)
        movers = (row for row in rows if row not in staying)
        order += [target if target in staying else next(movers) for target in targets]
    return order
