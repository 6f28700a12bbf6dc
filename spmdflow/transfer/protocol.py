"""Transfer protocols by name: which rows each rank gets and keeps, and which ranks answer.

A `Protocol` is four pure functions of a layout and a number of rows. What they return is checked at
every call:

- `num_shares`: the number of parts into which the rows are cut;
- `distribute`: the positions that each rank gets;
- `holds`: the positions of the result that each rank keeps;
- `collect`: the ranks that answer, in order.

This file has the eight protocols of the table in the package's docstring, and the registry for
those of a script. It does not know tensors or row ids. HybridFlow section 4.1, Table 3.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from spmdflow.errors import ProtocolError, RowError
from spmdflow.parallel.layout import Layout

Shares = Sequence[Sequence[int]]
"""Positions of each share. Shares may overlap: over epochs a row can visit several ranks."""

Rows = dict[int, list[int]]
"""Positions by rank. Ranks with the same rows may share one list, so treat it as read-only."""

RowsFunction = Callable[[Layout, int, Shares], Mapping[int, Sequence[int]]]
"""(layout, number of rows, shares) -> positions by rank."""


class Answer(NamedTuple):
    """The ranks that answer a call, and what their answers are together."""

    ranks: tuple[int, ...]
    """Answering ranks, in the order of the answer."""
    joined: bool
    """True: their rows together are the batch's rows. False: a list with one entry per rank."""


class Protocol:
    """A named transfer protocol. What its functions return is checked at every call.

    distribute gets as many shares as num_shares says: even chunks, unless the caller passes its
    own. Without holds, each answering rank keeps the rows that it got.
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
        self.name = name
        self.home = getattr(distribute, "__module__", "")
        self.num_shares = num_shares
        """The number of parts into which the rows of a call are cut, for a layout."""
        self._distribute = distribute
        self._holds = holds
        self._collect = collect

    def distribute(self, layout: Layout, num_rows: int, shares: Shares | None = None) -> Rows:
        """Return the positions of the rows that each rank gets, by rank.

        shares: the positions of each share, in place of even chunks. RowError if shares omit a row,
        repeat one inside a share, or are not num_shares many. ProtocolError if the protocol returns
        ranks or rows that do not exist.
        """
        parts = self._cut(layout, num_rows, shares)
        rows = self._distribute(layout, num_rows, parts)
        return self._check_rows("distribute", layout, num_rows, rows)

    def holds(self, layout: Layout, num_rows: int, shares: Shares | None = None) -> Rows:
        """Return the positions of the result's rows that each rank keeps, by rank.

        A rank without an entry keeps no row, and its method returns None. Without a function
        `holds`, each answering rank keeps the rows that it got. Raises the errors of `distribute`.
        Also raises ProtocolError if the answers are joined and the answering ranks together lack a
        row, or, without shares, have a row twice.
        """
        answer = self.collect(layout)
        if self._holds is None:
            inputs = self.distribute(layout, num_rows, shares)
            kept = {}
            for rank in sorted(answer.ranks):
                if rank in inputs:
                    kept[rank] = inputs[rank]
        else:
            parts = self._cut(layout, num_rows, shares)
            kept = self._check_rows("holds", layout, num_rows, self._holds(layout, num_rows, parts))
        if answer.joined:
            self._check_cover(answer, num_rows, kept, once=shares is None)
        return kept

    def collect(self, layout: Layout) -> Answer:
        """Return the answering ranks in order, and whether their answers are joined into one batch.

        ProtocolError if there is no answering rank, if one is repeated, or if one is not in the
        layout.
        """
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

    def _cut(self, layout: Layout, num_rows: int, shares: Shares | None) -> list[list[int]]:
        """Return the positions of each share: even chunks, or copies of `shares`.

        Raises RowError unless there are num_shares(layout) shares, each row is in at least one of
        them, and each share has only existing positions, each once. A row may be in several shares.
        """
        expected = self.num_shares(layout)
        if shares is None:
            return even_chunks(num_rows, expected)
        if len(shares) != expected:
            where = f"protocol {self.name}, layout {layout}"
            do = "cut the rows into num_shares(layout) shares"
            raise RowError.of(where, f"{len(shares)} shares", expected, do)
        parts = [list(share) for share in shares]
        for number, part in enumerate(parts):
            self._check_positions(f"share {number}", part, num_rows, RowError)
        missing = set(range(num_rows)).difference(*parts)
        if missing:
            where = f"protocol {self.name}"
            got = f"shares without row {min(missing)}"
            do = f"{len(missing)} rows are in no share: add them"
            raise RowError.of(where, got, f"all of {num_rows} rows", do)
        return parts

    def _check_rows(
        self, function: str, layout: Layout, num_rows: int, rows: Mapping[int, Sequence[int]]
    ) -> Rows:
        """Return the rows that a function of the protocol returned, as lists by ascending rank.

        Ranks with the same sequence object share one list. ProtocolError if a rank or a position
        does not exist, or if a rank has a position twice. function: its name, for the error.
        """
        foreign = sorted(set(rows) - set(layout.ranks))
        if foreign:
            raise ProtocolError(
                f"protocol {self.name}: {function} got rank {foreign[0]}, expected ranks of the "
                f"layout {layout.ranks}; correct {function}"
            )
        rows = dict(rows)
        lists = {}
        for positions in rows.values():
            lists[id(positions)] = list(positions)
        for positions in lists.values():
            self._check_positions(function, positions, num_rows, ProtocolError)
        result = {}
        for rank in sorted(rows):
            result[rank] = lists[id(rows[rank])]
        return result

    def _check_positions(
        self,
        where: str,
        positions: Sequence[int],
        num_rows: int,
        error: type[ProtocolError] | type[RowError],
    ) -> None:
        """Raise `error` unless all positions are distinct and from 0 to num_rows - 1.

        where: the function or the share that has the positions, for the error.
        """
        if not positions:
            return
        low = min(positions)
        high = max(positions)
        distinct = len(set(positions))
        if low < 0 or high >= num_rows or distinct != len(positions):
            raise error(
                f"protocol {self.name}: {where} got {len(positions)} positions ({distinct} "
                f"distinct) from {low} to {high}, expected each at most once and from 0 to "
                f"{num_rows - 1}; correct {where}"
            )

    def _check_cover(self, answer: Answer, num_rows: int, kept: Rows, *, once: bool) -> None:
        """Raise ProtocolError unless the answering ranks together keep every row.

        once: each row must also be on exactly one answering rank, because the shares do not
        overlap.
        """
        positions = []
        for rank in answer.ranks:
            positions += kept.get(rank, [])
        missing = set(range(num_rows)).difference(positions)
        if missing or (once and len(positions) != num_rows):
            if missing:
                problem = f"no answering rank has row {min(missing)}"
            else:
                problem = "some rows come twice"
            got = f"{len(positions)} rows from the answering ranks {answer.ranks}"
            expected = f"{num_rows}, because their answers are joined"
            do = f"{problem}: correct holds or collect"
            raise ProtocolError.of(f"protocol {self.name}", got, expected, do)


def even_chunks(num_rows: int, parts: int) -> list[list[int]]:
    """Split the positions 0 to num_rows - 1 into `parts` contiguous lists, larger ones first.

    Sizes differ by at most one: 5 rows in 2 parts are [0, 1, 2] and [3, 4]. RowError if num_rows is
    below 0, or parts below 1.
    """
    if num_rows < 0 or parts < 1:
        got = f"{num_rows} rows over {parts} parts"
        do = "check the batch and the layout's sizes"
        raise RowError.of("chunks", got, "0 or more rows over 1 or more parts", do)
    base, extra = divmod(num_rows, parts)
    starts = []
    for part in range(parts + 1):
        starts.append(part * base + min(part, extra))
    result = []
    for start, stop in zip(starts, starts[1:], strict=False):
        result.append(list(range(start, stop)))
    return result


Cut = tuple[Callable[[Layout], int], Callable[[Layout, int], int]]
"""(number of shares of a layout, number of the share that a rank gets)."""


def _by_share(
    name: str,
    cut: Cut,
    answerers: Callable[[Layout], Iterable[int]],
    *,
    joined: bool,
    holds: Callable[[Layout, int], bool] | None = None,
) -> Protocol:
    """Return a protocol that gives each rank one share of the rows.

    cut: the number of shares, and the function that says which share a rank gets. answerers:
    returns the answering ranks of a layout in order. joined: as in `Answer`.
    holds(layout, rank): whether the rank keeps the rows of its share of the result. None: exactly
    the answering ranks do.
    """
    num_shares, share_of = cut

    def distribute(layout: Layout, num_rows: int, shares: Shares) -> Mapping[int, Sequence[int]]:
        """Return the positions of each rank's share.

        RowError if the protocol is ALL_TO_ALL and the list does not have one entry for each rank.
        """
        if name == "ALL_TO_ALL" and num_rows != layout.size:
            where = "protocol ALL_TO_ALL"
            got = f"a list of {num_rows}"
            expected = f"{layout.size}, one entry for each rank"
            raise RowError.of(where, got, expected, f"give a list of {layout.size}")
        result = {}
        for rank in layout.ranks:
            result[rank] = shares[share_of(layout, rank)]
        return result

    def rows_after(layout: Layout, num_rows: int, shares: Shares) -> Mapping[int, Sequence[int]]:
        """Return the positions of the share of each rank for which holds(layout, rank) is true."""
        assert holds is not None
        result = {}
        for rank, rows in distribute(layout, num_rows, shares).items():
            if holds(layout, rank):
                result[rank] = rows
        return result

    return Protocol(
        name,
        distribute=distribute,
        collect=lambda layout: Answer(tuple(answerers(layout)), joined),
        num_shares=num_shares,
        holds=rows_after if holds else None,
    )


def _stages(layout: Layout) -> list[tuple[int, ...]]:
    """The ranks with tp = 0 and cp = 0 of all stages, for each dp."""
    return layout.axis_groups("pp")[:: layout.tp_size * layout.cp_size]


def _stage_share(layout: Layout, rank: int) -> int:
    coordinate = layout.coordinate(rank)
    return coordinate.dp * layout.pp_size + coordinate.pp


def _all_ranks(layout: Layout) -> tuple[int, ...]:
    return layout.ranks


def _is_in_last_stage(layout: Layout, rank: int) -> bool:
    """Whether a rank computes results: all tp and cp ranks of the last stage do, and hold them."""
    return layout.coordinate(rank).pp == layout.pp_size - 1


_WHOLE: Cut = (lambda layout: 1, lambda layout, rank: 0)
_RANK: Cut = (lambda layout: layout.size, Layout.group_rank)
_DP: Cut = (lambda layout: layout.dp_size, lambda layout, rank: layout.coordinate(rank).dp)
_MICRO_DP: Cut = (lambda layout: layout.generation_dp_size, Layout.generation_replica)
_STAGE: Cut = (lambda layout: layout.dp_size * layout.pp_size, _stage_share)
BUILT_IN = (
    _by_share("ONE_TO_ALL", _WHOLE, _all_ranks, joined=False),
    _by_share(
        "3D_PROTO",
        _DP,
        lambda layout: [ranks[-1] for ranks in _stages(layout)],
        joined=True,
        holds=_is_in_last_stage,
    ),
    _by_share(
        "3D_ALL_MICRO_DP",
        _MICRO_DP,
        lambda layout: [ranks[0] for ranks in layout.axis_groups("gen_replica")],
        joined=True,
        holds=lambda layout, rank: True,  # all ranks of a replica sample the same tokens
    ),
    _by_share("3D_PP_ONLY", _WHOLE, lambda layout: _stages(layout)[0], joined=False),
    _by_share("DP_PROTO", _RANK, _all_ranks, joined=True),
    _by_share("ALL_TO_ALL", _RANK, _all_ranks, joined=False),
    _by_share("3D_PP_AS_DP", _STAGE, lambda layout: chain(*_stages(layout)), joined=True),
    _by_share("DP_METRIC", _RANK, _all_ranks, joined=False),
)
"""The table in the package's docstring."""
_REGISTRY = {rules.name: rules for rules in BUILT_IN}


def protocol(name: str) -> Protocol:
    """Return the protocol that is registered under this name.

    ProtocolError, with all names and the most similar one, if there is none.
    """
    if name in _REGISTRY:
        return _REGISTRY[name]
    nearest = difflib.get_close_matches(name, _REGISTRY, n=1, cutoff=0)
    raise ProtocolError(
        f"transfer_mode: got {name!r}, expected one of {', '.join(_REGISTRY)}; "
        f"did you mean {nearest[0]!r}? A new one needs register_protocol(Protocol(...))"
    )


def register_protocol(new: Protocol) -> Protocol:
    """Register a protocol under its name, and return it.

    Every rank must do so, which happens when it imports the script. A module may replace a protocol
    that it registered itself (tests import one twice). ProtocolError if another module has
    registered the name. The module is the one that defines `distribute`.
    """
    old = _REGISTRY.get(new.name)
    if old is not None and old.home != new.home:
        where = f"protocol {new.name}"
        got = f"a definition in {new.home}"
        expected = f"a name that {old.home} does not use"
        raise ProtocolError.of(where, got, expected, "choose another name")
    _REGISTRY[new.name] = new
    return new
