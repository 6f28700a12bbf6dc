"""Train engines: the surface that roles are written against, and the engines behind it.

`engine.TrainEngine` is the contract: forward (no gradient), train_step (one optimizer step),
blocks and full_tensors (weights out), state_blocks and load_blocks (checkpoints), residency.

| method | `fsdp.FSDPEngine` |
|---|---|
| forward, train_step | every Hugging Face causal LM, and scalar heads (critic, reward) on one |
| full_tensors, shard_hashes, export_hugging_face | collective over the dp group |
| state_blocks, load_blocks | this rank's shards, for the same layout |
| residency | parameters and optimizer move; gradients live only inside train_step |

Files: `micro_batch` rows -> padded tensors; `optimizer` AdamW over shards and the schedule;
`hugging_face` the only file that imports transformers.
"""
