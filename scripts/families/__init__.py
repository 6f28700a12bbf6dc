"""Tiny models of many families, the runs of `scripts/family_table.py`, and vLLM's recorded rows."""
