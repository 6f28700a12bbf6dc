"""The parts of `scripts/learn.py`: its table, its runs, what it writes."""
