"""What a checkpoint holds of the script: the state as it was at the end of the step saved."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from spmdflow.checkpoint.manifest import CheckpointInfo
from spmdflow.checkpoint.run_dir import find_latest
from spmdflow.errors import CheckpointError, ProtocolError
from spmdflow.runtime.call import Call, InprocTransport, OnDone, Pending
from spmdflow.runtime.executor import FILES
from tests.unit.toy_flow import Toy, ToyConfig, draw, rank_of_one


class SlowDisk(InprocTransport):
    """Ranks that write their files only when the test lets them."""

    held: tuple[Call, Pending] | None = None

    def submit(self, call: Call, on_done: OnDone | None = None) -> Pending:
        """Run the call, unless it writes files."""
        if call.lane != FILES:
            return super().submit(call, on_done)
        pending = Pending(call, lambda pending: pending.sleep(60))
        self.held = (call, pending)
        return pending

    def write(self) -> None:
        """Write what is held."""
        assert self.held is not None
        call, pending = self.held
        pending.resolve(super().submit(call).result())


class Scores:
    """Keeps its history, and hands out the list itself, as most state_dict methods do."""

    def __init__(self) -> None:
        self.history: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        """The live list."""
        return {"history": self.history}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with this history."""
        self.history = state["history"]


def kept_in(run_dir: Path, step: int) -> Any:
    manifest = json.loads((run_dir / "checkpoints" / f"step-{step}" / "manifest.json").read_text())
    return manifest["meta"]["flow"]["kept"]


def test_checkpoint_has_the_state_of_its_step_though_it_is_written_during_the_next(
    tmp_path: Path,
) -> None:
    with rank_of_one(tmp_path) as rank:
        flow = rank.flow
        disk = SlowDisk(rank.state.operations())
        flow.caller.transport = disk
        toy = flow.spawn(Toy, ToyConfig())
        prompts = flow.prompts(rank.config.data)
        scores = flow.keep(scores=Scores())

        for step in flow.steps(2):
            draw(prompts, toy)
            scores.history.append(float(step.number))
            if step.number == 1:
                flow.save(every=1)
            else:
                disk.write()  # step 1, after the script has changed its list in step 2
        flow._saving.finish()

    assert kept_in(tmp_path, 1)["scores"] == {"history": [1.0]}


def saved_run(run_dir: Path, names: Sequence[str]) -> CheckpointInfo:
    """The checkpoint of a run of one step whose script keeps things of these names."""
    with rank_of_one(run_dir) as rank:
        flow = rank.flow
        toy = flow.spawn(Toy, ToyConfig())
        prompts = flow.prompts(rank.config.data)
        for name in names:
            flow.keep(**{name: Scores()}).history.append(7.0)
        for _ in flow.steps(1):
            draw(prompts, toy)
            flow.save(every=1)
        flow._saving.finish()
    found = find_latest(run_dir)
    assert found is not None
    return found


def test_resume_of_a_script_that_keeps_a_thing_no_more_is_refused_with_its_name(
    tmp_path: Path,
) -> None:
    checkpoint = saved_run(tmp_path, ["scores", "curriculum"])

    with rank_of_one(tmp_path) as rank:
        flow = rank.flow
        flow._saving.resumed_from = checkpoint
        flow.spawn(Toy, ToyConfig())
        flow.prompts(rank.config.data)
        flow.keep(scores=Scores())
        with pytest.raises(
            CheckpointError, match="has the state of curriculum, .* keeps only prompts, scores;"
        ):
            next(flow.steps(2))


def test_resume_says_that_a_thing_which_is_new_in_the_script_starts_as_it_was_made(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = saved_run(tmp_path, ["scores"])

    with rank_of_one(tmp_path) as rank:
        flow = rank.flow
        flow._saving.resumed_from = checkpoint
        flow.spawn(Toy, ToyConfig())
        flow.prompts(rank.config.data)
        old = flow.keep(scores=Scores())
        new = flow.keep(curriculum=Scores())
        with caplog.at_level(logging.WARNING):
            next(flow.steps(2))

    assert (old.history, new.history) == ([7.0], [])
    assert "no state of 'curriculum', which the script keeps now" in caplog.text


def test_seconds_of_a_save_are_known_once_its_checkpoint_is_sealed(tmp_path: Path) -> None:
    with rank_of_one(tmp_path) as rank:
        flow = rank.flow
        toy = flow.spawn(Toy, ToyConfig())
        prompts = flow.prompts(rank.config.data)
        for _ in flow.steps(1):
            draw(prompts, toy)
            flow.save(every=1)
        flow._saving.finish()

        assert flow._saving.ending.save_seconds > 0


class Saved:
    """Can be saved, but not loaded."""

    def state_dict(self) -> dict[str, Any]:
        """Nothing."""
        return {}


def test_thing_that_could_not_be_loaded_is_refused_when_it_is_kept(tmp_path: Path) -> None:
    with rank_of_one(tmp_path) as rank:
        with pytest.raises(ProtocolError, match="^keep: half is a Saved .* without load_state_d"):
            rank.flow.keep(half=Saved())
