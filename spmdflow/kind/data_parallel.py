"""FSDP and the stages of ZeRO: every rank has rows of its own (Rajbhandari et al. 2020)."""

from spmdflow.kind.engine import RECOMPUTE, EngineKind, EngineOption, Sharding, register_engine

_ROWS = "spmdflow.weights.ranks:row_tables"
_LAYERS = Sharding(parameters=True, micro_batch_gathers=2, micro_batch_reductions=1)

register_engine(
    EngineKind(
        "fsdp",
        "FSDP2: every rank has 1/n of each parameter",
        _LAYERS,
        options=RECOMPUTE
        | {
            "keep_gathered": EngineOption(
                "keep parameters gathered through a step",
                sharding=Sharding(parameters=True, gathers=1, reductions=1),
            )
        },
        weight_table=_ROWS,
        worker_class="FSDPWorker",
    )
)("spmdflow.workers.fsdp:FSDPEngine")

register_engine(
    EngineKind(
        "zero1",
        "ZeRO stage 1: divides the optimizer's moments",
        Sharding(gathers=1, reductions=2),
        options=RECOMPUTE,
        worker_class="ZeROWorker",
    )
)("spmdflow.workers.zero:ZeROEngine")

register_engine(
    EngineKind(
        "zero2",
        "ZeRO stage 2: gradients too, and parameters between steps",
        Sharding(parameters=True, gathers=1, micro_batch_reductions=1),
        options=RECOMPUTE,
        weight_table=_ROWS,
        worker_class="ZeROWorker",
    )
)("spmdflow.workers.fsdp:FSDPEngine")

register_engine(
    EngineKind(
        "zero3",
        "ZeRO stage 3: parameters, layer by layer",
        _LAYERS,
        options=RECOMPUTE,
        weight_table=_ROWS,
        worker_class="ZeROWorker",
    )
)("spmdflow.workers.fsdp:FSDPEngine")
