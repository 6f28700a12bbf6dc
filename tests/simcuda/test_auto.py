"""What a run on GPUs chooses by itself where a model and a data set are all that is set."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from spmdflow.mapping.hardware import FOLDER
from spmdflow.plan.__main__ import FINE, main
from tests.simcuda.conftest import ROOT, Simulated

TASK = ROOT / "algos" / "arithmetic"


@pytest.mark.drill
@pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed")
def test_model_and_data_are_all_that_a_run_on_one_gpu_needs(
    simulated: Simulated, tmp_path: Path
) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1")
    needed = (f"actor.model.path={TASK / 'model'}", f"data.train_path={TASK / 'train.jsonl'}")
    short = ("total_steps=2", "eval_every=0", "data.prompts_per_step=16", f"run.dir={tmp_path}")

    said = simulated(
        *(*torchrun, "-m", "spmdflow.run", "grpo", *needed, *short),
        "actor.update.mini_batch_size=64",
    )

    cfg = yaml.safe_load((tmp_path / "config.yaml").read_text())
    actor = cfg["actor"]
    records = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert actor["rollout"]["engine"] == "vllm" and actor["rollout"]["kv_cache_gib"] == 0.0625
    precisions = [actor["model"], actor["rollout"], cfg["reference"]["model"]]
    assert {part["dtype"] for part in precisions} == {"bfloat16"}
    assert actor["engine"]["offload"] == cfg["reference"]["engine"]["offload"] == []
    assert "auto   dtype: bfloat16 (actor.model, " in said and "because the device is cuda" in said
    assert "GiB that are free while actor generates" in said and "kv_cache_gib: 0.0625" in said
    last = json.loads(records[-1])
    assert last["rollout/weights_verified"] == 1 and 0 < last["rollout/drift"] < 0.05


SMALL = (
    *(
        "actor.rollout.engine=builtin",
        "data.prompts_per_step=16",
        "actor.update.mini_batch_size=16",
    ),
    *("critic.update.mini_batch_size=16", "eval_every=0", "total_steps=2"),
)
PARTS = ("parameters", "gradients", "optimizer")


ROLES = ("actor", "critic", "reference", "reward")


def peak_of(hardware: Path, capsys: pytest.CaptureFixture[str], *settings: str) -> float:
    """Bytes that the fullest phase of a step needs, by the plan."""
    words = ("ppo", *SMALL, *settings, "--world=2", f"--hardware={hardware}", "--json")
    assert main(list(words)) == FINE
    report = json.loads(capsys.readouterr().out)
    return float(max(phase["total"] for phase in report["memory"]))


def device_between(
    folder: Path, capsys: pytest.CaptureFixture[str], least: list[str], most: list[str]
) -> Path:
    """Hardware with more memory than a step needs with some settings, and less than with others."""
    path = folder / "small.yaml"
    facts = yaml.safe_load((FOLDER / "a100_80gb.yaml").read_text())
    facts["reserved_bytes"]["value"] = 0.0
    facts["usable_memory_fraction"]["value"] = 1.0
    path.write_text(yaml.safe_dump(facts))
    small = peak_of(path, capsys, *least)
    large = peak_of(path, capsys, *most)
    assert small < large
    facts["memory_bytes"]["value"] = (small + large) / 2
    path.write_text(yaml.safe_dump(facts))
    return path


@pytest.mark.slow
def test_parts_move_to_the_host_where_a_step_does_not_fit_and_change_no_number(
    simulated: Simulated, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    offload, keep = (
        [f"{role}.engine.offload=[{parts}]" for role in ROLES] for parts in (",".join(PARTS), "")
    )
    small = device_between(tmp_path, capsys, offload, keep)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    command = (*torchrun, "-m", "spmdflow.run", "ppo", *SMALL)

    said = simulated(*command, f"run.hardware={small}", f"run.dir={tmp_path / 'auto'}")
    simulated(*command, *keep, f"run.dir={tmp_path / 'keep'}")

    cfg = yaml.safe_load((tmp_path / "auto" / "config.yaml").read_text())
    moved = {role: cfg[role]["engine"]["offload"] for role in ("actor", "critic", "reference")}
    assert any(part in parts for parts in moved.values() for part in PARTS), moved
    assert "s of copies a step" in said and "which does not fit" not in said
    auto, keep = (
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("auto", "keep")
    )
    assert len(auto) == len(keep) == 2
    for one, other in zip(auto, keep, strict=True):
        names = [name for name in one if name.startswith(("actor/", "critic/", "rollout/"))]
        assert names and all(one[name] == other[name] for name in names)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["copy", "blocks"])
def test_weights_are_copied_for_graphs_where_a_second_copy_fits_and_else_read_in_place(
    simulated: Simulated, tmp_path: Path, capsys: pytest.CaptureFixture[str], way: str
) -> None:
    for package in ("vllm", "megatron"):
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    settings = [f"{role}.engine.offload=[]" for role in ROLES]
    settings += [f"{role}.engine.kind=megatron" for role in ("actor", "critic")]
    settings += ["actor.engine.layout=t2", "actor.rollout.engine=vllm"]
    settings += ["actor.rollout.kv_cache_gib=0.25"]  # generation is the fullest phase
    known = [[*settings, f"actor.rollout.weights={name}"] for name in ("blocks", "copy")]
    hardware = device_between(tmp_path, capsys, *known) if way == "blocks" else "a100_80gb"
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    run = (f"run.hardware={hardware}", f"run.dir={tmp_path / 'run'}")

    said = simulated(*torchrun, "-m", "spmdflow.run", "ppo", *SMALL, *settings, *run)

    cfg = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert cfg["actor"]["rollout"]["weights"] == way
    assert ("with copy more memory than there is: weights=blocks" in said) == (way == "blocks")
    assert ("s: weights=copy (actor.rollout)" in said) == (way == "copy")
    *_, last = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(last)["rollout/weights_verified"] == 1
