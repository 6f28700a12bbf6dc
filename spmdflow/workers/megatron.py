"""`MegatronEngine`: tensor, pipeline and data parallelism by Megatron-Core (paper section 2.1).

Every rank holds 1/t of the tensors of its stages; micro-batches flow through the stages in 1F1B
order (Narayanan et al. 2021). Works on any subset of ranks and next to other models in the process.
Ranks that divide rows (context parallelism) are data-parallel ranks for Megatron, and exchange
queries, keys and values in this project's attention. Knows no roles: what an output means is up to
`fn` and `loss`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from tensordict import TensorDict
from torch import Tensor, nn

from spmdflow.blocks.box import Box
from spmdflow.config.schema import EngineConfig, OptimizerConfig
from spmdflow.errors import ConfigError
from spmdflow.kind.engine import engine_kind
from spmdflow.objectives.log_prob import CausalOutput, ScalarOutput
from spmdflow.objectives.loss import Loss
from spmdflow.parallel.group import all_gather_plain
from spmdflow.weights.move import Block, Blocks, blocks, fill, own_parts
from spmdflow.weights.ranks import counted_boxes, megatron_tables, part_name
from spmdflow.weights.table import EMBEDDING, parameters
from spmdflow.worker_api.metric import Metric
from spmdflow.worker_api.worker import WorkerContext
from spmdflow.workers.engine import ForwardFn, Part, Place, TrainEngine
from spmdflow.workers.megatron_layers import PackedParams
from spmdflow.workers.megatron_lora import (
    StageAdapters,
    check_adapted_stage,
    freeze_base,
    merged_blocks,
    separate_blocks,
    start_gradients_at_embedding,
    without_adapters,
)
from spmdflow.workers.megatron_messages import StageMessages
from spmdflow.workers.megatron_model import (
    build_model,
    leave_padding_untrained,
    local_name,
    routers_of,
)
from spmdflow.workers.megatron_optimizer import Adopt, StageOptimizer, flat_blocks
from spmdflow.workers.megatron_runtime import megatron_runtime, process_groups
from spmdflow.workers.micro_batch import MicroBatch
from spmdflow.workers.model import ModelSource
from spmdflow.workers.optimizer import undecayed_of


class MegatronEngine(TrainEngine):
    """A `TrainEngine` over a model folder. Without an optimizer it only runs forward.

    All ranks of context.layout.ranks build it together. ConfigError if the model cannot be divided
    as the layout requires. adopt: see `megatron_optimizer.Adopt`.
    """

    model: ModelSource
    optimizer: StageOptimizer | None = None
    _adapters: StageAdapters | None = None

    def __init__(
        self,
        model: ModelSource,
        cfg: EngineConfig,
        context: WorkerContext,
        *,
        optimizer: OptimizerConfig | None = None,
        total_optimizer_steps: int = 0,
        adopt: Adopt | None = None,
    ) -> None:
        """Builds this rank's parts of the model and its optimizer, then reads its weights. See the
        class."""
        super().__init__(model, cfg, context)
        _check_options(self.name, cfg)
        self._divide_weights(model)
        with megatron_runtime():
            groups = self._megatron_groups = process_groups(self.layout, self.rank, self.groups)
            num_parts = self.layout.virtual_size
            architecture = model.architecture
            self._modules = self._build_parts(model, groups, cfg.options)
            self._config: TransformerConfig = self._modules[0].config
            self._routers = routers_of(self._modules, architecture, groups)
            self._run = get_forward_backward_func(
                groups.pp.size(), num_parts if num_parts > 1 else None
            )
            self._stages: StageMessages | None = None
            if groups.pp.size() > 1:
                self._stages = StageMessages(groups.pp, self._config)
            named = []
            for n, m in enumerate(self._modules):
                for x in m.named_parameters():
                    named.append((n, *x))
            self._parameters = {
                part_name(n, local_name(name), num_parts): p for n, name, p in named
            }
            if optimizer is None:
                for parameter in self._parameters.values():
                    parameter.requires_grad_(False)
            elif model.lora is not None:
                key = f"{self.name}.model.lora"
                freeze_base(self._parameters, self._table, model.lora.adapters, key=key)
            differ = self._parameters.keys() ^ self._table.keys()
            assert not differ, f"table and model differ: {differ}"
            for name, described in self._table.items():
                if described.padding:
                    self._parameters[name].detach().zero_()  # before the optimizer copies it
            if optimizer is not None:
                self.optimizer = StageOptimizer(
                    self._modules,
                    optimizer,
                    groups,
                    total_steps=total_optimizer_steps,
                    distributed=engine_kind(cfg.kind).sharding_with(cfg.options).optimizer,
                    overlap="overlap" in cfg.options,
                    adopt=adopt,
                    undecayed=self._undecayed_by(optimizer),
                )
        self._read(model)

    def _divide_weights(self, model: ModelSource) -> None:
        """Set which parts of the weights this rank has, and which of them it counts.

        ConfigError if the model cannot be divided as the layout requires.
        """
        holders = self.layout.axis_group(self.rank, "copy")
        self.weight_group = self.groups.get(holders)
        self._architecture = model.architecture
        if model.lora is not None:
            check_adapted_stage(self.name, model.architecture, self.layout, self.cfg.options)
            self._architecture = replace(model.architecture, adapters=model.lora.adapters)
        tables_of_ranks = megatron_tables(self._architecture, self.layout)
        self._table = tables_of_ranks[self.rank]
        tables = [tables_of_ranks[rank] for rank in holders]
        weights = [without_adapters(table) for table in tables]
        index = holders.index(self.rank)
        self._counted = counted_boxes(tables, index)
        self._counted_weights = counted_boxes(weights, index)

    def _build_parts(
        self, model: ModelSource, groups: ProcessGroupCollection, options: Collection[str]
    ) -> list[GPTModel]:
        """Build this rank's parts of the model, one for each virtual stage."""
        num_parts = self.layout.virtual_size
        padding_token = model.config.get("pad_token_id")
        result = []
        for part in range(num_parts):
            built = build_model(
                model.architecture,
                groups,
                self.dtype,
                options,
                part=part,
                num_parts=num_parts,
                divides_rows=self.context_group is not None,
                has_adapters=model.lora is not None,
            )
            if padding_token is not None:
                row = padding_token % model.architecture.vocab_size  # -1: the last
                leave_padding_untrained(built, row, groups.tp)
            if model.lora is not None:
                assert model.dropout is not None
                self._adapters = StageAdapters(
                    built, self._table, model.lora, dropout=model.dropout, group=groups.tp
                )
                start_gradients_at_embedding(built)
            result.append(built)
        return result

    # -- running ------------------------------------------------------------------------------

    def without_adapters(self) -> AbstractContextManager[None]:
        """See `TrainEngine.without_adapters`."""
        return nullcontext() if self._adapters is None else self._adapters.off()

    def outputs(self, micros: list[MicroBatch], fn: ForwardFn) -> list[Mapping[str, Tensor]]:
        """Run forward on each micro-batch, and return the results of fn.

        [] before the last pipeline stage. All ranks of the model call it together.
        """
        self.settle()
        with megatron_runtime():
            return self._run_micros(self._modules, micros, fn, train=False)

    def accumulate(
        self, micros: list[MicroBatch], loss: Loss, totals: Mapping[str, float]
    ) -> dict[str, float]:
        """Run forward and backward of each micro-batch, with gradients summed over all ranks' rows.

        Zeroes the gradients first. Returns the sums of the loss and its metrics over all rows. The
        last stage computes them, and every rank gets them. All ranks of the model call it together.
        """
        assert self.optimizer is not None

        def terms(output: Any, micro: MicroBatch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            """Return (loss, number of tokens, float64 metrics), in the form that Megatron expects.

            The number of tokens is unused and 0. The metrics include the loss.
            """
            value, metrics = loss(output, micro, totals)
            sums = {}
            for name, x in {**metrics, "loss": value}.items():
                sums[name] = x.detach().double()
            return value, torch.zeros((), dtype=torch.int), sums

        if self.context_group is not None:
            self.context_group.num_bytes = 0
        with megatron_runtime():
            self._start_routers(micros)
            self.optimizer.zero_gradients()
            metrics_of_micros = self._run_micros(self.optimizer.ddps, micros, terms, train=True)
            self.stop_dropout()
            if self._routers is not None:
                statistics = self._routers.end(self._sum_over_pool)
                self.router_metrics = statistics.metrics() | self._traffic_metrics()
            if self.context_group is not None:
                sent = self._sum_of_ranks(self.context_group.num_bytes)
                self.context_metrics = {"context_bytes": sent}
            return self._share_metrics(metrics_of_micros)

    def _traffic_metrics(self) -> dict[str, Metric]:
        """Return the bytes that all ranks have sent to experts in this step; {} without e."""
        if self._routers is None or self.layout.expert_size == 1:
            return {}
        return {"expert_bytes": self._sum_of_ranks(self._routers.traffic.num_bytes)}

    def _sum_of_ranks(self, value: float) -> float:
        """The sum of a number over all ranks of the model, which call it together."""
        total = torch.tensor(float(value), dtype=torch.float64, device=self.device)
        self._sum_over_pool(total)
        return float(total)

    def _start_routers(self, micros: list[MicroBatch]) -> None:
        """Begin a training pass of a mixture of experts; nothing for a dense model.

        With a weight of the auxiliary loss above 0, a forward without gradient first counts the
        tokens of each expert. All ranks of the model call it together.
        """
        routers = self._routers
        if routers is None:
            return
        routers.traffic.num_bytes = 0
        coef = self.router_balance_coef
        counted = None
        if coef:
            routers.start_counting()
            self.settle()
            with torch.no_grad():
                self._run_micros(self._modules, micros, lambda output, micro: {}, train=False)
            counted = routers.end(self._sum_over_pool)
        recomputes = self._config.recompute_granularity == "full"
        routers.start_training(coef, counted, recomputes=recomputes)

    def _sum_over_pool(self, values: Tensor) -> None:
        """Sum a tensor over all ranks of the model, in place. They call it together."""
        if self.layout.size > 1:
            dist.all_reduce(values, group=self.groups.get(self.layout.ranks))

    def gradient_norm(self) -> float:
        """See `TrainEngine.gradient_norm`."""
        assert self.optimizer is not None
        with megatron_runtime():
            return self.optimizer.gradient_norm()

    def update(self, norm: float) -> None:
        """See `TrainEngine.update`."""
        assert self.optimizer is not None
        with megatron_runtime():
            self.optimizer.step(norm)

    def forget_gradient(self) -> None:
        """See `TrainEngine.forget_gradient`."""
        assert self.optimizer is not None
        with megatron_runtime():
            self.optimizer.zero_gradients()

    # -- weights ------------------------------------------------------------------------------

    def settle(self) -> None:
        """Gather the weights of the last optimizer step, if that was left to the next forward.

        All ranks of the model call it together.
        """
        if self.optimizer is not None:
            with megatron_runtime():
                self.optimizer.gather()

    def blocks(self) -> Iterator[Block]:
        """(Hugging Face name, live view, its box of the complete tensor) of this rank's tensors.

        Merged adapters are in new tensors, not in live ones; otherwise B is multiplied by scale, in
        new tensors too.
        """
        self.settle()
        lora = self.model.lora
        if lora is None:
            return blocks(self._parameters, self._table)
        form = merged_blocks if self.merges_adapters else separate_blocks
        return form(self._parameters, self._table, lora)

    def own_blocks(self) -> Iterator[Block]:
        """See `TrainEngine.own_blocks`."""
        if self.model.lora is not None and self.merges_adapters:
            return own_parts(self.blocks(), self._counted_weights)
        return own_parts(self.blocks(), self._counted)

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """Return the shape of each complete tensor of the model by Hugging Face name.

        Also tensors that other ranks have. Adapters are included only if they are not merged.
        """
        architecture = self.model.architecture if self.merges_adapters else self._architecture
        result = {}
        for each in parameters(architecture):
            result[each.name] = torch.Size(each.shape)
        return result

    @property
    def trained_shapes(self) -> dict[str, torch.Size]:
        """The shapes of the tensors that are trained and saved, also those of other ranks."""
        lora = self.model.lora
        result = {}
        for each in parameters(self._architecture):
            if lora is None or lora.adapters.is_trained(each.name):
                result[each.name] = torch.Size(each.shape)
        return result

    # -- state --------------------------------------------------------------------------------

    def state_blocks(self) -> Iterator[Block]:
        """Yield (name, live float32 values, box) of the tensors that this rank steps.

        Each is followed by its moments, named "<name>.<moment>", such as <name>.exp_avg. With the
        distributed optimizer each element is in the blocks of one dp rank. Without an optimizer:
        this rank's weights.
        """
        if self.optimizer is None:
            yield from self.blocks()
            return
        for moment, (name, view, box) in self._stepped_blocks():
            yield name + (moment and f".{moment}"), view, box

    def residency(self, where: Place, part: Part) -> None:
        """Move a part to the host or back to the device.

        Gradients are freed instead of copied, because they are needed only in a step. On a CPU
        device only the gradient buffer is freed or reallocated, and other parts do not move.
        """
        if part != "gradients" and self.device.type == "cpu":
            return
        if part == "parameters":
            self.move(where, part, self._parameters.values)
        elif self.optimizer is not None:
            if part == "gradients":
                self.move(where, part, self.optimizer.gradients)
            else:
                self.move(where, part, self.optimizer.states)

    # -- helpers, in the order of use ---------------------------------------------------------

    def _undecayed_by(self, cfg: OptimizerConfig) -> frozenset[str]:
        """Return the local names of the tensors without weight decay, by `undecayed_of`."""
        num_dims = {}
        for name, tensor in self._table.items():
            num_dims[name] = len(tensor.shape)
        embeddings = []
        for name, tensor in self._table.items():
            if any(piece.name == EMBEDDING for piece in tensor.pieces):
                embeddings.append(name)
        return undecayed_of(cfg, num_dims, embeddings)

    def _read(self, model: ModelSource) -> None:
        """Read this rank's parts of the weights from the folder, each once, into the parameters.

        Also writes them to the float32 masters that the optimizer steps, in the file's precision.
        The first stage reads a tied embedding and broadcasts it to the last stage. All ranks of the
        model call it together.
        """
        has_masters = self.optimizer is not None and self.dtype != torch.float32
        stepped = self._stepped_blocks() if has_masters else ()
        masters = Blocks(block for moment, block in stepped if not moment)
        group = self._megatron_groups.embd if model.architecture.tied else None
        if group is None:
            first = self.rank
        else:
            first = dist.get_process_group_ranks(group)[0]

        def read(name: str, box: Box) -> Tensor:
            """Return a box of the folder's tensor, and write it to the masters.

            A tied embedding is read by the first stage only, and broadcast.
            """
            is_sent = group is not None and name == EMBEDDING
            reads = not is_sent or first == self.rank
            assert model.read is not None
            values = model.read(name, box if reads else Box.of_shape([0] * len(box.bounds)))
            if is_sent:
                values = (values if reads else values.new_empty(box.shape)).to(self.device)
                dist.broadcast(values, first, group=group)
            masters.write(name, box, values)
            return values

        fill(self._parameters, self._table, read)

    def _run_micros(
        self,
        modules: Sequence[nn.Module],
        micros: list[MicroBatch],
        fn: Callable[..., Any],
        *,
        train: bool,
    ) -> list[Any]:
        """Return fn(output, micro) for each micro-batch on the last stage; [] on other stages.

        One stage runs them one by one; several run Megatron's 1F1B order (Narayanan et al. 2021),
        interleaved where they have several parts. Micro-batches may differ in rows and length.
        train: also run backward and add the gradients in modules, which are then the parts' DDP
        wrappers; fn returns (scalar to differentiate, number of tokens, value to collect). All
        ranks call it together.
        """

        def step(
            remaining: Iterator[MicroBatch], model: nn.Module
        ) -> tuple[Tensor, Callable[..., Any]]:
            """Run the next micro-batch through this stage.

            Returns its output, and the function that applies fn to the output.
            """
            micro = next(remaining)
            ids = micro.input_ids
            positions = micro.position_ids
            packed = None
            if micro.packed is not None:
                fused = self._config.apply_rope_fusion
                packed = PackedParams.of(micro.packed, positions[0], fused=fused, shard=micro.shard)
            if self._routers is not None:
                self._routers.begin(micro)
            if train:
                self.start_dropout(micro)
            output = model(ids, positions, None, packed_seq_params=packed)
            return output, lambda output, non_loss_data=False: fn(
                self._output_of(output, micro), micro
            )

        for module in modules:
            module.train(train)  # recompute is only for training; there is no dropout
        if self._stages is not None:
            self._stages.expect(micros)
        results: list[Any] = self._run(
            forward_step_func=step,
            data_iterator=[iter(micros) for _ in modules] if len(modules) > 1 else iter(micros),
            model=list(modules) if len(modules) > 1 else modules[0],
            num_microbatches=len(micros),
            seq_length=micros[0].input_ids.shape[1],  # no effect, like the next line
            micro_batch_size=len(micros[0].input_ids),
            forward_only=not train,
            collect_non_loss_data=not train,
            pg_collection=self._megatron_groups,
            **({} if self._stages is None else {"p2p_communicator": self._stages}),
        )
        for part in self._modules:
            # a stage would keep the last activations that it received, and their gradient
            part.set_input_tensor(None)
        return results

    @property
    def token_multiple(self) -> int:
        """See `TrainEngine.token_multiple`: tp, if its ranks divide the sequence."""
        return self.layout.tp_size if self._config.sequence_parallel else 1

    def micro_batches(self, batch: TensorDict, num_micro_batches: int) -> list[MicroBatch]:
        """Split the rows into micro-batches on the device; see `TrainEngine.micro_batches`.

        With virtual stages their number is rounded up to a multiple of the pipeline's size.
        """
        size = self.layout.pp_size if self.layout.virtual_size > 1 else 1
        return super().micro_batches(batch, -(-num_micro_batches // size) * size)

    def _output_of(self, output: Tensor, micro: MicroBatch) -> CausalOutput | ScalarOutput:
        """Return the last stage's hidden states with its head, as a CausalOutput or a ScalarOutput.

        output: (b, T, H) of this rank's tokens. Hidden states of a causal LM are selected at the
        positions that predict a response token.
        """
        architecture = self.model.architecture
        model = self._modules[-1]
        tp = self._megatron_groups.tp
        hidden = output.flatten(0, 1)
        shard = micro.shard
        if architecture.head == "scalar":
            return ScalarOutput(
                hidden, lambda x: nn.functional.linear(x, model.output_layer.weight), shard
            )
        weight = model.output_layer.weight
        if architecture.tied:
            weight = model.shared_embedding_or_output_weight()
        predicting = micro.predicting
        targets = micro.targets
        join = None
        if shard is not None:
            predicting = shard.predicting
            targets = shard.targets(micro.targets)
            join = partial(shard.join, num_targets=len(micro.targets))
        return CausalOutput(
            hidden.index_select(0, predicting),
            weight,
            targets,
            first=tp.rank() * len(weight),
            vocab_size=architecture.vocab_size,
            group=tp if tp.size() > 1 else None,
            join=join,
        )

    def _share_metrics(self, metrics_of_micros: list[dict[str, Tensor]]) -> dict[str, float]:
        """Sum the metrics over micro-batches and dp, and return the same bits on every rank.

        The first rank of each replica's last stage computes them, and the replica's other ranks get
        them from it. All ranks of the model call it together.
        """
        replica = self.layout.axis_group(self.rank, "replica")
        source = replica[-self.layout.tp_size * self.layout.cp_size]
        metrics: dict[str, float] = {}
        if self.rank == source:
            local = {}
            for name in metrics_of_micros[0]:
                local[name] = sum(metrics_of_micro[name] for metrics_of_micro in metrics_of_micros)
            metrics = self.dp_sums(local)
        if len(replica) > 1:
            group = self.groups.get(replica, backend="gloo")  # from host to host
            metrics = all_gather_plain(metrics, group)[replica.index(source)]
        return metrics

    def _stepped_blocks(self) -> Iterator[tuple[str, Block]]:
        """Yield the tensors that this rank steps and their moments, cut into boxes.

        Each is (moment's name, (Hugging Face name, live float32 values, box)). The name is "" for
        weights.
        """
        assert self.optimizer is not None
        for name, start, tensors in self.optimizer.stepped_tensors():
            for moment, flat in tensors.items():
                for block in flat_blocks(self._table[name], flat, start):
                    yield moment, block


def _check_options(name: str, cfg: EngineConfig) -> None:
    """Raise ConfigError if engine.options has an option that this engine does not support."""
    known = engine_kind(cfg.kind).options
    unknown = sorted(set(cfg.options) - set(known))
    if unknown:
        where = f"{name}.engine.options"
        got = f"{unknown} for engine {cfg.kind}"
        do = "remove them or choose another engine.kind"
        raise ConfigError.of(where, got, f"some of {list(known)}", do)
