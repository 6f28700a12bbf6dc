"""`TrainEngine`: what every train engine can do. Roles know this and no engine (DESIGN 5)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Literal, Protocol

import torch
from tensordict import TensorDict
from torch import Tensor

from spmdflow.blocks.box import Box
from spmdflow.objectives.loss import Loss
from spmdflow.parallel.group import GroupTable
from spmdflow.parallel.layout import Layout
from spmdflow.transfer.worker import Metric
from spmdflow.workers.micro_batch import MicroBatch

ForwardFn = Callable[[Tensor, MicroBatch], Mapping[str, Tensor]]
"""(output, micro) -> columns: response-shaped (b, R) or dense (b,), one row per micro row."""

Part = Literal["parameters", "gradients", "optimizer"]
Place = Literal["device", "host"]


class TrainEngine(Protocol):
    """A distributed model. Every method is called by all ranks of the pool.

    Batches and answers lie in host memory (the store's); micro-batches go to the device. The
    output of a causal LM is logits (b, T, V), that of a scalar head values (b, T).
    """

    layout: Layout
    groups: GroupTable
    device: torch.device
    dtype: torch.dtype
    """Compute precision; master parameters, gradients and optimizer are float32."""
    weights_version: int
    """Goes up whenever the weights change: at each optimizer step and at load_blocks."""

    def forward(
        self, batch: TensorDict, fn: ForwardFn, *, num_micro_batches: int
    ) -> TensorDict | None:
        """Columns of fn for each row of batch, in order, without gradient.

        None on ranks before the last pipeline stage.

        (b, R) answers become ragged by the rows' response lengths. Every rank of the dp group
        makes num_micro_batches forwards, also with no rows.
        """

    def train_step(
        self, batch: TensorDict, loss: Loss, *, num_micro_batches: int
    ) -> dict[str, Metric]:
        """One optimizer step on the rows of all ranks; the same metrics on every rank.

        The loss's metrics plus loss, grad_norm (before clipping) and lr. SpmdflowError if the
        gradient is not finite; nothing is changed then.
        """

    def blocks(self) -> Iterable[tuple[str, Tensor, Box]]:
        """(Hugging Face name, live tensor, its box of the whole), tied ones once, fixed order."""

    def full_tensors(self) -> Iterable[tuple[str, Tensor]]:
        """(Hugging Face name, full float32 tensor) on every rank, in the order of blocks."""

    def shard_hashes(self, dtype: torch.dtype) -> dict[str, int]:
        """Positional hash of each whole tensor cast to dtype, from the shards themselves."""

    def state_blocks(self) -> dict[str, Tensor]:
        """This rank's exact state: shards, optimizer moments, steps done."""

    def load_blocks(self, blocks: Mapping[str, Tensor]) -> None:
        """Restore what state_blocks gave on the same layout, bit for bit."""

    def residency(self, where: Place, part: Part) -> None:
        """Move a part to the host or back to the device."""

    def export_hugging_face(self, folder: Path) -> None:
        """Write a folder that from_pretrained can load (the pool's first rank writes)."""
