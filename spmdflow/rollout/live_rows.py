"""The rows that the built-in generator decodes: their requests, and their state on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from spmdflow.cpu.parked import ParkedRow
from spmdflow.rollout.forward import Routing
from spmdflow.rollout.generator import Finished, Request
from spmdflow.router import OWN_CHOICE, Routers, as_column


@dataclass(frozen=True)
class LiveRow:
    """A request that is being decoded."""

    id: int
    request: Request
    joined_at: int
    """The generator's clock (number of draws so far) when the request joined."""
    num_own_tokens: int = 0
    """Prompt tokens in the row's own cache slots, after the shared prefix."""
    prompt_routes: Tensor | None = None
    """(P, layers, k): the experts of the prompt's tokens. None: they are not returned."""

    @property
    def limit(self) -> int:
        """Maximum number of tokens of the response."""
        return self.request.sampling.max_new_tokens


@dataclass
class LiveRows:
    """State of the rows being decoded, on the device. Each tensor is (n,) or (n, N + 1, ...), where
    N is the largest response limit."""

    starts: Tensor
    """Prompt lengths."""
    seeds: Tensor
    limits: Tensor
    drawn: Tensor
    """Response tokens drawn before this request (see Request.num_drawn)."""
    counts: Tensor
    """Tokens drawn so far. Constant once the row has ended."""
    running: Tensor
    """False once the last token is drawn."""
    tokens: Tensor
    """Drawn tokens. An ended row keeps overwriting the slot after its last token."""
    log_probs: Tensor
    routes: Tensor
    """(n, N + 1, layers, k) int16: the experts of each drawn token; no layers if not returned."""

    @classmethod
    def begin(
        cls, rows: Sequence[LiveRow], routers: Routers | None, device: torch.device
    ) -> LiveRows:
        """The state of rows before their first token is drawn. routers: if their experts are
        returned."""
        facts = []
        for r in rows:
            facts.append((len(r.request.prompt), r.request.seed, r.limit, r.request.num_drawn, 0))
        starts, seeds, limits, drawn, counts = torch.tensor(facts, device=device).T
        size = len(rows)
        width = max(row.limit for row in rows) + 1
        if routers is None:
            routes = torch.zeros(size, width, 0, 0, dtype=torch.int16, device=device)
        else:
            own = routers.own_routes(size * width).to(device)
            routes = own.view(size, width, *own.shape[1:])
        return cls(
            starts,
            seeds,
            limits,
            drawn,
            counts,
            torch.ones(size, dtype=torch.bool, device=device),
            torch.zeros(size, width, dtype=torch.int64, device=device),
            torch.zeros(size, width, device=device),
            routes,
        )

    def to_finished(self, row: LiveRow, index: int, size: int, routers: Routers | None) -> Finished:
        """Copy the first `size` tokens of the row at this index into a finished response."""
        routes = None
        if row.prompt_routes is not None and routers is not None:
            routes = torch.cat([row.prompt_routes, self.routes[index, :size]])
            routes[-1] = OWN_CHOICE  # the last token was never read
            routes = as_column(routes, routers.num_experts)
        tokens = self.tokens[index, :size]
        log_probs = self.log_probs[index, :size]
        return Finished(row.id, tokens.clone(), log_probs.clone(), routes)

    def record(self, chosen: Tensor, log_probs: Tensor, end_tokens: Tensor) -> None:
        """Writes one drawn token (n,) and its log-probability (n,) for every row.

        The count of a running row grows by one. A row stops running after an end token, at its
        limit, or if its log-probability is nan.
        """
        self.tokens.scatter_(1, self.counts[:, None], chosen[:, None])
        self.log_probs.scatter_(1, self.counts[:, None], log_probs[:, None])
        self.counts += self.running
        self.running &= torch.isin(chosen, end_tokens, invert=True)
        self.running &= self.counts < self.limits
        self.running &= log_probs.isnan().logical_not_()  # ends at once: `check_drawn` refuses it

    def to_parked(
        self, row: LiveRow, index: int, size: int, clock: int, truncates: bool
    ) -> ParkedRow:
        """The prompt of the row at this index and its response of `size` tokens without the last
        one, which was never read. clock, truncates: see ParkedRow."""
        prompt = row.request.prompt
        assert row.request.conversation is not None
        ids = torch.cat([prompt, self.tokens[index, : size - 1].cpu()])
        routes = None
        if row.prompt_routes is not None:
            routes = torch.cat([row.prompt_routes, self.routes[index, : size - 1]])
        shared = len(prompt) - row.num_own_tokens
        return ParkedRow(row.request.conversation, shared, ids, clock, routes, truncates)

    def pick(self, rows: Tensor) -> LiveRows:
        """The state of the rows with these indices, in this order."""
        return LiveRows(*(value[rows] for value in vars(self).values()))

    def join(self, other: LiveRows) -> LiveRows:
        """Returns these rows followed by the rows of `other`.

        Tensors of N + 1 entries for each row are padded with zeros to the larger N.
        """
        width = max(self.tokens.shape[1], other.tokens.shape[1])
        joined = []
        for pair in zip(vars(self).values(), vars(other).values(), strict=True):
            joined.append(torch.cat([_widen(x, width) for x in pair]))
        return LiveRows(*joined)


def with_prompt_routes(
    rows: Sequence[LiveRow],
    pairs: Sequence[tuple[ParkedRow, Request]],
    known: Sequence[int],
    routing: Routing | None,
) -> list[LiveRow]:
    """Continued rows with the experts of their prompts' tokens, if experts are returned.

    pairs: the parked row that each continues, and its request. known: tokens of the prompt that the
    parked row had; the last pass has computed the others. routing: None: experts are not returned.
    """
    if routing is None:
        return list(rows)
    result = []
    computed = zip(rows, pairs, known, routing.of_prompts, strict=True)
    for row, (parked, _), size, more in computed:
        assert parked.routes is not None
        result.append(replace(row, prompt_routes=torch.cat([parked.routes[:size], more])))
    return result


def _widen(x: Tensor, width: int) -> Tensor:
    """Pad (n, N, ...) with zeros to (n, width, ...). A tensor (n,) is returned as it is."""
    if x.ndim == 1:
        return x
    behind = (0, 0) * (x.ndim - 2)
    return F.pad(x, (*behind, 0, width - x.shape[1]))
