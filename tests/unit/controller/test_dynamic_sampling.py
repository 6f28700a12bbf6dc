"""Dynamic sampling: which prompts of a draw are kept, also where some of their samples failed."""

from __future__ import annotations

from math import nan
from typing import Any

import torch
from tensordict import TensorDict

from spmdflow.config.algorithm import DynamicSamplingConfig
from spmdflow.controller.batch import Batch
from spmdflow.controller.prompts import DynamicSampling
from spmdflow.worker_api.metric import Mean
from spmdflow.worker_api.register import map_function

SCORES = [
    ([nan, 0.0, 1.0], True),
    ([0.0, nan, 1.0], True),
    ([1.0, 0.0, nan], True),
    ([nan, 1.0, 1.0], False),
    ([nan, nan, 1.0], False),
    ([nan, nan, nan], False),
]
"""The scores of a prompt's samples, nan where one failed, and whether the prompt is kept."""


@map_function(reads=("number",), writes=("scores",))
def give_scores(batch: TensorDict, *, scores: list[float], reduce: Any, report: Any) -> TensorDict:
    """These scores, in the order of the rows, which one rank holds."""
    return TensorDict({"scores": torch.tensor(scores)}, batch_size=batch.batch_size)


def test_prompts_are_kept_where_the_samples_that_did_not_fail_differ(batch: Batch) -> None:
    samples = batch.repeat(3)
    scores = [score for of_prompt, _ in SCORES for score in of_prompt]
    samples |= samples.map(give_scores, scores=scores)
    kept = [prompt for prompt, (_, is_kept) in zip(batch.ids, SCORES, strict=True) if is_kept]
    sampling = DynamicSampling(9, DynamicSamplingConfig(max_rounds=1))

    sampling.add(samples)

    assert sampling.batch().parents.tolist() == [prompt for prompt in kept for _ in range(3)]
    assert sampling.metrics()["sampling/kept"] == Mean(9.0, 18.0)
