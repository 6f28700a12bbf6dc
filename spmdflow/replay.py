"""Replays a saved step and reports what differs: `... -m spmdflow.replay CAPSULE [key=value ...]`.

A capsule is a step that a run saved (run.capture_step, controller/capsule.py). The script runs
again from the state before the step, for this step only, in RUN_DIR/replays, and is saved there in
the same way. Then both are compared: the results of the calls in the order of the script, and the
state after the step. On the layout of the run they are equal bit for bit; on another one to
rounding (`TOLERANCE`). With --inproc everything runs in one process, and breakpoint() works.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
import yaml
from torch import Tensor

from spmdflow.blocks.box import Box
from spmdflow.checkpoint.manifest import read_manifest
from spmdflow.checkpoint.rows import read_columns
from spmdflow.checkpoint.state import StateFiles
from spmdflow.config.leaf import flat
from spmdflow.config.load import Loaded
from spmdflow.controller.capsule import FACTS, ROWS, SETTINGS, capsule_folder
from spmdflow.controller.flow import Flow
from spmdflow.data.column import Column
from spmdflow.errors import ConfigError
from spmdflow.run import FAILED, FINISHED, Arguments, RankEnvironment, prepare_rank, run_rank
from spmdflow.tracking.progress import shorten_text

TOLERANCE = 1e-3
"""Largest difference on another layout, relative to the largest number of the tensor."""
_REPLAYS = "replays"
_STATE = "*/rank-*.safetensors"
_USAGE = """\
usage: torchrun --standalone --nproc-per-node N -m spmdflow.replay CAPSULE [key=value ...]
       python -m spmdflow.replay --inproc CAPSULE [key=value ...]

Replays a step that was saved with run.capture_step=STEP, and reports the first tensor that differs.
With N ranks as in the run, tensors must be equal bit for bit. With --inproc everything runs in one
process, for a debugger, and values may differ by rounding. key=value changes a setting.
exit codes: 0 equal, 1 something differs or the run failed, 2 the capsule or a setting is invalid
"""
_OWN = (
    "run.resume=auto",
    "run.guards=[]",
    "run.trackers=[]",
    "run.metrics_port=null",
    "run.sample_every=0",
    "run.save_last=false",
)
"""Settings of a replay: only the step itself runs."""


def main(words: Sequence[str] | None = None) -> int:
    """Replay a capsule's step on this rank; rank 0 then prints what differs.

    Returns the rank's exit code: 0 equal (other ranks: finished), 1 different or failed, 2 invalid.
    Prints the usage for --help or without words.
    words: the arguments; default: sys.argv.
    """
    words = sys.argv[1:] if words is None else words
    if not words or {"--help", "-h"} & set(words):
        sys.stdout.write(_USAGE)
        return FINISHED
    folder = Path(next((w for w in words if not w.startswith("-") and "=" not in w), ".")).resolve()
    status = run_rank(partial(_prepare, folder, words))
    if status != FINISHED or RankEnvironment.from_environment().rank:
        return status
    return _report(folder)


def _prepare(
    folder: Path, words: Sequence[str], environment: RankEnvironment
) -> tuple[Loaded, bool]:
    """Return (script and settings that replay a capsule's step, whether in one process).

    The script's main is replaced by one that starts from the capsule's state and stops after the
    step. On another number of ranks than recorded, layouts are reset to t1 and auto. Rank 0 removes
    the folder of an earlier replay. words override settings, key=value.
    """
    facts = read_facts(folder)
    step = int(facts["step"])
    overrides = [f"run.dir={replay_folder(folder)}", f"run.capture_step={step}", *_OWN]
    if environment.world_size != len(facts["ranks"]):
        settings = flat(yaml.safe_load((folder / SETTINGS).read_text(encoding="utf-8")))
        overrides += ["placement=colocate"] if environment.world_size == 1 else []
        overrides += [f"{key}=t1" for key in settings if key.endswith(".engine.layout")]
        overrides += [f"{key}=auto" for key in settings if key.endswith(".rollout.layout")]
    overrides += [word for word in words if "=" in word]
    flags = frozenset("inproc" for word in words if word == "--inproc")
    if environment.rank == 0:
        shutil.rmtree(replay_folder(folder), ignore_errors=True)
    arguments = Arguments(facts["script"], str(folder / SETTINGS), tuple(overrides), flags)
    loaded = prepare_rank(arguments, environment)
    script = ModuleType(loaded.script.__name__)
    script.__file__ = loaded.script.__file__
    script.main = partial(_run, loaded.script, folder, step)  # type: ignore[attr-defined]
    return replace(loaded, script=script), "inproc" in flags


def replay_folder(capsule: Path) -> Path:
    """Return the folder of a capsule's replay: RUN_DIR/replays/step-N for RUN_DIR/capsules/step-N.

    For a capsule that was copied elsewhere, it is next to it: step-N-replay.
    """
    if capsule.parent.name == "capsules":
        return capsule.parent.with_name(_REPLAYS) / capsule.name
    return capsule.with_name(f"{capsule.name}-replay")


def read_facts(folder: Path) -> dict[str, Any]:
    """Return the content of a capsule's capsule.json; ConfigError if there is none."""
    try:
        facts: dict[str, Any] = json.loads((folder / FACTS).read_text(encoding="utf-8"))
    except (OSError, ValueError) as err:
        expected = "a folder with a capsule.json, such as RUN_DIR/capsules/step-3"
        do = "save a step with run.capture_step=3"
        raise ConfigError.of("capsule", f"{folder} ({err})", expected, do) from err
    return facts


def _run(script: ModuleType, folder: Path, step: int, flow: Flow, cfg: Any) -> None:
    """Run the script's main from the state of the capsule, for one step (controller thread)."""
    flow.replay(read_manifest(folder / "checkpoints" / f"step-{step - 1}"))
    script.main(flow, cfg)


def _report(folder: Path) -> int:
    """Print what differs between a capsule and its replay; return exit code 0 or 1.

    1 means that a tensor differs by more than the tolerance.
    """
    step = int(read_facts(folder)["step"])
    comparison = compare(folder, capsule_folder(replay_folder(folder), step))
    sys.stdout.write(comparison.text())
    sys.stdout.flush()
    if comparison.first:
        return FAILED
    return FINISHED


class CapsuleComparison(NamedTuple):
    """How two capsules of the same step differ."""

    num_equal: int
    """Number of tensors that are equal bit for bit."""
    largest: float
    """Largest difference of the other tensors before `first`, relative to the tensor's largest."""
    first: str | None
    """The first tensor that differs by more than the tolerance, and how it differs."""
    notes: Sequence[str] = ()
    """Differences in versions, script and layout."""

    def text(self) -> str:
        """Return the lines for a terminal: notes, then the first difference or "equal"."""
        lines = [f"replay: {note}" for note in self.notes]
        if self.largest:
            close = f", the others to within {self.largest:.1e} of their largest number"
        else:
            close = ""
        if self.first is None:
            lines.append(f"replay: equal: {self.num_equal} tensors bit for bit{close}")
        else:
            lines.append(f"replay: first difference: {self.first}")
            lines.append(
                f"replay: before it, {self.num_equal} tensors are equal bit for bit{close}"
            )
        return "\n".join(lines) + "\n"


def compare(recorded: Path, replayed: Path) -> CapsuleComparison:
    """Compare the tensors of two capsules in the order in which the recorded run wrote them.

    Stops at the first one that is missing or differs by more than the tolerance: 0 on the same
    layout, otherwise TOLERANCE. Notes tell differences in versions, script and layout, which are no
    failure.
    """
    one = read_facts(recorded)
    other = read_facts(replayed)
    step = one["step"]
    before = []
    for folder in (recorded, replayed):
        before.append(read_manifest(folder / "checkpoints" / f"step-{step - 1}").meta["layout"])
    same_layout = before[0] == before[1]
    notes = []
    for name, old in one["versions"].items():
        if other["versions"].get(name) != old:
            notes.append(f"{name} was {old}, is {other['versions'].get(name)}")
    if one["script_sha256"] != other["script_sha256"]:
        notes.append(f"{other['script']} has changed since")
    if not same_layout:
        notes.append(f"another layout: numbers are compared to within {TOLERANCE:g}")
    tolerance = 0.0 if same_layout else TOLERANCE
    num_equal = 0
    largest = 0.0
    for name, old, new in _pairs(recorded, replayed, step):
        if new is None:
            return CapsuleComparison(
                num_equal, largest, f"{name} is missing from the replay", notes
            )
        difference, text = _difference(old, new)
        if difference > tolerance:
            return CapsuleComparison(num_equal, largest, f"{name}: {text}", notes)
        num_equal += not difference
        largest = max(largest, difference)
    return CapsuleComparison(num_equal, largest, None, notes)


def _pairs(
    recorded: Path, replayed: Path, step: int
) -> Iterator[tuple[str, Column, Column | None]]:
    """Yield (name, recorded, replayed or None) of each column of the calls, then of the state.

    The state is each role's tensors after the step; roles are sorted by name. None: the replay has
    no tensor of that name and shape. What only the replay has is not compared.
    """
    written, again = (read_columns(folder / ROWS)[0] for folder in (recorded, replayed))
    for name, column in written.items():
        yield name, column, again.get(name)
    state, other = (folder / "checkpoints" / f"step-{step}" for folder in (recorded, replayed))
    for role in sorted({path.parent.name for path in state.glob(_STATE)}):
        files, others = (StateFiles(folder / role) for folder in (state, other))
        known = others.shapes()
        for name, shape in files.shapes().items():
            box = Box.of_shape(shape)
            what = f"{role} after the step: {name}"
            if known.get(name) == shape:
                new = Column("dense", others.read(name, box))
            else:
                new = None
            yield what, Column("dense", files.read(name, box)), new


def _difference(old: Column, new: Column) -> tuple[float, str]:
    """Return (relative difference, text about the first row that differs) of two columns.

    The difference is the largest one of a number, divided by the largest finite absolute number
    recorded; (0, "") if all are equal, nan and nan included. It is infinite if rows, lengths,
    integers or texts differ, if one number is not finite, or if all recorded ones are 0.
    """
    if (old.spec, len(old)) != (new.spec, len(new)):
        return inf, f"recorded {len(old)} rows of {old.spec}, replayed {len(new)} of {new.spec}"
    rows = torch.arange(len(old))
    if old.lengths is not None and new.lengths is not None:
        longer = (old.lengths != new.lengths).nonzero()
        if len(longer):
            row = int(longer[0])
            lengths = f"{int(old.lengths[row])} items, replayed {int(new.lengths[row])}"
            return (
                inf,
                f"row {row}: recorded {lengths}: {_show_row(old, row)}, {_show_row(new, row)}",
            )
        rows = rows.repeat_interleave(old.lengths)
    one, other = (
        each.values.double().flatten(1) if each.values.ndim > 1 else each.values.double()[:, None]
        for each in (old, new)
    )
    gap = (one - other).abs().nan_to_num(nan=inf, posinf=inf)
    gap[(one == other) | (one.isnan() & other.isnan())] = 0.0
    wrong = (gap > 0).any(1).nonzero()[:, 0]
    if not len(wrong):
        return 0.0, ""
    row = int(rows[wrong[0]])
    most = float(gap.max())
    finite = one[one.isfinite()]
    largest = float(finite.abs().max()) if len(finite) else 0.0
    if old.values.is_floating_point() and largest > 0:
        share = most / largest
    else:
        share = inf
    text = f"{len(rows[wrong].unique())} of {len(old)} rows differ, the first is {row}: recorded "
    text += f"{_show_row(old, row)}, replayed {_show_row(new, row)}; largest difference {most:.3g}"
    return share, text


def _show_row(column: Column, row: int) -> str:
    """Return a row of a column as text of at most 80 characters."""
    value = column.take(torch.tensor([row])).to_value()
    rows = list(value.unbind()) if isinstance(value, Tensor) else value
    return shorten_text(str(rows[0].tolist() if isinstance(rows[0], Tensor) else rows[0]), 80)


if __name__ == "__main__":
    sys.exit(main())
