"""What every rank runs, and how the controller reaches it.

Carries numbered calls from one thread of the first rank to lanes on every rank, and replies back.
Knows process groups, sockets, rows by number and worker classes by name. It knows no scripts and no
models. Failures are found and reported by spmdflow/failure.

| file | what |
|---|---|
| launch, session, rendezvous | how ranks form one session, and leave it |
| call | a call, its replies and its record; calls in one process (`--inproc`) |
| wire, inflow | envelopes and sockets (plain data: message.py); a message that never ends |
| io, teardown | the controller's side: sends calls, collects replies; ends a failed session |
| comm, executor, operation, rank_files, early | a rank's threads, lanes and commands |
| peak_memory | the memory peak of each command of a rank |
| process | what a rank sets in its own process |
"""
