"""`FSDPEngine`: a Hugging Face model sharded over all ranks of a pool with PyTorch's FSDP2.

Every rank holds 1/n of each parameter (float32), gathers one decoder layer at a time in the
compute precision, and steps AdamW on its own shards (ZeRO stage 3, Rajbhandari et al. 2020;
Zhao et al. 2023). With the option keep_gathered a unit stays gathered through a train step and
gradients are reduced once per step instead of once per micro-batch: less traffic, more memory.
"""

from __future__ import annotations

from spmdflow.config.schema import EngineConfig
from spmdflow.workers.data_parallel import DataParallelEngine
from spmdflow.workers.sharding import Partition


class FSDPEngine(DataParallelEngine):
    """Parameters, gradients and moments divided over the ranks."""

    @staticmethod
    def partition_of(cfg: EngineConfig) -> Partition:
        """Everything is divided; keep_gathered says for how long parameters and gradients are."""
        reshard = cfg.reshard_after_forward
        return Partition(
            parameters=True, reshard_after_forward=reshard, reduce_each_micro_batch=reshard
        )
