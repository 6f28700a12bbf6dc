"""The built-in generator: rows decoded together over a KV cache, on a copy of the full weights.

At most `max_batch_size` rows are decoded together. New rows join once enough rows have ended
(continuous batching, Yu et al. 2022). Samples of one prompt are prefilled once. A row of a
conversation is parked when it ends: it keeps its keys and values for the next request that begins
with its tokens, and only the new tokens are computed. Each conversation has at most one parked row.
Parked rows count towards `max_batch_size`, and the oldest are evicted first. On a CPU without stop
strings, the host checks after every token which rows have ended, otherwise after every few tokens.
Until the check, an ended row is still decoded, and those tokens are dropped. No inference engine is
needed; the forward pass is in rollout.forward.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import count

import torch
from torch import Tensor

from spmdflow.blocks.box import Box
from spmdflow.blocks.hash import box_sum, read_sums
from spmdflow.config.schema import RolloutConfig
from spmdflow.cpu.parked import ParkedRow, find_parked, newest_parked, order_rows
from spmdflow.data.shared_prompt import prefill_passes
from spmdflow.kind.generator import PREFILL_TOKENS, REFILL
from spmdflow.rollout.forward import Routing, end_tokens, forward_of
from spmdflow.rollout.generator import (
    NEVER,
    Finished,
    Replica,
    Request,
    RequestGenerator,
    WakePart,
    loads_folder,
    no_routes_error,
)
from spmdflow.rollout.grammar import GuidedRows
from spmdflow.rollout.live_rows import LiveRow, LiveRows, with_prompt_routes
from spmdflow.rollout.sampling import draw
from spmdflow.router import Routers, as_column
from spmdflow.weights.move import Block, Storages

_CHECK_EVERY = 8
"""Tokens between two checks for ended rows, where a check waits for the device or decodes text."""


class BuiltinGenerator(RequestGenerator):
    """Generator on a cached forward pass. rollout.generator.Generator documents its guarantees."""

    is_guided = True

    def __init__(self, cfg: RolloutConfig, model_path: str, device: torch.device) -> None:
        """Builds the forward pass of the model folder. The KV cache is allocated on first use."""
        self.weights_version = NEVER
        self.dtype = getattr(torch, cfg.precision)
        self.device = device
        self.replica = Replica.alone()
        self.has_folder_weights = loads_folder(model_path)
        """False: all weights are zeros until a sync, or until `take_folder_weights` reads them."""
        self._forward = forward_of(
            model_path, dtype=self.dtype, device=device, empty=not self.has_folder_weights
        )
        self._max_batch_size = cfg.max_batch_size
        # max_batch_size=1 decodes each row alone, for bits that depend on no other row: no parking
        self._parks = self._forward.parks and cfg.max_batch_size > 1
        self._routing: Routing | None = None
        """Set if the experts of the tokens are returned."""
        self._asleep: Storages | None = None
        self._end_tokens = torch.tensor(end_tokens(model_path), dtype=torch.int64, device=device)
        self._guided = GuidedRows(end_tokens(model_path))
        self._ids = count()
        self._clock = 0
        self._oldest = 0
        self._slots = 0
        self._waiting: list[tuple[int, Request]] = []
        self._parked: list[ParkedRow] = []
        """The first rows of the cache. The rows of self._live follow."""
        self._live: list[LiveRow] = []
        self._rows: LiveRows  # same order as self._live and self._logits
        self._logits: Tensor

    @property
    def _routers(self) -> Routers | None:
        return None if self._routing is None else self._routing.routers

    @property
    def max_positions(self) -> int:
        """Context length of the model, in tokens."""
        return self._forward.max_positions

    def return_routes(self) -> None:
        """See RequestGenerator.return_routes."""
        if self._forward.routing is None:
            raise no_routes_error(self)
        self._routing = self._forward.routing
        self._routing.routers.records = True

    def own_routes(self, num_tokens: int) -> Tensor | None:
        """See RequestGenerator.own_routes."""
        if self._routing is None:
            return None
        routers = self._routing.routers
        return as_column(routers.own_routes(num_tokens), routers.num_experts)

    def add(self, request: Request) -> int:
        """Queues a request for the next `step` and returns its id.

        Errors as in RequestGenerator.add.
        """
        others = [row.request for row in self._live[:1]] + [r for _, r in self._waiting[:1]]
        self.admit(request, others)
        self._waiting.append((next(self._ids), request))
        return self._waiting[-1][0]

    def abort(self, request_id: int) -> Finished | None:
        """Drops a request that waits or is being decoded, and returns its tokens so far.

        Returns an empty response for a request that waits, and None if there is no request with
        this id (it has ended). The cache row is freed, not parked.
        """
        for pair in self._waiting:
            if pair[0] == request_id:
                self._waiting.remove(pair)
                return Finished(request_id, torch.zeros(0, dtype=torch.int64), torch.zeros(0))
        for index, row in enumerate(self._live):
            if row.id == request_id:
                size = int(self._rows.counts[index])
                drawn = self._to_finished(self._rows, row, index, size)
                with torch.inference_mode():
                    self._remove_rows({index: 0})
                return drawn
        return None

    def forget(self, conversations: Collection[int]) -> None:
        """Drops the parked rows of these conversations and compacts the KV cache.

        Rows that are being decoded stay, also those of these conversations.
        """
        parked = {}
        for r, x in enumerate(self._parked):
            if x.conversation not in conversations:
                parked[r] = x
        if len(parked) < len(self._parked):
            with torch.inference_mode():
                self._compact(parked, self._live_indices())

    def step(self) -> list[Finished]:
        """Draws tokens for all rows and returns the responses that have ended, possibly none.

        Waiting requests join first, if 1/8 of the rows are free or no row is being decoded (only in
        the latter case if the forward pass cannot add rows). Draws up to 8 tokens per row before it
        looks for ended rows (`_draws_per_check`). An ended row of a conversation is parked.
        Reallocates freed weights first.
        """
        self.wake()
        with torch.inference_mode():
            free = self._max_batch_size - len(self._live)
            enough = self._forward.refills and free * REFILL >= self._max_batch_size
            if self._waiting and (enough or not self._live):
                self._refill(free)
            if not self._live:
                return []
            remaining = max(row.joined_at + row.limit for row in self._live) - self._clock
            draws = min(self._draws_per_check(), remaining)
            for number in range(draws):
                chosen = self._draw_tokens()
                if number + 1 < draws:
                    self._advance(chosen)
            counts = self._counts_of_ended(draws)
            ended = []
            for index, size in counts.items():
                ended.append((self._live[index], index, size))
            rows = self._rows
            if counts:
                chosen = chosen[self._remove_rows(counts)]
            if self._live:
                self._advance(chosen)
        result = []
        for row, index, size in ended:
            result.append(self._to_finished(rows, row, index, size))
        return result

    def _to_finished(self, rows: LiveRows, row: LiveRow, index: int, size: int) -> Finished:
        """The response of a row that leaves: its first `size` tokens and what is known of them."""
        finished = rows.to_finished(row, index, size, self._routers)
        return replace(finished, notes=self._guided.take(row.id, size))

    def tokens_so_far(self, request_ids: Sequence[int]) -> list[list[int]]:
        """See RequestGenerator.tokens_so_far."""
        drawn = {}
        for index, row in enumerate(self._live):
            if row.id in request_ids:
                drawn[row.id] = self._rows.tokens[index, : int(self._rows.counts[index])].tolist()
        return [drawn.get(number, []) for number in request_ids]

    def _draws_per_check(self) -> int:
        """Return how many tokens each row gets before ended rows are looked for.

        One on a CPU without stop strings, where the check costs nothing. One also where an ended
        row is to be parked and cannot be truncated, so that it must not be decoded any further.
        """
        if self.device.type == "cpu" and not self._have_stops():
            return 1
        if self._parks and not self._forward.truncates:
            if any(row.request.conversation is not None for row in self._live):
                return 1
        return _CHECK_EVERY

    def _have_stops(self) -> bool:
        """Whether any row that is being decoded has stop strings."""
        return any(row.request.sampling.stop for row in self._live)

    def _refill(self, free: int) -> None:
        """Moves the first `free` waiting requests into the batch and computes their prompts' cache.

        Requests with equal prompts are prefilled once. If a request's conversation has a parked row
        that begins like the prompt, the row is continued and only the other tokens are computed.
        Parked rows of other conversations are evicted to make room, the oldest first. A parked row
        whose conversation has a new request that cannot continue it is dropped.
        """
        admitted = self._waiting[:free]
        self._waiting = self._waiting[free:]
        turns = []
        for _, request in admitted:
            turns.append((request.conversation, request.prompt))
        parked_rows = find_parked(self._parked, turns)
        resumed: dict[int, LiveRow] = {}
        groups: dict[bytes, list[LiveRow]] = {}
        for index, (request_id, request) in enumerate(admitted):
            if index in parked_rows:
                head = len(request.prompt) - self._parked[parked_rows[index]].num_shared
                resumed[parked_rows[index]] = LiveRow(request_id, request, self._clock, head)
            else:
                key = request.prompt.numpy().tobytes()
                groups.setdefault(key, []).append(LiveRow(request_id, request, self._clock))
        waiting = list(groups.values())
        rows = [*self._live, *resumed.values(), *(row for group in waiting for row in group)]
        self._slots = max(row.num_own_tokens + row.limit for row in rows)
        if self._parked:
            busy = {request.conversation for _, request in admitted}
            idle = []
            for n, row in enumerate(self._parked):
                if row.conversation not in busy:
                    idle.append(n)
            room = self._max_batch_size - len(rows)
            self._resume_parked(resumed, newest_parked(self._parked, idle, room))
        self._forward.reserve(len(self._parked) + len(rows), self._slots)
        sizes = [len(group[0].request.prompt) for group in waiting]
        for chunk in prefill_passes(sizes, PREFILL_TOKENS):
            self._prefill(waiting[chunk])

    def _resume_parked(self, resumed: dict[int, LiveRow], idle: list[int]) -> None:
        """Continues parked rows with new requests, and drops all other parked rows except `idle`.

        resumed: index of a parked row -> its new request. Only the tokens that the row does not
        have yet are computed, and the row becomes a live one. idle: indices of the rows that stay
        parked.
        """
        before = self._parked
        rows = list(resumed)
        live = list(resumed.values())
        self._forward.reserve(0, self._slots)
        sizes = [len(row.request.prompt) for row in live]
        for chunk in prefill_passes(sizes, PREFILL_TOKENS):
            pairs = []
            for row in rows[chunk]:
                pairs.append((before[row], resumed[row].request))
            known = []
            for parked, request in pairs:
                known.append(parked.num_known(request.prompt))
            new_tokens = []
            for (_, r), size in zip(pairs, known, strict=True):
                new_tokens.append(r.prompt[size:])
            logits = self._forward.extend(rows[chunk], new_tokens, known)
            self._append_rows(with_prompt_routes(live[chunk], pairs, known, self._routing), logits)
        still_parked = {row: before[row] for row in idle}
        if len(still_parked) < len(before):
            first = len(self._live) - len(rows)
            self._compact(
                still_parked,
                self._live_indices(first) | dict(zip(rows, range(first, len(self._live)))),
            )

    def _prefill(self, groups: list[list[LiveRow]]) -> None:
        """Prefills the prompt of each group once, and appends one live row per member of the group.

        A group is a list of requests with equal prompts.
        """
        source = []
        for index, group in enumerate(groups):
            for _ in group:
                source.append(index)
        prompts = [group[0].request.prompt for group in groups]
        logits = self._forward.prefill(prompts, source)
        rows = []
        for index, group in enumerate(groups):
            for row in group:
                if self._routing is not None:
                    row = replace(row, prompt_routes=self._routing.of_prompts[index])
                rows.append(row)
        self._append_rows(rows, logits)

    def _append_rows(self, new: list[LiveRow], logits: Tensor) -> None:
        """Appends new live rows to self._live, self._rows and self._logits.

        logits (len(new), V): after the prompts. The rows start with no drawn tokens and running =
        True.
        """
        for row in new:
            self._guided.add(
                row.id,
                row.request.sampling,
                row.request.prompt,
                num_drawn=row.request.num_drawn,
                vocab_size=logits.shape[-1],
            )
        rows = LiveRows.begin(new, self._routers, self.device)
        if self._live:
            rows = self._rows.join(rows)
            logits = torch.cat([self._logits, logits])
        self._rows = rows
        self._logits = logits
        self._live += new
        self._oldest = min(row.joined_at - row.num_own_tokens for row in self._live)

    def _draw_tokens(self) -> Tensor:
        """Draws one token for every row, also for ended ones, and returns the tokens (n,).

        Writes tokens and log-probabilities into self._rows. The count of a running row grows by
        one; an ended row overwrites the slot after its last token. A row stops running after an end
        token, at its limit, or if its log-probability is nan. Advances the clock by one.
        """
        rows = self._rows
        sampling = self._live[0].request.sampling
        positions = rows.drawn + rows.counts
        chosen, log_probs = draw(self._logits, sampling, rows.seeds, positions)
        if self._guided:
            chosen, log_probs = self._guided.redraw(
                self._running_ids(),
                self._logits,
                sampling,
                rows.seeds,
                positions,
                (chosen, log_probs),
            )
        rows.record(chosen, log_probs, self._end_tokens)
        self._clock += 1
        return chosen

    def _running_ids(self) -> list[int | None]:
        """The id of each row that is being decoded; None for one that has ended."""
        running = zip(self._live, self._rows.running.tolist(), strict=True)
        return [row.id if runs else None for row, runs in running]

    def _advance(self, chosen: Tensor) -> None:
        """Runs the forward pass on these tokens (n,) and sets self._logits (n, V) to its result.

        An ended row overwrites its last cache slot.
        """
        rows = self._rows
        positions = rows.starts + rows.counts - 1
        span = min(self._clock - self._oldest, self._slots)  # the oldest row may have ended
        self._logits = self._forward.step(chosen, positions, span)
        if self._routing is not None:
            indices = torch.arange(len(chosen), device=chosen.device)
            rows.routes[indices, rows.counts - 1] = self._routing.of_tokens

    def _counts_of_ended(self, draws: int) -> dict[int, int]:
        """Returns index in self._live -> number of response tokens, for each row that has ended.

        A row has ended if it no longer runs, or if one of its last `draws` tokens completed a stop
        string. It then ends with the first token that did so, and later tokens do not count. draws:
        number of tokens drawn since the last check.
        """
        rows = self._rows
        have_stops = self._have_stops()
        if not have_stops and bool(rows.running.all()):
            return {}
        counts = rows.counts.tolist()
        running = rows.running.tolist()
        ended = {}
        for index, runs in enumerate(running):
            if not runs:
                ended[index] = counts[index]
        if have_stops:
            responses = []
            for row, tokens, size in zip(self._live, rows.tokens.tolist(), counts, strict=True):
                num_checked = max(0, self._clock - draws - row.joined_at)
                responses.append((row.request, tokens[:size], num_checked))
            for index, end in enumerate(self.find_stops(responses)):
                if end is not None:
                    ended[index] = end
        return ended

    def _remove_rows(self, ended: dict[int, int]) -> Tensor:
        """Removes ended rows from the batch and parks those that belong to a conversation.

        ended: index in self._live -> number of response tokens; 0 for an aborted row, which is not
        parked. A parked row has the prompt and the response without its last token, whose keys and
        values were never computed. Returns the old indices of the remaining live rows, in their new
        order.
        """
        parked = dict(enumerate(self._parked))
        live = self._live_indices()
        for row, index in list(live.items()):
            if index not in ended:
                continue
            del live[row]
            size = ended[index]
            if size and self._can_park(self._live[index], size):
                parked[row] = self._rows.to_parked(
                    self._live[index], index, size, self._clock, self._forward.truncates
                )
        return self._compact(parked, live)

    def _can_park(self, row: LiveRow, size: int) -> bool:
        """Whether a row that ends with `size` response tokens can wait for the next turn.

        Where a row cannot be truncated, its last token must be the last one that was drawn.
        """
        exact = self._clock - row.joined_at == size
        fits = self._forward.truncates or exact
        return self._parks and fits and row.request.conversation is not None

    def _live_indices(self, num_rows: int | None = None) -> dict[int, int]:
        """Returns cache row -> index in self._live, for the first `num_rows` live rows (None: all).

        In the cache, the live rows follow the parked ones.
        """
        indices = range(len(self._live))[:num_rows]
        result = {}
        for index in indices:
            result[len(self._parked) + index] = index
        return result

    def _compact(self, parked: dict[int, ParkedRow], live: dict[int, int]) -> Tensor:
        """Compacts the KV cache and the state to these rows: first parked rows, then live ones.

        parked: cache row -> parked row. live: cache row -> index in self._live. All other rows are
        dropped. A row keeps its index where possible; rows that move fill the gaps. Updates
        self._parked, self._live, self._rows and self._logits. Returns the old indices of the live
        rows, in their new order.
        """
        order = order_rows(list(parked), list(live))
        count = len(parked)
        self._forward.keep(order, count)
        self._parked = [parked[row] for row in order[:count]]
        indices = [live[row] for row in order[count:]]
        selection = torch.tensor(indices, dtype=torch.int64, device=self.device)
        self._rows = self._rows.pick(selection)
        self._logits = self._logits[selection]
        self._live = [self._live[index] for index in indices]
        self._oldest = min((row.joined_at - row.num_own_tokens for row in self._live), default=0)
        return selection

    def blocks(self) -> list[Block]:
        """Returns (Hugging Face name, live tensor, box of the complete tensor) of every weight.

        Reallocates freed weights first.
        """
        self.wake("weights")
        weights = self._forward.weights.items()
        result = []
        for name, tensor in weights:
            result.append((name, tensor, Box.of_shape(tensor.shape)))
        return result

    def renew(self, version: int) -> None:
        """See Generator.renew. Parked rows are dropped: the old weights computed them."""
        self.forget({row.conversation for row in self._parked})
        self._forward.renew()
        self.weights_version = version

    def hashes(self) -> dict[str, int]:
        """Hashes of the tensors that the forward reads."""
        self.wake("weights")
        weights = self._forward.weights.items()
        return read_sums({name: box_sum(x, Box.of_shape(x.shape)) for name, x in weights})

    def sleep(self, *, weights: bool = False) -> None:
        """Frees the KV cache and drops the parked rows; with `weights`, frees the weights too.

        Once the weights are freed, weights_version is NEVER: they must be synced again.
        """
        self._release()
        if weights and self._asleep is None:
            self._asleep = Storages(self._forward.weights.values())
            self._asleep.free()
            self._forward.renew()
            self.weights_version = NEVER

    def wake(self, part: WakePart | None = None) -> None:
        """Reallocate the weights; the next batch allocates its own cache."""
        if self._asleep is not None and part != "kv_cache":
            self._asleep.restore()
            self._asleep = None

    def close(self) -> None:
        """Frees the KV cache. The weights are freed with the object."""
        self._release()

    def _release(self) -> None:
        self._forward.release()
        self._parked = []
