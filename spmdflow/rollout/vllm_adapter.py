"""The policy's adapters in a vLLM engine: one slot of its LoRA layers, written in place.

vLLM wraps the linear layers that have an adapter and keeps A and B in stacked buffers, one row per
slot. Here there is one slot, and every request uses it. vLLM reads no adapter file: a weight sync
writes A and alpha / rank B into views of the slot. Slices of fused layers have the order of the
weight table.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import Any

from torch import Tensor

from spmdflow.config.model import LoRAConfig
from spmdflow.errors import ConfigError, WeightSyncError
from spmdflow.rollout.vllm_contract import walk
from spmdflow.weights.adapter import Adapters
from spmdflow.weights.ranks import adapter_boxes
from spmdflow.weights.table import ShardTable

_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Adapter ranks for which vLLM can allocate buffers."""
_ID = 1


def engine_arguments(lora: LoRAConfig, table: ShardTable) -> dict[str, Any]:
    """Returns the arguments of vllm.LLM that allocate one slot for the policy's adapters.

    max_lora_rank is the smallest rank that vLLM supports and that is at least lora.rank;
    ConfigError above 512. lora_target_modules are the last names of the vLLM layers that have an
    adapter. table: vLLM's tensors of a rank.
    """
    size = next((size for size in _RANKS if size >= lora.rank), None)
    if size is None:
        do = "lower it, or set actor.rollout.weights=auto"
        raise ConfigError.of("model.lora.rank", lora.rank, f"at most vLLM's {_RANKS[-1]}", do)
    wrapped = set()
    for name in _adapted_names(lora.adapters, table):
        wrapped.add(_layer_of(name).rpartition(".")[2])
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": size,
        "lora_target_modules": sorted(wrapped),
    }


class PolicyAdapter:
    """The one adapter slot, which all requests use."""

    def __init__(self, runner: Any, lora: LoRAConfig) -> None:
        """Creates the slot and fills it with zeros.

        runner: vLLM's model runner, after its warm-up. ConfigError if it lacks a name.
        """
        self.adapters = lora.adapters
        self._manager = walk(runner, "lora_manager._adapter_manager")
        request = import_module("vllm.lora.request").LoRARequest
        self.request = request("policy", _ID, "the policy's own")
        """The LoRARequest that every request must pass."""
        walk(runner, "lora_manager.add_dummy_lora")(self.request, lora.rank)
        walk(self._manager, "activate_adapter")(_ID)
        self.check()
        for buffer in self._buffers():
            buffer.zero_()

    def check(self) -> None:
        """WeightSyncError unless vLLM's one adapter slot contains the policy's adapter."""
        slots = walk(self._manager, "lora_index_to_id")
        if slots != [_ID]:
            do = "set actor.rollout.weights=auto and report this message"
            raise WeightSyncError.of("vLLM's adapter", f"slots {slots}", f"the policy's, {_ID}", do)

    def views(self, table: ShardTable) -> dict[str, Tensor]:
        """Returns Hugging Face name -> live view of this rank's A (rank, in) or B (out, rank).

        A fused vLLM layer gives one pair for each of its parts. vLLM's buffers are padded to a
        larger rank; the views leave the padding out. table: vLLM's tensors of weights.
        """
        views: dict[str, Tensor] = {}
        for name in _adapted_names(self.adapters, table):
            layer = self._manager.modules[_layer_of(name)]
            for index, piece in enumerate(table[name].pieces):
                names = list(adapter_boxes(piece, self.adapters))
                a = layer.lora_a_stacked[index][0, 0]
                b = layer.lora_b_stacked[index][0, 0]
                rank = self.adapters.rank
                views |= dict(zip(names, (a[:rank], b[:, :rank])))
        return views

    def _buffers(self) -> Iterable[Tensor]:
        for layer in self._manager.modules.values():
            yield from (*layer.lora_a_stacked, *layer.lora_b_stacked)


def _adapted_names(adapters: Adapters, table: ShardTable) -> list[str]:
    """vLLM's names of the tensors in which at least one part has an adapter."""
    result = []
    for name, tensor in table.items():
        if any(adapter_boxes(piece, adapters) for piece in tensor.pieces):
            result.append(name)
    return result


def _layer_of(name: str) -> str:
    return name.removesuffix(".weight")
