"""Rewards from functions, run in worker processes of their own.

A reward function is `fn(prompt: str, response: str, row: dict) -> float | dict`. `row` holds the
other fields of the data row and `response_tokens`. A dict has "score" (finite, any range) and may
have more finite numbers, which become metrics; what is no number in it is left out. It is named
"path/file.py:name" or "module:name" and found by that name in each worker process; further
keyword arguments come from the setting. docs/REWARDS.md shows all of it in use.

| file | does |
|---|---|
| load | name -> function, or a refusal |
| answer | what a function returned -> {"score": ...}, or what is wrong with it |
| weighted | the results of several functions -> one score |
| pool | `RewardPool`: samples in, scores out, in order; errors raised or scored 0 |
| work | which calls wait, are done or failed in one `score` call; plain integers |
| process | the pool's end of one worker process: start, feed, read, kill |
| child | the worker process's own end; imports no torch |
| gsm8k, math, countdown | right answers: a number, LaTeX by its meaning, an expression |
| format, length | the form asked for; penalties for long responses |
| arithmetic, sentiment | the bundled task's reward and control; a lexicon score of a text |
| final | where a response says its answer |
| overlong | a penalty for responses near the limit, added to scores of any source |

A worker process lives until its pool kills it or the pool's process is gone, whichever is first.
Knows no batches, no tokens and no ranks (`overlong` alone sees rows of a batch).
"""
