"""Backends for vLLM's weight-transfer interface, which wrap our receivers.

vLLM builds a backend by name (`weight_transfer_config`) in each of its workers, and calls it with
init_weight_transfer_engine, then start, update and finish for each update. Our backend passes
these calls to a `Receiver`, which receives the weights. `ServedModel` is the worker's model: it
loads whole tensors, as from a checkpoint, and hashes what its forward reads.

Loading uses vLLM's layer-wise reload, so packed and converted layers work. On CPU we do two things
ourselves. A tied output layer keeps a packed copy of the embedding, which we pack again. Packed
weights can be read only by computing with them: applying a layer to the identity matrix gives its
weight bit for bit, and `ServedModel.hashes` reads it so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Protocol

import torch
from torch import Tensor

from spmdflow.blocks.hash import MODULUS, box_hash
from spmdflow.errors import ConfigError, WeightSyncError
from spmdflow.rollout.vllm_contract import missing_names
from spmdflow.rollout.vllm_weights import Slot, combine_hashes, slots_of, whole_shapes
from spmdflow.weights.architecture import Architecture
from spmdflow.weights.ranks import vllm_shards
from spmdflow.weights.table import EMBEDDING, ShardTable

_HEAD = "lm_head"
_RELOAD = "vllm.model_executor.model_loader.reload"
_NAMES = {
    "vllm.distributed.weight_transfer": (
        "WeightTransferEngine.parse_init_info",
        "WeightTransferEngineFactory.register_engine",
    ),
    "vllm.config": (
        "ParallelConfig.data_parallel_index",
        "ParallelConfig.rank",
        "ParallelConfig.world_size",
    ),
    "vllm.distributed.parallel_state": ("get_world_group", "get_tensor_model_parallel_rank"),
}
"""Names of vLLM that a backend uses."""
_METHODS = frozenset(
    {
        "init_transfer_engine",
        "start_weight_update",
        "receive_weights",
        "finish_weight_update",
        "shutdown",
    }
)
"""Abstract methods of WeightTransferEngine that our backend implements; vLLM 0.27 has more."""


class Receiver(Protocol):
    """How one worker receives weights."""

    def start(self) -> None:
        """Prepare for an update."""

    def receive(self, facts: Mapping[str, Any]) -> None:
        """Receive one round of the update. facts: plain data that the trainer sent with it."""

    def finish(self) -> None:
        """Put the weights into use; all of them have arrived."""

    def close(self) -> None:
        """Close the connection to the trainer."""


class ServedModel:
    """A worker's model, and its index among the workers."""

    def __init__(self, engine: Any) -> None:
        """engine: vLLM's WeightTransferEngine around the model."""
        config = engine.vllm_config
        self._engine = engine
        parallel = config.parallel_config
        self.model_config = config.model_config
        self.dtype: torch.dtype = config.model_config.dtype
        self.device: torch.device = engine.device
        self.worker_index = parallel.data_parallel_index * parallel.world_size + parallel.rank
        """Index among the workers of all replicas of the server."""
        self.tp_size = parallel.tensor_parallel_size
        self.pp_size = parallel.pipeline_parallel_size

    def architecture(self) -> Architecture:
        """Architecture of the model; ConfigError if there is no weight table for its family."""
        return Architecture.dense_from_config(self.model_config.hf_config.to_dict())

    def start_reload(self) -> None:
        """Prepare the model for loading whole tensors."""
        _reload_module().initialize_layerwise_reload(self._engine.model)

    def load_chunk(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Load this worker's part of each tensor. tensors: (Hugging Face name, whole tensor)."""
        self._engine.model.load_weights(tensors)

    def finish_reload(self) -> None:
        """Convert the loaded weights for the forward pass, after the last chunk.

        On a CPU, also packs again the layers that keep their weight next to its packed copy,
        because it is shared with the embedding.
        """
        _reload_module().finalize_layerwise_reload(self._engine.model, self.model_config)
        for _, layer in self._packed_layers():
            if (
                layer.weight.numel()
            ):  # still there next to its packed copy: shared with the embedding
                layer.quant_method.process_weights_after_loading(layer)

    def hashes(self, arch: Architecture) -> dict[str, int]:
        """Return name -> hash of every complete tensor as this replica's workers read it.

        All workers of the replica call it together. Names are Hugging Face's. WeightSyncError if
        two readers of one tensor differ. ConfigError if the weights have a form that the tables do
        not cover (quantized, pipeline stages).
        """
        if self.pp_size > 1:
            got = f"a vLLM of {self.pp_size} pipeline stages"
            expected = "1, as hashes are read from tensor-parallel workers"
            do = "set actor.rollout.verify_every=0, or serve without pipeline stages"
            raise ConfigError.of("weight transfer", got, expected, do)
        group = import_module("vllm.distributed.parallel_state").get_world_group()
        tables = []
        for rank in range(self.tp_size):
            tables.append(
                vllm_shards(arch, tp_size=self.tp_size, tp_rank=rank, pp_size=1, pp_rank=0)
            )
        tp_rank = import_module("vllm.distributed.parallel_state").get_tensor_model_parallel_rank()

        def gather(values: Tensor) -> list[Tensor]:
            gathered = [torch.empty_like(values) for _ in tables]
            torch.distributed.all_gather(gathered, values, group=group.cpu_group)
            return gathered

        return combine_hashes(
            self._piece_hashes(tables[tp_rank]),
            whole_shapes(arch),
            [slots_of(table.values()) for table in tables],
            ranks=range(self.tp_size),
            gather=gather,
        )

    def _piece_hashes(self, table: ShardTable) -> dict[Slot, int]:
        """Return (Hugging Face name, box) -> hash of each piece that this worker reads.

        WeightSyncError if a tied head has other values than the embedding.
        """
        own = dict[Slot, int]()
        for name, tensor in self._read_weights(table):
            for piece in table[name].pieces:
                values = tensor[piece.local.slices()]
                slot = (piece.name, piece.box)
                value = box_hash(values, piece.box)
                if own.setdefault(slot, value) != value:
                    raise WeightSyncError(
                        f"weight transfer: got {_HEAD}.weight with hash {value:#018x} and the tied "
                        f"{name} with {own[slot] % MODULUS:#018x} in one vLLM worker, expected the "
                        f"same; do not generate with this server: restart it"
                    )
        return own

    def _read_weights(self, table: ShardTable) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, values that the forward reads) of each parameter of the table.

        Packed layers are unpacked. A tied head that has its own packed copy follows at the end,
        under the embedding's name. Values are in the model's dtype. ConfigError if a parameter is
        missing, has another shape, or has no floating-point values.
        """
        packed = dict(self._packed_layers())
        parameters = dict(self._engine.model.named_parameters())
        for name, expected_weight in table.items():
            path, _, kind = name.rpartition(".")
            values = parameters.get(name)
            if kind == "weight" and path in packed:
                values = _unpack_weight(packed[path], expected_weight.shape, self.dtype)
            if (
                values is None
                or tuple(values.shape) != expected_weight.shape
                or not values.is_floating_point()
            ):
                actual = None if values is None else (tuple(values.shape), values.dtype)
                got = f"{name} as {actual} in vLLM's model"
                expected = f"{expected_weight.shape} in a floating-point type to hash it"
                do = "serve without quantization, or set actor.rollout.verify_every=0"
                raise ConfigError.of("weight transfer", got, expected, do)
            yield name, values.detach().to(self.dtype)
        if EMBEDDING in table and f"{_HEAD}.weight" not in table and _HEAD in packed:
            shape = table[EMBEDDING].shape
            yield EMBEDDING, _unpack_weight(packed[_HEAD], shape, self.dtype)

    def _packed_layers(self) -> Iterator[tuple[str, Any]]:
        """Layers that compute with a packed copy of their weight (CPU only)."""
        for name, layer in self._engine.model.named_modules():
            if hasattr(layer, "cpu_linear"):
                yield name, layer


OpenReceiver = Callable[[Mapping[str, Any], ServedModel], Receiver]
"""(facts passed to init_weight_transfer_engine, the worker's model) -> its receiver."""


@dataclass
class ReceiverFacts:
    """Plain data for a receiver, in the form in which vLLM passes it: {"facts": {...}}."""

    facts: dict[str, Any] = field(default_factory=dict)


def register_backend(name: str, open_receiver: OpenReceiver) -> None:
    """Register a backend with vLLM in this process; a second call does nothing.

    ConfigError if the installed vLLM lacks the interface.
    """
    missing = missing_names(_NAMES) or _unknown_abstract_methods()
    if missing:
        got = f"a vLLM that lacks {', '.join(missing)}"
        expected = "the interface of 0.30 to 0.33 (tested: 0.32)"
        raise ConfigError.of("weight transfer", got, expected, "install one of them")
    transfer = import_module("vllm.distributed.weight_transfer")
    if name not in transfer.WeightTransferEngineFactory._registry:
        engine_class = _engine_class(transfer.WeightTransferEngine, open_receiver)
        transfer.WeightTransferEngineFactory.register_engine(name, engine_class)


def check_reload() -> None:
    """ConfigError if this vLLM cannot reload complete tensors after its start.

    It needs initialize_layerwise_reload and finalize_layerwise_reload.
    """
    missing = missing_names({_RELOAD: ("initialize_layerwise_reload", "finalize_layerwise_reload")})
    if missing:
        got = f"a vLLM that lacks {', '.join(missing)}"
        expected = "its layer-wise reload as in 0.30 to 0.33 (tested: 0.32)"
        raise ConfigError.of("weight transfer", got, expected, "serve with one of them")


def _unknown_abstract_methods() -> list[str]:
    """Error texts for abstract methods of this vLLM that our backend does not implement."""
    engine = import_module("vllm.distributed.weight_transfer").WeightTransferEngine
    unknown = sorted(getattr(engine, "__abstractmethods__", set()) - _METHODS)
    result = []
    for name in unknown:
        result.append(f"a WeightTransferEngine without abstract {name}")
    return result


def _engine_class(base: Any, open_receiver: OpenReceiver) -> Any:
    """Return a subclass of vLLM's WeightTransferEngine (base) that calls a receiver.

    open_receiver: called with each init_transfer_engine; the earlier receiver is closed first. An
    update before that raises WeightSyncError.
    """

    class ReceiverEngine(base):  # type: ignore[misc]
        """Adapter from vLLM's interface to a `Receiver`."""

        init_info_cls = update_info_cls = ReceiverFacts
        _receiver: Receiver | None = None

        def init_transfer_engine(self, init_info: ReceiverFacts) -> None:
            self.shutdown()
            self._receiver = open_receiver(init_info.facts, ServedModel(self))

        def start_weight_update(self) -> None:
            self._open_receiver().start()

        def update_weights(self, update_info: dict[str, Any]) -> None:
            self.receive_weights(self.parse_update_info(update_info))
            if self.device.type != "cpu":  # vLLM's own wants an accelerator
                torch.accelerator.synchronize()

        def receive_weights(self, update_info: ReceiverFacts) -> None:
            self._open_receiver().receive(update_info.facts)

        def finish_weight_update(self) -> None:
            self._open_receiver().finish()

        def shutdown(self) -> None:
            if self._receiver is not None:
                self._receiver.close()
            self._receiver = None

        def _open_receiver(self) -> Receiver:
            if self._receiver is None:
                raise WeightSyncError(
                    "weight transfer: got an update for a worker without a trainer, expected "
                    "init_weight_transfer_engine first; connect the trainer again"
                )
            return self._receiver

    return ReceiverEngine


def _unpack_weight(layer: Any, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The weight (outputs, inputs) of a packed layer, by applying it to the identity matrix."""
    rows = torch.eye(shape[1], dtype=dtype)
    return layer.cpu_linear(rows, layer.weight, None).t()


def _reload_module() -> Any:
    return import_module(_RELOAD)
