"""The generator: a rollout engine on its own ranks (disaggregated generation).

`SamplingWorker` is the part shared with `ActorWorker`, which generates on the trainer's ranks. The
generator's weights come from a `PolicyWorker` on other ranks (`flow.connect`), or from the model's
folder if nothing is trained (`load_weights`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from spmdflow.config.offline import EvaluatedConfig
from spmdflow.config.parallel import generation_sizes
from spmdflow.config.schema import ActorConfig
from spmdflow.data.ragged import lengths_of, ragged, rows_of
from spmdflow.data.row_id import is_held_out, seed_of
from spmdflow.datasets.tokenizer import load_tokenizer, template_ids
from spmdflow.errors import ConfigError, ProtocolError, WeightSyncError
from spmdflow.hybrid_engine.sync import WeightReceiver
from spmdflow.models.ahead import RowsAhead
from spmdflow.models.base import axis_groups
from spmdflow.models.episode import (
    EPISODE_COLUMNS,
    EpisodeWorker,
    check_environment,
    requests_of,
    written_by_ended_episodes,
)
from spmdflow.models.turn import RESPONSE, ContinuedRows, replays_routes, written_routes
from spmdflow.parallel.layout import Layout
from spmdflow.rollout.forward import end_tokens
from spmdflow.rollout.generator import (
    NEVER,
    Generator,
    Replica,
    Request,
    RequestGenerator,
    RunContext,
    generator_of,
    no_routes_error,
    response_columns,
    take_folder_weights,
    with_routes,
)
from spmdflow.rollout.sampling import Sampling
from spmdflow.router import ROUTES
from spmdflow.weights.architecture import Architecture
from spmdflow.worker_api.command import Command
from spmdflow.worker_api.metric import Max, Mean, Sum
from spmdflow.worker_api.register import register
from spmdflow.worker_api.worker import WorkerContext, any_layout


def row_seeds(context: WorkerContext, call: Command) -> list[int]:
    """Return a seed for each row of a call: a hash of (run seed, step, row id, generation).

    It does not depend on the rank. generation: how many times the row was generated before in this
    step; omitted from the hash if 0. Held-out rows use step 0, so evaluations differ only by their
    weights. ProtocolError if the method is not registered with draws=True.
    """
    if call.generation is None:
        raise ProtocolError(
            f"{context.name}: got a call that generates in a method without draws=True, expected "
            f"the mark, as a second call on the same rows must not repeat the noise of the first; "
            f"write @register(..., draws=True) above the method"
        )
    result = []
    for row, generation in zip(call.row_ids.tolist(), call.generation.tolist(), strict=True):
        result.append(
            seed_of(
                context.seed,
                "generate",
                0 if is_held_out(row) else call.step,
                row,
                *([generation] if generation else []),
            )
        )
    return result


def check_sampling(label: str, cfg: Any, arguments: Mapping[str, Any]) -> None:
    """Raise ConfigError if arguments of `generate_sequences` are outside their bounds.

    The bounds are those of the settings of actor.rollout. max_new_tokens must also be less than the
    model's number of positions. Nothing is checked if no argument but greedy is given.
    """
    if not set(arguments) - {"greedy"}:
        return  # the checks of the settings report all errors
    try:
        sampling = Sampling.from_config(cfg.rollout).for_call(**arguments)
    except ConfigError as err:
        raise ConfigError(f"{label}: {err}") from err
    if arguments.get("max_new_tokens") is None:
        return
    positions = Architecture.sizes_from_folder(cfg.model.path).max_positions
    if positions and sampling.max_new_tokens >= positions:
        raise ConfigError(
            f"{label}: max_new_tokens: got {sampling.max_new_tokens}, expected less than the "
            f"model's {positions} positions, which prompt and response share; ask for fewer tokens"
        )


class SamplingWorker(EpisodeWorker):
    """`generate_sequences` and `run_episodes`, which actors and generators share."""

    @register(
        transfer_mode="3D_ALL_MICRO_DP",
        reads=("prompts",),
        optional=(*RESPONSE, ROUTES, "tool_text"),
        writes=RESPONSE,
        also_writes=written_routes,
        extends=True,
        draws=True,
        check=check_sampling,
    )
    def generate_sequences(
        self,
        batch: TensorDict,
        *,
        greedy: bool = False,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        max_new_tokens: int | None = None,
        stop: Sequence[str] | None = None,
    ) -> TensorDict:
        """Generate one response for each row: responses, response_mask and rollout_log_probs.

        Rows that have a response continue it: the tokens of `tool_text` are appended (text, if the
        batch has it; response_mask False, rollout_log_probs 0), then newly sampled tokens. Columns
        that were computed from the shorter response are dropped from the result. A complete
        response has at most actor.rollout.max_new_tokens. A row without room for one more token
        does not change.

        Arguments replace settings of actor.rollout for this call. stop: a response ends with the
        token that completes one of these strings in its text. The complete token stays, also its
        text after the string (vLLM's include_stop_str_in_output). temperature, top_p, top_k and
        greedy determine which tokens are sampled. rollout_log_probs are always those of the policy
        at the settings' temperature, as in `compute_log_prob` and `update_actor`.

        An actor generates with the weights of its last update, a generator with those that it
        received last. The result keeps the columns of the prompts.
        """
        sampling = self.sampling.for_call(
            greedy=greedy,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            max_new_tokens=max_new_tokens,
            stop=stop,
        )
        seeds = row_seeds(self.context, self.call)
        prompts = batch["prompts"]
        if "responses" in batch.keys():
            return self._continue_responses(batch, sampling, seeds)
        columns = self.fresh_generator().generate(prompts, sampling, seeds)
        self._report_tokens(prompts, columns, num_rows=prompts.shape[0])
        self._report_truncated(columns["responses"], limit=sampling.max_new_tokens)
        return columns

    def _continue_responses(
        self, batch: TensorDict, sampling: Sampling, seeds: list[int]
    ) -> TensorDict:
        """Append the tool text and newly sampled tokens to each response that has room for them.

        At most rollout.max_new_tokens in the whole response, and the call's max_new_tokens new
        ones. Rows without room for one more token do not change, and rollout/no_room counts them.
        Returns the columns of `RESPONSE` for all rows. ConfigError if the generator does not
        support requests.
        """
        if "tool_text" not in batch.keys():
            texts = [""] * len(seeds)
        else:
            texts = list(batch["tool_text"])
        ids = template_ids(load_tokenizer(self.cfg.rollout.tokenizer_path), texts)
        turn = ContinuedRows.of(batch, ids, most=self.cfg.rollout.max_new_tokens)
        limits = []
        for room in turn.room:
            limits.append(min(room, sampling.max_new_tokens))
        generator = self.request_generator("generate_sequences on rows with a response")
        seeds = [seeds[row] for row in turn.rows]
        rows = self.call.row_ids[turn.rows].tolist()
        sampled = generator.generate(turn.prompts, sampling, seeds, limits, conversations=rows)
        self._report_tokens(turn.tool_ids, sampled, num_rows=0)
        self.report({"rollout/no_room": Sum(len(texts) - len(turn.rows))})
        return turn.close(sampled)

    def _report_tokens(self, read_ids: Tensor, sampled: TensorDict, *, num_rows: int) -> None:
        """Report rollout/prompt_tokens, rollout/response_tokens and rollout/response_length.

        They are the number of read_ids (ragged: tokens that the model reads for the first time), of
        sampled tokens, and the latter per row. num_rows: rows that the mean counts.
        """
        tokens = len(sampled["responses"].values())
        if isinstance(self.generator, RequestGenerator):
            self.report(self.generator.take_metrics())
        self.report(
            {
                "rollout/prompt_tokens": Sum(len(read_ids.values())),
                "rollout/response_tokens": Sum(tokens),
                "rollout/response_length": Mean(tokens, num_rows),
            }
        )

    def _report_truncated(self, responses: Tensor, *, limit: int) -> None:
        """Report rollout/truncated: the share of responses that were cut off at the limit.

        These have `limit` tokens, and the last one is no end token. responses: ragged ids.
        """
        lengths = lengths_of(responses)
        last = responses.values()[lengths.cumsum(0) - 1]
        is_cut = lengths >= limit
        for token in self._end_tokens:  # numbers: a tensor of them would be copied to the device
            is_cut &= last != token
        self.report({"rollout/truncated": Mean(int(is_cut.sum()), len(lengths))})

    @cached_property
    def _end_tokens(self) -> tuple[int, ...]:
        return end_tokens(self.cfg.model.path)

    def prepare_routes(self) -> None:
        """Let the generator return the experts of each token, if the settings replay them.

        ConfigError for a generator or a model without them.
        """
        if not replays_routes(self.cfg):
            return
        if not isinstance(self.generator, RequestGenerator):
            raise no_routes_error(self.generator)
        self.generator.return_routes()

    def make_room(self, *, trains: bool) -> None:
        """Frees the KV cache, and those of models that episodes call."""
        self.generator.sleep()
        if self._runner is not None:
            self._runner.sleep()

    def close(self) -> None:
        """Ends the environments, and frees the generator."""
        super().close()
        self.generator.close()


class GeneratorWorker(SamplingWorker):
    """Generates with weights that it receives. Spawned with the actor's settings."""

    role = "generator"

    @classmethod
    def layout_of(cls, cfg: ActorConfig | EvaluatedConfig, ranks: tuple[int, ...]) -> Layout:
        """Return the layout on these ranks, with the sizes of cfg.rollout.layout.

        The dp size is the number of generation replicas.
        """
        sizes = generation_sizes("actor", cfg)
        dp_size = len(ranks) // sizes.replica
        return Layout(
            ranks,
            pp_size=sizes.pp,
            dp_size=dp_size,
            tp_size=sizes.tp,
            gen_expert_size=sizes.ep,
        )

    @classmethod
    def needed_groups(
        cls, cfg: ActorConfig | EvaluatedConfig, layout: Layout
    ) -> list[tuple[int, ...]]:
        """The pool and the groups of its replicas."""
        return axis_groups(layout, ("replica", "tp", "pp"))

    def __init__(self, cfg: ActorConfig | EvaluatedConfig, context: WorkerContext) -> None:
        """Builds this rank's part of the generator, and starts the environments."""
        super().__init__(cfg, context)
        replica = Replica.of(context.layout, context.rank, context.groups)
        run = RunContext(context.run_dir, context.rank, context.layout.ranks)
        self.generator = generator_of(cfg.rollout, cfg.model.path, context.device, replica, run)
        self.prepare_routes()
        self.sampling = Sampling.from_config(cfg.rollout)
        self._receiver: WeightReceiver | None = None
        self._ahead: RowsAhead | None = None
        self.open_episodes()

    @register(transfer_mode="ONE_TO_ALL")
    def open_weights(self, peer: dict[str, Any]) -> None:
        """Prepares to receive the weights of a policy on other ranks. peer: its layout."""
        self._receiver = WeightReceiver(self.generator, self.context, self.cfg, Layout(**peer))

    @register(transfer_mode="ONE_TO_ALL")
    def receive_weights(self, version: int = 0) -> None:
        """Receive the weights that the connected policy sends in the same call, and compare hashes.

        All ranks of the generator and of the policy take part. version: of these weights.
        Unfinished rows of an open queue are suspended first, and continue with the new weights.
        ProtocolError before `open_weights` (flow.connect).
        """
        if self._receiver is None:
            raise ProtocolError(
                f"{self.context.name}.receive_weights: no policy is connected; write "
                f"weights = flow.connect(actor, generator) before the first step, then "
                f"weights.sync()"
            )
        if self._ahead is not None:
            self._ahead.suspend_all(version)
        self.report(self._receiver.receive())

    @register(transfer_mode="ONE_TO_ALL")
    def open_queue(self) -> None:
        """Prepare to generate rows ahead of the steps that learn from them (flow.queue).

        ConfigError for a generator that does not support requests, or whose random numbers do not
        belong to the row, because rows continue after the weights have changed.
        """
        if getattr(self.generator, "keeps_noise", False):
            got = self.cfg.rollout.engine
            do = "choose another actor.rollout.engine"
            expected = "a generator whose noise belongs to the row, as rows go on over a sync"
            raise ConfigError.of("flow.queue", got, expected, do)
        if self._runner is None:
            self.requests = requests_of(self.generator, self.cfg.model.path, "flow.queue")
        replica = Replica.of(self.context.layout, self.context.rank, self.context.groups)
        self._ahead = RowsAhead(self.requests, replica, self._runner)

    @register(transfer_mode="3D_ALL_MICRO_DP", reads=("prompts",), draws=True)
    def begin_sequences(self, batch: TensorDict, *, number: int) -> None:
        """Add rows without generating them yet. Later calls generate their responses.

        number: of the batch in the queue, from 1. The rows have the seeds that they would have in
        the step of this number, whenever they are generated. Unfinished rows stay where they are.
        ProtocolError before `open_queue`, WeightSyncError if the generator has no weights.
        """
        self._check_weights()
        call = replace(self.call, step=number)
        rows = rows_of(batch["prompts"])
        seeds = row_seeds(self.context, call)
        sampling = self.sampling.for_call()
        requests = []
        for row, seed in zip(rows, seeds):
            requests.append(Request(row.cpu(), seed, sampling))
        self.rows_ahead.begin_sequences(self.call.row_ids.tolist(), requests)

    @register(
        transfer_mode="3D_ALL_MICRO_DP",
        reads=("prompts",),
        writes=("responses", "response_mask", "rollout_log_probs", "token_versions"),
        also_writes=written_routes,
        extends=True,
        finishes=True,
    )
    def finish_sequences(self, batch: TensorDict, *, version: int) -> TensorDict:
        """Return the responses of rows that `begin_sequences` added on the same ranks.

        Generates for all unfinished rows until these have ended. Columns as in
        `generate_sequences`, and token_versions (ragged int32): version of the weights that each
        token was sampled with. version: of the policy that learns from the rows; rollout/age
        reports version - token_versions. ProtocolError before `open_queue`.
        """
        responses = self.rows_ahead.finish_sequences(self.call.row_ids.tolist())
        device = self.context.device
        none = torch.zeros(0)
        lengths = torch.tensor([len(row.tokens) for row in responses], dtype=torch.int64).to(device)
        tokens, log_probs, versions = (
            torch.cat([getattr(row, name) for row in responses] or [none]).to(device, dtype)
            for name, dtype in (
                ("tokens", torch.int64),
                ("log_probs", torch.float32),
                ("versions", torch.int32),
            )
        )
        columns = response_columns(tokens, log_probs, lengths)
        columns["token_versions"] = ragged(versions, lengths)
        if isinstance(self.generator, RequestGenerator):
            own = self.generator.own_routes(1)
            with_routes(columns, batch["prompts"], responses, own)
        self._report_tokens(batch["prompts"], columns, num_rows=len(responses))
        self._report_truncated(columns["responses"], limit=self.sampling.max_new_tokens)
        self._report_ages(version - versions)
        return columns

    @register(
        transfer_mode="3D_ALL_MICRO_DP",
        reads=("prompts", "prompt_text", "row"),
        draws=True,
        check=check_environment,
    )
    def begin_episodes(self, batch: TensorDict, *, number: int) -> None:
        """Add an episode for each row without running it yet. Later calls run them.

        number: see `begin_sequences`. ProtocolError before `open_queue`, WeightSyncError if the
        generator has no weights.
        """
        self._check_weights()
        self.rows_ahead.begin_episodes(
            self.call.row_ids.tolist(),
            self.episode_rows(batch),
            self.sampling.for_call(),
            partial(self._turn_seed, replace(self.call, step=number)),
        )

    @register(
        transfer_mode="3D_ALL_MICRO_DP",
        reads=("prompts",),
        writes=(*EPISODE_COLUMNS, "token_versions"),
        also_writes=written_by_ended_episodes,
        finishes=True,
        parents=True,
    )
    def finish_episodes(self, batch: TensorDict, *, version: int) -> TensorDict:
        """Return the episodes of rows that `begin_episodes` added on the same ranks.

        Continues all unfinished episodes until these have ended. Columns as in `run_episodes`, and
        token_versions as in `finish_sequences`; -1 for tokens of the environment. version: see
        `finish_sequences`; rollout/age counts only tokens that the policy sampled.
        """
        ids = self.call.row_ids.tolist()
        episodes = self.rows_ahead.finish_episodes(ids, self.judged_groups())
        columns = self.episode_columns(batch, episodes, "reward")
        versions = columns["token_versions"].values()[columns["response_mask"].values()]
        self._report_ages(version - versions)
        return columns

    def _report_ages(self, ages: Tensor) -> None:
        """Report mean and maximum of the ages (n,) of tokens, and the version of the weights.

        An age is the policy's version minus the version that sampled the token. 0 without tokens.
        """
        largest = Max(float(ages.max()) if len(ages) else 0.0)
        self.report({"rollout/age": Mean(float(ages.sum()), len(ages)), "rollout/age_max": largest})
        self.report({"rollout/weights_version": Max(float(self.generator.weights_version))})

    @register(transfer_mode="ONE_TO_ALL")
    def go_on(self, turn: int) -> None:
        """Generates for unfinished rows until `halt(turn)`, or until all have ended."""
        self.rows_ahead.generate_until(turn)

    def halt(self, turn: int) -> None:
        """See Worker.halt."""
        self.rows_ahead.halt(turn)

    @property
    def rows_ahead(self) -> RowsAhead:
        """The rows that are generated ahead. ProtocolError before `open_queue`."""
        if self._ahead is None:
            raise ProtocolError(
                f"{self.context.name}: no queue is open; write queue = flow.queue(prompts, "
                f"weights, max_staleness=...) before the first step, and take rows with "
                f"next(queue)"
            )
        return self._ahead

    def save_state(self, folder: Path) -> Callable[[], None] | None:
        """Return a function that writes the rows generated ahead to folder/ahead-RANK.safetensors.

        Only the first rank of each replica writes. None on other ranks, without an open queue, or
        if `RowsAhead.save` has nothing to write. It suspends the rows.
        """
        ahead = self._ahead
        context = self.context
        if ahead is None or Replica.of(context.layout, context.rank, context.groups).replica_rank:
            return None
        return ahead.save(folder / f"ahead-{context.rank}.safetensors")

    @any_layout
    def load_state(self, folder: Path) -> None:
        """Reads the files of all replicas, because rows may begin again on any rank."""
        if self._ahead is not None:
            self._ahead.load(sorted(folder.glob("ahead-*.safetensors")))

    def make_room(self, *, trains: bool) -> None:
        """Suspends unfinished rows, then frees the KV cache."""
        if self._ahead is not None:
            self._ahead.suspend_all()
        super().make_room(trains=trains)

    @register(transfer_mode="ONE_TO_ALL")
    def load_weights(self) -> None:
        """Load the weights of model.path, for a policy that is not trained.

        With rollout.verify_every above 0 their hashes are compared with the folder's;
        WeightSyncError if one differs. All ranks of a replica call it together.
        """
        verify = self.cfg.rollout.verify_every > 0
        num_tensors = take_folder_weights(self.generator, self.cfg.model.path, verify=verify)
        self.report({"rollout/weights_verified": Max(float(num_tensors > 0))})

    def fresh_generator(self) -> Generator:
        """Return the generator, with the weights that it received last.

        Suspends rows that are generated ahead. WeightSyncError if it has not received or loaded
        any.
        """
        self._check_weights()
        if self._ahead is not None:
            self._ahead.suspend_all()
        return self.generator

    def _check_weights(self) -> None:
        """Report the version of the generator's weights; WeightSyncError if it has none."""
        if self.generator.weights_version == NEVER:
            got = "a generator without weights"
            do = "connect the two with flow.connect(actor, generator) and call its "
            do += "sync() first, or call load_weights() for those of the folder"
            raise WeightSyncError.of("generate", got, "those of the policy", do)
        self.report({"rollout/weights_version": Max(float(self.generator.weights_version))})
