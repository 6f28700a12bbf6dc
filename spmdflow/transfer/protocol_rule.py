"""`Protocol`: four pure functions on a layout and a number of rows, checked at every call.

`num_shares` says into how many parts the rows are cut, `distribute` which positions each rank
gets, `holds` which positions of the result it keeps, `collect` who answers and in what order.
Knows no tensors and no row ids. HybridFlow section 4.1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from spmdflow.errors import ProtocolError, RowError
from spmdflow.parallel.layout import Layout
from spmdflow.transfer.chunk import chunks

Shares = Sequence[Sequence[int]]
"""Positions of each share. Shares may overlap: over epochs a row can visit several ranks."""

Rows = dict[int, list[int]]
"""Positions by rank. Ranks with the same rows may share one list; treat it as read-only."""

RowsFunction = Callable[[Layout, int, Shares], Mapping[int, Sequence[int]]]
"""(layout, number of rows, shares) -> positions by rank."""


class Answer(NamedTuple):
    """Who answers a call."""

    ranks: tuple[int, ...]
    """Answering ranks, in the order of the answer."""
    joined: bool
    """True: their rows together are the batch's rows; False: a list, one entry a rank."""


class Protocol:
    """A named transfer protocol; what its functions return is checked at every call.

    distribute gets the shares that num_shares asked for: even chunks, unless the caller brings
    its own. holds defaults to the answerers with what they were given.
    """

    def __init__(
        self,
        name: str,
        *,
        distribute: RowsFunction,
        collect: Callable[[Layout], Answer],
        num_shares: Callable[[Layout], int],
        holds: RowsFunction | None = None,
    ) -> None:
        self.name, self.home = name, getattr(distribute, "__module__", "")
        self._distribute, self._holds = distribute, holds
        self._collect, self._num_shares = collect, num_shares

    def num_shares(self, layout: Layout) -> int:
        """Parts into which the rows of a call are cut."""
        return self._num_shares(layout)

    def distribute(self, layout: Layout, num_rows: int, shares: Shares | None = None) -> Rows:
        """Positions each rank is given; shares replace the even chunks.

        RowError for shares that leave a row out, repeat one inside a share or have another
        number; ProtocolError if the protocol itself names foreign ranks or rows.
        """
        parts = self._shares(layout, num_rows, shares)
        return self._rows("distribute", layout, num_rows, self._distribute(layout, num_rows, parts))

    def holds(self, layout: Layout, num_rows: int, shares: Shares | None = None) -> Rows:
        """Positions of the result that each rank keeps; other ranks return None."""
        answer = self.collect(layout)
        if self._holds is None:
            given = self.distribute(layout, num_rows, shares)
            held = {rank: given[rank] for rank in sorted(answer.ranks) if rank in given}
        else:
            parts = self._shares(layout, num_rows, shares)
            held = self._rows("holds", layout, num_rows, self._holds(layout, num_rows, parts))
        if answer.joined:
            self._check_cover(answer, num_rows, held, once=shares is None)
        return held

    def collect(self, layout: Layout) -> Answer:
        """Answering ranks in order, and whether their answers join into one batch."""
        answer = Answer(*self._collect(layout))
        foreign = sorted(set(answer.ranks) - set(layout.ranks))
        if foreign or len(set(answer.ranks)) != len(answer.ranks) or not answer.ranks:
            raise ProtocolError(
                f"protocol {self.name}: collect got ranks {answer.ranks}, expected some of "
                f"{layout.ranks}, each once; correct collect"
            )
        return answer

    def __repr__(self) -> str:
        return f"Protocol({self.name})"

    def _shares(self, layout: Layout, num_rows: int, shares: Shares | None) -> list[list[int]]:
        expected = self.num_shares(layout)
        if shares is None:
            return [list(chunk) for chunk in chunks(num_rows, expected)]
        if len(shares) != expected:
            raise RowError(
                f"protocol {self.name}, layout {layout}: got {len(shares)} shares, expected "
                f"{expected}; cut the rows into num_shares(layout) shares"
            )
        parts = [list(share) for share in shares]
        for number, part in enumerate(parts):
            self._check_positions(f"share {number}", part, num_rows, RowError)
        missing = set(range(num_rows)).difference(*parts)
        if missing:
            raise RowError(
                f"protocol {self.name}: got shares without row {min(missing)}, expected all of "
                f"{num_rows} rows; {len(missing)} rows are in no share: add them"
            )
        return parts

    def _rows(
        self, function: str, layout: Layout, num_rows: int, rows: Mapping[int, Sequence[int]]
    ) -> Rows:
        foreign = sorted(set(rows) - set(layout.ranks))
        if foreign:
            raise ProtocolError(
                f"protocol {self.name}: {function} got rank {foreign[0]}, expected ranks of the "
                f"layout {layout.ranks}; correct {function}"
            )
        rows = dict(rows)
        lists = {id(positions): list(positions) for positions in rows.values()}
        for positions in lists.values():
            self._check_positions(function, positions, num_rows, ProtocolError)
        return {rank: lists[id(rows[rank])] for rank in sorted(rows)}

    def _check_positions(
        self,
        where: str,
        positions: Sequence[int],
        num_rows: int,
        error: type[ProtocolError] | type[RowError],
    ) -> None:
        if not positions:
            return
        low, high, distinct = min(positions), max(positions), len(set(positions))
        if low < 0 or high >= num_rows or distinct != len(positions):
            raise error(
                f"protocol {self.name}: {where} got {len(positions)} positions ({distinct} "
                f"distinct) from {low} to {high}, expected each at most once and from 0 to "
                f"{num_rows - 1}; correct {where}"
            )

    def _check_cover(self, answer: Answer, num_rows: int, held: Rows, *, once: bool) -> None:
        """Joined answers give every row; exactly once unless the caller's shares overlap."""
        answered = [position for rank in answer.ranks for position in held.get(rank, ())]
        missing = set(range(num_rows)).difference(answered)
        if missing or (once and len(answered) != num_rows):
            problem = f"row {min(missing)} is with none of them" if missing else "some come twice"
            raise ProtocolError(
                f"protocol {self.name}: got {len(answered)} rows from the answering ranks "
                f"{answer.ranks}, expected {num_rows}, as their answers are joined; {problem}: "
                f"correct holds or collect"
            )
