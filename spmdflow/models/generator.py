"""The generator: a rollout engine on ranks of its own (disaggregated generation).

`SamplingWorker` is what it shares with `ActorWorker`, which generates on the trainer's ranks. Its
weights come from a `PolicyWorker` on other ranks (`flow.connect`), or from the model's folder if
nothing is trained (`load_weights`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tensordict import TensorDict
from torch import Tensor

from spmdflow.config.offline import EvaluatedConfig
from spmdflow.config.parallel import generation_sizes
from spmdflow.config.schema import ActorConfig
from spmdflow.data.row_id import is_held_out, seed_of
from spmdflow.datasets.tokenizer import load_tokenizer, template_ids
from spmdflow.errors import ConfigError, ProtocolError, WeightSyncError
from spmdflow.hybrid_engine.sync import WeightReceiver
from spmdflow.models.base import axis_groups
from spmdflow.models.episode import EpisodeWorker
from spmdflow.models.turn import RESPONSE, Turn
from spmdflow.parallel.layout import Layout
from spmdflow.rollout.generator import NEVER, Generator, Replica, generator_of, take_folder_weights
from spmdflow.rollout.sampling import Sampling
from spmdflow.transfer.register import register
from spmdflow.transfer.worker import CallInfo, Max, Mean, Sum, WorkerContext
from spmdflow.weights.architecture import Architecture


def row_seeds(context: WorkerContext, call: CallInfo) -> list[int]:
    """A seed for each row of a call, from (seed, step, row id, generation), never from a rank.

    generation: how often the row was generated from before in this step; 0 is left out. Held-out
    rows have the same seeds at every step: evaluations differ by their weights only.
    ProtocolError if the method is not registered with draws=True.
    """
    if call.generation is None:
        raise ProtocolError(
            f"{context.name}: got a call that generates in a method without draws=True, expected "
            f"the mark, as a second call on the same rows must not repeat the noise of the first; "
            f"write @register(..., draws=True) above the method"
        )
    return [
        seed_of(
            context.seed,
            "generate",
            0 if is_held_out(row) else call.step,
            row,
            *([generation] if generation else []),
        )
        for row, generation in zip(call.row_ids.tolist(), call.generation.tolist(), strict=True)
    ]


def check_sampling(label: str, cfg: Any, arguments: Mapping[str, Any]) -> None:
    """ConfigError if arguments of `generate_sequences` are outside the bounds of the settings."""
    if not set(arguments) - {"greedy"}:
        return  # the settings have checks of their own, which tell all that is wrong
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
    """`generate_sequences`, which an actor and a generator share, beside `run_episodes`."""

    @register(
        transfer_mode="3D_ALL_MICRO_DP",
        reads=("prompts",),
        optional=(*RESPONSE, "tool_text"),
        writes=RESPONSE,
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
        """One response for each row; the result keeps the columns of the prompts.

        Rows that have a response go on: its end gets the tokens of `tool_text` (text, if the batch
        has it; response_mask False, rollout_log_probs 0), then what is sampled behind them. Columns
        that were made from the shorter response are left out of the result. A whole response has
        at most actor.rollout.max_new_tokens; a row without room for one more token stays as it is.

        Arguments replace settings of actor.rollout for this call. stop: a response ends with the
        token that completes one of these strings in its text. The whole token stays, also its text
        after the string (vLLM's include_stop_str_in_output). temperature, top_p, top_k and greedy
        decide which tokens are sampled; rollout_log_probs are always the policy's at the settings'
        temperature, as those of `compute_log_prob` and `update_actor` are.

        An actor generates with the weights of its last update, a generator with those it received
        last.
        """
        sampling = self.sampling.for_call(
            greedy=greedy,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            max_new_tokens=max_new_tokens,
            stop=stop,
        )
        seeds, prompts = row_seeds(self.context, self.call), batch["prompts"]
        if "responses" in batch.keys():
            return self._go_on(batch, sampling, seeds)
        made = self.fresh_generator().generate(prompts, sampling, seeds)
        self._report_tokens(prompts, made, num_rows=prompts.shape[0])
        return made

    def _go_on(self, batch: TensorDict, sampling: Sampling, seeds: list[int]) -> TensorDict:
        """The response so far of each row, with another turn behind it."""
        said = [""] * len(seeds) if "tool_text" not in batch.keys() else list(batch["tool_text"])
        ids = template_ids(load_tokenizer(self.cfg.rollout.tokenizer_path), said)
        turn = Turn.of(batch, ids, most=self.cfg.rollout.max_new_tokens)
        limits = [min(room, sampling.max_new_tokens) for room in turn.room]
        generator = self.request_generator("generate_sequences on rows with a response")
        seeds = [seeds[place] for place in turn.places]
        sampled = generator.generate(turn.prompts, sampling, seeds, limits)
        self._report_tokens(turn.heard, sampled, num_rows=0)
        self.report({"rollout/no_room": Sum(len(said) - len(turn.places))})
        return turn.close(sampled)

    def _report_tokens(self, heard: Tensor, sampled: TensorDict, *, num_rows: int) -> None:
        """heard: ragged, what the model reads that it has not read or said before."""
        tokens = len(sampled["responses"].values())
        self.report(
            {
                "rollout/prompt_tokens": Sum(len(heard.values())),
                "rollout/response_tokens": Sum(tokens),
                "rollout/response_length": Mean(tokens, num_rows),
            }
        )

    def make_room(self, *, trains: bool) -> None:
        """Free the KV cache."""
        self.generator.sleep()

    def close(self) -> None:
        """End environments, and free the generator."""
        super().close()
        self.generator.close()


class GeneratorWorker(SamplingWorker):
    """Generates with weights that it is sent; spawned with the actor's settings."""

    role = "generator"

    @classmethod
    def layout_of(cls, cfg: ActorConfig | EvaluatedConfig, ranks: tuple[int, ...]) -> Layout:
        """rollout.layout on this pool."""
        sizes = generation_sizes("actor", cfg)
        dp_size = len(ranks) // sizes.replica
        return Layout(ranks, pp_size=sizes.pp, dp_size=dp_size, tp_size=sizes.tp)

    @classmethod
    def needed_groups(
        cls, cfg: ActorConfig | EvaluatedConfig, layout: Layout
    ) -> list[tuple[int, ...]]:
        """The pool and the groups of its replicas."""
        return axis_groups(layout, ("replica", "tp", "pp"))

    def __init__(self, cfg: ActorConfig | EvaluatedConfig, context: WorkerContext) -> None:
        super().__init__(cfg, context)
        replica = Replica.of(context.layout, context.rank, context.groups)
        self.generator = generator_of(cfg.rollout, cfg.model.path, context.device, replica)
        self.sampling = Sampling.from_config(cfg.rollout)
        self._receiver: WeightReceiver | None = None
        self.open_episodes()

    @register(transfer_mode="ONE_TO_ALL")
    def open_weights(self, peer: dict[str, Any]) -> None:
        """Prepare to receive the weights of a policy on other ranks; peer: its layout."""
        self._receiver = WeightReceiver(self.generator, self.context, self.cfg, Layout(**peer))

    @register(transfer_mode="ONE_TO_ALL")
    def receive_weights(self) -> None:
        """Receive what the connected policy sends in the same call; compare every hash."""
        assert self._receiver is not None, "open_weights comes first"
        self.report(self._receiver.receive())

    @register(transfer_mode="ONE_TO_ALL")
    def load_weights(self) -> None:
        """Generate with the weights of model.path: a policy that nothing trains."""
        verify = self.cfg.rollout.verify_every > 0
        num_tensors = take_folder_weights(self.generator, self.cfg.model.path, verify=verify)
        self.report({"rollout/weights_verified": Max(float(num_tensors > 0))})

    def fresh_generator(self) -> Generator:
        """With the weights that came last; WeightSyncError if none did."""
        if self.generator.weights_version == NEVER:
            got = "a generator without weights"
            do = "connect the two with flow.connect(actor, generator) and call its "
            do += "sync() first, or call load_weights() for those of the folder"
            raise WeightSyncError.of("generate", got, "those of the policy", do)
        self.report({"rollout/weights_version": Max(float(self.generator.weights_version))})
        return self.generator
