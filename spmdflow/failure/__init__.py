"""How failures of a run are found, named and reported.

The session (spmdflow/runtime) decides what a failure ends. This package tells it what failed, on
which rank first, and where that rank's code was. It knows processes, threads and durations; no
sockets, no commands, no models.

| file | what |
|---|---|
| cause | one failure, the cause among several, and the report to the user and to failure.json |
| user_code | the user's own lines in a stack or a traceback |
| process, launcher, signals | processes of the run, torchrun above them, signals that stop a run |
| lane_state, stacks | where the code of a rank is; its stacks in RUN_DIR |
| duration | how long calls usually take, and which rank is slow |
| start_watch | a rank that dies before the session exists |
| status_file | RUN_DIR/status.json, for `spmdflow status` |
"""
