"""Where the host waits for its device in a step of PPO or GRPO: each place is listed with its
reason; and how much a step copies.

Counted as what a run of three steps does more than one of two, on rank 0 of two. A place that is
not listed, or waits more often, fails; so does an entry that no run needs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.simcuda.conftest import Simulated
from tests.simcuda.orders import costs, is_wait, read_memory, read_waits
from tests.simcuda.programs.runs import RUNS, STEPS

pytestmark = pytest.mark.drill

PROGRAM = Path(__file__).parent / "programs" / "runs.py"
ONE_STEP = sorted({name.rsplit(", ", 1)[0] for name in RUNS if name.endswith("steps")})
READ = "aten::_local_scalar_dense"
UP = "copy to the device (pageable) and wait"
DOWN = "copy to the host (pageable) and wait"
WAITS = {
    (UP, "rollout/live_rows.py:begin"): (1, "prompt lengths, seeds and limits of new rows"),
    (UP, "rollout/builtin.py:_compact"): (1, "which rows stay"),
    (UP, "rollout/generator.py:generate"): (1, "the order of the rows"),
    (READ, "rollout/generator.py:response_columns"): (1, "whether a log-probability is nan"),
    (READ, "rollout/builtin.py:_counts_of_ended"): (1, "whether all rows go on, every 8 tokens"),
    (DOWN, "rollout/builtin.py:_counts_of_ended"): (2, "if not, which, and their lengths"),
    (READ, "models/generator.py:_report_truncated"): (
        1,
        "how many responses were cut off, after the last token",
    ),
    (DOWN, "data/column.py:_copy_to_host"): (3, "what a method returns lies in host memory"),
    (DOWN, "data/column.py:column_of"): (3, "the lengths of its rows"),
    ("synchronize", "workers/engine.py:forward"): (3, "its answers have arrived"),
    (DOWN, "workers/engine.py:dp_sums"): (8, "sums over ranks by NCCL: loss scales and metrics"),
    (READ, "workers/fsdp.py:gradient_norm"): (4, "the norm decides about clipping"),
    (READ, "workers/megatron_optimizer.py:gradient_norm"): (4, "the norm decides about clipping"),
    (DOWN, "workers/engine.py:shard_hashes"): (1, "checksums of all weights of the trainer"),
    (DOWN, "blocks/hash.py:read_sums"): (1, "and of the generator"),
}
"""(what, function of spmdflow) -> most in a step, and why it is needed."""
COPIES = {
    "ppo, fsdp": (45, 19_000),
    "ppo, fsdp, offload": (360, 10_000_000),
    "ppo, megatron p2": (34, 29_000),
    "grpo, fsdp": (33, 82_000),
}
"""Kind of run -> most copies of a step between host and device, and their bytes."""


@pytest.fixture(scope="module")
def log(simulated: Simulated, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The record of all runs."""
    folder = tmp_path_factory.mktemp("waits")
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    names = [f"{name}, {steps} steps" for name in ONE_STEP for steps in STEPS]
    simulated(*torchrun, PROGRAM, folder, *names, log=folder / "log")
    return folder / "log"


@pytest.fixture(scope="module")
def waits(log: Path) -> Mapping[str, Counter[tuple[str, str]]]:
    """Kind of run -> what a step waits for."""
    found = read_waits(log)
    steps = {name: [found[f"{name}, {number} steps"] for number in STEPS] for name in ONE_STEP}
    return {
        name: Counter(
            {
                (what, line.removeprefix("spmdflow/")): number
                for (what, line), number in (longer - shorter).items()
                if is_wait(what)
            }
        )
        for name, (shorter, longer) in steps.items()
    }


@pytest.mark.parametrize("name", ONE_STEP)
def test_host_waits_for_the_device_only_where_it_is_listed(
    waits: Mapping[str, Counter[tuple[str, str]]], name: str
) -> None:
    most = {key: number for key, (number, _) in WAITS.items()}

    more = {key: number for key, number in waits[name].items() if number > most.get(key, 0)}

    assert more == {}


def test_every_listed_wait_is_there(waits: Mapping[str, Counter[tuple[str, str]]]) -> None:
    assert set(WAITS) <= {key for found in waits.values() for key in found}


@pytest.mark.parametrize("name", [name for name in ONE_STEP if "offload" in name])
def test_offload_waits_for_no_copy(
    waits: Mapping[str, Counter[tuple[str, str]]], name: str
) -> None:
    assert waits[name] == waits[name.removesuffix(", offload")]


@pytest.mark.parametrize("name", ONE_STEP)
def test_third_step_leaves_on_the_device_what_the_second_left(log: Path, name: str) -> None:
    steps = read_memory(log)[f"{name}, 3 steps"]

    assert set(steps) == {1, 2, 3}
    second, third = (steps[number] for number in (2, 3))
    assert third[1] == second[1], f"blocks after the second and the third step: {steps}"
    assert abs(third[0] - second[0]) <= 4096, f"bytes, of which a few are of the batch: {steps}"


@pytest.mark.parametrize("name", ONE_STEP)
def test_step_copies_no_more_than_is_listed(
    log: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shorter, longer = (costs(log)[f"{name}, {number} steps"] for number in STEPS)
    step = longer - shorter
    with capsys.disabled():
        print(f"\n{name}:", ", ".join(f"{number:,} {what}" for what, number in step.items()))

    assert step["copies"] <= COPIES[name][0] and step["bytes"] <= COPIES[name][1]
