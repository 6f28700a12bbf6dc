"""The interface of a generator: prompts in, responses out, weights replaced between calls.

`Replica`: the ranks that hold one copy of the weights and generate the same rows together. Their
process groups are the trainer's (from GroupTable), over strided or contiguous ranks.

`weights_version` is the version of the trainer's weights that the generator has, and NEVER before
the first sync. hybrid_engine.sync compares it with the trainer's version before it generates.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor

from spmdflow.blocks.hash import positional_hash
from spmdflow.config.schema import RolloutConfig
from spmdflow.data.ragged import lengths_of, ragged, ragged_from_rows, rows_of
from spmdflow.datasets.tokenizer import StopStrings, load_tokenizer
from spmdflow.errors import (
    ColumnError,
    ConfigError,
    ProtocolError,
    SpmdflowError,
    WeightSyncError,
)
from spmdflow.kind.generator import generator_kind, generator_names, generators_that_cut
from spmdflow.kind.registry import resolve
from spmdflow.parallel.device import backend_of
from spmdflow.parallel.group import GroupTable
from spmdflow.parallel.layout import Layout
from spmdflow.rollout.grammar import TokenNotes
from spmdflow.rollout.sampling import Sampling
from spmdflow.router import ROUTES
from spmdflow.weights.architecture import Architecture
from spmdflow.weights.folder import folder_tensors, trained_tensors_reader
from spmdflow.weights.move import Block, copy_box
from spmdflow.worker_api.metric import Metric

NEVER = -1
WakePart = Literal["weights", "kv_cache"]


@dataclass(frozen=True)
class Replica:
    """A generation replica as one of its ranks sees it."""

    rank: int
    """Global rank."""
    ranks: tuple[int, ...]
    """Global ranks, ascending: tp fastest, then pp."""
    tp_ranks: tuple[int, ...]
    pp_ranks: tuple[int, ...]
    groups: GroupTable | None = None
    divides_experts: bool = False
    """Whether the tensor-parallel ranks divide whole experts of a mixture, not each expert."""

    @classmethod
    def of(cls, layout: Layout, rank: int, groups: GroupTable) -> Replica:
        """The replica of a global rank under the layout's generation sizes."""
        ranks, tp_ranks, pp_ranks = (
            layout.axis_group(rank, axis) for axis in ("gen_replica", "gen_tp", "gen_pp")
        )
        divides = layout.gen_expert_size > 1
        return cls(rank, ranks, tp_ranks, pp_ranks, groups, divides)

    @classmethod
    def alone(cls) -> Replica:
        """The replica of this rank only. It needs no process group."""
        rank = dist.get_rank() if dist.is_initialized() else 0
        return cls(rank, (rank,), (rank,), (rank,))

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def replica_rank(self) -> int:
        """Index of this rank in `ranks`."""
        return self.ranks.index(self.rank)

    @property
    def tp_size(self) -> int:
        """t_g."""
        return len(self.tp_ranks)

    @property
    def pp_size(self) -> int:
        """p_g."""
        return len(self.pp_ranks)

    @property
    def tp_rank(self) -> int:
        """Rank in the tensor-parallel group."""
        return self.tp_ranks.index(self.rank)

    @property
    def pp_rank(self) -> int:
        """Pipeline stage."""
        return self.pp_ranks.index(self.rank)

    def group(self, ranks: tuple[int, ...], backend: str | None = None) -> dist.ProcessGroup:
        """The process group over some of the replica's ranks. ProtocolError if it does not
        exist."""
        if self.groups is None:
            got = f"ranks {ranks} without process groups"
            do = "build it with Replica.of(layout, rank, groups)"
            raise ProtocolError.of("replica", got, "a GroupTable that has them", do)
        return self.groups.get(ranks, backend=backend)

    def gather(self, values: Tensor, ranks: tuple[int, ...] = ()) -> list[Tensor]:
        """All-gathers a tensor over these ranks (default: all); returns one tensor per rank.

        The result is in the order of the ranks. The tensor has the same shape on all of them, and
        they call this together. For a single rank, returns [values] without communication.
        """
        ranks = ranks or self.ranks
        if len(ranks) == 1:
            return [values]
        gathered = [torch.empty_like(values) for _ in ranks]
        dist.all_gather(gathered, values, group=self.group(ranks, backend_of(values.device)))
        return gathered

    def check_equal(self, what: str, facts: Callable[[], object], device: torch.device) -> None:
        """Checks that `facts()` is equal on all ranks of the replica; all of them call it together.

        Compares an 8-byte hash of repr(facts()). ProtocolError with the ranks that differ from the
        first one. A replica of one rank does nothing. what: names the facts in the error. device:
        of the tensor that is gathered.
        """
        if self.size == 1:
            return
        digest = hashlib.blake2b(repr(facts()).encode(), digest_size=8).digest()
        number = torch.tensor([int.from_bytes(digest, "big", signed=True)], device=device)
        numbers = torch.cat(self.gather(number)).tolist()
        others = []
        for rank, number_of_rank in zip(self.ranks, numbers):
            if number_of_rank != numbers[0]:
                others.append(rank)
        if others:
            got = f"{what} on ranks {others} that differ from rank {self.ranks[0]}"
            expected = f"the same on all ranks {self.ranks} of a generation replica"
            do = "send every rank of a replica the same rows (transfer_mode "
            do += "3D_ALL_MICRO_DP does) and the same weights"
            raise ProtocolError.of("generate", got, expected, do)


@dataclass(frozen=True)
class RunContext:
    """Where a generator is in its run."""

    run_dir: Path | None = None
    """RUN_DIR; None: the generator belongs to no run."""
    rank: int = 0
    """Global rank."""
    ranks: tuple[int, ...] = (0,)
    """Global ranks of its pool."""


@dataclass(frozen=True)
class Request:
    """One response to draw."""

    prompt: Tensor
    """(P,) int64, at least one token."""
    seed: int
    """Below 2**63. The response depends only on the seed, the prompt and the weights."""
    sampling: Sampling
    """Requests that are generated together may differ only in max_new_tokens, stop, grammar and
    top_log_probs."""
    conversation: int | None = None
    """Number of the conversation that this turn belongs to. A later request with the same number,
    whose prompt begins with this prompt and its response, may reuse their keys and values."""
    num_drawn: int = 0
    """Response tokens at the end of the prompt. Random numbers continue after their positions."""


@dataclass(frozen=True)
class Finished:
    """A finished response."""

    id: int
    """The number that `add` returned."""
    tokens: Tensor
    """(n,) int64, including the end token."""
    log_probs: Tensor
    """(n,) float32."""
    routes: Tensor | None = None
    """(P + n, layers, k): the experts of each token of prompt and response, as a column has them
    (`router.as_column`). None: the generator does not return them."""
    notes: TokenNotes | None = None
    """Of a request with a grammar or top_log_probs."""


class Generator(Protocol):
    """One rank's part of a generation replica; the replica holds a full copy of the weights.

    All ranks of a replica make the same calls, with the same arguments, in the same order.
    """

    weights_version: int
    dtype: torch.dtype
    """Precision of the weights. The trainer's weights are rounded to it."""

    def generate(self, prompts: Tensor, sampling: Sampling, seeds: Sequence[int]) -> TensorDict:
        """Responses of B rows, in the order of prompts. Columns: `responses` (ragged int64,
        including the end token), `response_mask` (ragged bool, all True), `rollout_log_probs`
        (ragged float32).

        prompts: ragged int64 (B rows, each of at least one token); seeds: one per row, below
        2**63. A row's response depends on its prompt, its seed and the weights, never on the
        other rows. ConfigError if a prompt and max_new_tokens exceed the model's context.
        """

    def blocks(self) -> Sequence[Block]:
        """(Hugging Face name, live view, its box) of what this rank's forward reads.

        Reallocates freed weights first. A caller that overwrites them sets weights_version to NEVER
        before, and calls `renew` afterwards.
        """

    def renew(self, version: int) -> None:
        """Called after the weights were overwritten in place with this version. Drops everything
        that the old weights computed."""

    def hashes(self) -> dict[str, int]:
        """positional_hash of every complete tensor that the replica reads, by Hugging Face name."""

    def sleep(self, *, weights: bool = False) -> None:
        """Frees the KV cache until `wake`, or until generate needs it.

        weights: free the weights too. The generator then counts as never synced.
        """

    def wake(self, part: WakePart | None = None) -> None:
        """Undoes `sleep` for one part or for all. Freed weights are reallocated, but must be
        synced."""

    def close(self) -> None:
        """Frees all memory."""


class RequestGenerator(ABC):
    """A generator whose rows come and go one by one, with `generate` built on top.

    All ranks of a replica make the same calls in the same order.
    """

    replica: Replica
    device: torch.device
    is_guided = False
    """Whether requests may have a grammar, or ask for the likeliest tokens."""

    def return_routes(self) -> None:
        """From now on return the experts that the model's routers select (`Finished.routes`).

        ConfigError for a generator or a model that has none to return.
        """
        raise no_routes_error(self)

    def own_routes(self, num_tokens: int) -> Tensor | None:
        """A column of routes for tokens that the generator did not read: the trainer's routers
        select for them. None: it returns no routes."""
        return None

    def take_metrics(self) -> Mapping[str, Metric]:
        """Metrics of the generator itself since the last call, such as those of its servers."""
        return {}

    @property
    @abstractmethod
    def max_positions(self) -> int:
        """Maximum number of tokens of a prompt and its response together."""

    @abstractmethod
    def add(self, request: Request) -> int:
        """Accepts a request and returns its id. ConfigError if its sampling settings differ from
        those of the requests being generated, or if it is longer than the model's context."""

    @abstractmethod
    def abort(self, request_id: int) -> Finished | None:
        """Drops a request, so that `step` never returns it. Returns its tokens so far, or None if
        it has ended."""

    def settle(self) -> list[Finished]:
        """Returns responses that have ended and that `step` has not returned yet.

        Called before requests are taken out of the generator. One that must not interrupt a
        response waits here until all of them have ended.
        """
        return []

    def forget(self, conversations: Collection[int]) -> None:  # noqa: B027 not all keep something
        """Frees the keys and values that were retained for these conversations, which have
        ended."""

    @abstractmethod
    def step(self) -> list[Finished]:
        """Draws a few tokens for all requests. Returns the responses that have ended, possibly
        none."""

    def tokens_so_far(self, request_ids: Sequence[int]) -> list[list[int]]:
        """The tokens that have been drawn for each of these requests, which have not ended.

        Empty lists from a generator that knows them only when a response has ended.
        """
        return [[] for _ in request_ids]

    def admit(self, request: Request, others: Sequence[Request]) -> None:
        """Does the checks of `add`.

        ColumnError for an empty prompt. ConfigError if prompt and max_new_tokens exceed the
        context, or if sampling settings that all requests must share (`Sampling.of_batch`) differ
        from those of `others`. others: some of the requests being generated.
        """
        self.check_size(request)
        for other in others:
            if other.sampling.of_batch != request.sampling.of_batch:
                raise ConfigError(
                    f"generate: got {request.sampling} while requests with {other.sampling} are "
                    f"being generated, expected the same apart from max_new_tokens and stop; wait "
                    f"until those have ended"
                )

    def find_stops(self, rows: Sequence[tuple[Request, list[int], int]]) -> list[int | None]:
        """Returns for each row the response's length up to the token that completed a stop string.

        rows: (request, tokens that this generator has drawn, number of them that were checked
        before). None where no string is complete, or the request has none. Tokens that were drawn
        before the request came (`Request.num_drawn`) belong to the response, too.
        """
        places: dict[StopStrings, list[int]] = {}
        for place, (request, _, _) in enumerate(rows):
            stop = stop_strings(request.sampling)
            if stop is not None:
                places.setdefault(stop, []).append(place)
        result: list[int | None] = [None] * len(rows)
        for stop, some in places.items():
            searched = []
            for place in some:
                request, tokens, num_checked = rows[place]
                ids = request.prompt.tolist()
                size = len(ids) - request.num_drawn
                known = num_checked + request.num_drawn
                searched.append((ids[:size], ids[size:] + tokens, known))
            for place, end in zip(some, stop.first_ends(searched), strict=True):
                if end is not None:
                    result[place] = end - rows[place][0].num_drawn
        return result

    def check_size(self, request: Request) -> None:
        """ColumnError for an empty prompt.

        ConfigError if the prompt and its max_new_tokens together exceed max_positions, or for a
        grammar or top_log_probs where the generator is not guided.
        """
        sampling = request.sampling
        if not self.is_guided and (sampling.grammar is not None or sampling.top_log_probs):
            raise ConfigError.of(
                "generate",
                f"a grammar or top_log_probs for {type(self).__name__}",
                "a request without",
                "choose another actor.rollout.engine",
            )
        if not len(request.prompt):
            do = "begin prompts with a bos token"
            raise ColumnError.of("generate", "a prompt of no tokens", "at least 1", do)
        check_room(len(request.prompt), request.sampling, self.max_positions)

    @abstractmethod
    def wake(self, part: WakePart | None = None) -> None:
        """See Generator.wake."""

    def generate(
        self,
        prompts: Tensor,
        sampling: Sampling,
        seeds: Sequence[int],
        limits: Sequence[int] | None = None,
        *,
        conversations: Sequence[int] | None = None,
    ) -> TensorDict:
        """Returns the responses to B prompts in their order, as the columns of Generator.generate.

        Adds all requests, the longest prompts first, and steps until all have ended. All ranks of
        the replica call it together; ProtocolError if their prompts, seeds, settings or drawn
        tokens differ. SpmdflowError if a log-probability is nan.

        limits (B,): max_new_tokens of each response, instead of sampling.max_new_tokens.
        conversations (B,): see Request; all different.
        """
        self.wake()
        samplings = [sampling] * len(seeds)
        if limits is not None:
            samplings = []
            for limit in limits:
                samplings.append(replace(sampling, max_new_tokens=limit))
        shortest = min(samplings, key=lambda one: one.max_new_tokens, default=sampling)
        check_prompts(prompts, shortest, seeds=seeds, max_positions=self.max_positions)
        rows = [row.cpu() for row in rows_of(prompts)]
        self.replica.check_equal(
            "prompts, seeds or settings",
            lambda: ([row.tolist() for row in rows], list(seeds), samplings),
            self.device,
        )
        order = sorted(range(len(rows)), key=lambda row: -len(rows[row]))
        conversation_of: Sequence[int | None] = conversations or [None] * len(rows)
        row_of_request = {}
        for i in order:
            row_of_request[
                self.add(Request(rows[i], seeds[i], samplings[i], conversation_of[i]))
            ] = i
        done: list[Finished | None] = [None] * len(rows)
        while None in done:
            for finished in self.step():
                done[row_of_request[finished.id]] = finished
        tokens, log_probs = (
            torch.cat([getattr(row, name) for row in done] or [torch.zeros(0, dtype=dtype)])
            for name, dtype in (("tokens", torch.int64), ("log_probs", torch.float32))
        )
        self.replica.check_equal("tokens", tokens.tolist, self.device)
        lengths = torch.tensor([len(row.tokens) for row in done if row], dtype=torch.int64)
        columns = response_columns(
            tokens.to(self.device), log_probs.to(self.device), lengths.to(self.device)
        )
        return with_routes(columns, prompts, [row for row in done if row], self.own_routes(1))


def generator_of(
    cfg: RolloutConfig,
    model_path: str,
    device: torch.device,
    replica: Replica | None = None,
    run: RunContext | None = None,
) -> Generator:
    """Builds this rank's part of the generator that cfg.generator selects, for a model folder.

    replica: the ranks that generate together and their groups; None: this rank only. run: where
    the rank is in its run; only generators on servers need it. All ranks of a replica build the
    generator together. ConfigError if it has several ranks and this generator cannot cut a model
    over ranks. weights_version is NEVER: the generator must be synced before the first generation.
    It takes no seed, because each response depends on the seed of its row.
    """
    kind = generator_kind(cfg.generator)
    replica = replica or Replica.alone()
    if replica.size > 1 and not kind.cuts_model:
        raise ConfigError(
            f"rollout.engine={kind.name}: got generation replicas of {replica.size} ranks "
            f"(t{replica.tp_size}p{replica.pp_size}), expected 1 (it decodes on single ranks); "
            f"set actor.rollout.layout=t1 or actor.rollout.engine="
            f"{' or '.join(generators_that_cut())}"
        )
    arguments: list[Any] = [cfg, model_path, device]
    if kind.cuts_model:
        arguments.append(replica)
    if kind.is_served:
        arguments.append(run or RunContext())
    generator: Generator = resolve(kind.implementation)(*arguments)
    return generator


@lru_cache(maxsize=256)
def _cached_stop_strings(tokenizer_path: str, stop: tuple[str, ...]) -> StopStrings:
    return StopStrings(load_tokenizer(tokenizer_path), stop)


def stop_strings(sampling: Sampling) -> StopStrings | None:
    """The stop strings of a request; None if it has none. The same object for equal ones."""
    if not sampling.stop:
        return None
    return _cached_stop_strings(sampling.tokenizer_path, sampling.stop)


def no_routes_error(generator: Generator | RequestGenerator) -> ConfigError:
    """The error of a generator or a model that cannot return which experts its tokens used."""
    return ConfigError.of(
        "actor.update.router=replay",
        f"{type(generator).__name__}, which returns no experts for this model",
        "a mixture of experts, and a generator that returns its experts",
        "set actor.update.router=own",
    )


def check_prompts(
    prompts: Tensor, sampling: Sampling, *, seeds: Sequence[int], max_positions: int
) -> None:
    """Checks a batch of prompts (ragged, B rows) before generation; B may be 0.

    ColumnError unless there are B seeds and every prompt has a token. ConfigError if the longest
    prompt and sampling.max_new_tokens together exceed max_positions.
    """
    lengths = lengths_of(prompts)
    if len(seeds) != len(lengths):
        raise ColumnError(
            f"generate: got {len(seeds)} seeds for {len(lengths)} prompts; pass one seed per prompt"
        )
    if not len(lengths):
        return
    if int(lengths.min()) < 1:
        row = int(lengths.argmin())
        raise ColumnError(
            f"generate: prompt {row} has 0 tokens, expected at least 1; begin prompts with a "
            f"bos token"
        )
    check_room(int(lengths.max()), sampling, max_positions)


def check_room(longest: int, sampling: Sampling, max_positions: int) -> None:
    """ConfigError if a prompt of this length and its response exceed the model's context."""
    if longest + sampling.max_new_tokens > max_positions:
        raise ConfigError(
            f"generate: got a prompt of {longest} tokens and rollout.max_new_tokens="
            f"{sampling.max_new_tokens}, together {longest + sampling.max_new_tokens}; expected at "
            f"most the model's {max_positions} positions; lower rollout.max_new_tokens or "
            f"data.max_prompt_tokens"
        )


def response_columns(tokens: Tensor, log_probs: Tensor, lengths: Tensor) -> TensorDict:
    """Returns the columns responses, response_mask (all True) and rollout_log_probs, all ragged.

    tokens, log_probs: flat (sum of lengths,), the rows one after the other. SpmdflowError with the
    row and the token if a log-probability is nan; see `check_drawn`.
    """
    if bool(log_probs.isnan().any()):
        for row, part in enumerate(log_probs.split(lengths.tolist())):
            check_drawn(part, f"row {row} of the {len(lengths)} of the call")
    return TensorDict(
        {
            "responses": ragged(tokens, lengths),
            "response_mask": ragged(torch.ones_like(tokens, dtype=torch.bool), lengths),
            "rollout_log_probs": ragged(log_probs, lengths),
        },
        batch_size=[len(lengths)],
    )


def with_routes(
    columns: TensorDict, prompts: Tensor, rows: Sequence[Finished], own: Tensor | None
) -> TensorDict:
    """Add the column of routed experts to those of finished rows, in place.

    prompts: ragged, of these rows. own (1, layers, k): what a row without routes gets for each of
    its tokens. None: the generator returns no routes, and there is no such column.
    """
    if own is None:
        return columns
    routes = []
    for length, row in zip(lengths_of(prompts).tolist(), rows, strict=True):
        if row.routes is None:
            routes.append(own.repeat(length + len(row.tokens), 1, 1))
        else:
            routes.append(row.routes.to(own.device))
    columns[ROUTES] = ragged_from_rows(routes, dtype=own.dtype)
    return columns


def check_drawn(log_probs: Tensor, row: str) -> None:
    """SpmdflowError if a token of a response (n,) has a log-probability of nan.

    The model's logits were then not finite, and the drawn token is meaningless.
    """
    invalid = log_probs.isnan().nonzero()
    if len(invalid):
        raise SpmdflowError.of(
            f"generate, {row}",
            f"a log-probability of nan for token {int(invalid[0])} of its response",
            "a number: the model's logits are not finite",
            "check the generator's weights: the model folder, or the last updates "
            "(actor/grad_norm; a lower optimizer.lr), and rollout.dtype",
        )


def loads_folder(model_path: str) -> bool:
    """Whether a generator must read the folder itself. Without a weight table of the family for
    training and generation, nothing verifies that a sync covers all tensors."""
    return not Architecture.sizes_from_folder(model_path).is_dense_with_table


def take_folder_weights(generator: Generator, path: str, *, verify: bool) -> int:
    """Loads a folder's weights into a generator that has no trainer, and sets its version to 0.

    Copies nothing if the generator read its folder when it was built. verify: compare the hash of
    each of the folder's tensors, rounded to the generator's dtype, if the generator has a tensor of
    that name; WeightSyncError if one differs. Returns the number of compared tensors. All ranks of
    a generation replica call it together.
    """
    if not getattr(generator, "has_folder_weights", True):
        read = trained_tensors_reader(path)
        with torch.no_grad():
            for name, view, box in generator.blocks():
                copy_box(view, name, box, read)
    compared = 0
    hashes = generator.hashes() if verify else {}
    for name, tensor in folder_tensors(path) if verify else ():
        if name not in hashes:
            continue
        expected = positional_hash(tensor.to(generator.dtype))
        if hashes[name] != expected:
            raise WeightSyncError(
                f"weights of {path}: got rollout tensor {name} with hash {hashes[name]:#018x}, "
                f"expected the file's {expected:#018x}; set "
                f"actor.rollout.engine={generator_names()[0]} to see "
                f"whether the generator is the cause, and report this message"
            )
        compared += 1
    generator.renew(0)
    return compared
