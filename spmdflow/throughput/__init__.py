"""`spmdflow report --throughput`: what a claim of tokens per second needs, from RUN_DIR alone.

Reads launches.jsonl, throughput.jsonl (`controller.throughput_log`) and metrics.jsonl. Knows no
models and no ranks. Works while a run is live, after it was killed, and with runs of earlier
versions, which lack the first two files: then it says what is not known, and why.

| file | what |
|---|---|
| `measured_step` | the steps of a run, which of them count, and why the others do not |
| `distribution` | medians, quartiles and percentiles |
| `flops` | the FLOP formula, peaks of devices, model FLOPs utilization |
| `summary` | all numbers of the block |
| `text` | the block as text |
"""
