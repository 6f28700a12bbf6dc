"""Requests that outlive the weights: what was drawn is kept when the weights change.

Between two versions every request is taken out of the generator with its tokens so far, and given
back with them behind its prompt: the next tokens are drawn by the new weights over a cache that
they have computed themselves. Each token keeps the version that drew it, and the noise that it
would have had without the change. Any generator that takes requests can do it; knows no engine.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from itertools import count

import torch
from torch import Tensor

from spmdflow.rollout.generator import Finished, Request, RequestGenerator, check_drawn

_COLUMNS = {"tokens": torch.int64, "log_probs": torch.float32, "versions": torch.int32}


@dataclass(frozen=True)
class Lasted(Finished):
    """A response that has ended, on the host."""

    versions: Tensor
    """(n,) int32: of the weights that drew each token."""


def _nothing() -> dict[str, Tensor]:
    result = {}
    for name, dtype in _COLUMNS.items():
        result[name] = torch.zeros(0, dtype=dtype)
    return result


@dataclass
class _Row:
    """A request and what was drawn of it before the weights that the generator has now."""

    request: Request
    drawn: dict[str, Tensor] = field(default_factory=_nothing)
    """By name of the column: (n,)."""
    live: int | None = None
    """Its number in the generator; None: it is not there."""

    def extend(self, part: Finished, version: int) -> None:
        """Append what the generator has drawn, with the version of its weights."""
        check_drawn(part.log_probs, f"a prompt of {len(self.request.prompt)} tokens")
        versions = torch.full((len(part.tokens),), version)
        new = {"tokens": part.tokens, "log_probs": part.log_probs, "versions": versions}
        for name, dtype in _COLUMNS.items():
            self.drawn[name] = torch.cat([self.drawn[name], new[name].to("cpu", dtype)])
        self.live = None

    def left(self) -> Request:
        """What is still to be drawn."""
        request = self.request
        size = len(self.drawn["tokens"])
        room = request.sampling.max_new_tokens - size
        return Request(
            torch.cat([request.prompt, self.drawn["tokens"]]),
            request.seed,
            replace(request.sampling, max_new_tokens=room),
            request.conversation,
            num_drawn=size,
        )


class LastingRequests:
    """Requests of one generator, oldest first; all ranks of a replica make the same calls."""

    def __init__(self, generator: RequestGenerator, end_tokens: tuple[int, ...]) -> None:
        """end_tokens: ids that end a response."""
        self._generator = generator
        self._ends = set(end_tokens)
        self.version = 0
        """Of the weights that the generator has."""
        self._numbers = count()
        self._rows: dict[int, _Row] = {}
        self._live: dict[int, int] = {}
        """Number in the generator -> number here."""
        self._is_greedy = False
        self._aside: list[int] = []
        """Those that are not in the generator, oldest first."""

    def __len__(self) -> int:
        """Requests that have not ended."""
        return len(self._rows)

    def check(self, request: Request) -> None:
        """ColumnError or ConfigError if the generator cannot take a request of this size."""
        self._generator.check_size(request)

    def add(self, request: Request, drawn: Mapping[str, Tensor] | None = None) -> int:
        """Take a request; its number. drawn: what `state` gave of it."""
        number = next(self._numbers)
        self._rows[number] = _Row(request, dict(drawn) if drawn else _nothing())
        self._aside.append(number)
        return number

    def abort(self, number: int) -> None:
        """Drop a request; nothing happens if it has ended."""
        row = self._rows.pop(number, None)
        if row is None:
            return
        if row.live is None:
            self._aside.remove(number)
        else:
            self._generator.abort(row.live)
            del self._live[row.live]

    def forget(self, conversations: Collection[int]) -> None:
        """See RequestGenerator.forget."""
        self._generator.forget(conversations)

    def is_idle(self, *, greedy: bool) -> bool:
        """Whether there are no requests of this sort."""
        return all(row.request.sampling.greedy != greedy for row in self._rows.values())

    def step(self, *, greedy: bool = False) -> list[Lasted]:
        """Draw a few tokens for what is under way; the responses that have ended, maybe none.

        greedy: for requests that take the likeliest tokens, else for all others; the two are never
        in the generator together.
        """
        if greedy != self._is_greedy:
            self.set_aside()
            self._is_greedy = greedy
        if self._aside:
            self._generator.wake()
        ended = []
        waiting = []
        for number in self._aside:
            row = self._rows[number]
            if row.request.sampling.greedy != greedy:
                waiting.append(number)
            elif self._has_ended(row):
                ended.append(self._end(number))
            else:
                row.live = self._generator.add(row.left())
                self._live[row.live] = number
        self._aside = waiting
        for part in self._generator.step() if self._live else ():
            number = self._live.pop(part.id)
            self._rows[number].extend(part, self.version)
            ended.append(self._end(number))
        return ended

    def set_aside(self) -> None:
        """Take everything out of the generator: its weights or its cache will change."""
        for live, number in self._live.items():
            part = self._generator.abort(live)
            assert part is not None, (live, number)
            self._rows[number].extend(part, self.version)
        self._aside = sorted([*self._aside, *self._live.values()])
        self._live.clear()

    def state(self, number: int) -> dict[str, Tensor]:
        """What was drawn of a request so far, on the host: tokens, log_probs, versions, (n,)."""
        assert not self._live, "set_aside comes first"
        return self._rows[number].drawn

    def _has_ended(self, row: _Row) -> bool:
        """Whether its last token is drawn: an engine may be a step ahead of what it has told."""
        tokens = row.drawn["tokens"]
        is_long = len(tokens) >= row.request.sampling.max_new_tokens
        return is_long or (len(tokens) > 0 and int(tokens[-1]) in self._ends)

    def _end(self, number: int) -> Lasted:
        return Lasted(number, **self._rows.pop(number).drawn)
