"""The built-in generator: rows decoded together over a KV cache, on a copy of the full weights.

At most `max_batch_size` rows are decoded together. Rows that have ended leave, and others take
their place once enough have (continuous batching, Yu et al. 2022). Samples of one prompt are
prefilled once. A row of a conversation is parked when it ends: it keeps its keys and values for the
next request that begins with its tokens, and only what is new is computed. Parked rows, one for a
conversation, are among the `max_batch_size`; the oldest make room. The host checks which rows have
ended after every token on a CPU without stop strings, else after every few; until then an ended row
is decoded on, and those tokens are dropped. Needs no inference engine; the forward pass is in
rollout.forward.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor
from torch.nn import functional as F

from spmdflow.blocks.box import Box
from spmdflow.blocks.hash import box_sum, read_sums
from spmdflow.config.schema import RolloutConfig
from spmdflow.rollout.forward import end_tokens, forward_of
from spmdflow.rollout.generator import (
    NEVER,
    Finished,
    Replica,
    Request,
    RequestGenerator,
    WakePart,
    loads_folder,
)
from spmdflow.rollout.parked import Parked, find_parked, newest_parked, order_rows
from spmdflow.rollout.sampling import draw
from spmdflow.weights.move import Block, Storages

_REFILL = 8
"""New rows are prefilled when 1/8 of the rows is free: a prefill costs about as much as a step."""
_PREFILL_TOKENS = 8192
_LOOK_EVERY = 8
"""Tokens between two checks by the host, where it would wait for the device or decode text."""


@dataclass(frozen=True)
class _Live:
    """A request that is being decoded."""

    id: int
    request: Request
    born: int
    """The clock (draws so far) when it joined."""
    head: int = 0
    """Tokens of its prompt that lie in its own slots, behind the shared ones."""

    @property
    def limit(self) -> int:
        """Most tokens of the response."""
        return self.request.sampling.max_new_tokens


@dataclass
class _Rows:
    """State of the rows being decoded, on the device: (n,), or (n, N + 1) with N the most tokens of
    a response."""

    starts: Tensor
    """Prompt lengths."""
    seeds: Tensor
    limits: Tensor
    drawn: Tensor
    """Tokens that were drawn before the request."""
    counts: Tensor
    """Tokens drawn so far; no longer changes once the row has ended."""
    running: Tensor
    """False once the last token is drawn."""
    tokens: Tensor
    """A row that has ended keeps writing to the slot after its last token."""
    log_probs: Tensor

    def pick(self, rows: Tensor) -> _Rows:
        """Some rows, in this order."""
        return _Rows(*(value[rows] for value in vars(self).values()))

    def join(self, other: _Rows) -> _Rows:
        """These rows, then others; both padded to the larger N."""
        width = max(self.tokens.shape[1], other.tokens.shape[1])
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return _Rows(
            *(
                torch.cat([F.pad(x, (0, width - x.shape[1])) if x.ndim > 1 else x for x in pair])
                for pair in pairs
            )
        )


class BuiltinGenerator(RequestGenerator):
    """Generator over a cached forward; see rollout.generator.Generator for the promises."""

    def __init__(self, cfg: RolloutConfig, model_path: str, device: torch.device) -> None:
        self.weights_version = NEVER
        self.dtype = getattr(torch, cfg.precision)
        self.device = device
        self.replica = Replica.alone()
        self.has_folder_weights = loads_folder(model_path)
        """False: all are zeros until they are synced, or read by `take_folder_weights`."""
        self._forward = forward_of(
            model_path, dtype=self.dtype, device=device, empty=not self.has_folder_weights
        )
        self._max_batch_size = cfg.max_batch_size
        # a row alone in its batch has bits that depend on no other: none waits for another's place
        self._parks = self._forward.refills and cfg.max_batch_size > 1
        self._asleep: Storages | None = None
        self._end_tokens = torch.tensor(end_tokens(model_path), dtype=torch.int64, device=device)
        self._ids = count()
        self._clock = 0
        self._oldest = 0
        self._slots = 0
        self._waiting: list[tuple[int, Request]] = []
        self._parked: list[Parked] = []
        """The cache's first rows; those of self._live come behind them."""
        self._live: list[_Live] = []
        self._rows: _Rows  # of self._live, as self._logits are
        self._logits: Tensor

    @property
    def max_positions(self) -> int:
        """Context length of the model, in tokens."""
        return self._forward.max_positions

    def add(self, request: Request) -> int:
        """See RequestGenerator.add."""
        others = [row.request for row in self._live[:1]] + [r for _, r in self._waiting[:1]]
        self.admit(request, others)
        self._waiting.append((next(self._ids), request))
        return self._waiting[-1][0]

    def abort(self, request_id: int) -> Finished | None:
        """See RequestGenerator.abort."""
        for pair in self._waiting:
            if pair[0] == request_id:
                self._waiting.remove(pair)
                return Finished(request_id, torch.zeros(0, dtype=torch.int64), torch.zeros(0))
        for place, row in enumerate(self._live):
            if row.id == request_id:
                drawn = self._finished(row, self._rows, place, int(self._rows.counts[place]))
                with torch.inference_mode():
                    self._leave({place: 0})
                return drawn
        return None

    def forget(self, conversations: Collection[int]) -> None:
        """See RequestGenerator.forget."""
        parked = {}
        for r, x in enumerate(self._parked):
            if x.conversation not in conversations:
                parked[r] = x
        if len(parked) < len(self._parked):
            with torch.inference_mode():
                self._settle(parked, self._places())

    def step(self) -> list[Finished]:
        """See RequestGenerator.step: draws tokens until the host's next check."""
        self.wake()
        with torch.inference_mode():
            free = self._max_batch_size - len(self._live)
            enough = self._forward.refills and free * _REFILL >= self._max_batch_size
            if self._waiting and (enough or not self._live):
                self._refill(free)
            if not self._live:
                return []
            waits = self.device.type != "cpu" or self.stop is not None
            left = max(row.born + row.limit for row in self._live) - self._clock
            draws = min(_LOOK_EVERY if waits else 1, left)
            for number in range(draws):
                chosen = self._draw()
                if number + 1 < draws:
                    self._advance(chosen)
            counts = self._counts_of_ended(draws)
            ended = []
            for place, size in counts.items():
                ended.append((self._live[place], place, size))
            rows = self._rows
            if counts:
                chosen = chosen[self._leave(counts)]
            if self._live:
                self._advance(chosen)
        result = []
        for row, place, size in ended:
            result.append(self._finished(row, rows, place, size))
        return result

    @staticmethod
    def _finished(row: _Live, rows: _Rows, place: int, size: int) -> Finished:
        """The first tokens of a row."""
        tokens = rows.tokens[place, :size]
        log_probs = rows.log_probs[place, :size]
        return Finished(row.id, tokens.clone(), log_probs.clone())

    def _refill(self, free: int) -> None:
        """Prefill waiting requests, as many as there are free rows; samples of a prompt once, and
        of a parked conversation what is new."""
        coming = self._waiting[:free]
        self._waiting = self._waiting[free:]
        found = find_parked(self._parked, [request for _, request in coming])
        resumed: dict[int, _Live] = {}
        groups: dict[bytes, list[_Live]] = {}
        for place, (request_id, request) in enumerate(coming):
            if place in found:
                head = len(request.prompt) - self._parked[found[place]].num_shared
                resumed[found[place]] = _Live(request_id, request, self._clock, head)
            else:
                key = request.prompt.numpy().tobytes()
                groups.setdefault(key, []).append(_Live(request_id, request, self._clock))
        waiting = list(groups.values())
        rows = [*self._live, *resumed.values(), *(row for group in waiting for row in group)]
        self._slots = max(row.head + row.limit for row in rows)
        if self._parked:
            busy = {request.conversation for _, request in coming}
            idle = []
            for n, row in enumerate(self._parked):
                if row.conversation not in busy:
                    idle.append(n)
            most = self._max_batch_size - len(rows)
            self._resume(resumed, newest_parked(self._parked, idle, most))
        self._forward.reserve(len(self._parked) + len(rows), self._slots)
        for chunk in _chunks([len(group[0].request.prompt) for group in waiting]):
            self._join(waiting[chunk])

    def _resume(self, resumed: dict[int, _Live], idle: list[int]) -> None:
        """Decode these parked rows on, and keep of the others only `idle`."""
        before = self._parked
        rows = list(resumed)
        live = list(resumed.values())
        self._forward.reserve(0, self._slots)
        for chunk in _chunks([len(row.request.prompt) for row in live]):
            pairs = []
            for row in rows[chunk]:
                pairs.append((before[row], resumed[row].request))
            known = []
            for parked, request in pairs:
                known.append(parked.num_known(request))
            more = []
            for (_, r), size in zip(pairs, known, strict=True):
                more.append(r.prompt[size:])
            logits = self._forward.extend(rows[chunk], more, known)
            self._append(live[chunk], logits)
        kept = {row: before[row] for row in idle}
        if len(kept) < len(before):
            first = len(self._live) - len(rows)
            self._settle(kept, self._places(first) | dict(zip(rows, range(first, len(self._live)))))

    def _join(self, groups: list[list[_Live]]) -> None:
        """Prefill the rows of some prompts, and append them to those being decoded."""
        source = []
        for place, group in enumerate(groups):
            for _ in group:
                source.append(place)
        prompts = [group[0].request.prompt for group in groups]
        logits = self._forward.prefill(prompts, source)
        self._append([row for group in groups for row in group], logits)

    def _append(self, new: list[_Live], logits: Tensor) -> None:
        """More rows behind those that are decoded."""
        facts = []
        for r in new:
            facts.append((len(r.request.prompt), r.request.seed, r.limit, r.request.num_drawn, 0))
        starts, seeds, limits, drawn, counts = torch.tensor(facts, device=self.device).T
        width = max(row.limit for row in new) + 1
        rows = _Rows(
            starts,
            seeds,
            limits,
            drawn,
            counts,
            torch.ones(len(new), dtype=torch.bool, device=self.device),
            torch.zeros(len(new), width, dtype=torch.int64, device=self.device),
            torch.zeros(len(new), width, device=self.device),
        )
        if self._live:
            rows = self._rows.join(rows)
            logits = torch.cat([self._logits, logits])
        self._rows = rows
        self._logits = logits
        self._live += new
        self._oldest = min(row.born - row.head for row in self._live)

    def _draw(self) -> Tensor:
        """Draw one token (n,) for every row, and record it."""
        rows = self._rows
        sampling = self._live[0].request.sampling
        chosen, log_probs = draw(self._logits, sampling, rows.seeds, rows.drawn + rows.counts)
        rows.tokens.scatter_(1, rows.counts[:, None], chosen[:, None])
        rows.log_probs.scatter_(1, rows.counts[:, None], log_probs[:, None])
        rows.counts += rows.running
        rows.running &= torch.isin(chosen, self._end_tokens, invert=True)
        rows.running &= rows.counts < rows.limits
        rows.running &= log_probs.isnan().logical_not_()  # ends at once: `check_drawn` refuses it
        self._clock += 1
        return chosen

    def _advance(self, chosen: Tensor) -> None:
        """Compute logits after these tokens (n,); an ended row overwrites its last cache slot."""
        rows = self._rows
        places = rows.starts + rows.counts - 1
        span = min(self._clock - self._oldest, self._slots)  # the oldest row may have ended
        self._logits = self._forward.step(chosen, places, span)

    def _counts_of_ended(self, draws: int) -> dict[int, int]:
        """Rows that have ended since the last check, and the number of tokens of each."""
        rows = self._rows
        if self.stop is None and bool(rows.running.all()):
            return {}
        counts = rows.counts.tolist()
        running = rows.running.tolist()
        ended = {}
        for place, runs in enumerate(running):
            if not runs:
                ended[place] = counts[place]
        if self.stop is not None:
            said = []
            for row, tokens, size in zip(self._live, rows.tokens.tolist(), counts, strict=True):
                said.append(
                    (
                        row.request.prompt.tolist(),
                        tokens[:size],
                        max(0, self._clock - draws - row.born),
                    )
                )
            ends = self.stop.first_ends(said)
            ended |= {place: end for place, end in enumerate(ends) if end is not None}
        return ended

    def _leave(self, ended: dict[int, int]) -> Tensor:
        """End these rows: place -> its tokens, 0 if it was aborted; a row of a conversation is
        parked. Gives the old places of the others, in their new order."""
        parked = dict(enumerate(self._parked))
        live = self._places()
        for row, place in list(live.items()):
            if place not in ended:
                continue
            del live[row]
            request = self._live[place].request
            size = ended[place]
            if self._parks and size and request.conversation is not None:
                said = self._rows.tokens[place, : size - 1].cpu()  # the last one was never read
                ids = torch.cat([request.prompt, said])
                shared = len(request.prompt)
                shared -= self._live[place].head
                parked[row] = Parked(request.conversation, shared, ids, self._clock)
        return self._settle(parked, live)

    def _places(self, most: int | None = None) -> dict[int, int]:
        """Row of the cache -> place in self._live, of the first `most` that are decoded."""
        places = range(len(self._live))[:most]
        result = {}
        for place in places:
            result[len(self._parked) + place] = place
        return result

    def _settle(self, parked: dict[int, Parked], live: dict[int, int]) -> Tensor:
        """Go on with these rows of the cache: parked ones, and those of these places of self._live;
        rows that need not move stay. Gives the old places, in the new order."""
        order = order_rows(list(parked), list(live))
        count = len(parked)
        self._forward.keep(order, count)
        self._parked = [parked[row] for row in order[:count]]
        places = [live[row] for row in order[count:]]
        kept = torch.tensor(places, dtype=torch.int64, device=self.device)
        self._rows = self._rows.pick(kept)
        self._logits = self._logits[kept]
        self._live = [self._live[place] for place in places]
        self._oldest = min((row.born - row.head for row in self._live), default=0)
        return kept

    def blocks(self) -> list[Block]:
        """Every tensor whole; see Generator.blocks."""
        self.wake("weights")
        weights = self._forward.weights.items()
        result = []
        for name, tensor in weights:
            result.append((name, tensor, Box.of_shape(tensor.shape)))
        return result

    def renew(self, version: int) -> None:
        """See Generator.renew: what is parked is forgotten."""
        self.forget({row.conversation for row in self._parked})
        self.weights_version = version

    def hashes(self) -> dict[str, int]:
        """Hashes of the tensors that the forward reads."""
        self.wake("weights")
        weights = self._forward.weights.items()
        return read_sums({name: box_sum(x, Box.of_shape(x.shape)) for name, x in weights})

    def sleep(self, *, weights: bool = False) -> None:
        """Free the KV cache, and the weights if asked."""
        self._release()
        if weights and self._asleep is None:
            self._asleep = Storages(self._forward.weights.values())
            self._asleep.free()
            self.weights_version = NEVER

    def wake(self, part: WakePart | None = None) -> None:
        """Reallocate the weights; the next batch allocates its own cache."""
        if self._asleep is not None and part != "kv_cache":
            self._asleep.restore()
            self._asleep = None

    def close(self) -> None:
        """Free the KV cache; the weights go with the object."""
        self._release()

    def _release(self) -> None:
        self._forward.release()
        self._parked = []


def _chunks(sizes: list[int]) -> Iterator[slice]:
    """Consecutive rows of these sizes, of about _PREFILL_TOKENS tokens with their padding."""
    start = 0
    while start < len(sizes):
        longest = 0
        end = start
        while end < len(sizes) and (end - start + 1) * longest <= _PREFILL_TOKENS:
            longest = max(longest, sizes[end])
            end += 1
        yield slice(start, end)
        start = end
