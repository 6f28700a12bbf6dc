"""All cases of scripts/family_table.py, and the file with what is done."""

from __future__ import annotations

from scripts.families.run import ROOT, Case
from scripts.families.tiny import FAMILIES

STATE = ROOT / "docs" / "lab" / "families.json"
WAYS = (
    ("fsdp", "builtin"),
    ("fsdp", "vllm"),
    ("zero1", "builtin"),
    ("zero2", "builtin"),
    ("zero3", "builtin"),
)
"""Engine and generator."""
CASES = tuple(Case(family, *way) for family in FAMILIES for way in WAYS)
