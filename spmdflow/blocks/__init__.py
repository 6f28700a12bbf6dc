"""Blocks: boxes of an index space held by ranks, and plans that bring them where they are needed.

Used for batch rows (1-D blocks of single rows), weight shards (boxes of a full tensor) and
checkpoint files (boxes again). `redistribute(have, need)` is a pure function on integers; its plan
sends each missing element exactly once, from the nearest and least loaded holder, and nothing that
is already there. `find_cover_error` checks what each rank receives against that definition alone.
Every rank derives the same plan. Knows no tensors, columns, processes or bytes.

| file | what |
|---|---|
| `box` | `Box` and its algebra; which part of what several ranks hold counts on each |
| `plan` | `redistribute` for boxes of any number of dimensions; which holder sends; its proof |
| `rows` | the same for row ids, vectorised; `plan_rounds`: with a broadcast inside a replica |
| `hash` | additive hash of a tensor's elements and places |
"""
