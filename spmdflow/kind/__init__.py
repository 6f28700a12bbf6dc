"""Which train engines and generators there are, and the facts of each. Imports no torch.

Settings, checks, placement, plan, hybrid engine and roles read these facts and name no kind. A new
one, of the package or of a script, is registered with a decorator:

    @register_engine(EngineKind("ddp", "plain PyTorch", Sharding(optimizer=False, reductions=2)))
    class DDPEngine: ...

Files: `engine` what an engine states, and their table; `generator` the same of generators. The
built-in kinds: `data_parallel`, `megatron`, `builtin`, `vllm`; they name their class as
"module:Class", which is imported when a rank builds it. Page: docs/OWN_ENGINE.md.
"""

from spmdflow.kind import builtin, data_parallel, megatron, vllm

__all__ = ["builtin", "data_parallel", "megatron", "vllm"]
