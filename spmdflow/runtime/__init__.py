"""What every rank runs, and how a run fails.

Carries numbered orders from one thread of the first rank to lanes on every rank, and replies back.
Knows process groups, sockets, rows by number and worker classes by name; no scripts, no models.

| file | what |
|---|---|
| launch, session, rendezvous, roll_call, outside, settings | how ranks meet and part |
| order, message, wire, importing | what is sent: orders, plain data, envelopes, names |
| io, ledger, link, waiter | the sending rank's side: who was told what, who answered |
| comm, executor, operation | a rank's side: threads, lanes, and what each command does |
| process, launcher, signals, peers | processes of the run and the torchrun that started them |
| failure, verdict, watch, script_line | what failed first, and how every process hears of it |
| inproc | the same in one process, without threads (`--inproc`) |
"""
