"""Train engines: what roles are written against, and the engines behind it.

`engine.TrainEngine` is the contract and what all engines share: forward (no gradient), train_step
(one optimizer step), blocks (weights out), state_blocks and load_blocks
(checkpoints), residency. `spmdflow.kind` says which engines there are.

| method | `fsdp.FSDPEngine` | `fsdp.ZeROEngine`, stage 1 | `megatron.MegatronEngine` |
|---|---|---|---|
| forward, train_step | what transformers loads | the same | architectures of `weights`; 1F1B |
| shard_hashes | summed over the pool | own copy | summed over a replica |
| state_blocks, load_blocks | this rank's rows | all, moments of what it steps | boxes it steps |
| own_state_blocks | the same | its part, and these moments | its part |
| residency | parameters and moments | the same | gradient buffers too |

Without tp and pp every rank is on the last stage; elsewhere `forward` gives None.

Files: `model` what an engine is built from, the only file that imports transformers; `micro_batch`
rows -> the tensors of a forward; `attention` over packed rows; `optimizer` the schedule, and AdamW
over shards; `sharding` FSDP2 meshes and shards. Megatron: `megatron_runtime` process groups, and
its CUDA names on a CPU; `megatron_model` what a stage computes, `megatron_packed` of packed rows;
`megatron_optimizer` gradients and AdamW. Only these files and `megatron` import Megatron.
"""
