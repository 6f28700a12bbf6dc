"""The tests that a GPU will run first (tests/gpu), as they are, on simulated devices."""

from __future__ import annotations

import pytest

from tests.simcuda.conftest import Simulated

TORCH_ONLY = "not vllm and not megatron and not kv_cache"


def test_hybrid_engine_follows_the_trainer_on_simulated_devices(simulated: Simulated) -> None:
    output = simulated(
        *("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", "-k", TORCH_ONLY),
        "tests/gpu/test_hybrid_engine.py",
        seconds=280,
    )

    assert "8 passed" in output and "skipped" not in output


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_whole_algorithms_run_on_simulated_devices(simulated: Simulated) -> None:
    chosen = f"{TORCH_ONLY} and not one_step_apart and not learned"
    output = simulated(
        *("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", "-k", chosen),
        "tests/gpu/test_algorithms.py",
        seconds=880,
    )

    assert "3 passed" in output
