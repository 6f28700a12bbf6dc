"""How failures of a run are found, named and reported.

The controller watches calls, processes and signals, collects failures, and determines which rank
failed first. What a failure ends is decided elsewhere (runtime/teardown.py). This package knows
processes, threads, durations and calls by number. It knows no sockets, no commands and no models.

| file | what |
|---|---|
| cause | a failure, the cause among several, and the reports to the user and in failure.json |
| collector | the failures of a session, in order of arrival |
| session_watch, peers | deaths, silence and signals; the processes of other ranks |
| stall, limit, duration | calls that take too long; their limits; how long calls usually take |
| open_call | what is read about calls |
| lane_state, stacks, user_code | what a rank is doing; its stacks; the user's own lines |
| process, launcher, signals | processes, torchrun above them, signals that stop a run |
| start_watch | a rank that dies before the session exists |
| status_file | RUN_DIR/status.json, for `spmdflow status` |
| settings | time limits of a session, and what a failure of it ends |
"""
