"""What every rank runs (what failed, and how it is reported: spmdflow/failure).

Carries numbered calls from one thread of the first rank to lanes on every rank, and replies back.
Knows process groups, sockets, rows by number and worker classes by name; no scripts, no models.

| file | what |
|---|---|
| launch, session, rendezvous | how ranks form one session, and leave it |
| call | calls, their replies and records; calls run at once in one process (`--inproc`) |
| wire | what is sent: envelopes and sockets (plain data and names: message.py) |
| io, peers, verdict | the controller's side: who was told what, who answered, what failed first |
| limit, stall | the limit of a call; calls that are stuck |
| inflow | a message that never ends |
| comm, executor, operation, rank_files, early | a rank's threads, lanes and commands |
| process | what a rank sets in its own process |
"""
