"""The dry run: one iteration of a script on no device, and what it would do (paper section 6).

    python -m spmdflow.plan SCRIPT [CONFIG.yaml] [key=value ...] [--world N] [--json]

The real script runs through the real `Flow` and `Caller` on a transport that sends nothing: it
answers every order at once with rows that have shapes and lengths but no values, and writes down
what each rank would have been told. So layouts, assignments, transfers, groups and frees are the
controller's own; nothing is modelled twice. Knows no tensors, makes no process group.

| file | what |
|---|---|
| `__main__` | the command line |
| `trace`, `transport` | runs the script, records every order, answers for the ranks |
| `example` | stand-ins for values: forms of columns, examples, lengths of prompts |
| `replay` | the record of a run: its lengths for a dry run, its orders without its script |
| `record` | what was recorded, as frozen facts |
| `rows`, `check` | proofs on the record: rows; members, updates, weights |
| `weight` | how weights reach generators, and their bytes by edge |
| `workload`, `prediction` | seconds and memory, by the simulators of `mapping` |
| `report`, `text`, `picture` | what is shown: as data, as text, as a schedule |
| `showing` | what a planning that takes long does, on a terminal and in status.json |
| `comparison` | prediction beside measurement, after a run |
| `auto` | placement=auto |
| `residency` | what `auto` means for engine.residency, rollout.weights and rollout.kv_cache |
"""
