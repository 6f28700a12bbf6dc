"""The tests that a GPU will run first (tests/gpu), as they are, on simulated devices."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from tests.simcuda.conftest import Simulated

QUIET = ("-q", "-p", "no:cacheprovider", "-m", "gpu", "-rs")


ALONE = "hashes or (stale and builtin) or (zero2 and bfloat16)"
WITH_VLLM = "kv_cache and optimizer"
"""What no other test of this folder does with every push; all of them run under slow."""


def test_kernels_are_called_as_cuda_takes_them(simulated: Simulated) -> None:
    output = simulated(*("-m", "pytest", *QUIET, "tests/gpu/test_kernels.py"))

    assert "11 passed" in output and "skipped" not in output


@pytest.mark.parametrize(
    ("chosen", "number"),
    [
        pytest.param(ALONE, 3, id="torch alone", marks=pytest.mark.drill),
        pytest.param(WITH_VLLM, 1, id="vllm", marks=pytest.mark.drill),
    ],
)
def test_hybrid_engine_follows_the_trainer_on_simulated_devices(
    simulated: Simulated, chosen: str, number: int
) -> None:
    if chosen == WITH_VLLM and find_spec("vllm") is None:
        pytest.skip("vllm is not installed")
    output = simulated(*("-m", "pytest", *QUIET, "-k", chosen, "tests/gpu/test_hybrid_engine.py"))

    assert f"{number} passed" in output and "skipped" not in output


@pytest.mark.drill
def test_gradients_of_families_on_simulated_devices_are_those_of_transformers(
    simulated: Simulated,
) -> None:
    chosen = "gradients and float32"

    output = simulated(*("-m", "pytest", *QUIET, "-k", chosen, "tests/gpu/test_families.py"))

    assert "5 passed" in output and "skipped" not in output


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_all_that_a_gpu_will_run_first_runs_on_simulated_devices(simulated: Simulated) -> None:
    chosen = "not with_vllm_follows"  # kernels of vLLM's experts are not here

    output = simulated(*("-m", "pytest", *QUIET, "-k", chosen, "tests/gpu"), seconds=2900)

    assert "passed" in output and "skipped" not in output
