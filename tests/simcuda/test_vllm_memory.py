"""What a plan says of vLLM's memory against vLLM's own code (programs/vllm_memory.py).

The cache is exact, and weights too but for the padding of the vocabulary. Not compared: CUDA
graphs, which vLLM measures on a device.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from spmdflow.mapping.dataflow import Engine, Model, Rollout, Strategy, Workload
from spmdflow.mapping.memory import call_bytes
from spmdflow.mapping.seconds import sequence_bytes
from tests.simcuda.conftest import Simulated
from tests.simcuda.memory_cases import LENGTH, ROWS, SHAPES

PROGRAM = Path(__file__).parent / "programs" / "vllm_memory.py"
SIZES = {"7B": (1, 2, 4, 8), "13B": (1, 2, 4, 8), "70B": (1, 2, 4, 8), "0.5B": (1, 2)}
TOLERANCE = {"weights": 0.01, "token": 0.0, "sequence": 0.0, "pass": 0.05, "draw": 0.05}


def planned(name: str, size: int) -> dict[str, float]:
    """The same figures by the plan."""
    model = Model(
        "actor",
        SHAPES[name],
        trained=True,
        engine=Engine(layout=(size, 1)),
        rollout=Rollout(kind="vllm", weights="copy"),
    )
    cut = Strategy(tp=size, pp=1, dp=1, gen_tp=size, gen_pp=1)
    work = Workload(ROWS, LENGTH // 2, LENGTH // 2)
    parts = call_bytes(model, "generate", work, cut)
    cache = sequence_bytes(model, work, cut)
    found = {
        "weights": parts["generation_weights"],
        "token": cache / LENGTH,
        "sequence": cache,
        "pass": parts["activations"],
        "draw": parts["logits"],
    }
    return {key: float(np.ravel(value)[0]) for key, value in found.items()}


@pytest.mark.slow
@pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed")
def test_plan_counts_the_bytes_that_vllm_does(simulated: Simulated) -> None:
    words = [f"{name}:{size}" for name, sizes in SIZES.items() for size in sizes]
    lines = simulated(PROGRAM, *words, seconds=880).splitlines()
    traced = [json.loads(line) for line in lines if line.startswith('{"case"')]
    assert [found["case"] for found in traced] == words

    for found in traced:
        case = found.pop("case")
        name, _, size = case.partition(":")
        expected = planned(name, int(size))
        for key, number in found.items():
            print(f"{case} {key}: {number / 2**20:,.3f} MiB, {expected[key] / number - 1:+.1%}")
        for key, number in found.items():
            assert expected[key] == pytest.approx(number, rel=TOLERANCE[key]), (case, key, found)
