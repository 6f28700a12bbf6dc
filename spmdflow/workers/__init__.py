"""Train engines: the interface that roles use, and the engines that implement it.

`engine.TrainEngine` is the interface and the shared part of all engines: forward (no gradient),
train_step (one optimizer step), blocks (access to weights), state_blocks and load_blocks
(checkpoints), residency. `spmdflow.kind` lists the engines.

| method | `fsdp.FSDPEngine` | `fsdp.ZeROEngine`, stage 1 | `megatron.MegatronEngine` |
|---|---|---|---|
| forward, train_step | what transformers loads | the same | architectures of `weights`; 1F1B |
| shard_hashes | summed over the pool | own copy | summed over a replica |
| state_blocks, load_blocks | this rank's rows | all weights, own moments | boxes that it steps |
| own_state_blocks | the same | 1/n of the weights, own moments | its part of these boxes |
| residency | parameters and moments | the same | gradient buffers too |

Own moments are those of the tensors that this rank steps. `forward` returns None on ranks before
the last pipeline stage. Without pp every rank is on the last one.

| file | what |
|---|---|
| engine | `TrainEngine`, see above |
| model | what an engine is built from; the only file that imports transformers |
| micro_batch | rows -> the tensors of a forward |
| attention | attention over packed rows, on any device (blocks for a CPU: cpu.attention) |
| fsdp, sharding | FSDP and ZeRO; their meshes and shards |
| context_group | the ranks that divide the tokens of rows, and their messages |
| context_parallel | which tokens of rows a rank has, and its attention |
| ring_attention | attention while keys pass from rank to rank |
| partial_attention | attention over some of the keys that a query sees |
| divided_experts | experts that are on different ranks, for FSDP and ZeRO |
| optimizer, schedule | AdamW and others over shards; the learning rate |
| lora, lora_dropout | linear layers with an adapter; which of their inputs are dropped |
| megatron | the Megatron engine |
| megatron_runtime | process groups of Megatron, and its CUDA names on a CPU |
| megatron_messages | messages between stages, whose shapes both ends know |
| megatron_lora | adapters whose A and B are divided as their layer is |
| megatron_experts | its routers: experts of each token, replay, auxiliary loss |
| megatron_model, megatron_layers | what a pipeline stage computes |
| megatron_optimizer | gradients and AdamW of Megatron |

Only the files named `megatron...` import Megatron.
"""
