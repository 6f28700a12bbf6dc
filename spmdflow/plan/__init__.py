"""The dry run: one iteration of a script on no device, and what it would do (paper section 6).

    python -m spmdflow.plan SCRIPT [CONFIG.yaml] [key=value ...] [--world N] [--json]

The real script runs through the real `Flow` and `Caller` on a transport that sends nothing. It
answers every call at once with rows that have shapes and lengths but no values, and records what
each rank would have been sent. So layouts, assignments, transfers, groups and frees are the
controller's own, and nothing is modelled twice. The package knows no tensors and creates no process
group.

| file | what |
|---|---|
| `__main__` | the command line |
| `trace`, `transport` | runs the script, records every order, answers for the ranks |
| `example` | placeholders for values: forms of columns, examples, lengths of prompts |
| `replay` | the record of a run: its lengths for a dry run, its orders without its script |
| `record` | what was recorded, as frozen facts |
| `check` | checks of the record: members of groups, weights |
| `weight` | how weights reach generators, and their bytes by edge |
| `workload`, `prediction` | seconds and memory, by the simulators of `mapping` |
| `notes` | what it says besides: bytes for attention, what divided experts change |
| `spread`, `varied` | lengths of responses as they usually are, and a step with them |
| `report`, `text`, `picture` | the output: as data, as text, as a picture of the schedule |
| `showing` | the progress of a long planning, on a terminal and in status.json |
| `comparison` | prediction next to measurement, after a run |
| `placement` | the search for placement=auto |
| `fit` | what fits into memory: engine.offload, rollout.weights and rollout.kv_cache_gib |
"""
