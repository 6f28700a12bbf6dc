"""The single controller (paper section 4): what a script holds, and how its calls are planned.

A thread of rank 0 runs the script once. It knows row ids, column names, lengths, layouts and
orders; no models, no engines, no devices: a worker class is found by its name and called by its
method's name. `runtime` carries the orders out; every rank, rank 0 too, is an executor there.

The life of a call, `batch |= actor.compute_log_prob(batch)`:

1. `group` finds the method, `check` refuses what cannot work: the only errors a script may catch.
2. `assignment` says which rows each rank gets and who answers (`transfer` has the protocols),
   `transfers` plans the rows that a rank lacks, as edges from ranks that hold them.
3. `caller` sends a numbered command to each rank and returns a lazy `batch` at once.
4. `runtime.io` keeps the books; a transfer is released when its producer has replied.
5. On the rank the transfer lane moves rows, the compute lane runs the method
   (`runtime.executor`, `runtime.operation`); the reply holds lengths and metrics, never values.
6. `step` collects metrics. Only `fetch` brings values of a column to the script.

| file | what |
|---|---|
| flow, group, batch, prompts | what a script holds |
| step, evaluation, saving | metrics and what is shown of them, evaluation, checkpoints |
| caller, call, check, assignment, sender | a call: planned once, as integers, and sent |
| result, rows, transfers, transcript | what is known of rows, and how they move |
| script | builds all of this and runs `main` |
"""
