"""Train engines: the surface that roles are written against, and the engines behind it.

`engine.TrainEngine` is the contract: forward (no gradient), train_step (one optimizer step),
blocks and full_tensors (weights out), state_blocks and load_blocks (checkpoints), residency.

| method | `fsdp.FSDPEngine` | `zero.ZeROEngine` | `megatron.MegatronEngine` |
|---|---|---|---|
| forward, train_step | what transformers loads | the same | architectures of `weights`; 1F1B |
| full_tensors, export | over the pool | stage 1: no message | over a replica |
| shard_hashes | summed over the pool | stage 1: own copy | summed over a replica |
| state_blocks, load_blocks | this rank's rows | stage 1: tensors it steps | boxes it steps |
| residency | parameters and moments | the same | gradient buffers too |

Without tp and pp every rank is on the last stage; elsewhere `forward` gives None.

Files: `data_parallel` what FSDP and ZeRO share; `sharding` FSDP2 meshes and shards; `micro_batch`
rows -> padded tensors; `optimizer` AdamW over shards and the schedule; `hugging_face` the only file
that imports transformers; `model_source` folders read box by box; `residency` device memory given
back. Megatron: `megatron_shim` its CUDA names on a CPU; `megatron_groups` process groups;
`megatron_layer` and `megatron_model` what a stage computes; `megatron_schedule` micro-batches
through stages; `megatron_optimizer` gradients and AdamW; `megatron_weights` its tensors by Hugging
Face name. Only these files import Megatron.
"""
