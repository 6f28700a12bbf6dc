"""`MegatronEngine`: tensor, pipeline and data parallelism by Megatron-Core (paper section 2.1).

Every rank holds 1/t of the tensors of its stages; micro-batches flow through the stages in 1F1B
order (Narayanan et al. 2021). Works on any subset of ranks and beside other models in the process.
There is no context parallelism: Megatron's attention lacks it without TransformerEngine, and
layouts have no such axis. The embedding of a padding token is trained like any other (Hugging Face
stops its gradient). Knows no roles: what an output means is up to `fn` and `loss`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from megatron.core.transformer.transformer_config import TransformerConfig
from tensordict import TensorDict
from torch import Tensor, nn

from spmdflow.blocks.box import Box, describe_boxes, own_boxes
from spmdflow.config.schema import EngineConfig, OptimizerConfig
from spmdflow.errors import ConfigError
from spmdflow.kind.engine import engine_kind
from spmdflow.objectives.log_prob import CausalOutput, ScalarOutput
from spmdflow.objectives.loss import Loss
from spmdflow.parallel.group import all_gather_plain
from spmdflow.transfer.worker import WorkerContext
from spmdflow.weights.move import Block, Blocks, blocks, fill, own_parts
from spmdflow.weights.ranks import megatron_tables, part_name
from spmdflow.weights.table import EMBEDDING, parameters
from spmdflow.workers.engine import ForwardFn, Part, Place, TrainEngine
from spmdflow.workers.megatron_model import build_model, local_name
from spmdflow.workers.megatron_optimizer import Adopt, StageOptimizer, flat_blocks
from spmdflow.workers.megatron_packed import PackedParams
from spmdflow.workers.megatron_runtime import megatron_runtime, process_groups
from spmdflow.workers.micro_batch import MicroBatch, lengthened
from spmdflow.workers.model import ModelSource
from spmdflow.workers.optimizer import undecayed_of


class MegatronEngine(TrainEngine):
    """A `TrainEngine` over a model folder; without an optimizer it only runs forward.

    All ranks of context.layout.ranks build it together. ConfigError if the model cannot be cut
    as the layout asks. adopt: see `megatron_optimizer.Adopt`.
    """

    model: ModelSource
    optimizer: StageOptimizer | None = None

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
        super().__init__(model, cfg, context)
        _check_options(self.name, cfg)
        replica = self.layout.axis_group(self.rank, "replica")
        self.weight_group = self.groups.get(replica)
        every = megatron_tables(model.architecture, self.layout)  # ConfigError if that cannot be
        self._table = every[self.rank]
        # norms, small biases and a tied copy are on several ranks, and count once
        tables = ([p for x in every[rank].values() for p in x.pieces] for rank in replica)
        held = []
        for table in tables:
            held.append(describe_boxes((piece.name, piece.box) for piece in table))
        self._counted = own_boxes(held, replica.index(self.rank))
        with megatron_runtime():
            groups = self._megatron_groups = process_groups(self.layout, self.rank, self.groups)
            many = self.layout.virtual_size
            architecture = model.architecture
            options = cfg.options
            self._modules = [
                build_model(architecture, groups, self.dtype, options, part=n, num_parts=many)
                for n in range(many)
            ]
            self._config: TransformerConfig = self._modules[0].config
            self._run = get_forward_backward_func(groups.pp.size(), many if many > 1 else None)
            self._stages: _StageMessages | None = None
            if groups.pp.size() > 1:
                self._stages = _StageMessages(groups.pp, self._config)
            named = []
            for n, m in enumerate(self._modules):
                for x in m.named_parameters():
                    named.append((n, *x))
            self._parameters = {part_name(n, local_name(name), many): p for n, name, p in named}
            if optimizer is None:
                for parameter in self._parameters.values():
                    parameter.requires_grad_(False)
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

    # -- running ------------------------------------------------------------------------------

    def outputs(self, micros: list[MicroBatch], fn: ForwardFn) -> list[Mapping[str, Tensor]]:
        """See `TrainEngine.outputs`."""
        self.settle()
        with megatron_runtime():
            return self._pass(self._modules, micros, fn, train=False)

    def accumulate(
        self, micros: list[MicroBatch], loss: Loss, totals: Mapping[str, float]
    ) -> dict[str, float]:
        """See `TrainEngine.accumulate`. Sums are those of the last stage, on every rank."""
        assert self.optimizer is not None

        def terms(output: Any, micro: MicroBatch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            value, metrics = loss(output, micro, totals)
            found = {}
            for name, x in {**metrics, "loss": value}.items():
                found[name] = x.detach().double()
            return value, torch.zeros((), dtype=torch.int), found

        with megatron_runtime():
            self.optimizer.zero_gradients()
            found = self._pass(self.optimizer.ddps, micros, terms, train=True)
            return self._everywhere(found)

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
        """See `TrainEngine.settle`."""
        if self.optimizer is not None:
            with megatron_runtime():
                self.optimizer.gather()

    def blocks(self) -> Iterator[Block]:
        """(Hugging Face name, live view, its box of the whole) of all that this rank holds."""
        self.settle()
        return blocks(self._parameters, self._table)

    def own_blocks(self) -> Iterator[Block]:
        """See `TrainEngine.own_blocks`."""
        return own_parts(self.blocks(), self._counted)

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """See `TrainEngine.shapes`."""
        result = {}
        for each in parameters(self.model.architecture):
            result[each.name] = torch.Size(each.shape)
        return result

    # -- state --------------------------------------------------------------------------------

    def state_blocks(self) -> Iterator[Block]:
        """See `TrainEngine.state_blocks`; without an optimizer the weights held here.

        With the distributed optimizer each element is in the blocks of one dp rank.
        """
        if self.optimizer is None:
            yield from self.blocks()
            return
        for moment, (name, view, box) in self._stepped_blocks():
            yield name + (moment and f".{moment}"), view, box

    def residency(self, where: Place, part: Part) -> None:
        """Move a part to the host or back. Gradients are not kept: they live within a step.

        On a CPU device only gradients matter: their buffer is freed.
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
        """Local names of what weight decay spares."""
        num_dims = {}
        for name, tensor in self._table.items():
            num_dims[name] = len(tensor.shape)
        embeddings = []
        for name, tensor in self._table.items():
            if any(piece.name == EMBEDDING for piece in tensor.pieces):
                embeddings.append(name)
        return undecayed_of(cfg, num_dims, embeddings)

    def _read(self, model: ModelSource) -> None:
        """This rank's boxes from the folder, each once, in the file's precision: parameters and the
        masters that the optimizer steps. A tied embedding goes on to the last stage."""
        has_masters = self.optimizer is not None and self.dtype != torch.float32
        stepped = self._stepped_blocks() if has_masters else ()
        masters = Blocks(block for moment, block in stepped if not moment)
        group = self._megatron_groups.embd if model.architecture.tied else None
        if group is None:
            first = self.rank
        else:
            first = dist.get_process_group_ranks(group)[0]

        def read(name: str, box: Box) -> Tensor:
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

    def _pass(
        self,
        modules: Sequence[nn.Module],
        micros: list[MicroBatch],
        fn: Callable[..., Any],
        *,
        train: bool,
    ) -> list[Any]:
        """What fn gives for the output of each micro-batch, on the last stage; [] elsewhere.

        One stage runs them one by one; several run Megatron's 1F1B order (Narayanan et al. 2021),
        interleaved where they have several parts. Micro-batches may differ in rows and length.
        train: add up their gradients in modules, the parts' DDP wrappers; fn then gives (scalar to
        differentiate, number of tokens, what is collected).
        """

        def step(rest: Iterator[MicroBatch], model: nn.Module) -> tuple[Tensor, Callable[..., Any]]:
            micro = next(rest)
            ids = micro.input_ids
            places = micro.position_ids
            packed = None
            if micro.packed is not None:
                fused = self._config.apply_rope_fusion
                packed = PackedParams.of(micro.packed, places[0], fused=fused)
            output = model(ids, places, None, packed_seq_params=packed)
            return output, lambda output, non_loss_data=False: fn(self._named(output, micro), micro)

        for module in modules:
            module.train(train)  # recompute is for training only; there is no dropout
        if self._config.sequence_parallel:
            micros = [lengthened(micro, self.layout.tp_size) for micro in micros]
        if self._stages is not None:
            self._stages.expect(micros)
        found: list[Any] = self._run(
            forward_step_func=step,
            data_iterator=[iter(micros) for _ in modules] if len(modules) > 1 else iter(micros),
            model=list(modules) if len(modules) > 1 else modules[0],
            num_microbatches=len(micros),
            seq_length=micros[0].input_ids.shape[1],  # of no effect, as the next line
            micro_batch_size=len(micros[0].input_ids),
            forward_only=not train,
            collect_non_loss_data=not train,
            pg_collection=self._megatron_groups,
            **({} if self._stages is None else {"p2p_communicator": self._stages}),
        )
        return found

    def micro_batches(self, batch: TensorDict, num_micro_batches: int) -> list[MicroBatch]:
        """See `TrainEngine.micro_batches`; virtual stages need a multiple of p of them."""
        size = self.layout.pp_size if self.layout.virtual_size > 1 else 1
        return super().micro_batches(batch, -(-num_micro_batches // size) * size)

    def _named(self, output: Tensor, micro: MicroBatch) -> CausalOutput | ScalarOutput:
        """The last stage's hidden states (b, T, H) with its head, as roles know them."""
        architecture = self.model.architecture
        model = self._modules[-1]
        tp = self._megatron_groups.tp
        hidden = output.flatten(0, 1)
        if architecture.head == "scalar":
            return ScalarOutput(
                hidden, lambda x: nn.functional.linear(x, model.output_layer.weight)
            )
        weight = model.output_layer.weight
        if architecture.tied:
            weight = model.shared_embedding_or_output_weight()
        return CausalOutput(
            hidden.index_select(0, micro.predicting),
            weight,
            micro.targets,
            first=tp.rank() * len(weight),
            vocab_size=architecture.vocab_size,
            group=tp if tp.size() > 1 else None,
        )

    def _everywhere(self, found: list[dict[str, Tensor]]) -> dict[str, float]:
        """Metrics summed over micro-batches and dp, from each replica's first rank of the last
        stage to all its ranks: the same bits everywhere."""
        replica = self.layout.axis_group(self.rank, "replica")
        source = replica[-self.layout.tp_size]
        metrics: dict[str, float] = {}
        if self.rank == source:
            local = {}
            for name in found[0]:
                local[name] = sum(each[name] for each in found)
            metrics = self.dp_sums(local)
        if len(replica) > 1:
            group = self.groups.get(replica, backend="gloo")  # from host to host
            metrics = all_gather_plain(metrics, group)[replica.index(source)]
        return metrics

    def _stepped_blocks(self) -> Iterator[tuple[str, Block]]:
        """("", float32 weights) and (moment's name, its values) that this rank steps, by box."""
        assert self.optimizer is not None
        for name, start, tensors in self.optimizer.owned():
            for moment, flat in tensors.items():
                for block in flat_blocks(self._table[name], flat, start):
                    yield moment, block


class _StageMessages(P2PCommunicator):
    """Megatron's messages between stages, without the message with the shape ahead of each.

    Every stage has every micro-batch and so knows the shapes: in 1F1B order, activations arrive
    from the stage before in the order of micro-batches, and so do gradients from the stage after.
    """

    def expect(self, micros: list[MicroBatch]) -> None:
        """The micro-batches of the next pass.

        With virtual stages, the first stage receives activations of all but the last part of the
        last stage, and the last stage receives gradients of all but the first part of the first.
        """
        config = self.config
        if config.sequence_parallel:
            parts = config.tensor_model_parallel_size
        else:
            parts = 1
        sizes = [micro.input_ids.shape for micro in micros]
        shapes = []
        for rows, length in sizes:
            shapes.append([length // parts, rows, config.hidden_size])
        num_parts = config.virtual_pipeline_model_parallel_size
        inner = outer = shapes
        if num_parts is not None:
            size = config.microbatch_group_size_per_vp_stage
            order = get_schedule_table(len(micros), num_parts, size)
            inner = [shapes[micro] for micro, _ in order]
            outer = []
            for micro, part in order:
                if part < num_parts - 1:
                    outer.append(shapes[micro])
        place = self.pp_group.rank()
        last = self.pp_group.size() - 1
        self._activations = iter(outer if place == 0 else inner)
        self._gradients = iter(outer if place == last else inner)

    def _communicate_shapes(
        self, tensor_send_next: Any, tensor_send_prev: Any, recv_prev: bool, recv_next: bool
    ) -> tuple[list[int], list[int]]:
        before = next(self._activations) if recv_prev else [0, 0, 0]
        return before, next(self._gradients) if recv_next else [0, 0, 0]


def _check_options(name: str, cfg: EngineConfig) -> None:
    known = engine_kind(cfg.kind).options
    unknown = sorted(set(cfg.options) - set(known))
    if unknown:
        where = f"{name}.engine.options"
        got = f"{unknown} for engine {cfg.kind}"
        do = "leave them out or choose another engine.kind"
        raise ConfigError.of(where, got, f"some of {list(known)}", do)
