"""`TrainEngine`: interface and shared part of all train engines. `engine_of` builds one.

Roles know this class and no engine. An engine derives from it and defines how it runs
micro-batches, steps its weights and exposes its blocks. Its properties are in `spmdflow.kind`.
"""

from __future__ import annotations

import logging
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor

from spmdflow.blocks.box import Box, describe_boxes, own_boxes
from spmdflow.blocks.hash import MODULUS, box_sum
from spmdflow.config.schema import EngineConfig, UpdateConfig
from spmdflow.data.micro import num_micro_batches
from spmdflow.data.ragged import lengths_of
from spmdflow.errors import ProtocolError, SpmdflowError, WeightSyncError
from spmdflow.kind.engine import engine_kind
from spmdflow.kind.registry import resolve
from spmdflow.objectives.loss import Loss
from spmdflow.parallel.device import CPU, to_device, to_host
from spmdflow.parallel.group import all_gather_plain
from spmdflow.weights.architecture import Architecture, packs_rows
from spmdflow.weights.move import Block, Storages, own_parts
from spmdflow.worker_api.metric import Metric
from spmdflow.worker_api.worker import WorkerContext
from spmdflow.workers.context_group import RING, ULYSSES, ContextGroup
from spmdflow.workers.lora import adapt_source, add_adapters
from spmdflow.workers.micro_batch import MicroBatch, join_answers, micro_batches
from spmdflow.workers.model import CountedRead, LoadedModel, ModelSource, load_model, open_model
from spmdflow.workers.optimizer import Scheduled

logger = logging.getLogger(__name__)

ForwardFn = Callable[[Any, MicroBatch], Mapping[str, Tensor]]
"""(output, micro) -> columns: response-shaped (b, R) or dense (b,), one row per micro row."""

EMPTY = "empty_steps"
"""Metric of a mini-batch without tokens to learn from."""
NONFINITE = "nonfinite_steps"
"""Metric of a mini-batch that was skipped because its gradient was not finite."""

Part = Literal["parameters", "gradients", "optimizer"]
Place = Literal["device", "host"]


class TrainEngine(ABC):
    """A distributed model. Every method is called by all ranks of the pool.

    Batches and results are in host memory (the store's); micro-batches go to the device. The
    output of a causal LM is a `CausalOutput`, that of a scalar head a `ScalarOutput`.
    """

    optimizer: Scheduled | None = None
    """Steps the weights. None: the engine only runs forward."""
    router_balance_coef: float = 0.0
    """Weight of the auxiliary loss of a mixture of experts (`objectives.balance`)."""
    router_metrics: Mapping[str, Metric] = {}
    """Of the last `accumulate`; empty for a model without experts."""
    context_metrics: Mapping[str, Metric] = {}
    """Of the last `accumulate`; empty where each rank has whole rows."""

    def __init__(
        self, model: LoadedModel | ModelSource, cfg: EngineConfig, context: WorkerContext
    ) -> None:
        """Sets the attributes that all engines have. Logs on the first rank if rows are padded."""
        self.name = context.name
        self.layout = context.layout
        self.groups = context.groups
        self.device = context.device
        self.rank = context.rank
        self.model = replace(model, read=None)  # a reader keeps the files mapped
        self.cfg = cfg
        self.packs = packs_rows(cfg.kind, cfg.options, model.source)
        """Whether rows of a micro-batch lie end to end, without padding."""
        if not self.packs and "padded" not in cfg.options and self.rank == self.layout.ranks[0]:
            why = f"engine.kind={cfg.kind}"
            if engine_kind(cfg.kind).packs:
                why = f"model_type {model.config.get('model_type')}"
            logger.info("%s: rows are padded, because %s does not pack them", self.name, why)
        self.dtype = model.dtype
        """Compute precision; master parameters, gradients and optimizer are float32."""
        self.weights_version = 0
        """Increases whenever the weights change: at each optimizer step and at load_blocks. For a
        new engine, load_blocks sets it to the number of steps, as if the engine had taken them."""
        self.dp_group = self.groups.get(self.layout.axis_group(self.rank, "dp"))
        self.context_group: ContextGroup | None = None
        """The ranks that divide rows among them; None: each has whole rows."""
        if self.layout.cp_size > 1:
            self.context_group = self._find_context_group(model)
        self._storages: dict[Part, Storages] = {}
        self._own_boxes: list[list[Box]] | None = None

    def _find_context_group(self, model: LoadedModel | ModelSource) -> ContextGroup:
        """Return this rank's group, with the attention of engine.context_attention."""
        heads = Architecture.sizes_from_config(model.config).num_heads // self.layout.tp_size
        size = self.layout.cp_size
        attention = self.cfg.context_attention
        why = "engine.context_attention"
        if attention == "auto":
            attention = RING if heads % size else ULYSSES
            why = f"c{size} {'does not divide' if heads % size else 'divides'} {heads} heads"
        if self.rank == self.layout.ranks[0]:
            logger.info("%s: attention over %d ranks by %s (%s)", self.name, size, attention, why)
        peers = self.layout.axis_group(self.rank, "cp")
        return ContextGroup(peers.index(self.rank), self.groups.get(peers), attention)

    # -- running ------------------------------------------------------------------------------

    def forward(
        self, batch: TensorDict, fn: ForwardFn, *, num_micro_batches: int
    ) -> TensorDict | None:
        """Run the model without gradient, and return the columns of fn for each row, in order.

        None on ranks before the last pipeline stage. (b, R) results become ragged, truncated to the
        response lengths. Every rank of the dp group runs num_micro_batches forwards, even without
        rows. Results are copied to the host per micro-batch; the host waits once, at the end.
        """
        micros = self.micro_batches(batch, num_micro_batches)

        def answer(output: Any, micro: MicroBatch) -> dict[str, Tensor]:
            """Return the columns of fn for one micro-batch, copied to the host.

            The host has to wait for the device before it reads them.
            """
            result = {}
            for name, column in fn(output, micro).items():
                result[name] = to_host(column)
            return result

        with torch.no_grad():
            answers = self.outputs(micros, answer)
        if self.device != CPU:
            torch.accelerator.synchronize(self.device)
        if answers:
            return join_answers(answers, micros)
        return None

    def without_adapters(self) -> AbstractContextManager[None]:
        """Inside the block, forward passes use the model without adapters, as in its folder."""
        return nullcontext()

    def start_dropout(self, micro: MicroBatch) -> None:
        """Drop inputs of adapters in the next passes, which train on this micro-batch."""
        if self.model.dropout is not None:
            assert self.optimizer is not None
            self.model.dropout.start(micro, self.optimizer.steps_done)

    def stop_dropout(self) -> None:
        """Drop nothing in the next passes."""
        if self.model.dropout is not None:
            self.model.dropout.stop()

    @abstractmethod
    def outputs(self, micros: list[MicroBatch], fn: ForwardFn) -> list[Mapping[str, Tensor]]:
        """The result of fn for each micro-batch; [] before the last pipeline stage."""

    def train_step(
        self, batch: TensorDict, loss: Loss, *, num_micro_batches: int
    ) -> dict[str, Metric]:
        """Take one optimizer step on the rows of all ranks. Returns the same metrics on every rank.

        They are the metrics of the loss, loss, grad_norm (before clipping) and lr. Increases
        weights_version. If no row of any rank has tokens to learn, nothing changes and the only
        metric is `EMPTY`. If the gradient is not finite, no weight changes: the only metric is
        `NONFINITE` if optimizer.skip_nonfinite permits it, otherwise SpmdflowError is raised. Every
        rank decides in the same way, by sums and a norm over all ranks. ProtocolError without an
        optimizer.
        """
        optimizer = self.optimizer
        if optimizer is None:
            raise ProtocolError(
                f"{self.name}: train_step on a model without an optimizer; expected one built "
                f"for training; give the engine an OptimizerConfig"
            )
        totals = self.dp_sums(loss.denominators(batch))
        if totals and not any(totals.values()):
            self._warn("no optimizer step: every row of the mini-batch has failed or is masked")
            return {EMPTY: 1.0}
        micros = self.micro_batches(batch, num_micro_batches)
        metrics = loss.finalize(self.accumulate(micros, loss, totals))
        norm = self.gradient_norm()
        if not math.isfinite(norm):
            self._skip_nonfinite(optimizer, norm, metrics["loss"])
            return {NONFINITE: 1.0}
        lr = optimizer.next_lr
        self.update(norm)
        optimizer.nonfinite_in_a_row = 0
        optimizer.last_lr = lr
        self.weights_version += 1
        more = {**self.router_metrics, **self.context_metrics}
        return {**metrics, **more, "grad_norm": norm, "lr": lr}

    def _skip_nonfinite(self, optimizer: Scheduled, norm: float, loss: float) -> None:
        """Discard a gradient that is not finite, count it in nonfinite_in_a_row, and log a warning.

        SpmdflowError instead if optimizer.skip_nonfinite steps in a row have already been skipped.
        """
        allowed = optimizer.cfg.skip_nonfinite
        skipped = optimizer.nonfinite_in_a_row
        if skipped >= allowed:
            before = f", as have the {skipped} tries before it," if skipped else ""
            raise SpmdflowError(
                f"{self.name}: optimizer step {optimizer.steps_done}{before} has gradient norm "
                f"{norm} and loss {loss}; expected finite numbers, no weight was changed; lower "
                f"optimizer.lr ({optimizer.cfg.lr}), look for extreme rewards and log-probs in "
                f"the batch, or skip up to n of such steps in a row with "
                f"optimizer.skip_nonfinite=n"
            )
        optimizer.nonfinite_in_a_row = skipped + 1
        self.forget_gradient()
        self._warn(
            "no optimizer step: the gradient norm is %s and the loss %s (%d in a row, "
            "optimizer.skip_nonfinite=%d)",
            norm,
            loss,
            optimizer.nonfinite_in_a_row,
            allowed,
        )

    def _warn(self, text: str, *values: float) -> None:
        """Logs a warning on the first rank of the pool."""
        if self.rank == self.layout.ranks[0]:
            logger.warning("%s: " + text, self.name, *values)

    @abstractmethod
    def accumulate(
        self, micros: list[MicroBatch], loss: Loss, totals: Mapping[str, float]
    ) -> dict[str, float]:
        """Forward and backward of every micro-batch: gradients summed over all ranks' rows.

        Returns the sums of the loss and its metrics over all ranks' rows, on every rank.
        """

    @abstractmethod
    def gradient_norm(self) -> float:
        """Norm of the complete model's summed gradient. Called once, after `accumulate`."""

    @abstractmethod
    def update(self, norm: float) -> None:
        """Clips the gradient, whose norm is given, steps the weights and discards the gradient."""

    def forget_gradient(self) -> None:
        """Discards the gradient without a step: the next `accumulate` starts from zero.
        ProtocolError for an engine that does not define it."""
        raise ProtocolError(
            f"{self.name}: got optimizer.skip_nonfinite with {type(self).__name__}, which does not "
            f"define forget_gradient, expected an engine that does; define it, or set "
            f"optimizer.skip_nonfinite=0"
        )

    # -- weights ------------------------------------------------------------------------------

    merges_adapters = True
    """True: blocks are weights with merged adapters. False: weights, A and alpha / rank B."""

    gathered_bytes = 0
    """Bytes that this rank has received so far to build blocks: the parts of merged adapters."""

    weight_group: dist.ProcessGroup | None = None
    """The ranks that together hold one copy of the weights. None: this rank has a complete copy."""

    replica_group: dist.ProcessGroup | None = None
    """The ranks with the same weights as this one, where the engine has several copies whose hashes
    are compared."""

    def settle(self) -> None:  # noqa: B027 most engines leave nothing running
        """Completes asynchronous work of the last optimizer step. Called on every rank before the
        weights are read in place."""

    @abstractmethod
    def blocks(self) -> Iterable[Block]:
        """(Hugging Face name, live tensor, its box of the complete tensor), tied tensors once,
        fixed order."""

    def own_blocks(self) -> Iterable[Block]:
        """The blocks that are hashed: each element on exactly one rank of the weight group."""
        return self.blocks()

    @property
    def shapes(self) -> Mapping[str, torch.Size]:
        """Shape of each block's tensor by Hugging Face name, in the order of `blocks`.

        Engines whose blocks are only parts of tensors override it to return complete shapes.
        """
        result = {}
        for name, view, _ in self.blocks():
            result[name] = view.shape
        return result

    @property
    def trained_shapes(self) -> Mapping[str, torch.Size]:
        """The shapes of tensors that are trained and saved: all tensors, or the adapters."""
        return self.shapes

    def shard_hashes(self, dtype: torch.dtype) -> dict[str, int]:
        """Return the positional hash of each complete tensor, cast to dtype, by Hugging Face name.

        Each rank hashes its own shards. The hashes are summed over the weight group and compared
        over the replica group, so all ranks of both call it together. WeightSyncError if replicas
        differ.
        """
        shapes = self.shapes
        sums = torch.zeros(len(shapes), dtype=torch.int64, device=self.device)
        index_of_name = {}
        for index, name in enumerate(shapes):
            index_of_name[name] = index
        for name, view, box in self.own_blocks():
            sums[index_of_name[name]] += box_sum(view.to(dtype), box)
        if self.weight_group is not None:
            dist.all_reduce(sums, group=self.weight_group)  # int64 wraps: modulo 2**64
        both = torch.stack([sums, ~sums])  # the least sum has the largest complement
        if self.replica_group is not None:
            dist.all_reduce(both, dist.ReduceOp.MAX, group=self.replica_group)
        extremes = dict(zip(shapes, zip(*both.tolist(), strict=True), strict=True))  # one wait
        differ = []
        for name, (most, least) in extremes.items():
            if most != ~least:
                differ.append(name)
        if differ:
            raise WeightSyncError(
                f"{self.name}: got copies of {differ[0]} with different values "
                f"({len(differ)} tensors differ), expected the same bits in every replica; "
                f"resume from the last checkpoint and report this message"
            )
        result = {}
        for name, (most, _) in extremes.items():
            result[name] = most % MODULUS
        return result

    # -- state --------------------------------------------------------------------------------

    @abstractmethod
    def state_blocks(self) -> Iterable[Block]:
        """This rank's exact live state in a fixed order; see `blocks`. The float32 tensors that the
        optimizer steps have Hugging Face names, their moments "<name>.exp_avg" and so on."""

    def own_state_blocks(self) -> Iterator[Block]:
        """Yield the parts of `state_blocks` that this rank saves.

        Over the whole pool every element is saved once: elements on several ranks are divided
        equally among them. All ranks of the pool make the first call together, because it exchanges
        their boxes.
        """
        state = list(self.state_blocks())
        if self._own_boxes is None:
            boxes_of_ranks = self.from_all(describe_boxes((name, box) for name, _, box in state))
            self._own_boxes = own_boxes(boxes_of_ranks, self.layout.group_rank(self.rank))
        return own_parts(state, self._own_boxes)

    def load_blocks(self, load: Callable[[Iterable[Block]], None], steps_done: int) -> None:
        """Restore parameters and moments bit for bit. They must be on the device.

        load: writes the saved values of `own_state_blocks`, from any layout, into the views that it
        gets. CheckpointError for a missing box. steps_done: optimizer steps so far, passed to
        optimizer.mark_restored. Increases weights_version, or sets it to steps_done for a new
        engine.
        """
        self._storages = {n: x for n, x in self._storages.items() if n == "gradients"}  # outdated
        self.weights_version = max(self.weights_version + (self.weights_version > 0), steps_done)
        with torch.no_grad():
            load(self.state_blocks())
            if self.optimizer is not None:
                self.optimizer.mark_restored(steps_done)

    @abstractmethod
    def residency(self, where: Place, part: Part) -> None:
        """Moves a part to the host or back to the device."""

    # -- for engines --------------------------------------------------------------------------

    def from_all(self, mine: Any) -> list[Any]:
        """The values that all ranks of the pool pass, in rank order: plain data. Collective."""
        if self.layout.size == 1:
            return [mine]
        return all_gather_plain(mine, self.groups.get(self.layout.ranks, backend="gloo"))

    def move(self, where: Place, part: Part, tensors: Callable[[], Iterable[Tensor]]) -> None:
        """Move the storages of a part to the device or to the host, for `residency`.

        Values that are unchanged since they were last on the host (same weights_version) are not
        copied again. Gradients are freed instead of copied, and are zero when they come back.
        tensors: returns the part's tensors; called the first time only.
        """
        if part not in self._storages:
            self._storages[part] = Storages(tensors())
        storages = self._storages[part]
        if where == "device":
            storages.restore()
        elif part == "gradients":
            storages.free()
        else:
            storages.to_host(self.weights_version)

    @property
    def token_multiple(self) -> int:
        """The number of a rank's tokens in a micro-batch is made a multiple of this."""
        return 1

    def micro_batches(self, batch: TensorDict, num_micro_batches: int) -> list[MicroBatch]:
        """The rows of batch on the device, split into micro-batches according to the settings."""
        by_tokens = self.cfg.max_micro_batch_tokens is not None
        return micro_batches(
            batch,
            num_micro_batches=num_micro_batches,
            by_tokens=by_tokens,
            device=self.device,
            packed=self.packs,
            shares_prompts=engine_kind(self.cfg.kind).shares_prompts,
            context_group=self.context_group,
            multiple=self.token_multiple,
        )

    def count_micro_batches(self, batch: TensorDict) -> int:
        """Return how many micro-batches these rows need: the maximum over the dp group.

        For rows that a role derived from those of its call, whose number the controller did not
        count. All ranks of the dp group call it together.
        """
        tokens = (lengths_of(batch["prompts"]) + lengths_of(batch["responses"])).tolist()
        rows = self.cfg.micro_batch_size_per_rank
        limit = self.cfg.max_micro_batch_tokens
        mine = num_micro_batches([tokens], max_rows=rows, max_tokens=limit, packed=self.packs)
        peers = self.layout.axis_group(self.rank, "dp")
        needs = self.dp_sums({str(rank): mine * (rank == self.rank) for rank in peers})
        return int(max(needs.values()))

    def dp_sums(self, local: Mapping[str, float | Tensor]) -> dict[str, float]:
        """Return the sum of each number over the dp group, in float64.

        Every rank of the group calls it with the same names. Tensors must be scalars.
        """
        names = sorted(local)
        on_host = []
        for name in names:
            on_host.append(0.0 if isinstance(local[name], Tensor) else local[name])
        sums = to_device(torch.tensor(on_host, dtype=torch.float64), self.device)
        for index, name in enumerate(names):
            if isinstance(local[name], Tensor):
                sums[index] = local[name]
        if self.layout.dp_size > 1:
            dist.all_reduce(sums, group=self.dp_group)
        return dict(zip(names, sums.tolist(), strict=True))


def planned_steps(update: UpdateConfig | None) -> int:
    """Return the planned number of optimizer steps in one step of the run.

    num_epochs * ceil(samples_per_step / mini_batch_size). 1 without update settings, or if
    samples_per_step is 0.
    """
    if update is None or update.samples_per_step == 0:
        return 1
    mini_batches = -(-update.samples_per_step // update.mini_batch_size)
    return update.num_epochs * mini_batches


def engine_of(
    cfg: Any,
    context: WorkerContext,
    *,
    head: str,
    adopt: Callable[..., None] | None = None,
) -> TrainEngine:
    """Build the train engine that cfg.engine.kind names, with the weights of cfg.model.

    head: causal_lm, scalar (a trained one-label head) or critic (a zero head if the folder has
    none). It has an optimizer if cfg has the section `optimizer`, and adapters if cfg.model.lora is
    set; the first rank then logs the numbers of parameters. It also logs how much of the folder it
    has read. adopt: places the weights in the
    storage that a generator shares (megatron_optimizer.Adopt). All ranks of the pool call it
    together.
    """
    total_steps = context.total_steps * planned_steps(getattr(cfg, "update", None))
    kind = engine_kind(cfg.engine.kind, key=f"{context.name}.engine.kind")
    lora = getattr(cfg.model, "lora", None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron warns about every extra that is not installed
        engine_class = resolve(kind.implementation)
    model = (open_model if kind.reads_folder else load_model)(cfg.model, head=head)
    counted = None
    if model.read is not None:
        counted = CountedRead(model.read)
        model = replace(model, read=counted)
    if lora is not None:
        assert kind.adapters, kind.name
        key = f"{context.name}.model.lora"
        if isinstance(model, LoadedModel):
            model = add_adapters(model, lora, seed=context.seed, key=key)
        else:
            model = adapt_source(model, lora, seed=context.seed, key=key)
    engine: TrainEngine = engine_class(
        model,
        cfg.engine,
        context,
        optimizer=getattr(cfg, "optimizer", None),
        total_optimizer_steps=total_steps,
        **({} if adopt is None else {"adopt": adopt}),
    )
    update = getattr(cfg, "update", None)
    engine.router_balance_coef = getattr(update, "router_balance_coef", 0.0)
    if context.rank != context.layout.ranks[0]:
        return engine
    if counted is not None:
        files = sum(path.stat().st_size for path in model.source.glob("*.safetensors"))
        sizes = counted.num_bytes / 1e6, files / 1e6
        logger.info("%s: read %.1f of %.1f MB of weights in %s", context.name, *sizes, model.source)
    if lora is not None:
        sides = engine.trained_shapes, engine.shapes
        trained, num_all = (sum(map(math.prod, side.values())) for side in sides)
        arguments = context.name, trained, num_all, lora.rank, lora.alpha
        logger.info(
            "%s: trains %d parameters next to %d: adapters of rank %d, alpha %g", *arguments
        )
    return engine
