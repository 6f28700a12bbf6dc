"""Train engines: the surface that roles are written against, and the engines behind it.

`engine.TrainEngine` is the contract: forward (no gradient), train_step (one optimizer step),
blocks and full_tensors (weights out), state_blocks and load_blocks (checkpoints), residency.

| method | `fsdp.FSDPEngine` | `zero.ZeROEngine` |
|---|---|---|
| forward, train_step | every Hugging Face causal LM, and scalar heads on one | the same |
| full_tensors, export_hugging_face | collective over the pool | stage 1: no message |
| shard_hashes | pieces, summed over the pool | stage 1: each rank its own copy |
| state_blocks, load_blocks | this rank's rows | stage 1: the whole tensors it steps |
| residency | parameters and moments move; gradients live only inside train_step | the same |

Files: `data_parallel` what the two share; `sharding` FSDP2 meshes and shards; `micro_batch` rows ->
padded tensors; `optimizer` AdamW over shards and the schedule; `hugging_face` the only file that
imports transformers.
"""
