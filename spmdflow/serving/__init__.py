"""Servers of other programs: a run generates on them, or sends them its weights.

**Generating on servers** (`rollout.engine=served`, docs/SERVERS.md):

    policy's ranks --(hybrid_engine)--> mirror of a rank --(gloo or NIXL)--> servers
    rows of the rank <-------------------(HTTP, token ids)----------------> servers

| file | what |
|---|---|
| `generator` | the generator of a rank: its mirror, its fleet, the servers that it has started |
| `fleet` | hands rows out to servers, and takes them back |
| `care` | who is alive, and has which weights |
| `member` | a server and a row as a rank sees them |
| `client`, `dialect` | the HTTP side of a server, and checks of its answers; one a program |
| `mirror`, `update` | the weights on the host, and what of them changed: positions and values |
| `link`, `transport` | brings them to one server; messages of torch.distributed |
| `nixl` | one-sided writes into a worker's memory: the other transport |
| `roster` | which servers the ranks of a pool look after |
| `supervisor`, `child` | a server that a rank has started, and starts again |
| `start`, `settings` | `spmdflow serve`; what a server's process is told |
| `door`, `identity` | inside the server: key, weights version and routes; hashes of the model |
| `row_noise`, `worker` | inside its worker: draws tokens as in process; takes weights |
| `sglang`, `sglang_link`, `broadcast` | SGLang: its client, and how it gets weights |

**Sending weights to a vLLM server** that others use (`connect_server`, docs/lab/HYBRID.md):

    connect     the trainer's first rank asks the server; every rank connects to every vLLM worker
    publish     the server pauses; each rank sends its boxes; the workers load them as a checkpoint
    compare     hashes of the weights that the workers' forward reads with the trainer's hashes
    resume      only if they are equal

| file | what |
|---|---|
| `publisher` | the interface of the trainer's side, and the table of the server's backends |
| `connection` | the facts that both programs share, and the sockets between them |
| `sender` | the trainer's side |
| `receiver`, `backend` | the side of a vLLM worker, for vLLM's weight-transfer interface |
| `server` | the HTTP routes of a vLLM server |
| `nccl` | to a server that has vLLM's own NCCL backend instead (never run) |
"""
