"""What a rank does with each kind of command: make groups, spawn, call, map, fetch, save, load.

One `RankState` per rank; the executor's lanes call its operations with the command's data and
send back what they return. A method sees a TensorDict; its result stays here, in the store.
"""

from __future__ import annotations

import logging
import resource
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from spmdflow.data.column import Column, column_of, join, to_message
from spmdflow.data.ragged import is_ragged, with_offsets
from spmdflow.data.row_id import Ids, RowGroups
from spmdflow.data.store import RowCondition, RowStore, Unchanged
from spmdflow.datasets.scan import PromptSource, ScanReport, scan
from spmdflow.datasets.tokenizer import load_tokenizer
from spmdflow.errors import ColumnError, DeadlineError, SpmdflowError
from spmdflow.parallel.allocated import AllocatedPeak
from spmdflow.parallel.device import CPU, take_peak_bytes
from spmdflow.parallel.group import GroupSpec, GroupTable
from spmdflow.parallel.layout import Layout
from spmdflow.runtime.call import names_in
from spmdflow.runtime.early import EarlyMethods
from spmdflow.runtime.peak_memory import PeakMemories
from spmdflow.runtime.rank_files import RankFiles
from spmdflow.tracking.trace import StepProfiler
from spmdflow.transfer.lane import CountedTransport, run_release
from spmdflow.worker_api.command import Command
from spmdflow.worker_api.metric import Metric
from spmdflow.worker_api.register import MethodSpec, find_map_function, map_spec, method_spec
from spmdflow.worker_api.worker import Worker, WorkerContext, find_worker_class

logger = logging.getLogger(__name__)

Plain = Mapping[str, Any]
Operation = Callable[[Plain, int], dict[str, Any]]


@dataclass(frozen=True)
class RankSettings:
    """What every operation of a rank needs to know."""

    rank: int
    device: torch.device
    seed: int
    call_seconds: float
    run_dir: Path
    announce: Callable[[Any], None] | None = None
    """Tells ranks outside the run which groups are made next; None: no more."""
    profiled: tuple[int, ...] = ()
    """Steps that torch.profiler records here."""
    waits_for_rows: bool = True
    """Whether another thread may bring rows; otherwise rows that are not here are an error."""


class RankState:
    """Groups, workers and rows of one rank. Lanes share only the store, and what is to be
    saved."""

    def __init__(
        self,
        settings: RankSettings,
        groups: GroupTable,
        transport: CountedTransport,
        arrival: RowCondition | None = None,
        allocated: AllocatedPeak | None = None,
    ) -> None:
        """arrival: how the compute lane waits for rows. allocated: on a CPU, what measures its
        memory; `close` ends it. None: it is not measured."""
        self._settings = settings
        self._groups = groups
        self._transport = transport
        self._arrival = arrival = arrival or RowCondition()
        self.store = RowStore(arrival)
        self._early = EarlyMethods(arrival)
        folder = settings.run_dir / "profile"
        self._profiler: StepProfiler | None = None
        if len(settings.profiled):
            self._profiler = StepProfiler(settings.profiled, folder, settings.rank)
        self._workers: dict[str, Worker] = {}
        self._specs: dict[tuple[str, str], MethodSpec] = {}
        """Of the methods that were called, by group and name."""
        self._files = RankFiles(
            self._workers, arrival, rank=settings.rank, make_room=self._make_room
        )
        self._allocated = allocated
        self._peaks = PeakMemories(self._take_peak)
        self._sources: dict[str, PromptSource] = {}
        self._scanned: ScanReport | None = None
        """What the last scan found, until the controller has all of it."""
        self._reading = threading.Lock()

    def operations(self) -> dict[str, Operation]:
        """Return all operations of this rank: name -> operation(payload, number) -> reply.

        Commands use these names. All operations but "begin" also free results and report times
        (`_report_times`).
        """
        named: dict[str, Operation] = {
            "groups": self._make_groups,
            "spawn": self._spawn,
            "scan": self._scan,
            "scan_more": self._scan_more,
            "source": self._open_source,
            "call": self._call,
            "map": self._map,
            "join": self._join,
            "fetch": self._fetch,
            "transfer": self._transfer,
            "halt": self._halt,
            "reach": lambda plain, number: {},
            **self._files.operations(),
            "close": self._close,
        }
        timed = {}
        for name, operation in named.items():
            timed[name] = self._report_times(operation)
        return timed | {"begin": self._begin}

    def _take_peak(self) -> int | None:
        """Peak of this rank's memory since it was asked last; None if it is not measured."""
        if self._settings.device != CPU:
            return take_peak_bytes(self._settings.device)
        if self._allocated is None:
            return None
        return self._allocated.take()

    def _report_times(self, operation: Operation) -> Operation:
        """Wrap an operation so that it frees results first and reports time and memory (`run`)."""

        def run(plain: Plain, number: int) -> dict[str, Any]:
            """Free plain["free"], run the operation, and add span and memory to its reply.

            span: (start, end) in seconds since the epoch. host_bytes: memory of this process
            without mapped files. device_bytes: peak memory of tensors on its device while the
            operation ran (on a CPU: what it has allocated); absent if it is not known. Then wake
            threads that wait on `arrival`.
            """
            started = time.time()
            start_seconds = time.monotonic()
            with self._peaks.measure() as peak:
                self.store.free(plain.get("free", []))
                reply = operation(plain, number)
            self._arrival.wake()  # early methods wait for workers and data too
            span = (started, started + time.monotonic() - start_seconds)
            measured = {"span": span, "host_bytes": _host_bytes()}
            if peak.bytes is not None:
                measured["device_bytes"] = peak.bytes
            return reply | measured

        return run

    # Building

    def _make_groups(self, plain: Plain, number: int) -> dict[str, Any]:
        """Make process groups; all ranks of the world make the same ones together.

        plain["specs"]: (ranks, lane, backend) of each, or None if no more will come. On the rank
        that informs ranks outside the run, it announces the specs to them first, so that they take
        part. Existing groups are not made again.
        """
        specs = plain["specs"]
        if self._settings.announce is not None:
            self._settings.announce(specs)
        wanted = [GroupSpec(tuple(ranks), *kind) for ranks, *kind in specs or ()]
        self._groups.make(wanted, self._settings.device)
        return {}

    def _spawn(self, plain: Plain, number: int) -> dict[str, Any]:
        """Construct this rank's worker of a model, and register it under plain["name"].

        The workers that are there free device memory first. The first rank of the layout also logs
        it, and hashes the model's weights if they are frozen.
        """
        settings = self._settings
        context = WorkerContext(
            name=plain["name"],
            layout=Layout(**plain["layout"] | {"ranks": tuple(plain["layout"]["ranks"])}),
            rank=settings.rank,
            groups=self._groups,
            device=settings.device,
            seed=settings.seed,
            total_steps=plain["total_steps"],
            run_dir=settings.run_dir,
            call_seconds=settings.call_seconds,
            nodes=plain["nodes"],
            workers=self._workers,
        )
        worker_class = find_worker_class(plain["class"])
        is_first = settings.rank == context.layout.ranks[0]
        if is_first:
            logger.info("%s: building %s, %s", context.name, worker_class.__name__, context.layout)
        self._make_room(plain["name"], trains=True)
        self._workers[plain["name"]] = worker_class(plain["config"], context)
        if is_first:
            self._files.hash_frozen(plain["name"])
        return {}

    def _make_room(self, name: str, *, trains: bool) -> None:
        """Let the workers of this rank but `name` free device memory that can be reallocated.

        trains: see `Worker.make_room`.
        """
        for other, worker in self._workers.items():
            if other != name:
                worker.make_room(trains=trains)

    def _scan(self, plain: Plain, number: int) -> dict[str, Any]:
        """Read a data file, and reply with the report on its first plain["most_rows"] good rows.

        Reply: "report", and "is_whole", whether these are all. If rows are left, this rank keeps
        the report for `_scan_more`. A rank does this and not the controller, because it needs a
        tokenizer.
        """
        data = plain["data"]
        report = scan(data, plain["path"], load_tokenizer(data.tokenizer_path))
        most = plain["most_rows"]
        is_whole = len(report.rows) <= most
        self._scanned = None if is_whole else report
        return {"report": report.part(0, most), "is_whole": is_whole}

    def _scan_more(self, plain: Plain, number: int) -> dict[str, Any]:
        """Reply with good rows `start` to `start + most_rows` of the file that was scanned last.

        Forgets the report after its last row ("is_whole" is true). AssertionError if there is none.
        """
        assert self._scanned is not None, "no file was scanned"
        stop = plain["start"] + plain["most_rows"]
        is_whole = len(self._scanned.rows) <= stop
        reply = {"report": self._scanned.part(plain["start"], stop), "is_whole": is_whole}
        if is_whole:
            self._scanned = None
        return reply

    def _open_source(self, plain: Plain, number: int) -> dict[str, Any]:
        self._sources[plain["name"]] = PromptSource(plain["files"], plain["data"])
        return {}

    # Rows

    def _spec_of(self, group: str, method: str) -> MethodSpec:
        """Return the `MethodSpec` of a worker's method, cached by (group, method).

        ProtocolError if the method does not exist or is not registered.
        """
        key = (group, method)
        if key not in self._specs:
            worker = self._workers[group]
            self._specs[key] = method_spec(type(worker), method).with_settings(worker.cfg)
        return self._specs[key]

    def _call(self, plain: Plain, number: int) -> dict[str, Any]:
        """Run a worker's method, store the columns that it returns, and reply with its metrics.

        Without plain["ids"] the method gets plain["item"], if any, and the reply has its "value".
        Otherwise it gets the rows as a TensorDict, after the other workers of this rank have freed
        device memory (`make_room`); worker.call and worker.early_result are set for it. What a
        method with `writes` returns is stored as result `number` for the rows plain["holds"]; None:
        this rank stores nothing. ColumnError if the method changed its input in place, or returned
        other columns than `writes`.
        """
        worker = self._workers[plain["group"]]
        spec = self._spec_of(plain["group"], plain["method"])
        method = getattr(worker, plain["method"])
        if plain.get("ids") is None:
            items = [plain["item"]] if "item" in plain else []
            value = method(*items, **plain["arguments"])
            return {"value": value, "metrics": worker.take_metrics()}
        label = f"{plain['group']}.{plain['method']}"
        unchanged = Unchanged()
        batch = self._batch(plain, unchanged)
        worker.call = Command.on_rows(plain, number)
        worker.early_result = self._early.take(number) if "early" in plain else None
        self._make_room(plain["group"], trains=spec.minibatches)
        with self._profile(plain["step"], label):
            returned = method(batch, **plain["arguments"])
        unchanged.check(label)
        reply: dict[str, Any] = {"metrics": worker.take_metrics()}
        if not spec.writes:
            return reply | {"value": returned}
        if plain["holds"] is None:
            return reply | {"columns": {}}
        return reply | self._keep(label, number, plain["holds"], returned, spec.writes)

    def _profile(self, step: int, label: str) -> AbstractContextManager[object]:
        """The range of a call in torch.profiler's record, if this rank makes one."""
        if self._profiler is None:
            return nullcontext()
        return self._profiler.call(step, label)

    def _begin(self, plain: Plain, number: int) -> dict[str, Any]:
        """Start the early method of a call in a thread, before the call's turn (comm thread).

        The thread waits until the worker, the data files and all rows that other calls make are
        here. Starts nothing if all rows come from data files. `_call` takes the result at its turn.
        """
        parts_of_calls = []
        for part in plain["inputs"]:
            if "source" not in part:
                parts_of_calls.append(part)
        sources = set()
        for part in plain["inputs"]:
            if "source" in part:
                sources.add(part["source"])
        if not parts_of_calls:  # no rows to wait for: it would start no earlier
            return {}

        def is_there() -> bool:
            return plain["group"] in self._workers and sources <= self._sources.keys()

        def wait() -> None:
            """Wait until worker, data files and the rows of other calls are on this rank."""
            self._arrival.wait(is_there)
            for part in parts_of_calls:
                if self._settings.waits_for_rows:
                    self.store.wait(part["result"], part["columns"], part["ids"])

        def run() -> Any:
            worker = self._workers[plain["group"]]
            early = method_spec(type(worker), plain["method"]).early  # whatever the command says
            return getattr(worker, str(early))(
                self._batch(plain, Unchanged()), Command.on_rows(plain, number)
            )

        self._early.begin(number, wait, run)
        return {}

    def _map(self, plain: Plain, number: int) -> dict[str, Any]:
        """Run a map function on this rank's rows, and store its columns as result `number`.

        Replies with its metrics. As far as it declares them, the function also gets `reduce`
        (collective over plain["ranks"]), `report` and `groups`. ProtocolError if it is not marked
        as a map function. ColumnError if it changes its input in place, returns other columns than
        it declares, or combines ragged columns of different row lengths.
        """
        function = find_map_function(plain["function"])  # refuses what is not marked
        spec = map_spec(function)
        metrics: dict[str, Metric] = {}
        reduce = self._groups.reducer(tuple(plain["ranks"]))
        more: dict[str, Any] = {"reduce": reduce, "report": metrics.update}
        if "groups" in plain:
            index, index_in_group = (torch.from_numpy(plain[name]) for name in ("groups", "places"))
            more["groups"] = RowGroups(
                index, plain["num_groups"], reduce, index_in_group, plain["largest_group"]
            )
        arguments = plain["arguments"] | {name: more[name] for name in spec.rank_arguments}
        label = f"map.{function.__name__}"
        unchanged = Unchanged()
        batch = self._batch(plain, unchanged)
        with self._profile(plain["step"], label), _explaining_lengths(label):
            returned_columns = function(batch, **arguments)
        unchanged.check(label)
        kept = self._keep(label, number, plain["ids"], returned_columns, spec.writes)
        return {"metrics": metrics} | kept

    def _join(self, plain: Plain, number: int) -> dict[str, Any]:
        """Concatenate the rows of several results, and store them as the result `number`.

        The rows of plain["inputs"] are appended in order, and get the row ids plain["ids"]. All
        inputs have the columns of the first. Waits for rows that are not here yet. Replies with the
        spec and row lengths of each column.
        """
        parts = [self._input(part) for part in plain["inputs"]]
        columns = {}
        for name in parts[0]:
            columns[name] = join([part[name] for part in parts])
        return self._put(number, plain["ids"], columns)

    def _batch(self, plain: Plain, unchanged: Unchanged) -> TensorDict:
        """Return the rows plain["ids"] as a TensorDict in host memory, with all input columns.

        Waits for rows that transfers bring. Values are not copied; text columns are lists of str.
        Ragged columns of equal row lengths share their offsets, so that they can be added and
        compared. unchanged: remembers the columns, to detect a method that writes into them.
        """
        ids = plain["ids"]
        batch = TensorDict({}, batch_size=[len(ids)])
        offsets: list[Tensor] = []
        for part in plain["inputs"]:
            columns = self._input(part)
            unchanged.remember(columns)
            for name, column in columns.items():
                value = column.to_value()
                if isinstance(value, list):
                    batch.set_non_tensor(name, value)
                else:
                    batch[name] = with_offsets(value, offsets) if is_ragged(value) else value
        return batch

    def _input(self, part: Plain) -> dict[str, Column]:
        """Return the columns of one entry of plain["inputs"], under the names that the method sees.

        Rows of a data file are read first if they are not here. Waits for rows of other calls, or
        raises RowError if no other thread can bring them.
        """
        if "source" in part:
            self._read_source(part)
        columns_of_result = self.store.take(
            part["result"], part["columns"], part["ids"], waits=self._settings.waits_for_rows
        )
        columns = {}
        for seen, stored in names_in(part):
            columns[seen] = columns_of_result[stored]
        return columns

    def _read_source(self, part: Plain) -> None:
        with self._reading:  # early methods read too
            self._read_missing(part)

    def _read_missing(self, part: Plain) -> None:
        """Read those rows of a data file that are not in the store, and put them there.

        Only rows whose "prompts" are missing are read. DataError if the file has changed.
        """
        result = part["result"]
        ids = part["ids"]
        lacking = np.isin(ids, self.store.missing(result, "prompts", ids))
        if not lacking.any() and self.store.has(result):
            return
        rows = self._sources[part["source"]].read_rows(part["rows"][lacking].tolist())
        columns = {}
        for name in map(str, rows.keys()):
            columns[name] = column_of(name, rows[name], int(lacking.sum()))
        self.store.put(result, ids[lacking], columns)

    def _keep(
        self, label: str, number: int, ids: Ids, returned_columns: Any, writes: Sequence[str]
    ) -> dict[str, Any]:
        """Store what a method returned as the rows `ids` of the result `number`.

        Returns a part of the reply: "columns" (`_put`) and "copied_bytes", the bytes of CPU tensors
        that were copied. ColumnError if the columns are not exactly `writes`, or if one has a wrong
        type or row count.
        """
        names = sorted(returned_columns.keys()) if hasattr(returned_columns, "keys") else None
        if names != sorted(writes):
            got = type(returned_columns).__name__ if names is None else f"columns {names}"
            raise ColumnError(
                f"{label}: returned {got}, expected columns {sorted(writes)}; "
                f"return exactly what `writes` declares"
            )
        try:
            columns = {}
            for name in writes:
                columns[name] = column_of(name, returned_columns[name], len(ids))
        except ColumnError as err:
            raise ColumnError(f"{label}: {err}") from err
        copied = sum(
            columns[name].values.nbytes
            for name in writes
            if isinstance(returned_columns[name], Tensor)
            and returned_columns[name].device.type == "cpu"
        )
        return self._put(number, ids, columns) | {"copied_bytes": copied}

    def _put(self, number: int, ids: Ids, columns: dict[str, Column]) -> dict[str, Any]:
        """Store columns as the rows `ids` of the result `number`, and describe them for the reply.

        Returns {"columns": name -> [spec as plain data, row lengths (B,) or None if dense]}.
        """
        self.store.put(number, ids, columns)
        facts = {}
        for name, column in columns.items():
            lengths = None if column.lengths is None else column.lengths.numpy()
            facts[name] = [column.spec.to_plain(), lengths]
        return {"columns": facts}

    def _fetch(self, plain: Plain, number: int) -> dict[str, Any]:
        (column,) = self._input(plain["input"]).values()
        return {"column": to_message(column)}

    def _transfer(self, plain: Plain, number: int) -> dict[str, Any]:
        run_release(number, plain, self.store, self._transport)
        return self._transport.take_counts()

    def _halt(self, plain: Plain, number: int) -> dict[str, Any]:
        self._workers[plain["group"]].halt(plain["turn"])
        return {}

    # The end

    def _close(self, plain: Plain, number: int) -> dict[str, Any]:
        self.close()
        return {}

    def close(self) -> None:
        """Write the running profile, close every worker, and end the threads of early methods.

        Workers are closed in reverse order of creation and forgotten. An error of one does not
        prevent the others: the first error is raised at the end. A second call closes no worker
        again.
        """
        if self._profiler is not None:
            self._profiler.close()
        if self._allocated is not None:
            self._allocated.end()
        errors = []
        while self._workers:
            _, worker = self._workers.popitem()
            try:
                worker.close()
            except (SpmdflowError, OSError, RuntimeError) as err:
                errors.append(err)
        try:
            self._early.end()
        except DeadlineError as err:
            errors.append(err)
        if errors:
            raise errors[0]


@contextmanager
def _explaining_lengths(label: str) -> Iterator[None]:
    """Turn torch's RuntimeError about ragged columns of different row lengths into a ColumnError.

    It is recognised by "pointwise function" in its text. Other errors are passed on.
    """
    try:
        yield
    except RuntimeError as err:
        if "pointwise function" not in str(err):
            raise
        raise ColumnError(
            f"{label}: {err}; got ragged columns whose rows have different lengths, expected equal "
            f"ones (columns of equal lengths can be added, multiplied and compared); give both one "
            f"width with pad(column, width=...), or go row by row with rows_of(column)"
        ) from err


def _host_bytes() -> int:
    """Bytes of host memory that only this process uses: no mapped files and no shared memory."""
    with open("/proc/self/statm", "rb") as file:
        _, resident, shared, *_ = file.read().split()
    return (int(resident) - int(shared)) * resource.getpagesize()
