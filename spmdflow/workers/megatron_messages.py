"""Messages between the stages of a Megatron pipeline, whose shapes both ends know."""

from __future__ import annotations

from typing import Any

from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_schedule_table

from spmdflow.workers.micro_batch import MicroBatch


class StageMessages(P2PCommunicator):
    """Megatron's messages between stages, without a preceding message with the shape.

    Every stage has every micro-batch and therefore knows the shapes. In 1F1B order, activations
    arrive from the previous stage in the order of micro-batches, and gradients from the next stage
    too.
    """

    def expect(self, micros: list[MicroBatch]) -> None:
        """Set the shapes of the messages that this stage receives in the next pass.

        A shape is (T, b, H), with T divided by tp under sequence parallelism. Without virtual
        stages they are in the order of micro-batches. With virtual stages they are in the order of
        Megatron's schedule; the first stage receives no activations for its first part, and the
        last stage no gradients for its last part.
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
        stage = self.pp_group.rank()
        last = self.pp_group.size() - 1
        self._activations = iter(outer if stage == 0 else inner)
        self._gradients = iter(outer if stage == last else inner)

    def _communicate_shapes(
        self, tensor_send_next: Any, tensor_send_prev: Any, recv_prev: bool, recv_next: bool
    ) -> tuple[list[int], list[int]]:
        before = next(self._activations) if recv_prev else [0, 0, 0]
        return before, next(self._gradients) if recv_next else [0, 0, 0]
