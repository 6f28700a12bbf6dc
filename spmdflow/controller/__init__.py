"""The single controller (paper section 4): what a script holds, and what carries out its calls.

The controller is a thread of rank 0 that runs the script once. Every rank, rank 0 too, is an
executor. Knows row ids, column names, lengths, layouts and messages; no models, no engines, no
CUDA and no Megatron: a worker class is found by its name and called by its method's name.

The life of a call, `batch |= actor.compute_log_prob(batch)`:

1. `group` finds the method, `check` refuses what cannot work: the only errors a script may catch.
2. `assignment` says which rows each rank gets and who answers (`transfer` has the protocols),
   `transfers` plans the rows that a rank lacks, as edges from ranks that hold them.
3. `caller` sends a numbered command to each rank and returns a lazy `batch` at once.
4. `io` keeps the books (`ledger`) and releases a transfer when its producer has replied.
5. On the rank the transfer lane moves rows, the compute lane runs the method (`executor`,
   `operation`); the reply holds lengths and metrics, never values.
6. `step` collects metrics. Only `fetch` brings values of a column to the script.

| file | what |
|---|---|
| flow, group, batch, result, prompts, dynamic_sampling, weight_link | what a script holds |
| step, evaluation, judged, saving, show | a step: metrics, evaluation, checkpoints, what is shown |
| caller, check, inputs, assignment, schedule, join, frame, fetch | a call, planned as integers |
| order, transfers, ledger, io | the controller's transport: orders out, replies in |
| executor, operation, importing | a rank: lanes and what each command does |
| comm, link, waiter, wire, message | threads and sockets of a rank, envelopes, bytes |
| launch, session, settings, rendezvous, peers, neighbours | how ranks become one session |
| process, signals, watch, failure, verdict | processes, signals, and how a run fails |
| inproc, transcript | the transport of `--inproc`; answers that a plan is compared with |
"""
