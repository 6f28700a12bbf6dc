"""The policy in training, and the frozen reference it is compared with (paper Table 4).

`PolicyWorker` computes log-probabilities and trains. `ActorWorker` adds generation on the same
ranks; without it a `GeneratorWorker` on other ranks generates (disaggregated generation), to which
`flow.connect` brings the weights. `SupervisedWorker` is the policy before any RL: it learns by
cross-entropy on examples (supervised fine-tuning).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from tensordict import TensorDict
from torch import Tensor

from spmdflow.config.schema import ActorConfig
from spmdflow.data.ragged import ROW_WEIGHTS, VALID, pad, sampled_mask, without_failed
from spmdflow.errors import ColumnError, ProtocolError
from spmdflow.hybrid_engine.factory import hybrid_of, storage_of, sync_mode
from spmdflow.hybrid_engine.sync import WeightSender
from spmdflow.models.base import EngineWorker
from spmdflow.models.generator import SamplingWorker
from spmdflow.models.rows import example_rows, text_rows, with_text_rows
from spmdflow.objectives.kl import compute_rollout_weights
from spmdflow.objectives.log_prob import CausalOutput
from spmdflow.objectives.loss import Loss
from spmdflow.objectives.policy import PolicyLoss, PreUpdateMetrics
from spmdflow.objectives.supervised import PretrainedPolicyLoss, SupervisedLoss, row_losses
from spmdflow.parallel.layout import Layout
from spmdflow.rollout.generator import NEVER, Generator, Replica, RunContext, generator_of
from spmdflow.rollout.sampling import Sampling
from spmdflow.router import ROUTES
from spmdflow.serving.publisher import Publisher, publisher_of
from spmdflow.worker_api.metric import Max, Mean, Metric
from spmdflow.worker_api.register import register
from spmdflow.worker_api.worker import WorkerContext
from spmdflow.workers.engine import Part
from spmdflow.workers.micro_batch import MicroBatch

UPDATE_READS = ("prompts", "responses", "response_mask", "old_log_probs", "advantages")
UPDATE_MAY = (
    *("ref_log_probs", "rollout_weights", "covariant", "pretrain_ids"),
    *(ROUTES, ROW_WEIGHTS, *VALID),
)
"""Columns of `update_actor`: those it needs, and those it uses if they are there."""
INSTEAD = {"old_log_probs": "rollout_log_probs"}
"""Column that may replace old_log_probs (controller/old_log_probs.py)."""


def _correction(settings: Any) -> tuple[Callable[..., TensorDict], dict[str, Any]] | None:
    """Return (`compute_rollout_weights`, its settings), which is applied after `compute_log_prob`.

    None if actor.update.correction is missing or its kind is "none".
    """
    correction = getattr(settings.update, "correction", None)
    if correction is None or correction.kind == "none":
        return None
    return compute_rollout_weights, {"cfg": correction}


class PolicyWorker(EngineWorker):
    """Log-probabilities and updates of the policy."""

    role = "actor"
    head = "causal_lm"
    exports = True

    def __init__(self, cfg: ActorConfig, context: WorkerContext) -> None:
        super().__init__(cfg, context)
        self.engine.merges_adapters = cfg.rollout.weights != "adapter"
        budget = cfg.rollout.max_new_tokens
        self.loss = PolicyLoss(cfg.loss, cfg.rollout.temperature, budget=budget)
        self.loss.truncates = getattr(cfg.update, "old_log_probs", "") == "rollout"
        self._sender: WeightSender | None = None
        self._publisher: Publisher | None = None

    @register(transfer_mode="ONE_TO_ALL")
    def open_weights(self, peer: dict[str, Any]) -> None:
        """Prepare to send the weights to a generator on other ranks. peer: its layout."""
        self._sender = WeightSender(self.engine, self.context, self.cfg, Layout(**peer))

    @register(transfer_mode="ONE_TO_ALL")
    def send_weights(self) -> None:
        """Send the weights to the connected generator, which receives them in the same call.

        All ranks of the policy and of the generator take part. ProtocolError before `open_weights`
        (flow.connect). Reports the metrics of the transfer.
        """
        if self._sender is None:
            raise ProtocolError(
                f"{self.context.name}.send_weights: no generator is connected; write "
                f"weights = flow.connect(actor, generator) before the first step, then "
                f"weights.sync()"
            )
        with self.resident("parameters"):
            self.report(self._sender.send())

    @register(transfer_mode="ONE_TO_ALL")
    def connect_server(self, url: str, backend: str = "spmdflow") -> None:
        """Prepare to publish weights to a vLLM server outside the run.

        url: http://host:port. The server must serve actor.model.path with the weight-transfer
        backend named here: spmdflow, or nccl, which is vLLM's own (docs/lab/HYBRID.md).
        """
        self._publisher = publisher_of(
            self.engine, self.context, self.cfg, url=url, backend=backend
        )

    @register(transfer_mode="ONE_TO_ALL")
    def publish_weights(self) -> None:
        """Send the weights to the connected server, which pauses generation meanwhile.

        All ranks take part. ProtocolError before `connect_server`. Reports the metrics of the
        transfer.
        """
        if self._publisher is None:
            raise ProtocolError(
                f"{self.context.name}.publish_weights: no server is connected; call "
                f"{self.context.name}.connect_server(url=...) once before the first step"
            )
        with self.resident("parameters"):
            self.report(self._publisher.publish())

    @register(
        transfer_mode="3D_PROTO",
        reads=("prompts", "responses", "response_mask"),
        optional=("rollout_log_probs", ROUTES, *VALID),
        writes=("old_log_probs",),
        instead=INSTEAD,
        followed_by=_correction,
    )
    def compute_log_prob(self, batch: TensorDict) -> TensorDict | None:
        """Return old_log_probs (ragged float32): the trainer's log-prob of each response token.

        They are at the rollout's temperature. None before the last pipeline stage. Reports
        actor/entropy per token and, if the batch has rollout_log_probs, rollout/drift and
        rollout/drift_max: mean and maximum of |rollout_log_probs - old_log_probs|. Both skip tokens
        that the policy did not sample and failed rows. With actor.update.correction,
        `compute_rollout_weights` then adds rollout_weights.
        """
        temperature = self.cfg.rollout.temperature

        def score(output: CausalOutput, micro: MicroBatch) -> dict[str, Tensor]:
            log_probs, entropy = map(micro.spread, output.log_probs_and_entropy(temperature))
            return {"old_log_probs": log_probs, "entropy": entropy}

        columns = self.score(batch, score)
        if columns is None:
            return None
        if "rollout_log_probs" in batch.keys():
            self._report_mismatch(batch, columns["old_log_probs"])
        mask = sampled_mask(batch)
        entropy = pad(columns["entropy"])
        total = float((entropy * mask).sum())
        self.report({"actor/entropy": Mean(total, float(mask.sum()))})
        return columns.exclude("entropy")

    @register(
        transfer_mode="3D_PROTO",
        reads=("prompts", "responses", "response_mask"),
        optional=(ROUTES,),
        writes=("squared_probs",),
    )
    def compute_squared_probs(self, batch: TensorDict) -> TensorDict | None:
        """Return squared_probs (ragged float32): sum_v p_v^2 of the policy at each response token.

        For advantage.estimator=optimal_token_baseline. With q = softmax(2 z / tau) and z_y the
        token's logit, sum_v p_v^2 = p_y^2 / q_y: two log-probabilities, no (tokens, V) tensor. At
        most 1. None before the last pipeline stage.
        """
        temperature = self.cfg.rollout.temperature

        def score(output: CausalOutput, micro: MicroBatch) -> dict[str, Tensor]:
            log_p = output.log_probs(temperature)
            log_q = output.log_probs(temperature / 2)
            return {"squared_probs": micro.spread((2 * log_p - log_q).exp().clamp(max=1.0))}

        return self.score(batch, score)

    @register(
        transfer_mode="3D_PROTO",
        reads=("prompts",),
        writes=("pretrain_ids", "pretrain_losses"),
    )
    def compute_loss(self, batch: TensorDict) -> TensorDict | None:
        """Return the cross-entropy of pre-training texts, which are the prompts of these rows.

        pretrain_losses (B,): nats of each text, summed over all tokens but the first, at
        temperature 1. pretrain_ids: the texts themselves. If a batch for `update_actor` has this
        column, the texts' loss is added to the policy's (PPO-ptx). None before the last pipeline
        stage. Reports actor/pretrain_loss_before, the mean per token.
        """
        texts = batch["prompts"]
        scored = self.score(
            text_rows(texts), lambda output, micro: {"losses": row_losses(output, micro)}
        )
        if scored is None:
            return None
        losses = scored["losses"]
        tokens = float(len(texts.values()) - len(losses))
        self.report({"actor/pretrain_loss_before": Mean(float(losses.sum()), tokens)})
        columns = {"pretrain_ids": texts, "pretrain_losses": losses}
        return TensorDict(columns, batch_size=batch.batch_size)

    @register(
        transfer_mode="3D_PROTO",
        reads=UPDATE_READS,
        optional=UPDATE_MAY,
        minibatches=True,
        instead=INSTEAD,
    )
    def update_actor(self, batch: TensorDict) -> dict[str, Any]:
        """Take one optimizer step for each mini-batch, and return the mean metrics of these steps.

        With pretrain_ids, each sample's text is learnt in the same step, weighted by
        loss.pretrain_coef. Failed rows (valid is False) do not count. If there are
        rollout_log_probs or no old_log_probs, the first step's forwards also give the metrics of
        the policy before the update (`PreUpdateMetrics`). ColumnError if actor.update.correction is
        on and the batch has no rollout_weights.
        """
        if _correction(self.cfg) is not None and "rollout_weights" not in batch.keys():
            got = (
                f"no column rollout_weights, with correction.kind={self.cfg.update.correction.kind}"
            )
            do = "batch |= batch.map(compute_rollout_weights, cfg=cfg.actor.update.correction)"
            raise ColumnError.of("update_actor", got, "that of compute_log_prob", do)
        batch = without_failed(batch)
        before: PreUpdateMetrics | None = None
        loss: Loss = self.loss
        if "rollout_log_probs" in batch.keys() or "old_log_probs" not in batch.keys():
            before = PreUpdateMetrics(with_reference="old_log_probs" not in batch.keys())
        if "pretrain_ids" in batch.keys():
            batch, self.call = with_text_rows(batch, self.call)
            loss = PretrainedPolicyLoss(self.loss, self.cfg.loss.pretrain_coef)
        self.loss.before = before

        def step(rows: TensorDict, num_micro_batches: int) -> Mapping[str, Metric]:
            """Train on one mini-batch and return its metrics.

            Also ends the collection of pre-update metrics, because the weights have changed. With
            text rows among the samples, micro-batches are counted again, which all dp ranks do
            together.
            """
            if loss is not self.loss:  # text rows are among them
                num_micro_batches = self.engine.count_micro_batches(rows)
            metrics = self.engine.train_step(rows, loss, num_micro_batches=num_micro_batches)
            self.loss.before = None  # the weights have changed
            return metrics

        metrics = self.take_steps(batch, step, prefix="actor")
        if before is not None:
            self.report(before.metrics())
        return metrics

    def _report_mismatch(self, batch: TensorDict, old: Tensor) -> None:
        """Report rollout/drift and rollout/drift_max of this batch.

        They are the mean and the maximum of |rollout_log_probs - old| over tokens that the policy
        sampled, in rows that did not fail. The maximum is 0 without tokens.
        """
        mask = sampled_mask(batch)
        gap = (pad(batch["rollout_log_probs"]) - pad(old)).abs() * mask
        mean = Mean(float(gap.sum()), float(mask.sum()))
        largest = float(gap.max()) if gap.numel() else 0.0
        self.report({"rollout/drift": mean, "rollout/drift_max": Max(largest)})


class ActorWorker(SamplingWorker, PolicyWorker):
    """Generates with the rollout engine and learns with the train engine, on the same ranks."""

    generates = True
    evaluation = None  # evaluated by its responses, also if combined with another role

    def __init__(self, cfg: ActorConfig, context: WorkerContext) -> None:
        super().__init__(cfg, context)
        replica = Replica.of(context.layout, context.rank, context.groups)
        run = RunContext(context.run_dir, context.rank, context.layout.ranks)
        rollout = replace(cfg.rollout, weights=self._mode)
        self.generator = generator_of(rollout, cfg.model.path, context.device, replica, run)
        self.hybrid = hybrid_of(
            self.engine, self.generator, context, self.cfg, storage=self._storage
        )
        self.prepare_routes()
        self.sampling = Sampling.from_config(cfg.rollout)
        self.open_episodes()

    def adopter(self) -> Callable[..., None] | None:
        """Return the function that moves the weights to storage shared with the generator.

        None if trainer and generator have separate weights. Sets `_mode` (how weights reach the
        generator: blocks, flat, copy or adapter) and `_storage`.
        """
        self._mode = sync_mode(self.cfg, self.context.layout)
        self._storage = storage_of(self._mode, self.context)
        if self._storage is None:
            return None
        return self._storage.adopt

    @property
    def is_synced(self) -> bool:
        """Whether the generator has the current weights."""
        return not self.hybrid.needs_sync

    def plain_state(self) -> dict[str, Any]:
        """The state for a checkpoint, including whether the generator has the saved weights."""
        more = {"is_synced": self.is_synced, "num_syncs": self.hybrid.num_syncs}
        return super().plain_state() | more

    def load_plain(self, plain: Mapping[str, Any]) -> None:
        """Restore whether the generator has the trainer's weights, and the number of syncs.

        Syncs the generator now if it was synced when the state was saved, otherwise marks it as
        never synced. So the first step after a resume reports the metrics that it would have
        reported.
        """
        self.generator.weights_version = NEVER
        if plain.get("is_synced"):
            with self.resident("parameters"):
                self.hybrid.sync()
        self.hybrid.num_syncs = plain.get("num_syncs", 0)

    def fresh_generator(self) -> Generator:
        """Return the generator with the trainer's current weights.

        If an update has changed them, the weights are synced first and the sync's metrics reported,
        which all ranks of the actor do together.
        """
        if self.hybrid.needs_sync:
            with self.resident("parameters"):
                self.report(self.hybrid.sync())
        return self.generator

    @contextmanager
    def resident(self, *parts: Part) -> Iterator[None]:
        """Free the KV cache, then do as `EngineWorker.resident`."""
        self.make_room(trains="gradients" in parts)
        with super().resident(*parts):
            yield

    def make_room(self, *, trains: bool) -> None:
        """Free the generator's KV cache.

        trains: a model is trained next; the generator's copy of the weights is then freed too.
        """
        super().make_room(trains=trains)
        if trains:
            self.hybrid.release()


class SupervisedWorker(EngineWorker):
    """Updates and held-out losses of a policy on examples."""

    role = "actor"
    head = "causal_lm"
    exports = True
    evaluation = "compute_loss"

    @register(transfer_mode="3D_PROTO", reads=("prompts", "loss_mask"), writes=("losses",))
    def compute_loss(self, batch: TensorDict, *, prefix: str = "actor") -> TensorDict | None:
        """Return losses (B,): nats of each row, summed over the tokens to learn (loss_mask).

        None before the last pipeline stage. Reports prefix/loss, the mean per token.
        """
        rows = example_rows(batch)
        scored = self.score(rows, lambda output, micro: {"losses": row_losses(output, micro)})
        if scored is None:
            return None
        tokens = float(rows["response_mask"].values().sum())
        total = float(scored["losses"].sum())
        self.report({f"{prefix}/loss": Mean(total, tokens)})
        return scored

    @register(transfer_mode="3D_PROTO", reads=("prompts", "loss_mask"), minibatches=True)
    def update_actor(self, batch: TensorDict) -> dict[str, Any]:
        """One optimizer step for each mini-batch; metrics are means over the steps."""
        return self.train(example_rows(batch), SupervisedLoss(), prefix="actor")


class ReferenceWorker(EngineWorker):
    """Log-probabilities under the policy that training started from. It is never updated."""

    role = "reference"
    head = "causal_lm"

    @register(
        transfer_mode="3D_PROTO",
        reads=("prompts", "responses", "response_mask"),
        writes=("ref_log_probs",),
        on_demand=True,
    )
    def compute_ref_log_prob(self, batch: TensorDict) -> TensorDict | None:
        """Return ref_log_probs (ragged float32): log-probability of each response token.

        They are of logits / cfg.temperature. None before the last pipeline stage.
        """
        temperature = self.cfg.temperature

        def score(output: CausalOutput, micro: MicroBatch) -> dict[str, Tensor]:
            return {"ref_log_probs": micro.spread(output.log_probs(temperature))}

        return self.score(batch, score)
