"""Weight syncs from an FSDP engine into the built-in generator. One torchrun, the tests judge."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.forked import torchrun

PROGRAMS = Path(__file__).parent / "programs"
VICTIM = "model.layers.1.self_attn.k_proj.weight"
TWIN = "model.layers.0.self_attn.k_proj.weight"


def run_ranks(program: str, folder: Path) -> list[dict[str, Any]]:
    """What ranks 1 and 2 of three wrote."""
    words = ["--nproc-per-node=3", str(PROGRAMS / program), str(folder)]
    torchrun(words, folder / "log.txt", seconds=840)
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in (1, 2)]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What ranks 1 and 2 measured."""
    return run_ranks("rollout_sync.py", tmp_path_factory.mktemp("rollout"))


def judge_versions(found: dict[str, Any]) -> None:
    """Needs a sync, and refuses to generate, exactly while the versions differ."""
    refused = {
        "new": "weights that were never synced while the trainer is at version 0",
        "updated": "weights of version 0 while the trainer is at version 1",
        "restored": "weights of version 1 while the trainer is at version 2",
    }
    for state, expected in refused.items():
        needs_sync, said = found[state]
        assert needs_sync
        assert said.startswith("WeightSyncError: ") and expected in said and "call sync()" in said
    assert found["synced"] == found["synced again"] == [False, ""]
    assert found["bytes"][0] == found["bytes"][1] > 0


def judge_faults(found: dict[str, Any]) -> None:
    """Every fault is caught, names the tensor and stops generation; a good sync repairs it."""
    assert found.pop("none") == ["", False, ""]
    assert found.pop("flip, never verified") == ["", False, ""]  # it was the comparison that saw it
    named = {"swap": TWIN}  # the first in order of the two
    assert set(found) == {"flip", "negative zero", "swap", "shift", "skip", "stale"}
    for fault, (said, needs_sync, repaired) in found.items():
        assert said.startswith("WeightSyncError: "), fault
        assert named.get(fault, VICTIM) in said, fault
        assert needs_sync and repaired == "", fault
    assert "with hash 0x" in found["skip"][0]
    assert "with hash 0x" in found["flip"][0] and "of version 0" in found["flip"][0]
    assert f"and 1 more ({VICTIM})" in found["swap"][0]


def test_generating_is_refused_while_trainer_and_generator_differ(ranks: list[dict]) -> None:
    for found in ranks:
        judge_versions(found["versions"])


@pytest.mark.parametrize("model", ["untied", "tied"])
def test_responses_after_updates_are_those_of_a_fresh_model(ranks: list[dict], model: str) -> None:
    for found in ranks:
        assert found[f"updates of {model}"]["faults"] == []
        assert found[f"updates of {model}"]["close"] <= 2
        assert found[f"updates of {model}"]["distinct"] == 3


def test_every_fault_of_a_sync_is_caught_and_named(ranks: list[dict]) -> None:
    for found in ranks:
        judge_faults(dict(found["faults"]))


def test_hashes_are_compared_at_the_first_and_every_third_sync(ranks: list[dict]) -> None:
    assert [found["verified"] for found in ranks] == [[1, 0, 0, 1, 0, 0, 1]] * 2


def test_bfloat16_generator_holds_the_rounded_weights_of_the_trainer(ranks: list[dict]) -> None:
    for found in ranks:
        dtype, said, said_of_flipped_bit = found["bfloat16"]
        assert (dtype, said) == ("torch.bfloat16", "")
        assert VICTIM in said_of_flipped_bit
