"""Where every weight lies: boxes of Hugging Face tensors in the tensors of each engine.

One declarative table per architecture family (`architecture` for what differs between families,
`table` for the tensors) and one function per layout that says, for a rank, which box of which
Hugging Face tensor fills which part of which local tensor. Loading, export, resharding,
checkpoints and certificates read these tables; no other code knows how a weight is cut. Integers
only but for `move` and `folder`; no processes, no Megatron, no vLLM.

| file | what |
|---|---|
| `architecture` | `Architecture`: sizes and features, read from config.json or refused |
| `table` | `parameters`: name, shape and kind of every tensor; `stage_layers` |
| `piece` | `Piece`, `LocalTensor`, `ShardTable`; stacking; who owns what several ranks hold |
| `cut` | the ways to cut: whole, rows, columns, vocabulary, heads, groups of heads |
| `megatron` | interleaved qkv, gate over up, padded vocabulary, stages |
| `vllm` | q over k over v, gate over up, vocabulary padded to 64, replicated kv heads |
| `sharded` | FSDP2 (rows in equal chunks) and whole tensors (ZeRO parameters, built-in generator) |
| `ranks` | the tables of all ranks of a layout |
| `move` | fill local tensors through a reader; views by box; whole tensors from boxes |
| `folder` | a reader of boxes over safetensors files, and the writing of such a folder |

    table = megatron_shards(arch, tp_size=2, tp_rank=1, pp_size=2, pp_rank=0, vocab_multiple=64)
    fill(dict(model.named_parameters()), table, HuggingFaceFolder(path, arch).read)
"""
