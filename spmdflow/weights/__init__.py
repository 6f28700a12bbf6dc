"""How weights are sharded: boxes of Hugging Face tensors in the tensors of each engine.

One declarative table per architecture family (`architecture` for the differences between families,
`table` for the tensors) and one function per engine (`ranks`), which says for a rank which box of
which Hugging Face tensor fills which part of which local tensor. Loading, export, resharding and
checksums read these tables; no other code knows how a weight is cut. All modules but `move`,
`numbered`, `direct`, `file`, `folder` and `peft_folder` handle integers only. No module uses
processes, Megatron or vLLM.

| file | what |
|---|---|
| `architecture` | `Architecture`: sizes and features from config.json, or why no table fits |
| `table` | `parameters`: name and shape of every tensor; `Piece`, `LocalTensor`; ways to cut |
| `ranks` | the tables of all ranks of a layout: Megatron's, vLLM's, rows in equal chunks (FSDP2) |
| `recorded` | rows of vLLM's tables for each family, recorded from its loader (`vllm_rows.json`) |
| `codes` | codes of elements, by which a table is compared with what a loader does |
| `numbered` | where a loader puts every element, read off numbers that it stores |
| `converted` | which tensors of a folder make up a tensor that transformers fuses |
| `move` | fill local tensors through a reader; views by box; memory freed and reallocated |
| `direct` | a new file that is written with O_DIRECT, bypassing the page cache |
| `file` | safetensors files that are hashed while they are written, and read in parts |
| `index` | which file of a folder holds which tensor |
| `own_code` | Python files of a model folder: never run, refused where they are needed |
| `adapter` | the names of LoRA adapters |
| `peft_settings` | the settings of an adapter in peft's format |
| `peft_folder` | a reader of the weights of an adapter in peft's format |
| `dcp` | a reader of boxes over a folder of torch.distributed.checkpoint |
| `folder` | a reader of boxes over safetensors files, and the writing of such a folder |

    table = megatron_shards(arch, tp_size=2, tp_rank=1, pp_size=2, pp_rank=0, vocab_multiple=64)
    fill(dict(model.named_parameters()), table, HuggingFaceFolder(path, arch).read)
"""
