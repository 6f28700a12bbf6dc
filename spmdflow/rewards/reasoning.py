"""Answers to problems of reasoning-gym (pip install 'reasoning-gym>=0.1.25'), by its own scores.

A row has "task" and "seed", which select the problem, and may have "settings" of the task, as JSON.
scripts/make_problems.py writes such rows. spmdflow.envs.reasoning poses the same problems to an
agent.
"""

from __future__ import annotations

import json
from functools import lru_cache
from importlib import import_module
from typing import Any

from spmdflow.rewards.format import answer_part, grade


def score(prompt: str, response: str, row: dict[str, Any]) -> dict[str, Any]:
    """Return reasoning-gym's score of the answer, in [0, 1]; accuracy = 1 if the score is 1.

    The answer is the content of the last <answer>...</answer>, otherwise what follows the last
    </think>, otherwise the whole response. answered = 0 for an empty one.
    """
    tasks, problem = find_problem(
        str(row["task"]), int(row["seed"]), settings=str(row.get("settings") or "{}")
    )
    answer = answer_part(response).strip()
    earned = float(tasks.score_answer(answer, problem)) if answer else 0.0
    return grade(answer or None, earned >= 1, score=earned)


@lru_cache(maxsize=8192)
def find_problem(task: str, seed: int, *, settings: str = "{}") -> tuple[Any, dict[str, Any]]:
    """Return reasoning-gym's data set of one problem, which can score answers, and the problem.

    settings: of the task, as JSON.
    """
    package = import_module("reasoning_gym")
    tasks = package.create_dataset(task, size=1, seed=seed, **json.loads(settings))
    return tasks, tasks[0]
