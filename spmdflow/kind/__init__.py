"""Which train engines and generators there are, and the facts of each. Imports no torch.

Settings, checks, placement, plan, hybrid engine and roles read these facts and name no kind. A new
one, of the package or of a script, is registered with a decorator:

    @register_engine(EngineKind("ddp", "plain PyTorch", Sharding(optimizer=False, reductions=2)))
    class DDPEngine: ...

Files: `registry` names and what they stand for; `engine`, `generator` what each states, and their
registries; `table` the kinds of the package, which name their class as "module:Class": it is
imported when a rank builds it; and the optimizers. Page: docs/OWN_ENGINE.md.
"""

from spmdflow.kind import table

__all__ = ["table"]
