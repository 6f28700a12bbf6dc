"""A checkpoint of PPO holds actor and critic once, spread over the ranks; any layout loads it."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.distributed.moved import check_bits, check_losses
from tests.distributed.programs import saving
from tests.distributed.programs.layout_matrix import run_all_and_cells

if find_spec("megatron") is None:
    pytest.skip("the megatron extra is not installed", allow_module_level=True)

pytestmark = pytest.mark.drill

MODEL = saving.ROOT / "algos" / "arithmetic" / "model"
NAMES = ("fsdp", "zero1", "t2")
OTHERS = ("s2", "p2")
CLASSES = {"actor": AutoModelForCausalLM, "critic": AutoModelForSequenceClassification}
HEADER = 128 << 10
"""Most bytes of a rank's file that are no tensor's: names, places and hashes."""


CELLS = (("fsdp-d1", "t2p2d1"), ("t2p2d1", "zero1-d2"))
"""Of the matrix of layouts: those that save and resume."""

Runs = tuple[dict[str, Path], list[dict[str, list[str]]]]


@pytest.fixture(
    scope="module", params=[NAMES, pytest.param((*NAMES, *OTHERS), marks=pytest.mark.slow)], ids=len
)
def runs(
    tmp_path_factory: pytest.TempPathFactory,
    spawn_ranks: Callable[..., list[Any]],
    request: pytest.FixtureRequest,
) -> Runs:
    """Folder of each case's checkpoint, and what each rank found when it loaded all of them."""
    out = tmp_path_factory.mktemp("saving")
    names = request.param
    asked = (saving.NUM_RANKS, str(out), names, CELLS)
    found = spawn_ranks(run_all_and_cells, *asked)
    return {name: out / name / "checkpoints" / "step-1" for name in names}, found


def num_parameters(role: str) -> int:
    """As transformers counts them."""
    extra = {"num_labels": 1} if role == "critic" else {}
    model = CLASSES[role].from_pretrained(MODEL, **extra)
    return sum(each.numel() for each in model.parameters())


def tensor_bytes(path: Path) -> int:
    """As the safetensors library counts them."""
    with safe_open(path, "pt") as file:
        return sum(file.get_tensor(name).nbytes for name in file.keys())


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_twelve_bytes_of_each_parameter_are_written_once_and_evenly(runs: Runs, role: str):
    for name, folder in runs[0].items():
        paths = sorted((folder / role).glob("rank-*.safetensors"))
        written = [tensor_bytes(path) for path in paths]

        assert len(paths) == saving.NUM_RANKS
        assert sum(written) == num_parameters(role) * (4 + 8), name
        mean = sum(written) / len(written)
        assert max(written) <= 1.15 * mean, name  # ZeRO 1 steps whole tensors, stages differ
        sizes = [path.stat().st_size for path in paths]
        assert max(size - data for size, data in zip(sizes, written, strict=True)) <= HEADER


def test_nothing_else_is_written_but_the_export_once_and_no_byte_of_frozen_roles(runs: Runs):
    for folder in runs[0].values():
        check_rest(folder)


def check_rest(folder: Path) -> None:
    paths = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
    manifest = json.loads((folder / "manifest.json").read_text())

    assert {path.parts[0] for path in paths} == {"actor", "critic", "manifest.json"}
    assert {"reference"} <= set(manifest["meta"]["frozen"])
    assert sorted(manifest["files"]) == sorted(str(p) for p in paths if p.name != "manifest.json")
    exports = [path for path in paths if "hugging_face" in path.parts]
    weights = [folder / path for path in exports if path.suffix == ".safetensors"]
    assert sum(map(tensor_bytes, weights)) == num_parameters("actor") * 4  # forward's float32
    others = [path for path in exports if path.suffix != ".safetensors"]
    assert sum((folder / path).stat().st_size for path in others) < 64 << 10
    for path, facts in manifest["files"].items():
        hashed_on_the_way = path.endswith(".safetensors")
        assert (facts["head_bytes"] is not None) == hashed_on_the_way, path


def test_every_layout_loads_what_every_other_and_torch_saved_bit_for_bit(runs: Runs):
    for found in runs[1]:
        assert len(found) == len(runs[0]) ** 2 + len(runs[0])
        assert {pair: wrong for pair, wrong in found.items() if wrong} == {}


def test_a_run_goes_on_under_another_layout_and_world_size(runs: Runs):
    folder = runs[0]["fsdp"].parents[2] / "cells"

    check_bits(folder, CELLS)
    check_losses(folder, CELLS)
