"""What a run does when a guard holds: warns, ends, or leaves an update out; the batch is kept.

A guard with `skip` is asked before an update, about what the calls that made the batch reported;
then no update of these rows is made. The others are asked when a step is over, before it is
saved. Batches are kept in RUN_DIR/guards, the newest `MOST_FILES`. Script thread.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from spmdflow.checkpoint.rows import write_rows
from spmdflow.config.guard import SKIP, STOP
from spmdflow.controller.batch import Batch
from spmdflow.controller.caller import Caller
from spmdflow.controller.result import RowResult
from spmdflow.errors import CheckpointError, ConfigError, GuardError
from spmdflow.tracking.guard import Guards, Trip

logger = logging.getLogger(__name__)

FOLDER = "guards"
MOST_FILES = 8
MOST_BYTES = 32 << 20
"""Of the rows that are kept of a batch; it is cut after as many rows as fit."""


class Guarding:
    """The guards of a run; kept with checkpoints."""

    def __init__(self, texts: Sequence[str], caller: Caller, run_dir: Path) -> None:
        self._guards = Guards(texts)
        self._caller = caller
        self._folder = run_dir / FOLDER
        self.state_dict = self._guards.state_dict
        self.load_state_dict = self._guards.load_state_dict
        self._skips = {each.name for each in self._guards.guards if each.action == SKIP}
        self._known: set[str] = set()
        self._decided: dict[bytes, bool] = {}
        if self._skips:
            caller.is_skipped = self._is_skipped

    def _is_skipped(self, batch: Batch) -> bool:
        """Return whether updates on these rows are skipped, as the condition of a guard is true.

        Checks the `skip` guards on the metrics of the calls that made the batch, and waits for
        these calls. Decides once in a step for all updates on these rows. Logs a warning for each
        of these guards with `_warn`.
        """
        rows = batch.ids.tobytes()
        if rows not in self._decided:
            refs = (batch.column(name) for name in batch.columns)
            producers = set()
            for ref in refs:
                if isinstance(ref.result, RowResult):
                    producers.add(ref.result)
            metrics = self._caller.metrics_of(producers)
            self._known |= metrics.keys()
            trips = self._guards.trips(metrics, skipping=True)
            self._decided[rows] = bool(trips)
            self._warn(self._caller.step, trips, batch, "no update learns from its batch")
        return self._decided[rows]

    def metrics(self) -> dict[str, float]:
        """Return guards/skipped, the number of batches of the step that no update learns from.

        {} if the guards with `skip` were not asked in this step.
        """
        if self._decided:
            return {"guards/skipped": float(sum(self._decided.values()))}
        return {}

    def end_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Ask the guards about the metrics of a step, before it is saved.

        A guard with `warn` that holds is reported (`_warn`). With `stop` the batch is written, and
        GuardError ends the run. Otherwise the metrics join the earlier values. ConfigError if the
        metric of a guard with `skip` comes only from the update. Resets the decisions and the
        learnt batch of the step.
        """
        late = sorted((self._skips & metrics.keys()) - self._known)
        if late and not all(self._decided.values()):
            expected = f"one that is known before the update ({', '.join(sorted(self._known))})"
            do = "write warn or stop"
            raise ConfigError.of("run.guards", f"skip for {late[0]}", expected, do)
        self._decided = {}
        trips = self._guards.trips(metrics, skipping=False)
        batch = self._caller.learnt or self._caller.scored.get("train")
        self._caller.learnt = None
        stops = []
        for trip in trips:
            if trip.guard.action == STOP:
                stops.append(trip)
        self._warn(step, [trip for trip in trips if trip not in stops], batch, "the run goes on")
        if stops:
            kept = self._keep(step, stops, batch)
            got = "; ".join(f"{trip.got} in step {step}" for trip in stops)
            expected = "; ".join(trip.expected for trip in stops)
            do = f"{stops[0].advice}; {kept}step {step} is not saved; if the newest checkpoint has "
            do += "the fault already, write an older one's name into checkpoints/latest"
            raise GuardError.of("run.guards", got, expected, do)
        self._guards.learn(metrics)

    def _warn(self, step: int, trips: Sequence[Trip], batch: Batch | None, result: str) -> None:
        """Log each guard that holds for the 1st, 2nd, 4th, 8th, ... time, and write the batch then.

        Other times it does nothing. result: what the run does about it, for the log line.
        """
        reported = []
        for trip in trips:
            if trip.is_reported:
                reported.append(trip)
        kept = self._keep(step, reported, batch) if reported else ""
        for trip in reported:
            got = f"got {trip.got} in step {step}, expected {trip.expected}"
            times = f"time {trip.times}, told again at time {2 * trip.times}"
            logger.warning("run.guards: %s; %s (%s): %s%s", got, result, times, kept, trip.advice)

    def _keep(self, step: int, trips: Sequence[Trip], batch: Batch | None) -> str:
        """Write the batch's first rows to a file; return the part of a message that says where.

        The file is RUN_DIR/guards/step-N.safetensors. Writes as many rows as fit into 32 MiB,
        without columns of the data file, and deletes all but the newest 8 files of the folder.
        Waits for the rows and fetches them. Returns "" without a batch, and, after a warning, if
        writing fails.
        """
        if batch is None:
            return ""
        path = self._folder / f"step-{step}.safetensors"
        refs = {}
        for name in batch.columns:
            refs[name] = batch.column(name)
        sizes = np.ones(len(batch))
        for name, ref in list(refs.items()):
            if isinstance(ref.result, RowResult):
                ref.result.wait()
                sizes += ref.row_bytes()
            else:  # of the data file
                del refs[name]
        fitting = np.flatnonzero(np.cumsum(sizes) <= MOST_BYTES)
        columns = {}
        for name, ref in refs.items():
            columns[name] = self._caller.column(name, ref.at(fitting), purpose="guards")
        facts = {"step": step, "guards": [trip.guard.text for trip in trips]}
        try:
            write_rows(path, columns, facts)
            files = sorted(self._folder.iterdir(), key=lambda file: file.stat().st_mtime)
            for old in files[:-MOST_FILES]:
                old.unlink()
        except (CheckpointError, OSError) as err:
            logger.warning("cannot keep the batch of step %s: %s", step, err)
            return ""
        return f"{len(fitting)} of its {len(batch)} rows are in {path}; "
