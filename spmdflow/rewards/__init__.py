"""Rewards from functions, which run in separate worker processes.

A reward function is `fn(prompt: str, response: str, row: dict) -> float | dict`. `row` holds the
other fields of the data row and `response_tokens`. A dict has "score" (finite, any range) and may
have more finite numbers, which become metrics, and "answer" as text; other entries are ignored. A
function is named "path/file.py:name" or "module:name", and each worker process looks it up. Further
keyword arguments come from the setting. docs/REWARDS.md has examples.

| file | does |
|---|---|
| pool | `RewardPool`: samples in, scores out, in order; the weighted sum of several functions |
| process | the pool's side of one worker process: start, send, read, kill |
| keeper | the parent of a worker process: kills everything that the worker started |
| calling | how a worker process calls functions: one sample or many, plain or async, again |
| child | the code of a worker process: finds functions, reads their results; imports no torch |
| distinct | how varied responses are: distinct-n |
| gsm8k, math, countdown | right answers: a number, LaTeX by its meaning, an expression |
| dapo | DAPO's scorer of mathematical answers |
| format, length | the required format, and where the answer is; penalties for long responses |
| arithmetic, sentiment | the bundled task's reward and control; a lexicon score of a text |
| instructions, reasoning | conditions of a prompt; answers to problems of reasoning-gym |
| control | a random score with the true accuracy of any of these, for a control run |

A worker process lives until its pool kills it or the pool's process ends. All processes that it
started end with it, including those in another session.

Why not pebble.ProcessPool: it has timeouts and restarts, but kills only the worker process.
Children of a hung function would live on, a worker whose rank was killed would run until its
function returns, SIGTERM to the whole job would end workers before the ranks have saved, and
nothing would show the stack of a hung function. Why not vaderSentiment: the lexicon is the user's
file, and scores stay comparable with those of earlier runs.

This package does not know batches, tokens or ranks.
"""
