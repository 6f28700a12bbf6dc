"""Models that engines are built from: a module of transformers, or an architecture.

`LoadedModel` is a transformers module whose weights are read later. `ModelSource` is for engines
that build their own modules. No rank reads more than its share of either. Knows no ranks. Of the
package, only this file imports transformers, when a model is loaded.

A causal LM returns a `CausalOutput`; a scalar model (reward, cost, critic) a `ScalarOutput`, of a
bias-free linear head `score` on the last hidden state, with the tensor names of
`...ForSequenceClassification`. `fn` is called inside the module's forward, where engines that
gather weights still have those of the head.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from spmdflow.blocks.box import Box
from spmdflow.config.model import LoRAConfig, ModelConfig
from spmdflow.cpu.product import (
    compute_dtype,
    multiply_in_type_of_weights,
    use_onednn_products,
)
from spmdflow.errors import ConfigError
from spmdflow.kind.engine import engine_names
from spmdflow.objectives.log_prob import CausalOutput, ScalarOutput
from spmdflow.router import Routers
from spmdflow.weights.architecture import Architecture, Head, read_config
from spmdflow.weights.folder import (
    HuggingFaceFolder,
    attention_of,
    check_finite,
    empty_module,
    folder_of,
)
from spmdflow.weights.move import Read
from spmdflow.workers.attention import (
    AttentionForm,
    PackedRows,
    dense_attention,
    packed_attention,
    rotate,
)
from spmdflow.workers.context_parallel import TokenShard, context_attention
from spmdflow.workers.lora_dropout import AdapterDropout
from spmdflow.workers.micro_batch import MicroBatch


@dataclass(frozen=True, kw_only=True)
class _Exported:
    """The common part of `ModelSource` and `LoadedModel`."""

    dtype: torch.dtype
    """Compute precision of all parts that are not always float32."""
    config: Mapping[str, Any]
    """config.json of an export."""
    source: Path
    """The model's folder. An export contains its tokenizer files."""
    lora: LoRAConfig | None = None
    """Its adapters (`lora.add_adapters`). If set, only what lora.adapters names is trained."""
    dropout: AdapterDropout | None = None
    """Of its adapters; None without them."""


@dataclass(frozen=True, kw_only=True)
class ModelSource(_Exported):
    """The facts that an engine needs about a model: its architecture, and a reader of its
    weights."""

    architecture: Architecture
    read: Read | None
    """None: the engine has read them."""


@dataclass(frozen=True, kw_only=True)
class LoadedModel(_Exported):
    """A module in float32, and what an engine must know to shard and run it.

    `sharding.read_weights` reads the weights, after the engine has sharded the module.
    """

    module: nn.Module
    """Its forward: (micro, fn) -> fn(output, micro), with the output of the head."""
    read: Read | None = None
    """Reads the parameters, which are on the meta device. None: they are on the host already."""
    layers: tuple[nn.Module, ...]
    """Decoder layers, the units that are sharded and recomputed."""
    float32_modules: tuple[nn.Module, ...]
    """Parts that always compute in float32, because bfloat16 is too coarse for a value."""
    routers: Routers | None = None
    """Of a mixture of experts. The module's forward prepares them for each micro-batch."""


class CountedRead:
    """Reads boxes as another function does; counts their bytes, in the precision of the files."""

    def __init__(self, read: Read) -> None:
        """Nothing is counted yet."""
        self._read = read
        self.num_bytes = 0

    def __call__(self, name: str, box: Box) -> Tensor:
        """See `weights.move.Read`."""
        values = self._read(name, box)
        self.num_bytes += values.nbytes
        return values


class ScalarModel(nn.Module):
    """A decoder and a scalar head, with the attribute names of the Hugging Face class."""

    def __init__(
        self, decoder_name: str, decoder: nn.Module, score: nn.Module, routers: Routers | None
    ) -> None:
        """decoder_name: the attribute of the decoder in the Hugging Face class."""
        super().__init__()
        self._decoder_name = decoder_name
        self._routers = routers
        self.add_module(decoder_name, decoder)
        self.add_module("score", score)

    def forward(self, micro: MicroBatch, fn: Callable[[Any, MicroBatch], Any]) -> Any:
        """Run the decoder, and return fn(output, micro) with its output as a ScalarOutput."""
        decoder = self.get_submodule(self._decoder_name)
        score = self.get_submodule("score")
        if self._routers is not None:
            self._routers.begin(micro.routes)
        hidden = decoder(**_inputs(micro)).last_hidden_state  # (b, T, H)
        return fn(ScalarOutput(hidden.flatten(0, 1), score, micro.shard), micro)


def _inputs(micro: MicroBatch) -> dict[str, Any]:
    """Return the decoder's keyword arguments: input_ids and, for packed rows, positions and rows.

    Right padding needs no mask under causal attention, with positions from 0.
    """
    arguments: dict[str, Any] = {"input_ids": micro.input_ids, "use_cache": False}
    if micro.packed is not None:
        arguments["packed_rows"] = micro.packed
    if micro.shard is not None:
        arguments["shard"] = micro.shard
    if micro.packed is not None or micro.shard is not None:
        arguments["position_ids"] = micro.position_ids
    return arguments


class _SelectiveHead:
    """Replaces the forward of a causal LM's head: it runs at the needed positions, or not at all.

    A bias-free linear head is applied by `CausalOutput`, unless its family caps or scales the
    logits. Any other head runs here, at the positions that predict response tokens.
    """

    def __init__(self, model: Any, routers: Routers | None) -> None:
        """Replaces the forward functions of the model and of its head."""
        self._routers = routers
        self._forward = model.forward
        self._head = model.get_output_embeddings()
        self._positions = torch.zeros(1, dtype=torch.int64)
        self.is_plain = type(self._head) is nn.Linear and self._head.bias is None
        self._head.forward = self._pick
        model.forward = self
        if self.is_plain:
            self.is_plain = self._leaves_logits(model)

    def __call__(self, micro: MicroBatch, fn: Callable[[Any, MicroBatch], Any]) -> Any:
        """The model's forward: fn(output, micro)."""
        shard = micro.shard
        self._positions = micro.predicting if shard is None else shard.predicting
        if self._routers is not None:
            self._routers.begin(micro.routes)
        hidden = self._forward(**_inputs(micro)).logits[0]
        weight = self._head.weight if self.is_plain else None
        if shard is None:
            return fn(CausalOutput(hidden, weight, micro.targets), micro)
        join = partial(shard.join, num_targets=len(micro.targets))
        return fn(CausalOutput(hidden, weight, shard.targets(micro.targets), join=join), micro)

    def _pick(self, hidden: Tensor) -> Tensor:
        """Replace the head's forward: select the positions that predict response tokens.

        (b, T, H) -> hidden states (1, n, H) if the head is plain, otherwise logits (1, n, V) of the
        family's own head.
        """
        picked = hidden.flatten(0, 1).index_select(0, self._positions)[None]
        if self.is_plain:
            return picked
        return type(self._head).forward(self._head, picked)

    def _leaves_logits(self, model: Any) -> bool:
        """Return whether the family's forward returns the head's output unchanged.

        Tested with a dummy input and a head that returns its input. Restores the decoder's forward
        and `_pick` afterwards.
        """
        decoder = model.base_model
        decoder_forward = model.base_model.forward
        head_inputs: list[Tensor] = []

        def echo(hidden: Tensor) -> Tensor:
            head_inputs.append(hidden)
            return hidden

        nothing = torch.zeros(1, 1, self._head.in_features)
        decoder.forward = lambda *_, **__: _DecoderOutput(nothing)
        self._head.forward = echo
        output = self._forward(input_ids=torch.zeros(1, 1, dtype=torch.int64), use_cache=False)
        decoder.forward = decoder_forward
        self._head.forward = self._pick
        return len(head_inputs) == 1 and output.logits is head_inputs[0]


class _DecoderOutput:
    """A decoder's output with hidden states only. All other fields are None."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: int) -> Tensor:
        return self.last_hidden_state


def load_model(cfg: ModelConfig, *, head: str) -> LoadedModel:
    """Load the module of the folder cfg.path, in float32.

    head: causal_lm (it runs only at positions that predict response tokens), scalar (a trained
    one-label head) or critic (a zero head if there is none). The weights are read later (`read`),
    or here if transformers must transform them. Families whose rows can be packed get
    `row_attention`. ConfigError if the folder or one of its tensors is missing, or if its
    classification head has several labels.
    """
    import transformers

    names = read_config(cfg.path).get("architectures") or [""]  # ConfigError without it
    auto = transformers.AutoModelForCausalLM
    settings = {}
    if head != "causal_lm":
        auto = transformers.AutoModelForSequenceClassification
        settings = {"num_labels": 1}
        labels = transformers.AutoConfig.from_pretrained(
            cfg.path, trust_remote_code=False
        ).num_labels
        if names[0].endswith("ForSequenceClassification") and labels != 1:
            raise ConfigError(
                f"model.path {cfg.path}: got a head with {labels} labels; expected one, whose "
                f"output is the score or value; choose a model trained with num_labels=1"
            )
    model, read = _open_or_load(auto, cfg.path, settings, new_head=head == "critic")
    architecture = Architecture.sizes_from_folder(cfg.path)
    if architecture.packs:
        transformers.AttentionInterface.register("rows", row_attention)
        model.config._attn_implementation = "rows"
    if architecture.is_dense_with_table:
        _rotate_in_one_pass(model.base_model)
    routers = Routers.of(model)
    module = model
    score = None
    if head == "causal_lm":
        _SelectiveHead(model, routers)
    else:
        module = _scalar_model(cfg, model, routers)
        score = module.get_submodule("score")
    use_onednn_products(module)
    multiply_in_type_of_weights(module)
    model.get_input_embeddings().register_forward_hook(_to_compute_dtype)
    units = set(model._no_split_modules or ())
    return LoadedModel(
        dtype=getattr(torch, cfg.precision),
        config=model.config.to_dict()
        | {"architectures": [type(model).__name__], "dtype": "float32"},
        source=Path(cfg.path),
        module=module,
        read=read,
        layers=tuple(part for part in module.modules() if type(part).__name__ in units),
        float32_modules=() if score is None else (score,),
        routers=routers,
    )


def _to_compute_dtype(module: nn.Module, _: Any, embedded: Tensor) -> Tensor:
    """Convert embeddings in bfloat16 to float32 on a CPU (cpu.product); others stay as they are.

    The layers that follow pass this type on.
    """
    return embedded.to(compute_dtype(embedded))


def _rotate_in_one_pass(decoder: Any) -> None:
    """Make this decoder rotate queries and keys by `rotate`, in a sixth of transformers' time.

    Replaces apply_rotary_pos_emb in the family's module, once. A hook attaches signed sines, which
    `rotate` needs, to the sines of this decoder. For sines without them, such as other decoders',
    the original function runs.
    """
    family: Any = sys.modules[type(decoder).__module__]
    original = family.apply_rotary_pos_emb

    def rotate_signed(query: Tensor, key: Tensor, cos: Tensor, sin: Any, *more: Any) -> Any:
        """Rotate by the signed sines if `sin` has them, otherwise by the original function."""
        signed = getattr(sin, "spmdflow_signed", None)
        if signed is None:
            return original(query, key, cos, sin, *more)
        return rotate(query, key, cos, signed)

    def sign(module: nn.Module, _: Any, angles: tuple[Tensor, Any]) -> None:
        _, sin = angles
        half = sin.shape[-1] // 2
        sin.spmdflow_signed = torch.cat([-sin[..., :half], sin[..., half:]], -1)

    decoder.rotary_emb.register_forward_hook(sign)
    if original.__name__ != rotate_signed.__name__:
        family.apply_rotary_pos_emb = rotate_signed


def _open_or_load(
    auto: Any, path: str, settings: Mapping[str, Any], *, new_head: bool
) -> tuple[Any, Read | None]:
    """Return (a module without weights, a reader of them) or (a module with weights, None).

    The second if transformers does more than copy the files' tensors. ConfigError if a tensor is
    missing. new_head: a missing score.weight is zeros instead. A loaded module is in eval mode and
    checked for values that are not finite. Registers `grouped_attention` as "sdpa".
    """
    import transformers

    transformers.AttentionInterface.register("sdpa", grouped_attention)
    module = empty_module(auto, path, torch.float32, **settings)
    folder = folder_of(module, path, new_head=new_head)
    if folder is not None:
        return module, folder.read
    # transformers would report missing tensors on every rank; they are checked here instead
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    attention = attention_of(module.config)
    module, info = auto.from_pretrained(
        path,
        dtype=torch.float32,
        output_loading_info=True,
        trust_remote_code=False,
        **settings,
        **attention,
    )
    missing = set(info["missing_keys"])
    if new_head and "score.weight" in missing:
        nn.init.zeros_(module.score.weight)
        missing.remove("score.weight")
    if missing:
        raise ConfigError(
            f"model.path {path}: the folder lacks {sorted(missing)[:5]}; expected every "
            f"tensor of the model; choose the folder of a complete model of this kind"
        )
    for name, values in module.state_dict().items():
        check_finite(values, name, path)
    # eval for good: no dropout, and old and new log-probs come from the same function
    return module.eval(), None


def _scalar_model(cfg: ModelConfig, model: Any, routers: Routers | None) -> ScalarModel:
    """Return decoder and head of a transformers model as a ScalarModel.

    ConfigError if it has no head named score.
    """
    if not hasattr(model, "score"):
        raise ConfigError(
            f"model.path {cfg.path}: {type(model).__name__} has no head named score; expected a "
            f"decoder with a scalar head; choose a causal architecture such as Llama or Qwen2"
        )
    name = model.base_model_prefix
    return ScalarModel(name, getattr(model, name), model.score, routers)


def row_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    packed_rows: PackedRows | None = None,
    shard: TokenShard | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention function for transformers, for families whose rows may be packed. Needs no mask.

    query (b, heads, T, d), key and value (b, kv heads, T, d) -> ((b, T, heads, d), None); b is 1 if
    the rows are packed (packed_rows). Padded rows attend causally. softcap and s_aux: the cap and
    the sinks of `AttentionForm`. shard: this rank's tokens under context parallelism.
    """
    form = AttentionForm(scaling, sliding_window, softcap, s_aux)
    if shard is not None:
        return context_attention(query, key, value, packed_rows, form, shard), None
    if packed_rows is None:
        return dense_attention(query, key, value, form).transpose(1, 2), None
    # a view whose gradient is one: that of x[0] would be a copy into zeros
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))  # (N, heads, d)
    return packed_attention(q, k, v, packed_rows, form)[None], None


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """Run transformers' "sdpa", with key and value heads repeated where the kernels need it.

    query (b, heads, T, d), key and value (b, kv heads, T, d) -> ((b, T, heads, d), None). They are
    repeated for float32 on a device: of CUDA's kernels only those for half precision support
    grouped heads, and float32 would store the T x T scores.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    owner: Any = module
    if query.dtype == torch.float32 and query.device.type != "cpu":
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
        owner = SimpleNamespace(is_causal=getattr(module, "is_causal", True))
    output: tuple[Tensor, None] = sdpa_attention_forward(owner, query, key, value, mask, **settings)
    return output


def open_model(cfg: ModelConfig, *, head: str) -> ModelSource:
    """Return the architecture of the folder cfg.path and a reader of its weights.

    head: as `load_model`. ConfigError if the folder is incomplete, or if its kind of model has no
    table of weights.
    """
    path = Path(cfg.path)
    kind: Head = "causal_lm" if head == "causal_lm" else "scalar"
    config = read_config(path)
    architecture = Architecture.from_config(config, head=kind)
    return ModelSource(
        dtype=getattr(torch, cfg.precision),
        config=_with_head(config, kind),
        source=path,
        architecture=architecture,
        read=_folder_of_table(path, architecture, new_head=head == "critic").read,
    )


def _folder_of_table(
    path: Path, architecture: Architecture, *, new_head: bool
) -> HuggingFaceFolder:
    """Return a reader of the tensors that a table of weights has.

    Experts are fused as in transformers' module, which says where the files' tensors are in them.
    ConfigError if the folder is incomplete, or if only transformers can read it.
    """
    if architecture.is_dense:
        return HuggingFaceFolder(path, architecture, new_head=new_head)
    import transformers

    auto = transformers.AutoModelForCausalLM
    settings = {}
    if architecture.head == "scalar":
        auto = transformers.AutoModelForSequenceClassification
        settings = {"num_labels": 1}
    folder = folder_of(empty_module(auto, path, torch.float32, **settings), path, new_head=new_head)
    if folder is None:
        got = f"{path}, whose tensors are not copies of the model's"
        do = f"save it with transformers again, or set engine.kind={engine_names()[0]}"
        raise ConfigError.of("model.path", got, "copies", do)
    return folder


def _with_head(config: dict[str, Any], head: Head) -> dict[str, Any]:
    """Return config.json for an export with float32 weights and this head.

    For scalar, ...ForCausalLM in architectures becomes ...ForSequenceClassification with one label.
    """
    config = {key: value for key, value in config.items() if key != "torch_dtype"}
    config["dtype"] = "float32"
    if head == "scalar":
        names = config.get("architectures") or [""]
        config["architectures"] = [
            name.replace("ForCausalLM", "ForSequenceClassification") for name in names
        ]
        config |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    return config
