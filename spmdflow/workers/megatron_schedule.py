"""Micro-batches through the stages of a Megatron model: forward only, or forward and backward.

One stage runs them one by one; several run Megatron's 1F1B order (Narayanan et al. 2021). Shapes
travel with the activations, so micro-batches may differ in rows and length. Knows no losses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor, nn

from spmdflow.objectives.log_prob import LogitShard
from spmdflow.weights.architecture import Architecture
from spmdflow.workers.micro_batch import MicroBatch, lengthened

OnOutput = Callable[[Any, MicroBatch], Any]
"""(values, logits or a LogitShard; micro) -> what the schedule collects."""


class StageSchedule:
    """The part of one rank in running its model."""

    def __init__(
        self, module: GPTModel, architecture: Architecture, groups: ProcessGroupCollection
    ) -> None:
        self._module, self._architecture, self._groups = module, architecture, groups
        self._run = get_forward_backward_func(groups.pp.size(), None)
        self._pipeline = (
            {"p2p_communicator": P2PCommunicator(groups.pp, module.config)}
            if groups.pp.size() > 1
            else {}
        )

    def forward(self, micros: list[MicroBatch], fn: OnOutput) -> list[Any]:
        """What fn gives for each micro-batch, on the last stage; [] elsewhere."""
        return self._pass(self._module, micros, fn, train=False)

    def forward_backward(
        self, module: nn.Module, micros: list[MicroBatch], fn: OnOutput
    ) -> list[Any]:
        """Gradients of every micro-batch added up in module, the stage's DDP wrapper.

        fn gives (scalar to differentiate, number of tokens, anything): the list of the last on
        the last stage, [] elsewhere.
        """
        return self._pass(module, micros, fn, train=True)

    def _pass(
        self, module: nn.Module, micros: list[MicroBatch], fn: OnOutput, *, train: bool
    ) -> list[Any]:
        def step(rest: Iterator[MicroBatch], model: nn.Module) -> tuple[Tensor, Callable[..., Any]]:
            micro = next(rest)
            output = model(micro.input_ids, micro.position_ids, None)
            return output, lambda output, non_loss_data=False: fn(self._named(output), micro)

        module.train(train)  # recompute is for training only; there is no dropout
        if self._module.config.sequence_parallel:
            micros = [lengthened(micro, self._groups.tp.size()) for micro in micros]
        found: list[Any] = self._run(
            forward_step_func=step,
            data_iterator=iter(micros),
            model=module,
            num_microbatches=len(micros),
            seq_length=micros[0].input_ids.shape[1],  # of no effect: shapes are sent along
            micro_batch_size=len(micros[0].input_ids),
            forward_only=not train,
            collect_non_loss_data=not train,
            pg_collection=self._groups,
            **self._pipeline,
        )
        return found

    def _named(self, output: Tensor) -> Any:
        """The last stage's output as roles know it: values, logits or a shard of them."""
        if self._architecture.head == "scalar":
            return output.squeeze(-1)  # (b, T, 1) -> (b, T)
        size = self._architecture.vocab_size
        if self._groups.tp.size() == 1:
            return output[..., :size]
        first = self._groups.tp.rank() * output.shape[-1]
        return LogitShard(output, first, size, self._groups.tp)
