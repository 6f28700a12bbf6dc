"""What rows of a queue must be, computed again without spmdflow: transformers and plain torch.

Reads what programs/queue_rows.py has written. Version v of the weights is that of the checkpoint of
step v, as each step updates and syncs once; version 0 is the model that the run began with.
Everything is computed in float64 from the weights that were saved.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

Found = dict[str, Any]
"""A batch, as programs/queue_rows.py writes it."""
LARGEST_RATIO = 2.0
"""Cap of the ratio where old_log_probs=rollout."""


def steps_of_rows(run_dir: Path) -> dict[int, list[Found]]:
    """Step -> its batches, in the order of their calls."""
    found = {}
    for path in (run_dir / "rows").glob("step-*.pt"):
        found[int(path.stem.removeprefix("step-"))] = torch.load(path, weights_only=True)
    return dict(sorted(found.items()))


class Versions:
    """The policy at each version of its weights, in float64."""

    def __init__(self, run_dir: Path, base: Path) -> None:
        """base: the model that the run began with."""
        self._run_dir = run_dir
        self._base = base
        self._models: dict[int, PreTrainedModel] = {}

    def model(self, version: int) -> PreTrainedModel:
        """The policy of a version; an adapter is merged by peft."""
        if version not in self._models:
            folder = self._run_dir / "checkpoints" / f"step-{version}" / "actor" / "hugging_face"
            has_adapter = (folder / "adapter_config.json").exists()
            start = folder if version and not has_adapter else self._base
            model = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float64)
            if version and has_adapter:
                model = peft.PeftModel.from_pretrained(model, folder).merge_and_unload().double()
            self._models[version] = model.eval()
        return self._models[version]

    def log_probs(self, version: int, prompt: Tensor, tokens: Tensor, temperature: float) -> Tensor:
        """(n,) float64: log-probability of each of the n tokens behind the prompt."""
        logits = self.model(version)(torch.cat([prompt, tokens])[None]).logits[0]
        logits = logits[len(prompt) - 1 : -1] / temperature
        return logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]


@dataclass
class Gaps:
    """Largest differences between a run and the reference, and what was compared."""

    rollout: float = 0.0
    """Of the log-probability of a token under the weights that sampled it."""
    old: float = 0.0
    """The same under the weights that trained on it."""
    weight: float = 0.0
    """Of truncated importance weights, relative."""
    num_tokens: int = 0
    num_mixed: int = 0
    """Rows whose tokens several versions have sampled."""
    num_old: int = 0
    """Tokens that an older version has sampled than the one that trained on them."""
    num_capped: int = 0
    oldest: int = 0
    """Largest age of a token."""


@torch.no_grad()
def compare_rows(
    steps: Mapping[int, Sequence[Found]],
    versions: Versions,
    temperature: float,
    *,
    cap: float = LARGEST_RATIO,
) -> Gaps:
    """Compute every sampled token's log-probabilities and weight again. cap: of the weights."""
    gaps = Gaps()
    for step, batches in steps.items():
        for found in batches:
            for row in range(len(found["ids"])):
                _compare_row(gaps, found, row, step - 1, versions, temperature, cap)
    return gaps


def _compare_row(
    gaps: Gaps, found: Found, row: int, now: int, versions: Versions, temperature: float, cap: float
) -> None:
    """Compare one row. now: the version that trains on it."""
    prompt = found["prompts"][row]
    tokens = found["responses"][row]
    mask = found["response_mask"][row]
    drawn_by = found["token_versions"][row]
    new = versions.log_probs(now, prompt, tokens, temperature)
    sampled = torch.zeros_like(new)
    for version in set(drawn_by[mask].tolist()):
        of_version = versions.log_probs(version, prompt, tokens, temperature)
        sampled = torch.where(drawn_by == version, of_version, sampled)
        gaps.oldest = max(gaps.oldest, now - version)
    gaps.num_mixed += len(set(drawn_by[mask].tolist())) > 1
    gaps.num_old += int((drawn_by[mask] < now).sum())
    gaps.num_tokens += int(mask.sum())
    gaps.rollout = max(gaps.rollout, _gap(found["rollout_log_probs"][row], sampled, mask))
    if "old_log_probs" in found:
        gaps.old = max(gaps.old, _gap(found["old_log_probs"][row], new, mask))
    if "rollout_weights" in found:
        weights = (new - sampled).exp().clamp(max=cap)
        gaps.num_capped += int((weights[mask] == cap).sum())
        difference = (found["rollout_weights"][row].double() / weights - 1)[mask]
        gaps.weight = max(gaps.weight, float(difference.abs().max()) if len(difference) else 0.0)


def _gap(ours: Tensor, theirs: Tensor, mask: Tensor) -> float:
    """Largest difference where the mask is True."""
    difference = (ours.double() - theirs)[mask].abs()
    return float(difference.max()) if len(difference) else 0.0


@dataclass
class LossTerms:
    """The loss of an update."""

    loss: Tensor
    size: float
    """The same sum of absolute values: differences are relative to it, as the terms cancel."""


def loss_of(
    found: Found, version: int, versions: Versions, temperature: float, *, clip: float
) -> LossTerms:
    """The policy's loss of a batch in one optimizer step, that can be differentiated.

    l_t = -w_t min(r_t A_t, clip(r_t, 1 - clip, 1 + clip) A_t), means over a row's tokens, then
    over rows with their weights. With weights, r_t = pi / pi_old = 1 in value. Without weights,
    r_t = min(pi / mu, LARGEST_RATIO): mu is the generator's policy.
    """
    total = torch.zeros((), dtype=torch.float64)
    size = 0.0
    count = 0.0
    for row in range(len(found["ids"])):
        mask = found["response_mask"][row]
        row_weight = float(found["row_weights"][row]) if "row_weights" in found else 1.0
        if not mask.any():
            continue
        new = versions.log_probs(
            version, found["prompts"][row], found["responses"][row], temperature
        )[mask]
        advantages = found["advantages"][row][mask].double()
        if "rollout_weights" in found:
            old = new.detach()
            weights = found["rollout_weights"][row][mask].double()
        else:
            mu = found["rollout_log_probs"][row][mask].double()
            old = torch.maximum(mu, new.detach() - math.log(LARGEST_RATIO))
            weights = torch.ones_like(mu)
        ratio = (new - old).exp()
        clipped = ratio.clamp(1 - clip, 1 + clip)
        losses = -torch.minimum(ratio * advantages, clipped * advantages) * weights
        total = total + row_weight * losses.mean()
        size += row_weight * float(losses.detach().abs().mean())
        count += row_weight
    return LossTerms(total / count, size / count)


def grad_norm_of(terms: LossTerms, model: PreTrainedModel) -> float:
    """Norm of the gradient of a loss over all weights, as of one optimizer step."""
    model.zero_grad()
    terms.loss.backward()
    squares = [float(x.grad.square().sum()) for x in model.parameters() if x.grad is not None]
    model.zero_grad()
    return math.sqrt(sum(squares))
