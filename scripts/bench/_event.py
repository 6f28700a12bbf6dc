"""The paper's placements under the event simulator: generation overlaps scoring on other pools.

A result of its own, beside d_cost: the ten best placements and the paper's are ranked by the time
of their events, with the rows of generation handed over in 1, 2, 4 or 8 parts.
"""

from __future__ import annotations

from bench._cells import CELLS, score_cell
from spmdflow.mapping.event import simulate_events, step_seconds
from spmdflow.mapping.machine import Hardware

CHUNKS = (1, 2, 4, 8)


def event_scores(hardware: Hardware, *, log_prob: bool = True) -> dict[int, tuple[int, int, str]]:
    """Parts -> (cells within 1 %, within 5 %, ratios of the others)."""
    scores = [score_cell(cell, hardware, log_prob=log_prob, keep=15) for cell in CELLS]
    found = {}
    for chunks in CHUNKS:
        ratios = []
        for score in scores:
            flow = score.cell.dataflow(log_prob=log_prob)
            seconds = [
                step_seconds(simulate_events(flow, placed, chunks=chunks))
                for placed in (score.paper, *score.mapping.best)
            ]
            ratios.append(seconds[0] / min(seconds))
        rest = ", ".join(
            f"{score.cell.models}@{score.cell.num_gpus} {ratio:.2f}"
            for score, ratio in zip(scores, ratios)
            if ratio > 1.01
        )
        found[chunks] = sum(r <= 1.01 for r in ratios), sum(r <= 1.05 for r in ratios), rest
    return found
