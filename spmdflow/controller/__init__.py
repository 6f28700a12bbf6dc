"""The single controller (paper section 4): what a script holds, and how its calls are planned.

A thread of rank 0 runs the script once. It knows row ids, column names, lengths, layouts and
commands; no models, no engines, no devices: a worker class is found by its name and called by its
method's name. `runtime` carries the commands out; every rank, rank 0 too, is an executor there.

The life of a call, `batch |= actor.compute_log_prob(batch)`:

1. `group`: the handle finds the method; `Caller.invoke` (`caller`) is given the batch.
2. `planning` makes it one `Call` (`runtime.call`), from the marks of the method
   (`worker_api.register`) and the columns of the batch. What cannot work is refused here: the only
   errors that a script may catch.
3. For this, `assignment` says which rows each rank is given and holds afterwards, and who
   answers (`transfer.protocol` has the rules); for an update also its mini-batches.
4. `caller` has `Transfers` (`transfers`) plan the rows that a rank lacks, as edges from ranks that
   hold them, sends each rank its numbered command, and returns a lazy `batch` at once.
5. `runtime.io` collects replies. When the producer of rows has replied, `result` has their dtypes
   and lengths, and the transfers that waited for them are sent.
6. On the rank the transfer lane moves rows, the compute lane runs the method
   (`runtime.executor`, `runtime.operation`); the reply holds lengths and metrics, never values.
7. When the step ends, each call and its replies are a `CallRecord`. `step` makes metrics of them;
   an `Observer` (timeline, calls.jsonl, transcript, capsule, a dry run) reads them, and nothing in
   the run depends on it. Only `fetch` brings values of a column to the script.

| file | what |
|---|---|
| flow, group, batch, prompts | what a script holds |
| draw_count | how often a row was drawn in a step |
| planning, assignment, caller | a call: planned once, as integers, and sent |
| joining | rows of several calls as rows of one result |
| step, evaluation, saving | what a step measures, evaluation, checkpoints |
| observer, transcript, capsule | what reads the records of calls; a step that is kept |
| metrics_page | hands records to the page for Prometheus |
| row_use, token_count | tokens of a step: trained, dropped, stale |
| throughput_log | writes them, and facts of each start |
| queue | rollouts that begin steps before they are learnt from |
| ahead | calls interrupt what a generator generates for later steps |
| sample | a few scored rows of a step, for people |
| ending | when a run ends before its last step |
| extending | what the answer of a call carries along of its batch |
| guarding | what is done when a guard holds |
| old_log_probs | where the log-probs of before an update come from |
| on_demand | calls that wait until something reads their columns |
| result, transfers | what is known of rows, and how they move |
| script | builds all of this and runs `main` |
"""
