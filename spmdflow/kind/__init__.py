"""The registered train engines and generators, and the facts of each. Imports no torch.

Settings, checks, placement, plan, hybrid engine and roles read these facts and never test for one
kind by name. A decorator registers a new kind, in the package or in a script:

    @register_engine(EngineKind("ddp", "plain PyTorch", Sharding(optimizer=False, reductions=2)))
    class DDPEngine: ...

| file | what |
|---|---|
| `registry` | names and the entries that they refer to |
| `engine`, `generator` | the facts of a train engine and of a generator, and their registries |
| `table` | the kinds of the package, and the optimizers |

`table` refers to a class as "module:Class", so that only a rank that builds it imports the module.
docs/OWN_ENGINE.md shows how to write a kind.
"""

from spmdflow.kind import table

__all__ = ["table"]
