"""Tasks of reasoning-gym (pip install reasoning-gym): an endless source of rows and their reward.

    environment: spmdflow.envs.reasoning:episode(task='chain_sum')

A row's "seed" selects its problem, and a row may set its own "task". The data file needs nothing
else but a prompt, which is not shown. An episode has one turn. The answer is the text after the
last "<answer>" of the reply.
"""

from __future__ import annotations

from typing import Any

from spmdflow.envs.client import ChatClient
from spmdflow.rewards.reasoning import find_problem

_FORM = "\nGive your final answer as <answer>answer</answer>."


async def episode(
    row: dict[str, Any],
    *,
    base_url: str,
    model: str,
    api_key: str,
    task: str = "chain_sum",
    max_tokens: int | None = None,
) -> dict[str, Any]:
    """Pose one problem and return reasoning-gym's score of the reply, in [0, 1].

    row: "seed" selects the problem; "task" overrides `task`. The answer is the text after the last
    "<answer>" of the reply, "" without one. Returns score, accuracy (1.0 if the score is 1) and the
    answer.
    """
    data, entry = find_problem(str(row.get("task", task)), int(row["seed"]))
    limit = {} if max_tokens is None else {"max_tokens": max_tokens}
    ask = [{"role": "user", "content": entry["question"] + _FORM}]
    async with ChatClient(base_url, model=model, api_key=api_key) as client:
        reply = await client.chat(ask, **limit)
    answer = str(reply["content"]).rpartition("<answer>")[2].partition("</answer>")[0].strip()
    score = float(data.score_answer(answer, entry))
    return {"score": score, "accuracy": float(score >= 1), "answer": answer}
