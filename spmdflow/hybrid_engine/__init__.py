"""The hybrid engine: one set of ranks trains and generates, and the weights pass between.

       update          sync: reshard         generate              release
    train ----> version n -------> generator at n ----> responses ----------> train ...

Ways from the trainer's layout t-p-d to the generator's t_g-p_g-d_g-d, paper section 5 (M bytes of
weights; what each way adds to the trainer's own M / (t p), its moments and gradients):

| way | works for | received per rank | held besides |
|---|---|---|---|
| blocks | Megatron + vLLM, nested | (d_g - 1)/(t p) M | peers' shards while generating |
| flat | the same | the same | peers' shards, at fixed addresses |
| boxes | all layouts of `weights` | what is missing | M / (t_g p_g), unless offloaded |
| tensors | data-parallel, t_g = p_g = 1 | (n - 1)/n M | M, unless offloaded |

boxes and tensors are what rollout.weights calls copy; blocks and flat need one precision.
blocks and flat keep one copy: vLLM's layers work on lists of Megatron's shards
(rollout.vllm_blocks), so training and generation read the same storage and nothing is redundant
but norms and alignment. With engine.residency=offload generation frees the trainer's moments and
gradients, and training frees the KV cache and a copy's weights.

| file | what |
|---|---|
| `factory` | which way applies to settings and layout, and its parts |
| `sync` | what all ways share: versions, the certificate by hashes, release |
| `shared_storage`, `shared_sync` | blocks and flat |
| `stream`, `copy_sync` | copies, by the planner's messages or tensor by tensor |
| `wire` | what carries messages: the job's groups, or sockets to another program |
| `remote` | from a policy to a generator on other ranks |
| `outside`, `whole` | what a trainer and a vLLM elsewhere agree on; whole tensors in chunks |
| `outside_sender`, `outside_receiver`, `vllm_server` | its two ends, and the server's HTTP routes |
| `nccl_sender` | to a server that has vLLM's own NCCL backend (never run) |
| `reshard` | plans: boxes in bounded buckets, whole shards inside micro-dp groups. Integers only |
| `cost`, `amount` | received, peak and redundant bytes of five systems (Table 2), told apart |
| `systems` | the five systems as objects that move real tensors, for test and benchmark |
| `table` | which boxes settings give to each rank |
"""
