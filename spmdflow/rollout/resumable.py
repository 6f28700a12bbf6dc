"""Requests that continue across weight updates (partial rollouts).

When the weights change, every request is taken out of the generator with its tokens so far. It is
added again with these tokens at the end of its prompt, so that the new weights compute the cache
before they draw the next tokens. Each token records the version of the weights that drew it, and
uses the same random numbers as without the update. Works with any `RequestGenerator`; knows no
engine.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

import torch
from torch import Tensor

from spmdflow.rollout.generator import Finished, Request, RequestGenerator, check_drawn
from spmdflow.rollout.grammar import TokenNotes

_COLUMNS = {"tokens": torch.int64, "log_probs": torch.float32, "versions": torch.int32}


@dataclass(frozen=True)
class VersionedResponse(Finished):
    """A finished response on the host, with the weights version of each token."""

    versions: Tensor = field(kw_only=True)
    """(n,) int32: version of the weights that drew each token."""


def _empty_columns() -> dict[str, Tensor]:
    """Returns the columns `tokens`, `log_probs` and `versions`, each of shape (0,)."""
    result = {}
    for name, dtype in _COLUMNS.items():
        result[name] = torch.zeros(0, dtype=dtype)
    return result


@dataclass
class _Row:
    """A request and the tokens that were drawn before it was last added to the generator."""

    request: Request
    drawn: dict[str, Tensor] = field(default_factory=_empty_columns)
    """Column name -> values (n,)."""
    live: int | None = None
    """Its id in the generator. None: the generator does not have it."""
    routes: Tensor | None = None
    """The experts of all tokens so far, as the generator used them when it had the row last."""

    notes: TokenNotes | None = None
    """See Finished.notes."""

    def extend(self, part: Finished, version: int) -> None:
        """Appends drawn tokens, log-probabilities and the weights' version to `drawn`, on the host.

        Sets `live` to None, because the generator no longer has the request. SpmdflowError if a
        log-probability is nan.
        """
        check_drawn(part.log_probs, f"a prompt of {len(self.request.prompt)} tokens")
        versions = torch.full((len(part.tokens),), version)
        new = {"tokens": part.tokens, "log_probs": part.log_probs, "versions": versions}
        for name, dtype in _COLUMNS.items():
            self.drawn[name] = torch.cat([self.drawn[name], new[name].to("cpu", dtype)])
        if part.routes is not None:
            self.routes = part.routes
        if part.notes is not None:
            self.notes = part.notes if self.notes is None else self.notes.join(part.notes)
        self.live = None

    def cut(self, size: int) -> None:
        """Keeps the first `size` drawn tokens."""
        for name in _COLUMNS:
            self.drawn[name] = self.drawn[name][:size]
        if self.routes is not None:
            self.routes = self.routes[: len(self.request.prompt) + size]
        if self.notes is not None:
            self.notes = self.notes.cut(size)

    def remaining_request(self) -> Request:
        """Returns the request for the tokens that are still to be drawn.

        Its prompt ends with the tokens drawn so far. max_new_tokens is lower by their number, which
        is num_drawn. Seed and conversation are the same.
        """
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


class ResumableRequests:
    """Requests of one generator, oldest first. All ranks of a replica make the same calls."""

    def __init__(self, generator: RequestGenerator, end_tokens: tuple[int, ...]) -> None:
        """end_tokens: token ids that end a response."""
        self._generator = generator
        self._ends = set(end_tokens)
        self.version = 0
        """Version of the generator's weights."""
        self._numbers = count()
        self._rows: dict[int, _Row] = {}
        self._live: dict[int, int] = {}
        """Id in the generator -> request number."""
        self._is_greedy = False
        self._suspended: list[int] = []
        """Requests that are not in the generator, oldest first."""
        self._settled: list[int] = []
        """Requests that ended while all were suspended; the next `step` returns them."""

    def __len__(self) -> int:
        """Requests that have not ended."""
        return len(self._rows)

    @property
    def is_guided(self) -> bool:
        """See RequestGenerator.is_guided."""
        return self._generator.is_guided

    def check(self, request: Request) -> None:
        """ColumnError or ConfigError if the generator cannot take a request of this size."""
        self._generator.check_size(request)

    def add(self, request: Request, drawn: Mapping[str, Tensor] | None = None) -> int:
        """Accepts a request and returns its number.

        The generator gets it in the next `step` of its kind. drawn: tokens drawn earlier, as
        `state` returned them; None: there are none.
        """
        number = next(self._numbers)
        self._rows[number] = _Row(request, dict(drawn) if drawn else _empty_columns())
        self._suspended.append(number)
        return number

    def abort(self, number: int) -> None:
        """Drops a request and its tokens, also in the generator; does nothing if it has ended."""
        row = self._rows.pop(number, None)
        if row is None:
            return
        if number in self._settled:
            self._settled.remove(number)
        elif row.live is None:
            self._suspended.remove(number)
        else:
            self._generator.abort(row.live)
            del self._live[row.live]

    def forget(self, conversations: Collection[int]) -> None:
        """See RequestGenerator.forget."""
        self._generator.forget(conversations)

    def is_idle(self, *, greedy: bool) -> bool:
        """Whether there are no greedy requests, or no others if greedy is False."""
        return all(row.request.sampling.greedy != greedy for row in self._rows.values())

    def step(self, *, greedy: bool = False) -> list[VersionedResponse]:
        """Draws a few tokens for all requests of one kind, and returns those that have ended.

        greedy: step the greedy requests, otherwise all others. The generator never has both: when
        the kind changes, `suspend_all` is called first. Suspended requests of this kind are then
        added again, oldest first, with their drawn tokens in the prompt. A request whose last token
        is already drawn is returned instead. The result may be empty. SpmdflowError if a
        log-probability is nan.
        """
        if greedy != self._is_greedy:
            self.suspend_all()
            self._is_greedy = greedy
        if self._suspended:
            self._generator.wake()
        ended = self._take_settled(greedy=greedy)
        waiting = []
        for number in self._suspended:
            row = self._rows[number]
            if row.request.sampling.greedy != greedy:
                waiting.append(number)
            elif self._has_ended(row):
                ended.append(self._end(number))
            else:
                row.live = self._generator.add(row.remaining_request())
                self._live[row.live] = number
        self._suspended = waiting
        for part in self._generator.step() if self._live else ():
            number = self._live.pop(part.id)
            self._rows[number].extend(part, self.version)
            ended.append(self._end(number))
        return ended

    def suspend_all(self) -> None:
        """Takes all requests out of the generator, because its weights or its cache will change.

        Stores their tokens so far, with the current version. The next `step` adds them again, but
        for those that have ended by now.
        """
        for ended in self._generator.settle() if self._live else ():
            number = self._live.pop(ended.id)
            self._rows[number].extend(ended, self.version)
            self._settled.append(number)
        for live, number in self._live.items():
            part = self._generator.abort(live)
            assert part is not None, (live, number)
            self._rows[number].extend(part, self.version)
        self._suspended = sorted([*self._suspended, *self._live.values()])
        self._live.clear()

    def tokens_so_far(self, numbers: Sequence[int]) -> list[list[int]]:
        """The tokens drawn so far of some requests that have not ended; [] for one that has."""
        live = []
        for number in numbers:
            row = self._rows.get(number)
            if row is not None and row.live is not None:
                live.append(row.live)
        news = dict(zip(live, self._generator.tokens_so_far(live), strict=True))
        result = []
        for number in numbers:
            row = self._rows.get(number)
            tokens = [] if row is None else row.drawn["tokens"].tolist()
            if row is not None and row.live is not None:
                tokens += news[row.live]
            result.append(tokens)
        return result

    def state(self, number: int) -> dict[str, Tensor]:
        """The tokens drawn so far of a request, on the host: tokens, log_probs, versions, each
        (n,)."""
        assert not self._live, "call suspend_all first"
        return self._rows[number].drawn

    def _take_settled(self, *, greedy: bool) -> list[VersionedResponse]:
        """Returns the settled responses of one kind."""
        numbers = []
        for number in self._settled:
            if self._rows[number].request.sampling.greedy == greedy:
                numbers.append(number)
        self._settled = [number for number in self._settled if number not in numbers]
        return [self._end(number) for number in numbers]

    def _has_ended(self, row: _Row) -> bool:
        """Whether its last token is drawn. An engine may be a step ahead of what `step` has
        returned. Tokens after a stop string are dropped."""
        tokens = row.drawn["tokens"]
        (end,) = self._generator.find_stops([(row.request, tokens.tolist(), 0)])
        if end is not None:
            row.cut(end)
            return True
        is_long = len(tokens) >= row.request.sampling.max_new_tokens
        return is_long or (len(tokens) > 0 and int(tokens[-1]) in self._ends)

    def _end(self, number: int) -> VersionedResponse:
        row = self._rows.pop(number)
        return VersionedResponse(number, **row.drawn, routes=row.routes, notes=row.notes)
