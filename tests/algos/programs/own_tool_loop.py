"""GRPO with a calculator: the policy asks, the tool's tokens are read and never learnt."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict

from spmdflow import (
    ActorWorker,
    Batch,
    Flow,
    GRPOConfig,
    PromptStream,
    RewardWorker,
    compute_advantages,
    concatenate,
    load_tokenizer,
    ragged_from_rows,
    row_maths,
    rows_of,
)

Config = GRPOConfig


@row_maths(reads=("prompts", "responses"), writes=("calls", "asked"))
def find_calls(batch: TensorDict, *, tool: list[int], reduce: Any, report: Any) -> TensorDict:
    """calls (B,): the response asks the tool (here: it begins with a small token).

    asked: prompt, response and the tool's answer, from where the policy goes on.
    """
    prompts, responses = rows_of(batch["prompts"]), rows_of(batch["responses"])
    calls = torch.tensor([bool(len(row)) and int(row[0]) % 2 == 0 for row in responses])
    rows = [torch.cat([p, r, torch.tensor(tool)]) for p, r in zip(prompts, responses, strict=True)]
    report({"tool/calls": float(calls.float().mean())})
    made = TensorDict({"calls": calls.view(len(batch))}, batch_size=batch.batch_size)
    made["asked"] = ragged_from_rows(rows, dtype=torch.int64)
    return made


@row_maths(
    reads=("responses", "response_mask", "more", "more_mask"),
    writes=("responses", "response_mask"),
)
def stitch(batch: TensorDict, *, tool: list[int], reduce: Any, report: Any) -> TensorDict:
    """Both turns as one response; the mask leaves out what the tool said."""
    said, unlearnt = torch.tensor(tool), torch.zeros(len(tool), dtype=torch.bool)
    parts = {
        "responses": (rows_of(batch["responses"]), said, rows_of(batch["more"])),
        "response_mask": (rows_of(batch["response_mask"]), unlearnt, rows_of(batch["more_mask"])),
    }
    made = TensorDict({}, batch_size=batch.batch_size)
    for name, (first, between, second) in parts.items():
        rows = [torch.cat([a, between, b]) for a, b in zip(first, second, strict=True)]
        made[name] = ragged_from_rows(rows, dtype=between.dtype)
    return made


def main(flow: Flow, cfg: GRPOConfig) -> None:
    """The algorithm; runs once, on the controller."""
    actor = flow.spawn(ActorWorker, cfg.actor)
    reward = flow.spawn(RewardWorker, cfg.reward)
    prompts = flow.keep(prompts=PromptStream(cfg.data))
    tool = load_tokenizer(cfg.data.tokenizer_path).encode("+0=", add_special_tokens=False)
    flow.assume(calls=[0, 1], asked="int64 like prompts")

    def converse(rows: Batch, greedy: bool = False) -> Batch:
        """One turn, and a second one for those that asked the tool."""
        batch = actor.generate_sequences(rows, greedy=greedy).drop("rollout_log_probs")
        found = batch.map(find_calls, tool=list(tool))
        calling = (batch | found).where("calls")
        again = actor.generate_sequences(calling.only("asked").rename(prompts="asked"))
        more = again.only("responses", "response_mask")
        both = calling | more.rename(more="responses", more_mask="response_mask")
        calling = calling.only(*rows.columns) | both.map(stitch, tool=list(tool))
        return concatenate([batch.without(calling), calling]).ordered_like(batch)

    flow.evaluate(generate=converse)
    for step in flow.steps(cfg.total_steps):
        batch = converse(next(prompts))
        batch |= actor.compute_log_prob(batch)
        batch |= reward.compute_reward(batch)
        batch |= batch.map(compute_advantages, estimator="grpo", cfg=cfg.advantage)
        step.log(actor.update_actor(batch))
        flow.evaluate(every=cfg.eval_every)
