"""Parts of scripts/real_matrix.py: every algorithm, engine and generator with one real model.

| file | holds |
|---|---|
| case | `Case`: what one row of the table says |
| table | all cases |
| rank | the program of one rank of a case |
| start | starts a case, and returns what it measured, next to what the plan says |
| page | the tables of docs/lab/REAL_MODEL.md |
"""
