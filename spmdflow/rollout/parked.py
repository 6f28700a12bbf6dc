"""Which rows of a KV cache wait for the next turn of their conversation, and where rows lie.

Integers and token ids only: rollout.builtin decides by them, rollout.llama moves the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from spmdflow.rollout.generator import Request


@dataclass(frozen=True)
class Parked:
    """A row that keeps its keys and values for the next request of its conversation, which has no
    other row."""

    conversation: int
    num_shared: int
    """Tokens whose keys and values it shares with other rows."""
    ids: Tensor
    """(L,) int64 on the host: the tokens whose keys and values there are."""
    since: int
    """The generator's clock when it was parked."""

    def num_known(self, request: Request) -> int:
        """Tokens of the request's prompt that need not be computed again; 0: the row is no use.

        At least one token is left to compute, as its logits are wanted.
        """
        size = min(len(self.ids), len(request.prompt) - 1)
        equal = int((self.ids[:size] == request.prompt[:size]).long().cumprod(0).sum())
        if equal >= self.num_shared:
            return equal
        return 0


def find_parked(parked: Sequence[Parked], requests: Sequence[Request]) -> dict[int, int]:
    """Request's place -> place of the parked row of its conversation, if that is of use."""
    row_of: dict[int | None, int] = {each.conversation: row for row, each in enumerate(parked)}
    pairs = ((n, row_of.pop(request.conversation, None)) for n, request in enumerate(requests))
    result = {}
    for place, row in pairs:
        if row is not None and parked[row].num_known(requests[place]):
            result[place] = row
    return result


def newest_parked(parked: Sequence[Parked], rows: Sequence[int], most: int) -> list[int]:
    """The `most` rows of these that were parked last, ascending."""
    return sorted(sorted(rows, key=lambda row: -parked[row].since)[: max(0, most)])


def order_rows(first: Sequence[int], second: Sequence[int]) -> list[int]:
    """The rows `first`, then the rows `second`, as many as can be at their old places."""
    order: list[int] = []
    for rows, start in ((first, 0), (second, len(first))):
        places = range(start, start + len(rows))
        staying = set(rows) & set(places)
        movers = (row for row in rows if row not in staying)
        order += [place if place in staying else next(movers) for place in places]
    return order
