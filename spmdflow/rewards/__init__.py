"""Rewards from a user's function, run in worker processes of its own.

A reward function is `fn(prompt: str, response: str, row: dict) -> float | dict`. `row` holds the
other fields of the data row. A dict has "score" (finite, any range) and may have more finite
numbers, which become metrics; what is no number in it is left out. It is named
"path/file.py:name" or "module:name" and found by that name in each worker process.

| file | does |
|---|---|
| load | name -> function, or a refusal |
| answer | what a function returned -> {"score": ...}, or what is wrong with it |
| pool | `RewardPool`: samples in, scores out, in order; errors raised or scored 0 |
| work | which samples wait, are done or failed in one `score` call; plain integers |
| process | the pool's end of one worker process: start, feed, read, kill |
| child | the worker process's own end; imports no torch |
| overlong | a penalty for responses near the limit, added to scores of any source |
| arithmetic, sentiment | the bundled task's reward and control; a lexicon score of a text |

A worker process lives until its pool kills it or the pool's process is gone, whichever is first.
Knows no batches, no tokens and no ranks (`overlong` alone sees rows of a batch).
"""
