"""Megatron-Core: tensor, pipeline and data parallelism; the paper's 3D parallel engine."""

from spmdflow.kind.engine import RECOMPUTE, EngineKind, EngineOption, Sharding, register_engine

register_engine(
    EngineKind(
        "megatron",
        "Megatron-Core: tensor-, pipeline- and data-parallel",
        Sharding(gathers=1, reductions=1),
        axes=("tp", "pp"),
        options=RECOMPUTE
        | {
            "sequence_parallel": EngineOption("divide norms over the sequence too", needs="tp"),
            "plain_optimizer": EngineOption(
                "step every weight on every dp rank",
                sharding=Sharding(optimizer=False, reductions=2),
            ),
        },
        float32_weights=False,
        keeps_gradients=True,
        reads_folder=True,
        shares_storage=True,
        weight_table="spmdflow.weights.ranks:megatron_tables",
        worker_class="ThreeDParallelWorker",
        files=("spmdflow/weights/megatron.py",),
    )
)("spmdflow.workers.megatron:MegatronEngine")
