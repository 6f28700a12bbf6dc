"""A server and a row as a rank sees them, and what a fleet is told and counts. Plain records."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass, field, replace

import torch

from spmdflow.config.schema import RolloutConfig
from spmdflow.datasets.tokenizer import StopStrings
from spmdflow.rollout.generator import NEVER, Finished, Request
from spmdflow.serving.client import ServerClient, ServerFacts
from spmdflow.serving.link import UpdateLink
from spmdflow.serving.roster import RosterEntry

READY = "ready"
STARTING = "starting"
SYNCING = "syncing"
SLOW = "slow"
DEAD = "dead"
REFUSED = "refused"


@dataclass(frozen=True)
class FleetSettings:
    """Limits of a fleet, from actor.rollout.server."""

    health_seconds: float
    """Limit of an answer to "who are you", and the time between two of them."""
    stall_seconds: float
    """A row without new tokens for so long goes to another server."""
    transfer_seconds: float
    """Limit of each message of an update, and of the switch."""
    wait_seconds: float
    """Longest time without any server."""
    transport: str
    is_exact: bool
    """Rows that move begin again; otherwise they go on after the tokens that have arrived."""
    takes_any_sampler: bool
    """Servers without row noise are used too (rollout.sampler=server)."""

    @classmethod
    def from_config(cls, cfg: RolloutConfig) -> FleetSettings:
        """The limits that the settings of a rollout give."""
        server = cfg.server
        return cls(
            health_seconds=server.health_seconds,
            stall_seconds=server.stall_seconds,
            transfer_seconds=server.transfer_seconds,
            wait_seconds=server.wait_seconds,
            transport=server.transport,
            is_exact=server.exact,
            takes_any_sampler=cfg.sampler == "server",
        )


@dataclass(frozen=True)
class Identity:
    """What a server must have."""

    model: str
    tokenizer: str
    dtype: str
    longest_row: int
    """Tokens of the longest prompt and response together."""

    def difference(self, facts: ServerFacts, settings: FleetSettings) -> str | None:
        """Why a server with these facts must not be used, or None."""
        pairs = (
            ("model", facts.model, self.model),
            ("tokenizer", facts.tokenizer, self.tokenizer),
            ("precision", facts.dtype, self.dtype),
        )
        for name, got, expected in pairs:
            if got != expected:
                return f"another {name}: got {got or 'none'}, expected {expected or 'none'}"
        if facts.max_model_len < self.longest_row:
            return f"room for {facts.max_model_len} tokens a row, expected {self.longest_row}"
        if not facts.row_noise and not settings.takes_any_sampler:
            return "no row noise: start it with spmdflow serve, or set actor.rollout.sampler=server"
        if settings.is_exact and (facts.max_num_seqs != 1 or facts.prefix_caching):
            return (
                f"{facts.max_num_seqs} rows at a time, prefix caching {facts.prefix_caching}; "
                f"exact mode needs one row and none: start it with --max-batch-size 1"
            )
        return None


@dataclass
class FleetCounters:
    """What has happened since the fleet exists."""

    moved_rows: int = 0
    """Rows that were taken from a server that failed."""
    recomputed_tokens: int = 0
    """Tokens, of prompts and responses, that another server had to compute again."""
    wrong_answers: int = 0
    deaths: int = 0
    """Servers that were ready, and then failed."""
    updates: int = 0
    full_updates: int = 0
    update_bytes: int = 0
    lost_updates: int = 0
    """Updates after which a server had other weights than it should."""
    waiting_seconds: float = 0.0
    """Time in which rows waited and no server was ready."""
    update_seconds: float = 0.0
    """Of the longest update."""
    switch_seconds: float = 0.0
    """Of the longest switch: the part of an update in which a server generates nothing."""


@dataclass
class FleetRow:
    """A row that is to be generated."""

    id: int
    request: Request
    stop: StopStrings | None
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    num_nan: int = 0
    task: asyncio.Task[None] | None = None
    group: tuple[int, ...] = ()
    """Its prompt, by which the length of its response is guessed."""

    def next_request(self, *, is_exact: bool) -> Request:
        """The request for the tokens that are missing."""
        if is_exact or not self.tokens:
            return self.request
        request = self.request
        drawn = torch.tensor(self.tokens, dtype=torch.int64)
        left = request.sampling.max_new_tokens - len(self.tokens)
        return replace(
            request,
            prompt=torch.cat([request.prompt, drawn]),
            sampling=replace(request.sampling, max_new_tokens=left),
            num_drawn=request.num_drawn + len(self.tokens),
        )

    def is_complete(self, ends: Collection[int]) -> bool:
        """Whether its last token has arrived. ends: token ids that end a response."""
        is_long = len(self.tokens) >= self.request.sampling.max_new_tokens
        return is_long or (len(self.tokens) > 0 and self.tokens[-1] in ends)

    def to_finished(self) -> Finished:
        """Its tokens so far."""
        tokens = torch.tensor(self.tokens, dtype=torch.int64)
        return Finished(self.id, tokens, torch.tensor(self.log_probs, dtype=torch.float32))


@dataclass
class Server:
    """A server as this rank sees it."""

    client: ServerClient
    entry: RosterEntry
    is_own: bool
    """Whether this rank brings it its weights."""
    state: str = STARTING
    reason: str = ""
    instance: str = ""
    version: int = NEVER
    capacity: int = 1
    rows: dict[int, FleetRow] = field(default_factory=dict)
    """Rows that it generates for this rank, by id."""
    num_tokens: int = 0
    """Drawn for this rank."""
    last_token: float = float("-inf")
    """Time (monotonic) of the last token for this rank."""
    recomputed_tokens: int = 0
    """Of rows that it lost, which others computed again."""
    restarts: int = 0
    failures: int = 0
    """In a row."""
    wrong_answers: int = 0
    """In a row."""
    until: float = 0.0
    """Time (monotonic) before which it is not asked again."""
    link: UpdateLink | None = None
    task: asyncio.Task[None] | None = None
    """It looks after the server."""
    wake: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def url(self) -> str:
        """Its address."""
        return self.client.url
