"""Rewards from functions, run in worker processes of their own.

A reward function is `fn(prompt: str, response: str, row: dict) -> float | dict`. `row` holds the
other fields of the data row and `response_tokens`. A dict has "score" (finite, any range) and may
have more finite numbers, which become metrics; what is no number in it is left out. It is named
"path/file.py:name" or "module:name" and found by that name in each worker process; further
keyword arguments come from the setting. docs/REWARDS.md shows all of it in use.

| file | does |
|---|---|
| pool | `RewardPool`: samples in, scores out, in order; the weighted sum of several functions |
| process | the pool's end of one worker process: start, feed, read, kill |
| child | the worker process's own end: finds functions, reads their results; imports no torch |
| gsm8k, math, countdown | right answers: a number, LaTeX by its meaning, an expression |
| format, length | the form asked for, and where the answer stands; penalties for long responses |
| arithmetic, sentiment | the bundled task's reward and control; a lexicon score of a text |

A worker process lives until its pool kills it or the pool's process is gone, whichever is first.

Processes are managed by hand and not by pebble.ProcessPool, which has timeouts and restarts but
kills a worker process alone: children of a hung function live on, a worker whose rank was killed
runs until its function returns, SIGTERM to the whole job ends workers before the ranks have saved,
and nothing asks a hung function for its stack before it is killed. All of this would have to be
added by hand again. The sentiment score is not vaderSentiment's, as the lexicon
is the user's file and scores of earlier runs stay comparable.

Knows no batches, no tokens and no ranks.
"""
