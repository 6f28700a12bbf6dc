"""Blocks: boxes of an index space that ranks hold, and plans that move them to where needed.

Used for batch rows (1-D blocks of single rows), weight shards and checkpoint files (boxes of a full
tensor). `redistribute(have, need)` is a pure function on integers. Its plan sends each missing
element exactly once, from the nearest and least loaded holder, and nothing that a rank already has.
`find_cover_error` checks what each rank receives, independently, from this definition. Every rank
derives the same plan. This package does not know tensors, columns, processes or bytes.

| file | what |
|---|---|
| `box` | `Box` and its algebra; how ranks that hold the same elements divide their ownership |
| `plan` | `redistribute` for boxes of any number of dimensions; which holder sends; its check |
| `rows` | redistribution of row ids, vectorised; `plan_rounds`: with a broadcast inside a replica |
| `hash` | additive hash of a tensor's elements and their positions |
"""
