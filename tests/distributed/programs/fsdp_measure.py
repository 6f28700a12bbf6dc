"""Distances between what an FSDP engine gave and what the plain reference gives."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from fsdp_reference import TEMPERATURE, Reference, load, row_log_probs, row_values
from tensordict import TensorDict
from torch import Tensor

from spmdflow.data.ragged import ragged_from_rows, rows_of
from spmdflow.objectives.log_prob import CausalOutput, ScalarOutput
from spmdflow.workers.micro_batch import MicroBatch


def log_prob_columns(output: CausalOutput, micro: MicroBatch) -> dict[str, Tensor]:
    return {"log_probs": micro.spread(output.log_probs(TEMPERATURE))}


def score_columns(output: ScalarOutput, micro: MicroBatch) -> dict[str, Tensor]:
    return {"scores": output.at(micro.ends)}


def errors(
    metrics: Mapping[str, Any], state: Mapping[str, Tensor], expected: Reference
) -> dict[str, float]:
    """Largest absolute differences from the reference."""
    norm = torch.stack([g.double().norm() for g in expected.gradients.values()]).norm()
    gradients = {name: state[f"{name}.exp_avg"] for name in expected.gradients}
    return {
        "loss": abs(metrics["loss"] - expected.loss),
        "norm": abs(metrics["grad_norm"] / float(norm) - 1),
        "gradient": largest(gradients, expected.gradients),
        "largest_gradient": max(float(g.abs().max()) for g in expected.gradients.values()),
        "compared": clear_share(expected),
        "weight": max(
            weight_error(state[n], w, expected.gradients[n]) for n, w in expected.weights.items()
        ),
    }


def clear_share(expected: Reference) -> float:
    """Share of weights that weight_error looks at."""
    clear = [((g.abs() > 1e-5) | (g == 0)).flatten() for g in expected.gradients.values()]
    return float(torch.cat(clear).float().mean())


def weight_error(ours: Tensor, theirs: Tensor, gradient: Tensor) -> float:
    """Largest difference where the gradient is no mere rounding error.

    Adam's first step is lr * sign(gradient): where the true gradient is 0 (the rotary pairs of a
    first token, say), the sign of a 1e-9 decides and no two programs agree.
    """
    clear = (gradient.abs() > 1e-5) | (gradient == 0)
    return float(((ours - theirs).abs() * clear).max())


def largest(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """Largest absolute difference over the tensors that b names."""
    return max(float((a[name] - b[name]).detach().abs().max()) for name in b)


def forward_error(folder: Path, batch: TensorDict, joined: list[Any]) -> float:
    log_probs = [row for rows, _, _ in joined for row in rows]
    scores = torch.cat([scores for _, scores, _ in joined])
    assert sum(count for _, _, count in joined) == batch.batch_size[0] == len(log_probs)
    policy = load(folder, "tied")
    reward = load(folder, "reward")
    answer = {"log_probs": ragged_from_rows(log_probs), "scores": scores}
    return max(
        output_gap(policy, "tied", batch, answer), output_gap(reward, "reward", batch, answer)
    )


def output_gap(model: Any, kind: str, batch: TensorDict, answer: Mapping[str, Tensor]) -> float:
    """Largest difference between an engine's columns and a plain model, row by row."""
    columns = {str(name): rows_of(batch[name]) for name in batch.keys()}
    worst = 0.0
    with torch.no_grad():
        for i in range(batch.batch_size[0]):
            row = {name: rows[i] for name, rows in columns.items()}
            if kind == "reward":
                gap = row_values(model, row)[-1] - answer["scores"][i]
            else:
                gap = row_log_probs(model, row) - rows_of(answer["log_probs"])[i]
            worst = max(worst, float(gap.abs().max()))
    return worst
