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

    def num_known(self, prompt: Tensor) -> int:
        """Number of tokens of a prompt (P,) that need not be recomputed. 0: the row cannot be
        reused.

        At least one token remains to be computed, because its logits are needed.
        """
        size = min(len(self.ids), len(prompt) - 1)
        equal = int((self.ids[:size] == prompt[:size]).long().cumprod(0).sum())
        if equal >= self.num_shared:
            return equal
        return 0


def find_parked(
    parked: Sequence[ParkedRow], requests: Sequence[tuple[int | None, Tensor]]
) -> dict[int, int]:
    """Request index -> index of its conversation's parked row, where that row can be reused.

    requests: (conversation, prompt) of each. Only the first request of a conversation gets its row.
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
    """The rows `first`, then the rows `second`. As many as possible keep their index within their
    part."""
    order: list[int] = []
    for rows, start in ((first, 0), (second, len(first))):
        targets = range(start, start + len(rows))
        staying = set(rows) & set(targets)
        movers = (row for row in rows if row not in staying)
        order += [target if target in staying else next(movers) for target in targets]
    return order
