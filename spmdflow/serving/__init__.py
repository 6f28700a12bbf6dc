"""Sends the trainer's weights to a vLLM server that runs as another program.

    connect     the trainer's first rank asks the server; every rank connects to every vLLM worker
    publish     the server pauses; each rank sends its boxes; the workers load them as a checkpoint
    compare     hashes of the weights that the workers' forward reads with the trainer's hashes
    resume      only if they are equal

`models.policy` uses the small interface of `publisher`. Nothing inside a job needs this package.

| file | what |
|---|---|
| `publisher` | the interface of the trainer's side, and the table of the server's backends |
| `connection` | the facts that both programs share, and the sockets between them |
| `sender` | the trainer's side |
| `receiver`, `backend` | the side of a vLLM worker, for vLLM's weight-transfer interface |
| `server` | the HTTP routes of a vLLM server |
| `sglang`, `sglang_link` | the client of SGLang's servers, and how they get weights |
| `broadcast` | the group over which they get them |
| `nccl` | to a server that has vLLM's own NCCL backend instead (never run) |
"""
