"""What every rank runs, and how a run fails.

Carries numbered orders from one thread of the first rank to lanes on every rank, and replies back.
Knows process groups, sockets, rows by number and worker classes by name; no scripts, no models.

| file | what |
|---|---|
| launch, session, rendezvous | how ranks form one session, and leave it |
| order | what a script gives and gets: orders, replies; run at once in one process (`--inproc`) |
| wire | what is sent: envelopes and sockets (plain data and names: parallel/message) |
| io, peers, verdict | the controller's side: who was told what, who answered, what failed first |
| limit, pace | the limit of a call; how long calls take |
| stall, place, stacks | calls that are stuck, and where |
| start_watch, inflow | a rank that dies during the start; a message that never ends |
| status_file | RUN_DIR/status.json, for `spmdflow status` |
| comm, executor, operation, rank_files, early | a rank's threads, lanes and commands |
| process, failure | processes and signals of the run; how a failure is reported |
"""
