"""The weighted sum of several functions' results. Plain floats, summed in the order of the terms,
so that a sample's score has the same bits wherever it is computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spmdflow.config.reward_terms import RewardTerm

Result = dict[str, Any]
"""What is known of a sample by name: floats, and "answer" as text or None."""


def weighted(terms: Sequence[RewardTerm], results: Sequence[Result]) -> Result:
    """One sample's {"score": sum of weight * score, name: score of each named term, ...}.

    Further numbers of the first term keep their names unless a term has that name; those of
    the others get their term's name in front (format_length). "errors" add up, and the first
    "answer" counts.
    """
    assert len(terms) == len(results), (len(terms), len(results))
    names = {term.name for term in terms}
    total: Result = {"score": 0.0}
    for number, (term, result) in enumerate(zip(terms, results, strict=True)):
        total["score"] += term.weight * result["score"]
        for key, value in result.items():
            if key == "errors":
                total[key] = total.get(key, 0.0) + value
            elif key == "answer":
                total.setdefault(key, value)
            elif key != "score":
                total[f"{term.name}_{key}" if number or key in names else key] = value
        if term.name:
            total[term.name] = result["score"]
    return total
