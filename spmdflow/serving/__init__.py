"""Serving: sends the trainer's weights to a vLLM server that is another program.

    connect     the trainer's first rank asks the server; every rank connects to every vLLM worker
    publish     the server pauses; each rank sends its boxes; the workers load them as a checkpoint
    compare     hashes of what the workers' forward reads, against those of the trainer's shards
    resume      only if they are equal

`models.policy` uses the small interface of `publisher`; nothing inside a job needs this package.

| file | what |
|---|---|
| `publisher` | the interface: a trainer's end, by the name of the server's backend |
| `connection` | what both programs agree on, and the sockets between them |
| `sender` | the trainer's end |
| `receiver`, `backend` | the end in a vLLM worker, in vLLM's weight-transfer interface |
| `server` | the HTTP routes of a vLLM server |
| `nccl` | to a server that has vLLM's own NCCL backend instead (never run) |
"""
