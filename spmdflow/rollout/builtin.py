"""The built-in generator: rows decoded together over a KV cache, on a copy of the full weights.

At most `max_batch_size` rows are decoded together. Rows that have ended leave, and others take
their place once enough have (continuous batching, Yu et al. 2022). Samples of one prompt are
prefilled once. The host checks which rows have ended after every token on a CPU without stop
strings, else after every few; until then an ended row is decoded on, and those tokens are dropped.
Needs no inference engine; the forward pass is in rollout.forward.
"""

from __future__ import annotations

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
        self.device, self.replica = device, Replica.alone()
        self.has_folder_weights = loads_folder(model_path)
        """False: all are zeros until they are synced, or read by `take_folder_weights`."""
        self._forward = forward_of(
            model_path, dtype=self.dtype, device=device, empty=not self.has_folder_weights
        )
        self._max_batch_size = cfg.max_batch_size
        self._asleep: Storages | None = None
        self._end_tokens = torch.tensor(end_tokens(model_path), dtype=torch.int64, device=device)
        self._ids, self._clock, self._oldest, self._slots = count(), 0, 0, 0
        self._waiting: list[tuple[int, Request]] = []
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

    def abort(self, request_id: int) -> None:
        """See RequestGenerator.abort."""
        self._waiting = [pair for pair in self._waiting if pair[0] != request_id]
        ended = [place for place, row in enumerate(self._live) if row.id == request_id]
        if ended:
            with torch.inference_mode():
                self._leave(ended)

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
            ended = [(self._live[place], place, size) for place, size in counts.items()]
            rows = self._rows
            if counts:
                chosen = chosen[self._leave(list(counts))]
            if self._live:
                self._advance(chosen)
        return [
            Finished(
                row.id, rows.tokens[place, :size].clone(), rows.log_probs[place, :size].clone()
            )
            for row, place, size in ended
        ]

    def _refill(self, free: int) -> None:
        """Prefill waiting requests, as many as there are free rows; samples of a prompt once."""
        coming, self._waiting = self._waiting[:free], self._waiting[free:]
        requests = [row.request for row in self._live] + [request for _, request in coming]
        self._slots = max(request.sampling.max_new_tokens for request in requests)
        self._forward.reserve(len(requests), self._slots)
        groups: dict[bytes, list[_Live]] = {}
        for request_id, request in coming:
            key = request.prompt.numpy().tobytes()
            groups.setdefault(key, []).append(_Live(request_id, request, self._clock))
        waiting = list(groups.values())
        while waiting:
            longest, most = 0, 0
            while most < len(waiting) and (most + 1) * longest <= _PREFILL_TOKENS:
                longest, most = max(longest, len(waiting[most][0].request.prompt)), most + 1
            self._join(waiting[:most])
            waiting = waiting[most:]

    def _join(self, groups: list[list[_Live]]) -> None:
        """Prefill the rows of some prompts, and append them to those being decoded."""
        new = [row for group in groups for row in group]
        source = [place for place, group in enumerate(groups) for _ in group]
        facts = [(len(r.request.prompt), r.request.seed, r.limit, 0) for r in new]
        columns = torch.tensor(facts, device=self.device).T
        width = max(row.limit for row in new) + 1
        starts, seeds, limits, counts = columns
        rows = _Rows(
            starts,
            seeds,
            limits,
            counts,
            torch.ones(len(new), dtype=torch.bool, device=self.device),
            torch.zeros(len(new), width, dtype=torch.int64, device=self.device),
            torch.zeros(len(new), width, device=self.device),
        )
        logits = self._forward.prefill(
            [group[0].request.prompt for group in groups],
            source,
        )
        if self._live:
            rows, logits = self._rows.join(rows), torch.cat([self._logits, logits])
        self._rows, self._logits = rows, logits
        self._live += new
        self._oldest = min(row.born for row in self._live)

    def _draw(self) -> Tensor:
        """Draw one token (n,) for every row, and record it."""
        rows, sampling = self._rows, self._live[0].request.sampling
        chosen, log_probs = draw(self._logits, sampling, rows.seeds, rows.counts)
        rows.tokens.scatter_(1, rows.counts[:, None], chosen[:, None])
        rows.log_probs.scatter_(1, rows.counts[:, None], log_probs[:, None])
        rows.counts += rows.running
        rows.running &= torch.isin(chosen, self._end_tokens, invert=True)
        rows.running &= rows.counts < rows.limits
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
        counts, running = rows.counts.tolist(), rows.running.tolist()
        ended = {place: counts[place] for place, runs in enumerate(running) if not runs}
        if self.stop is not None:
            said = [
                (row.request.prompt.tolist(), tokens[:size], max(0, self._clock - draws - row.born))
                for row, tokens, size in zip(self._live, rows.tokens.tolist(), counts, strict=True)
            ]
            ends = self.stop.first_ends(said)
            ended |= {place: end for place, end in enumerate(ends) if end is not None}
        return ended

    def _leave(self, ended: list[int]) -> Tensor:
        """Drop these rows; the last ones take their places. Gives the old indices of the rest."""
        size, gone = len(self._live) - len(ended), set(ended)
        movers = (place for place in range(size, len(self._live)) if place not in gone)
        order = [next(movers) if place in gone else place for place in range(size)]
        self._forward.keep(order)
        kept = torch.tensor(order, dtype=torch.int64, device=self.device)
        self._rows, self._logits = self._rows.pick(kept), self._logits[kept]
        self._live = [self._live[place] for place in order]
        self._oldest = min((row.born for row in self._live), default=0)
        return kept

    def blocks(self) -> list[Block]:
        """Every tensor whole; see Generator.blocks."""
        self.wake("weights")
        weights = self._forward.weights.items()
        return [(name, tensor, Box.of_shape(tensor.shape)) for name, tensor in weights]

    def renew(self, version: int) -> None:
        """See Generator.renew; no cache outlives a batch."""
        self.weights_version = version

    def hashes(self) -> dict[str, int]:
        """Hashes of the tensors that the forward reads."""
        self.wake("weights")
        weights = self._forward.weights.items()
        return read_sums({name: box_sum(x, Box.of_shape(x.shape)) for name, x in weights})

    def sleep(self, *, weights: bool = False) -> None:
        """Free the KV cache, and the weights if asked."""
        self._forward.release()
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
        self._forward.release()
