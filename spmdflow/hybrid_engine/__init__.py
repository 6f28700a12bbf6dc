"""The hybrid engine: one set of ranks trains and generates; weights are resharded in between.

       update          sync: reshard         generate              release
    train ----> version n -------> generator at n ----> responses ----------> train ...

How weights get from the trainer's layout t-p-d to the generator's t_g-p_g-d_g-d, paper section 5 (M
bytes of weights; memory in addition to the trainer's own M / (t p), its moments and gradients):

| mode | works for | received per rank | additional memory |
|---|---|---|---|
| blocks | Megatron + vLLM, nested | (d_g - 1)/(t p) M | peers' shards while generating |
| flat | the same | the same | peers' shards, at fixed addresses |
| copy | every engine, generator and layout | missing boxes | M / (t_g p_g), freed for training |
| copy, other ranks | a generator's own pool | M / (t_g p_g) | the same |
| adapter | adapters + vLLM | missing boxes of A and B | M / (t_g p_g), always |

copy goes box by box: each rank receives the boxes of Hugging Face tensors that its generator
lacks, in the generator's precision. blocks and flat need one precision and keep one copy: vLLM's
layers work on lists of Megatron's shards (rollout.vllm_blocks), so training and generation read
the same storage, and only norms and alignment are redundant. The KV cache is allocated while its
model generates. A copy's weights and peers' shards also stay while other models only run forward.
The parts of a trainer listed in engine.offload are on the device only for calls that need them.

| file | contents |
|---|---|
| `factory` | chooses the mode for settings and layout, and builds its parts |
| `sync` | versions, checksums, release; copies on the same ranks or to others; shards in place |
| `shared_storage` | the trainer's shards as generation reads them: blocks and flat |
| `stream` | a plan's messages over the job's groups; whole Hugging Face tensors out of shards |
| `reshard` | the boxes of each rank according to the settings, and plans to move them |
| `bucket` | bounded buckets of transfers that are in flight at the same time |
"""
