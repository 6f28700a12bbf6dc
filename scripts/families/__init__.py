"""Tiny models of many families of transformers, and the runs of `scripts/family_table.py`."""
