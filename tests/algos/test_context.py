"""Runs whose ranks divide the tokens of rows: the same steps as with whole rows, on any layout."""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.algos.runs import ROOT, check_prediction, run_ranks, steps_of

GRPO = ROOT / "algos" / "grpo.py"
PPO = ROOT / "algos" / "ppo.py"
FEW = (
    "data.prompts_per_step=16",
    "actor.update.mini_batch_size=16",
    "actor.optimizer.schedule=constant",
    "actor.optimizer.warmup_steps=0",
    "eval_every=0",
    "run.sample_every=0",
)


def norms(run_dir: Path, name: str = "actor/grad_norm") -> list[float]:
    """A metric of each step."""
    return [step[name] for step in steps_of(run_dir)]


def test_grpo_on_divided_rows_has_the_steps_of_whole_rows_and_resumes_with_them(
    tmp_path: Path,
) -> None:
    """Two ranks: two steps with c2, and a third one from its checkpoint, with whole rows."""
    data_parallel, divided = (tmp_path / name for name in ("data_parallel", "divided"))
    c2 = ("actor.engine.layout=c2", "reference.engine.layout=c2", "save_every=2")
    run_ranks(data_parallel, *FEW, "total_steps=3", num_ranks=2, script=GRPO, small=())

    run_ranks(divided, *FEW, *c2, "total_steps=2", num_ranks=2, script=GRPO, small=())
    (sent,) = json.loads((divided / "prediction.json").read_text())["attention"]
    assert sent["planned"] == sent["counted"]
    run_ranks(divided, *FEW, "total_steps=3", num_ranks=2, script=GRPO, small=())

    check_prediction(divided)
    assert norms(divided) == pytest.approx(norms(data_parallel), rel=1e-4)
    assert [step.get("actor/context_bytes", 0.0) > 0 for step in steps_of(divided)] == [1, 1, 0]


@pytest.mark.drill
def test_ppo_with_a_critic_divides_rows_in_both_ways(tmp_path: Path) -> None:
    """Four ranks: actor d2c2, critic c4 with gathered keys, reference c2."""
    data_parallel, divided = (tmp_path / name for name in ("data_parallel", "divided"))
    words = (*FEW, "critic.update.mini_batch_size=16", "total_steps=2")
    layouts = ("actor.engine.layout=d2c2", "critic.engine.layout=c4", "reference.engine.layout=c2")
    run_ranks(data_parallel, *words, num_ranks=4, script=PPO, small=())

    gather = "critic.engine.context_attention=gather"
    run_ranks(divided, *words, *layouts, gather, num_ranks=4, script=PPO, small=())

    check_prediction(divided)
    assert norms(divided) == pytest.approx(norms(data_parallel), rel=1e-4)
    critic = "critic/grad_norm"
    assert norms(divided, critic) == pytest.approx(norms(data_parallel, critic), rel=1e-4)


@pytest.mark.drill
@pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed")
def test_checkpoint_of_divided_rows_goes_on_with_tensor_parallelism(tmp_path: Path) -> None:
    words = (*FEW, "save_every=1")
    first = tmp_path / "first"
    run_ranks(
        first, *words, "actor.engine.layout=c2", "total_steps=1", num_ranks=2, script=GRPO, small=()
    )
    other = tmp_path / "other"
    shutil.copytree(first, other)
    megatron = ("actor.engine.kind=megatron", "actor.engine.layout=t2")

    run_ranks(
        first, *words, "actor.engine.layout=c2", "total_steps=2", num_ranks=2, script=GRPO, small=()
    )
    run_ranks(other, *words, *megatron, "total_steps=2", num_ranks=2, script=GRPO, small=())

    assert norms(other) == pytest.approx(norms(first), rel=1e-4)


@pytest.mark.drill
@pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed")
@pytest.mark.parametrize(
    ("layout", "generator", "weights"),
    [
        ("c2", "builtin", "copy"),
        pytest.param("c2", "vllm", "blocks", marks=pytest.mark.slow),
        pytest.param("t2c2", "vllm", "flat", marks=pytest.mark.slow),
        pytest.param("p2c2", "vllm", "copy", marks=pytest.mark.slow),
    ],
)
def test_megatron_divides_rows_and_its_generators_get_the_weights(
    layout: str, generator: str, weights: str, tmp_path: Path
) -> None:
    """Two steps with c2, and a third one from its checkpoint, on FSDP; vLLM is not divided."""
    data_parallel, divided = (tmp_path / name for name in ("data_parallel", "divided"))
    num_ranks = 2 if layout == "c2" else 4
    rollout = (f"actor.rollout.engine={generator}", "actor.rollout.layout=t1")
    words = (*FEW, *rollout, "save_every=2")
    megatron = ("actor.engine.kind=megatron", f"actor.engine.layout={layout}")
    shared = f"actor.rollout.weights={weights}"
    run_ranks(data_parallel, *words, "total_steps=3", num_ranks=num_ranks, script=GRPO, small=())

    first = (*words, *megatron, shared, "total_steps=2")
    run_ranks(divided, *first, num_ranks=num_ranks, script=GRPO, small=())
    run_ranks(divided, *words, "total_steps=3", num_ranks=num_ranks, script=GRPO, small=())

    check_prediction(divided)
    assert norms(divided) == pytest.approx(norms(data_parallel), rel=1e-4)
    assert [step.get("actor/context_bytes", 0.0) > 0 for step in steps_of(divided)] == [1, 1, 0]
