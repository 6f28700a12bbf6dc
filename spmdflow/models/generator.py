"""The generator: a rollout engine on ranks of its own (disaggregated generation).

Its weights come from a `PolicyWorker` on other ranks, which `flow.connect` joins it to, or from the
model's folder (`load_weights`), where nothing is trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tensordict import TensorDict

from spmdflow.config.evaluate import EvaluatedConfig
from spmdflow.config.parallel import generation_sizes
from spmdflow.config.schema import ActorConfig
from spmdflow.errors import WeightSyncError
from spmdflow.hybrid_engine.remote import WeightReceiver
from spmdflow.models.base import axis_groups
from spmdflow.models.generation import check_sampling, rollout_metrics, row_seeds, tokenizer_path
from spmdflow.parallel.layout import Layout
from spmdflow.rollout.factory import generator_of
from spmdflow.rollout.from_folder import take_folder_weights
from spmdflow.rollout.generator import NEVER
from spmdflow.rollout.replica import Replica
from spmdflow.rollout.sampling import Sampling
from spmdflow.transfer.register import register
from spmdflow.transfer.worker import Max, Worker, WorkerContext


class GeneratorWorker(Worker):
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
        return axis_groups(layout)

    def __init__(self, cfg: ActorConfig | EvaluatedConfig, context: WorkerContext) -> None:
        super().__init__(cfg, context)
        replica = Replica.of(context.layout, context.rank, context.groups)
        self.generator = generator_of(cfg.rollout, cfg.model.path, context.device, replica)
        self.sampling = Sampling.from_config(cfg.rollout)
        self._receiver: WeightReceiver | None = None

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

    @register(
        transfer_mode="3D_ALL_MICRO_DP",
        reads=("prompts",),
        writes=("responses", "response_mask", "rollout_log_probs"),
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
        """One response for each row, with the weights that came last.

        Arguments: those of `ActorWorker.generate_sequences`.
        """
        if self.generator.weights_version == NEVER:
            raise WeightSyncError(
                "generate: got a generator without weights, expected those of the policy; connect "
                "the two with flow.connect(actor, generator) and call its sync() first, or call "
                "load_weights() for those of the folder"
            )
        sampling = self.sampling.for_call(
            greedy=greedy,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            max_new_tokens=max_new_tokens,
            stop=stop,
            tokenizer_path=tokenizer_path(self.context),
        )
        seeds = row_seeds(self.context, self.call)
        made = self.generator.generate(batch["prompts"], sampling, seeds)
        self.report(rollout_metrics(batch["prompts"], made["responses"]))
        self.report({"rollout/weights_version": Max(float(self.generator.weights_version))})
        return made

    def close(self) -> None:
        """Free the generator."""
        self.generator.close()
