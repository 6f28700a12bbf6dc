"""`Capsule`: one step of a run, kept so that `spmdflow.replay` can run it again.

    RUN_DIR/capsules/step-N/
        config.yaml                 the settings
        checkpoints/step-(N-1)      the state before the step: weights, moments, positions, seeds
        rows.safetensors            what every call of the step made, in the order of the script
        transcript                  the commands to ranks
        checkpoints/step-N          the state after the step
        capsule.json                script, ranks, versions, calls, metrics; written last

Rows are in the order of their ids, whichever rank made them. Script thread.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from spmdflow.checkpoint.disk import disk_errors, write_atomically
from spmdflow.checkpoint.rows import write_rows
from spmdflow.config.schema import RunConfig
from spmdflow.controller.batch import Batch
from spmdflow.controller.caller import Caller
from spmdflow.controller.observer import ObservedFlow, Observer, StepRecord
from spmdflow.controller.result import ColumnRef, Result, RowResult, SourceRows
from spmdflow.controller.saving import Saving
from spmdflow.controller.transcript import TRANSCRIPT_FILE, Transcript
from spmdflow.data.column import Column
from spmdflow.runtime.call import Pending
from spmdflow.tracking.origin import versions

logger = logging.getLogger(__name__)

FOLDER = "capsules"
FACTS = "capsule.json"
ROWS = "rows.safetensors"
SETTINGS = "config.yaml"
"""Names of the folder and of files in it; see above."""


def capsule_folder(run_dir: Path, step: int) -> Path:
    """Where the capsule of a step is."""
    return run_dir / FOLDER / f"step-{step}"


class Capsule(Observer):
    """Keeps run.capture_step while it runs."""

    def __init__(self, run: RunConfig, run_dir: Path, settings: str, script: Path) -> None:
        """settings: every setting, as YAML. script: its file."""
        self.step = run.capture_step
        self._run = run
        self._settings = settings
        self._script = script.resolve()
        self._folder = capsule_folder(run_dir, run.capture_step)
        self._saving: Saving | None = None
        self._start: Mapping[str, Any] = {}
        self._flow: ObservedFlow | None = None

    def attach(self, flow: ObservedFlow) -> None:
        """The flow whose step is kept."""
        self._flow = flow

    def begin_steps(self, first: int, last: int) -> None:
        """Warn if the step to be kept is not one of this launch."""
        if not first <= self.step <= last:
            text = "run.capture_step: got %s, which is not kept: this launch has the steps %s to %s"
            logger.warning(text, self.step, first, last)

    def begin_step(self, number: int) -> None:
        """Before step run.capture_step, save settings and state, and start to record its calls.

        Does nothing for other steps. Deletes an older capsule of the step. Waits for the checkpoint
        that is being written, and then until the capsule's own is written. CheckpointError if
        writing fails.
        """
        if number != self.step:
            return
        assert self._flow is not None
        flow = self._flow
        flow.finish_saving()
        state = flow.state(number - 1)
        with disk_errors("write", self._folder):
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder.parent.mkdir(exist_ok=True)  # RUN_DIR itself is never made again
            self._folder.mkdir()
            write_atomically(self._folder / SETTINGS, self._settings.encode())
        run = replace(self._run, keep_checkpoints=2, keep_best=None)
        self._saving = Saving(self._folder, None, run, self._settings)
        self._start = state
        self._saving.save(self.step - 1, flow.caller, flow.groups, state, {})
        self._saving.finish()
        flow.caller.captured = []

    def end_step(self, step: StepRecord) -> None:
        """After the step to be kept, write what its calls made, the transcript and the new state.

        Ignores all other steps. Fetches the rows to the controller. Waits for the checkpoint, and
        writes capsule.json last, so that a folder that has it is complete. CheckpointError if
        writing fails.
        """
        if step.number != self.step:
            return
        assert self._flow is not None and self._saving is not None
        caller = self._flow.caller
        assert caller.captured is not None, self.step
        captured = caller.captured
        caller.captured = None
        transcript = Transcript(
            self._folder / TRANSCRIPT_FILE,
            caller.ranks,
            [caller.transport.node_of(r) for r in caller.ranks],
        )
        transcript.continue_from(self._start)
        transcript.end_step(step)
        columns: dict[str, Column] = {}
        calls: list[tuple[str, str, int]] = []
        for label, phase, outputs in _calls(caller, captured):
            columns |= {f"{len(calls):03d} {label} {name}": outputs[name] for name in outputs}
            calls.append((label, phase, len(outputs)))
        write_rows(self._folder / ROWS, columns, {})
        self._saving.save(self.step, caller, self._flow.groups, self._flow.state(self.step), {})
        self._saving.finish()
        facts = {"step": self.step, "script": str(self._script), "ranks": list(caller.ranks)}
        facts |= {"script_sha256": hashlib.sha256(self._script.read_bytes()).hexdigest()}
        facts |= {"versions": versions(), "calls": calls, "metrics": dict(step.metrics)}
        data = json.dumps(facts, indent=1).encode()
        with disk_errors("write", self._folder):
            write_atomically(self._folder / FACTS, data)
        logger.info("kept step %s: python -m spmdflow.replay %s", self.step, self._folder)


Made = dict[str, Column]


def _calls(
    caller: Caller, captured: Iterable[tuple[Pending, RowResult | None, Batch | None]]
) -> Iterator[tuple[str, str, Made]]:
    """Yield (label, phase, columns) of each call that makes rows or metrics, in script order.

    Before the first call that reads some prompts of a data file, also yields these prompts. Skips
    all other calls. Fetches the rows to the controller, in ascending order of their ids.
    """
    seen: set[int] = set()
    for pending, result, batch in captured:
        call = pending.call
        if result is not None:
            ids = np.unique(np.concatenate([*result.answer.values()]))
            outputs = {}
            for name in result.holders:
                ref = ColumnRef(result, ids, name)
                outputs[name] = caller.column(name, ref, purpose="capsule")
        elif (numbers := _numbers(pending)) is not None:
            outputs = numbers
        else:
            continue
        for name, ref in _sources(batch):
            if ref.result.number not in seen:
                seen.add(ref.result.number)
                column = caller.column(name, ref, purpose="capsule")
                yield ref.result.label, call.phase, {name: column}
        yield call.label, call.phase, outputs


def _numbers(pending: Pending) -> Made | None:
    """Return what a call answered as float64 columns (1,), by metric, merged over ranks.

    None if no rank answers, or if an answer is not a dict of metrics. Waits for the call.
    """
    call = pending.call
    if not call.reply_ranks:
        return None
    values = Result(call.label, pending, call.reply_ranks)
    if not all(isinstance(value, dict) for value in values.values_by_rank()):
        return None
    numbers = {}
    for name, value in values.items():
        numbers[name] = Column("dense", torch.tensor([value], dtype=torch.float64))
    return numbers


def _sources(batch: Batch | None) -> Iterator[tuple[str, ColumnRef]]:
    """Yield ("prompts", reference) if the batch has prompts of a data file, otherwise nothing."""
    if batch is not None and "prompts" in batch.columns:
        ref = batch.column("prompts")
        if isinstance(ref.result, SourceRows):
            yield "prompts", ref
