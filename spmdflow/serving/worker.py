"""`WeightTaker`: what a worker of a vLLM server does for the trainer's ranks.

vLLM adds its methods to the worker's class (`--worker-extension-cls`), and the server's door calls
them on all workers. An update arrives in a thread while the worker generates with the weights that
it has; `spmdflow_switch` puts it into use. Results are plain data.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from spmdflow.errors import SpmdflowError, WeightSyncError
from spmdflow.rollout.generator import Replica
from spmdflow.rollout.vllm_weights import Reading, read_stock_weights
from spmdflow.serving.row_noise import RowNoiseSampler
from spmdflow.serving.transport import UpdateReceiver, open_receiver
from spmdflow.serving.update import BoxUpdate, apply_update, check_facts, message_sizes

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _WorkerReplica(Replica):
    """The workers of a server, which gather over vLLM's own group."""

    def gather(self, values: Tensor, ranks: tuple[int, ...] = ()) -> list[Tensor]:
        """See Replica.gather; over all workers, in host memory."""
        if self.size == 1:
            return [values]
        group = import_module("vllm.distributed.parallel_state").get_world_group()
        own = values.cpu()
        gathered = [torch.empty_like(own) for _ in self.ranks]
        torch.distributed.all_gather(gathered, own, group=group.cpu_group)
        return gathered


class _Update:
    """An update that arrives in a thread of its own."""

    def __init__(
        self,
        receiver: UpdateReceiver,
        messages: Sequence[Sequence[Sequence[int]]],
        dtype: torch.dtype,
        *,
        number: int,
    ) -> None:
        self.number = number
        self._receiver = receiver
        self._messages = messages
        self._dtype = dtype
        self._staged: list[BoxUpdate] = []
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="spmdflow-update", daemon=True)
        self._thread.start()

    @property
    def has_arrived(self) -> bool:
        """Whether it has arrived or failed."""
        return not self._thread.is_alive()

    def result(self, seconds: float) -> list[BoxUpdate]:
        """Wait for the update and return it. Raises the thread's error."""
        self._thread.join(seconds)
        if self._thread.is_alive():
            raise WeightSyncError(
                f"weights: update {self.number} has not arrived within {seconds:g} s; look at the "
                f"trainer's log"
            )
        if self._error is not None:
            raise self._error
        return self._staged

    def _run(self) -> None:
        """Receive all messages; runs in the thread."""
        sizes = [message_sizes(facts) for facts in self._messages]
        try:
            arriving = self._receiver.receive(sizes, self._dtype, update=self.number)
            for facts, message in zip(self._messages, arriving, strict=True):
                self._staged += message.split(facts)
        except (SpmdflowError, RuntimeError, OSError, ValueError) as err:
            self._error = err


class WeightTaker:
    """Methods of a vLLM worker. vLLM's Worker is the other base class."""

    model_runner: Any
    vllm_config: Any
    rank: int
    _spmdflow_reading: Reading | None = None
    _spmdflow_receiver: UpdateReceiver | None = None
    _spmdflow_update: _Update | None = None

    def spmdflow_describe(self) -> dict[str, Any]:
        """Return what the worker has: boxes (name, bounds), dtype, and whether it has row noise."""
        boxes = []
        for name, _, box in self._spmdflow_read().blocks:
            boxes.append([name, [list(bounds) for bounds in box.bounds]])
        return {
            "boxes": boxes,
            "dtype": str(self.vllm_config.model_config.dtype).removeprefix("torch."),
            "row_noise": isinstance(self.model_runner.sampler, RowNoiseSampler),
        }

    def spmdflow_connect(self, transport: str, facts: list[Any], seconds: float) -> dict[str, Any]:
        """Open this worker's end of a connection. facts: of the ends for all workers, in order.

        An earlier connection, such as that of a trainer that has ended, is closed.
        """
        self._spmdflow_disconnect()
        own = facts[self._spmdflow_replica().replica_rank]
        num_bytes = sum(view.nbytes for _, view, _ in self._spmdflow_read().blocks)
        self._spmdflow_receiver = open_receiver(
            transport, own, num_bytes=num_bytes, seconds=seconds
        )
        return self._spmdflow_receiver.reply

    def spmdflow_receive(self, number: int, messages: list[Any]) -> bool:
        """Begin to receive an update in a thread. messages: the facts of each, for all workers.

        WeightSyncError without a connection, or for facts that do not fit the worker's boxes.
        """
        if self._spmdflow_receiver is None:
            raise WeightSyncError("weights: an update without a connection; connect first")
        own = messages[self._spmdflow_replica().replica_rank]
        blocks = self._spmdflow_read().blocks
        problem = check_facts(own, [box.size for _, _, box in blocks])
        if problem is not None:
            raise WeightSyncError(f"weights: got {problem} in update {number}; send it again")
        dtype = blocks[0][1].dtype
        self._spmdflow_update = _Update(self._spmdflow_receiver, own, dtype, number=number)
        return True

    def spmdflow_switch(self, number: int, verify: bool, seconds: float) -> dict[str, int]:
        """Put an update into use; return name -> hash of every complete tensor, {} unless verify.

        All workers of a server call it together, while nothing is generated. The error of an update
        that has not arrived leaves the weights as they were.
        """
        update = self._spmdflow_update
        if update is None or update.number != number:
            raise WeightSyncError(f"weights: update {number} was not announced; send it again")
        self._spmdflow_update = None
        staged = update.result(seconds)
        reading = self._spmdflow_read()
        with torch.no_grad():
            for part in staged:
                apply_update(reading.blocks[part.index][1], part.values, part.positions)
        if not verify:
            return {}
        return reading.hashes(self._spmdflow_replica(), torch.device("cpu"))

    def spmdflow_clear_cache(self) -> None:
        """Fill the KV cache with zeros. After a sleep it has any values, also nan.

        Some attention kernels multiply values of masked places with 0.
        """
        for cache in self.model_runner.kv_caches:
            cache.zero_()

    def _spmdflow_read(self) -> Reading:
        """The worker's live views, by Hugging Face name."""
        if self._spmdflow_reading is None:
            path = self.vllm_config.model_config.model
            model = self.model_runner.model
            configuration = import_module("vllm.config").set_current_vllm_config
            with configuration(self.vllm_config):
                self._spmdflow_reading = read_stock_weights(model, path, self._spmdflow_replica())
        return self._spmdflow_reading

    def _spmdflow_replica(self) -> Replica:
        """The workers of the server, as the ranks of a generation replica."""
        parallel = self.vllm_config.parallel_config
        if parallel.pipeline_parallel_size > 1:
            raise WeightSyncError(
                "weights: got a server with pipeline stages, expected tensor-parallel workers "
                "alone; start it with --pipeline-parallel-size 1"
            )
        ranks = tuple(range(parallel.tensor_parallel_size))
        index = self.rank % len(ranks)
        return _WorkerReplica(index, ranks, ranks, (index,))

    def _spmdflow_disconnect(self) -> None:
        if self._spmdflow_receiver is not None:
            self._spmdflow_receiver.close()
        self._spmdflow_receiver = None
        self._spmdflow_update = None
