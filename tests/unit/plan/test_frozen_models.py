"""The weights of models that episodes call are part of a rank's memory in the plan."""

from __future__ import annotations

import pytest

from spmdflow.mapping.hardware import load_hardware
from spmdflow.plan.prediction import predict
from spmdflow.weights.architecture import Architecture
from tests.unit.planned import ALGORITHMS, traced

MODEL = ALGORITHMS / "guess" / "model"


def memory_of(models: str) -> dict[str, dict[str, float]]:
    """Parts of each phase, of a dry step of two ranks."""
    settings = (f"actor.rollout.episode.models={models}", "actor.rollout.dtype=bfloat16")
    found = traced("grpo_agent", 2, *settings, "eval_every=0")
    predicted = predict(found, found.in_step(), load_hardware("h100"))
    return {phase.phase: dict(phase.parts) for phase in predicted.memory}


def test_frozen_models_count_in_every_phase_of_the_ranks_that_generate() -> None:
    without = memory_of("{}")
    phases = memory_of("{reference: {}, policy@step: {loaded: 2}, judge: {url: 'http://j/v1'}}")

    assert phases.keys() == without.keys() and "actor.run_episodes" in phases
    size = 3 * Architecture.sizes_from_folder(MODEL).num_parameters * 2  # bfloat16
    for name, parts in phases.items():
        if name != "actor.build":
            assert parts.pop("frozen_models") == pytest.approx(size), name
    assert all("frozen_models" not in parts for parts in without.values())
