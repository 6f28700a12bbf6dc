"""Online DPO: two samples of each prompt, judged, are a pair that the same policy learns from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict

from spmdflow import (
    ActorWorker,
    AnswerReferenceWorker,
    Flow,
    GRPOConfig,
    PreferenceLossConfig,
    PreferenceWorker,
    PromptStream,
    RewardWorker,
    SurrogateActorConfig,
    part,
    ragged_from_rows,
    row_maths,
    rows_of,
)


@dataclass
class ActorConfig(SurrogateActorConfig):
    """An actor that learns from preferences too."""

    preference: PreferenceLossConfig = part(PreferenceLossConfig)


@dataclass
class Config(GRPOConfig):
    """GRPO's settings with that actor."""

    actor: ActorConfig = part(ActorConfig)


class Policy(ActorWorker, PreferenceWorker):
    """Generates, and learns from pairs."""


@row_maths(
    reads=("prompts", "responses", "scores", "other_responses", "other_scores"),
    writes=("prompts", "loss_mask", "chosen_tokens"),
)
def make_pairs(batch: TensorDict, *, reduce: Any, report: Any) -> TensorDict:
    """The better response after its prompt, then the worse one after the same prompt.

    Of two with one score the first is both: such a pair has no gradient.
    """
    prompts, masks, cuts = [], [], []
    scores = zip(batch["scores"].tolist(), batch["other_scores"].tolist())
    texts = (rows_of(batch[name]) for name in ("prompts", "responses", "other_responses"))
    for prompt, first, second, (one, other) in zip(*texts, scores, strict=True):
        better, worse = (first, second) if one > other else (second, first)
        worse = better if one == other else worse
        rows = [torch.cat([prompt, answer]) for answer in (better, worse)]
        prompts.append(torch.cat(rows))
        masks.append(torch.cat([torch.arange(len(row)) >= len(prompt) for row in rows]))
        cuts.append(len(rows[0]))
    report({"pairs/differ": float((batch["scores"] != batch["other_scores"]).float().mean())})
    made = TensorDict({"chosen_tokens": torch.tensor(cuts)}, batch_size=batch.batch_size)
    made["prompts"], made["loss_mask"] = ragged_from_rows(prompts), ragged_from_rows(masks)
    return made


def main(flow: Flow, cfg: Config) -> None:
    """The algorithm; runs once, on the controller."""
    actor = flow.spawn(Policy, cfg.actor)
    reference = flow.spawn(AnswerReferenceWorker, cfg.reference)
    reward = flow.spawn(RewardWorker, cfg.reward)
    prompts = flow.keep(prompts=PromptStream(cfg.data))

    for step in flow.steps(cfg.total_steps):
        drawn = next(prompts)
        one, other = actor.generate_sequences(drawn), actor.generate_sequences(drawn)
        one |= reward.compute_reward(one).only("scores")
        other |= reward.compute_reward(other).only("scores")
        other = other.only("responses", "scores")
        both = one | other.rename(other_responses="responses", other_scores="scores")
        pairs = both.map(make_pairs)
        pairs |= reference.compute_ref_log_prob(pairs)
        step.log(actor.update_preference(pairs))
        flow.evaluate(every=cfg.eval_every)
        flow.save(every=cfg.save_every)
