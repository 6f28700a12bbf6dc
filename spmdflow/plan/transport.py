"""`DryRunTransport` sends nothing and writes every call down with its line; `Answers` has what the
ranks would have replied: column kinds, lengths, examples, no values but examples.

The Transport surface of `runtime.call`; calls submitted while another is answered follow it, as
with sockets. A result's lengths come, in this order, from the run that is replayed, from a column
of the inputs that is as long, from the data file, from `flow.assume`, from the settings.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spmdflow.data.column import Column, to_message
from spmdflow.datasets.scan import ScanReport
from spmdflow.errors import PlanError
from spmdflow.log import PLANNING
from spmdflow.models.turn import replays_routes
from spmdflow.plan.example import (
    JSON_COLUMNS,
    PROMPTS,
    RESPONSES,
    ROWS,
    SEGMENTS,
    TOOL_TEXT,
    Examples,
    scan_or_assume,
)
from spmdflow.plan.record import (
    BytesByEdge,
    Key,
    Tokens,
    bytes_by_edge,
    row_edges,
)
from spmdflow.plan.replay import (
    ColumnLengths,
    Commands,
    Plain,
    Replay,
    RowLengths,
    fetched_column,
    unique_ids,
)
from spmdflow.router import ROUTES, Routers, route_dtype
from spmdflow.runtime.call import (
    Call,
    ImmediateTransport,
    OnDone,
    Pending,
    Replies,
    names_in,
    refuse_to_wait,
)
from spmdflow.runtime.executor import COMPUTE
from spmdflow.weights.folder import causal_lm_on_meta
from spmdflow.worker_api.register import MethodSpec, find_map_function, map_spec, method_spec
from spmdflow.worker_api.worker import find_worker_class

Lines = tuple[int, ...]
"""Lines of the script that were running, the innermost first: a helper's, then its caller's."""

planning = logging.getLogger(PLANNING)

MOST_CALLS = 100
"""Calls of one step, or before the first; a script that makes more is taken for one that never
ends its step."""


class DryRunTransport(ImmediateTransport):
    """Calls of a script that runs on no rank."""

    def __init__(
        self, nodes: Sequence[int], answers: Answers, script_file: str, *, most_calls: int
    ) -> None:
        """nodes: the node of each rank of the world."""
        super().__init__()
        self.world_size = len(nodes)
        self._nodes = tuple(nodes)
        self.answers = answers
        self._file = script_file
        self._most_calls = most_calls
        self._num_calls = 0
        self.calls: list[Call] = []
        self.waits: list[tuple[Lines, str]] = []
        """(lines, what was waited for) of every look at a result from the script."""
        self.paths: list[Lines] = []
        """Of every call of a step: the script's lines that led to it."""
        self.steps: list[int] = []
        """Numbers of the steps that began."""
        self.is_looking = True
        """Whether results are asked for by the script, not by the end of a step."""
        self.tokens: dict[Key, Tokens] = {}
        self.edges: dict[int, BytesByEdge] = {}
        """Row bytes by step and (source, destination), as the controller's own account has them."""

    # Steps: what the observer of the dry run tells

    def begin_step(self, number: int) -> None:
        """A step begins: count its calls from 0."""
        self.steps.append(number)
        self._num_calls = 0

    def end_step(self, number: int, planned: Counter[tuple[int, int]]) -> None:
        """A step is over. planned: row bytes by edge since the first one."""
        self.edges[number] = dict(planned - sum(map(Counter, self.edges.values()), Counter()))

    @property
    def step(self) -> int:
        """Number of the step that runs; 0 before the first."""
        if self.steps:
            return self.steps[-1]
        return 0

    def use(self, names: Iterable[str]) -> None:
        """The script reads these metrics."""
        if self.is_looking:
            self.answers.examples.use(names)

    # The transport's surface

    def submit(self, call: Call, on_done: OnDone | None = None) -> Pending:
        """Record a call with the script's line, answer it without ranks, return its `Pending`.

        Raises PlanError if the step has more calls in the compute lane than allowed. The answer
        follows the answers of calls submitted before. A fetch is recorded in the compute lane.
        Calls named reach and halt, which end another call early, get empty replies at once and are
        not recorded.
        """
        path = self.lines()
        line = path[0] if path else None
        if call.lane == COMPUTE:
            self._count(call.label, line)
        if self.step:
            self.paths.append(path)
        planning.debug("step %d on %d ranks: %s", self.step, len(self._nodes), call.label)
        if call.operation == "fetch":
            call = replace(call, lane=COMPUTE)  # by whichever lane it is answered
        call = replace(call, step=self.step, line=f"{self._file}:{line}" if line else "")
        pending = _WatchedPending(call, self, on_done)
        if call.operation in ("reach", "halt"):  # they end a call early, and are none themselves
            pending.resolve({rank: {} for rank in call.commands})
            return pending
        self.calls.append(call)
        self.post(partial(self._answer, pending))
        return pending

    def node_of(self, rank: int) -> int:
        """The node that a rank would run on."""
        return self._nodes[rank]

    def lines(self) -> Lines:
        """Return the script's line numbers on the call stack, innermost first; () if none."""
        lines = []
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_filename == self._file:
                lines.append(frame.f_lineno)
            frame = frame.f_back
        return tuple(lines)

    def _count(self, label: str, line: int | None) -> None:
        """Count one more call since the step began (before the first step: since the start).

        Raises PlanError with the call's label and line if there are now more than the allowed
        number.
        """
        self._num_calls += 1
        if self._num_calls <= self._most_calls:
            return
        when = f"in step {self.step}" if self.step else "before the first step"
        what = "the step to end" if self.step else "flow.steps(...) to begin"
        where = f"script line {line}"
        got = f"call {self._num_calls} ({label}) {when}"
        do = "a loop that waits for data may never see it here: declare what it waits "
        do += "for with flow.assume(name=value), or raise --calls"
        raise PlanError.of(where, got, f"{what} within {self._most_calls} calls", do)

    def _answer(self, pending: Pending) -> None:
        """Set the replies that a call's ranks would send, run its on_done, then resolve it.

        If the call has rows, their number and mean lengths are stored in `tokens`.
        """
        call = pending.call
        replies = self.answers.to(call)
        tokens = self.answers.rows.tokens(call.number, call.commands)
        if tokens is not None:
            self.tokens[call.key] = tokens
        pending.replies = replies
        pending.run_on_done()
        pending.resolve(replies)


class _WatchedPending(Pending):
    """Replies that are there at once; each look from the script is recorded."""

    def __init__(self, call: Call, transport: DryRunTransport, on_done: OnDone | None) -> None:
        super().__init__(call, refuse_to_wait, on_done)
        self._transport = transport

    def result(self) -> Replies:
        """Return the replies.

        If the script asks for them during a step, its lines and the call's label are added to the
        transport's `waits`.
        """
        if self._transport.is_looking and self._transport.step:
            path = self._transport.lines()
            if path:
                self._transport.waits.append((path, self.label))
        return super().result()


class Answers:
    """The replies to every kind of call."""

    def __init__(self, examples: Examples, replay: Replay | None, *, read_data: bool) -> None:
        """read_data: whether prompt lengths come from the data file, if it is there and small."""
        self.examples = examples
        self._replay = replay
        self._read_data = read_data
        self._classes: dict[str, type] = {}
        self._settings: dict[str, Any] = {}
        """Of each spawned model."""
        self.rows = RowLengths()
        self.notes: list[str] = []
        """Where the lengths of prompts come from."""

    def to(self, call: Call) -> Replies:
        """Return the payload that each rank would reply to a call.

        A call or map that writes columns gets their kinds, lengths and example metrics. Another
        call gets the value that a replayed run recorded, otherwise the declared example. scan,
        join, fetch and transfer have answers of their own; all other operations get {}. Stores new
        lengths in `rows` and, for a spawn, the model's worker class. A replayed run's answers to
        one label are used up in order.
        """
        commands = call.commands
        number = call.number
        plain = call.command
        recorded_answer = self._replay.answer(call.label) if self._replay is not None else {}
        known = self.rows.record_answer(number, call.label, commands, recorded_answer)
        match call.operation:
            case "spawn":
                self._spawn(plain)
            case "scan":
                return dict.fromkeys(commands, {"report": self._scan(call.label, plain)})
            case "call":
                spec = self._spec_of(plain)
                if plain.get("ids") is not None and spec.writes:
                    return self._to_rows(number, commands, spec.writes, known=known)
                value = self.examples.answer(call.label)
                values = recorded_answer.get("values", {})
                result = {}
                for rank in commands:
                    result[rank] = {"value": values.get(rank, value)}
                return result
            case "map":
                writes = map_spec(find_map_function(plain["function"])).writes
                return self._to_rows(number, commands, writes, known=known)
            case "join":
                return self._to_join(number, commands)
            case "fetch":
                return self._to_fetch(commands, fetched_column(recorded_answer))
            case "transfer":
                return _to_transfer(call)
        return {rank: {} for rank in commands}

    def _spawn(self, plain: Plain) -> None:
        """Remember a model's class and settings, and the form of a column that depends on it."""
        settings = plain["config"]
        self._classes[plain["name"]] = find_worker_class(plain["class"])
        self._settings[plain["name"]] = settings
        if replays_routes(settings):
            self.examples.add({ROUTES: _form_of_routes(settings.model.path)})

    def _spec_of(self, plain: Plain) -> MethodSpec:
        """Return the facts of the method that a command calls."""
        spec = method_spec(self._classes[plain["group"]], plain["method"])
        return spec.with_settings(self._settings[plain["group"]])

    def _scan(self, label: str, plain: Plain) -> ScanReport:
        """Return the scan report of the data source that `label` names, such as "train.scan".

        The first request reads or assumes the file (`scan_or_assume`), stores the report in
        `rows.scans`, and notes where its lengths come from. A report that is already known is
        returned as it is.
        """
        source = label.removesuffix(".scan")
        if source not in self.rows.scans:
            scanned = scan_or_assume(plain["data"], plain["path"], read_data=self._read_data)
            self.rows.scans[source], note = scanned
            self.notes.append(note)
        return self.rows.scans[source]

    # Rows

    def _to_rows(
        self, number: int, commands: Commands, writes: tuple[str, ...], *, known: bool
    ) -> Replies:
        """Return replies to a command that writes these columns, and store the columns' lengths.

        A reply has "columns": name -> [kind, items of each row], and "metrics". A rank that stores
        no rows gets {"columns": {}}. Ranks that store the same rows (tensor-parallel peers) share
        one reply.
        known: whether the lengths of the rows are those of a replayed run.
        """
        lengths = self.rows.results.setdefault(number, {})
        for name in writes:
            form = self.examples.form(name)
            lengths.setdefault(name, ColumnLengths(form.spec))
        reply_by_rows: dict[bytes, dict[str, Any]] = {}  # tensor-parallel peers hold the same rows
        replies: Replies = {}
        for rank, plain in commands.items():
            ids = plain.get("holds", plain["ids"])
            if ids is None:
                replies[rank] = {"columns": {}}
                continue
            key = ids.tobytes()
            if key not in reply_by_rows:
                columns = {}
                for n in writes:
                    columns[n] = self._column(lengths[n], n, plain, ids, known=known)
                reply_by_rows[key] = {"columns": columns, "metrics": self.examples.metrics()}
            replies[rank] = reply_by_rows[key]
        return replies

    def _column(
        self, lengths: ColumnLengths, name: str, plain: Plain, ids: np.ndarray, *, known: bool
    ) -> list[Any]:
        """Return [kind, items of the rows `ids`] of one column; items are None if it is dense.

        known: take the recorded items from `lengths`. Otherwise compute them and add them to
        `lengths`.
        """
        items = None
        if lengths.spec.kind != "dense":
            items = lengths.of(ids) if known else self._items(name, plain, ids)
            if not known:
                lengths.add(ids, items)
        return [lengths.spec.to_plain(), items]

    def _items(self, name: str, plain: Plain, ids: np.ndarray) -> np.ndarray:
        """Return (n,) int64: the items of the rows `ids` in a column that the command writes.

        The first of these that applies: the bytes of declared example texts; if the method
        continues responses, the old response + tool text + new tokens, limited to the longest
        response; the tokens of an input column with the same lengths (like prompts or responses);
        new tokens. New tokens are the example's, at most the argument max_new_tokens. In the last
        two cases, tokens are multiplied by the column's items per token.
        """
        form = self.examples.form(name)
        texts = self.examples.texts(name, ids)
        if texts is not None:
            return np.array([len(text.encode()) for text in texts], dtype=np.int64)
        if form.like == ROWS:
            return self._items(PROMPTS, plain, ids) + self._items(RESPONSES, plain, ids)
        drawn = self.examples.tokens(form.like, ids)
        if form.like == SEGMENTS:
            return drawn
        if most := plain.get("arguments", {}).get("max_new_tokens"):
            drawn = np.minimum(drawn, most)
        seen = {}
        for part in plain["inputs"]:
            for n, _ in names_in(part):
                seen[n] = part
        if self._goes_on(plain, seen):
            input_lengths = (
                self._known_lengths(n, seen, plain, ids) for n in (RESPONSES, TOOL_TEXT)
            )
            before, tool_tokens = (0 if tokens is None else tokens for tokens in input_lengths)
            grown = np.minimum(before + tool_tokens + drawn, self.examples.longest[RESPONSES])
            return np.maximum(before, grown)
        for other in seen:
            if self.examples.form(other).like == form.like:
                tokens = self._known_lengths(other, seen, plain, ids)
                if tokens is not None:
                    return tokens * form.items_per_token
        return drawn * form.items_per_token

    def _known_lengths(
        self, name: str, seen: Mapping[str, Plain], plain: Plain, ids: np.ndarray
    ) -> np.ndarray | None:
        """Return (n,) int64: the tokens of the rows `ids` in the input column `name`, or None.

        None if the command has no such input, the column is dense, its lengths are not known, or
        one of the rows is not among the command's rows. Items are divided by items per token,
        rounded up.
        seen: parts of the command's inputs, by the column names that the call sees.
        """
        form = self.examples.form(name)
        if name not in seen or form.spec.kind == "dense":
            return None
        items = self.rows.of_input(dict(names_in(seen[name]))[name], seen[name])
        order = np.argsort(plain["ids"], kind="stable")
        indices = np.searchsorted(plain["ids"], ids, sorter=order)
        indices = order[np.minimum(indices, len(order) - 1)] if len(ids) else order[:0]
        if items is None or not np.array_equal(plain["ids"][indices], ids):
            return None  # it holds rows that it was not given
        return -(-items[indices] // form.items_per_token)

    def _goes_on(self, plain: Plain, seen: Iterable[str]) -> bool:
        """Return whether a command calls a method that continues the responses of its input.

        This is a method with `extends` that writes at least one column of `seen`, its inputs.
        """
        if plain["operation"] != "call":
            return False
        spec = self._spec_of(plain)
        return spec.extends and not {*spec.writes}.isdisjoint(seen)

    def _to_join(self, number: int, commands: Commands) -> Replies:
        """Return replies to a join of rows: "columns": name -> [kind, items of each row].

        The items of the joined parts follow one another in the order of the inputs; they are None
        for a dense column. Kinds and items are stored in `rows.results` under the join's number.
        """
        result = self.rows.results.setdefault(number, {})
        replies: Replies = {}
        for rank, plain in commands.items():
            columns = {}
            for name, _ in names_in(plain["inputs"][0]):
                if name not in result:
                    result[name] = ColumnLengths(self._made_by_a_call(name, commands).spec)
                items = None
                spec = result[name].spec
                if spec.kind != "dense":
                    parts = []
                    for part in plain["inputs"]:
                        parts.append((dict(names_in(part))[name], part))
                    items = np.concatenate([self._known_items(n, part) for n, part in parts])
                    result[name].add(plain["ids"], items)
                columns[name] = [spec.to_plain(), items]
            replies[rank] = {"columns": columns}
        return replies

    def _made_by_a_call(self, name: str, commands: Commands) -> ColumnLengths:
        """A part of a joined column that a call has made; `Caller.join` sees to it."""
        parts = (part for plain in commands.values() for part in plain["inputs"])
        part = next(part for part in parts if "source" not in part)
        return self.rows.results[part["result"]][dict(names_in(part))[name]]

    def _known_items(self, name: str, part: Plain) -> np.ndarray:
        """Return (n,): the items of an input's rows, in the order of its row ids.

        A column without known lengths (of a data file) counts as the longest prompt the settings
        allow.
        """
        items = self.rows.of_input(name, part)
        if items is None:
            each = self.examples.longest[PROMPTS] * self.examples.form(name).items_per_token
            items = np.full(len(part["ids"]), each)
        return items

    # Values

    def _to_fetch(self, commands: Commands, recorded: Column | None) -> Replies:
        """Return replies to a fetch: "column": the values of each rank's rows as a message.

        recorded: the values of the replayed run, one row for each row id of all ranks, ascending.
        Without it, the values are examples.
        """
        everyone = unique_ids(plain["input"]["ids"] for plain in commands.values())
        replies: Replies = {}
        for rank, plain in commands.items():
            part = plain["input"]
            if recorded is not None:
                column = recorded.take(torch.from_numpy(np.searchsorted(everyone, part["ids"])))
            else:
                column = self._example_column(part)
            replies[rank] = {"column": to_message(column)}
        return replies

    def _example_column(self, part: Plain) -> Column:
        """Return example values of one stored column for the rows of a command's input part.

        Dense columns: the example of the name that the script sees, repeated to the row's shape;
        PlanError without an example. Text: the letter "x", or an empty object if the column holds
        JSON. Other ragged columns: zeros. Ragged rows have the known lengths; if these are unknown,
        the longest that the settings allow.
        """
        ids = part["ids"]
        ((seen, name),) = names_in(part)
        if "source" in part:
            spec = self.examples.form(name).spec
        else:
            spec = self.rows.results[part["result"]][name].spec
        dtype = getattr(torch, spec.dtype)
        if spec.kind == "dense":
            values = torch.from_numpy(self.examples.values(seen, ids, name)).to(dtype)
            shaped = values.view(-1, *[1] * len(spec.row_shape))
            return Column("dense", shaped.expand(-1, *spec.row_shape).contiguous())
        items = self._known_items(name, part)
        fill = ord("x") if spec.kind == "text" else 0
        size = (int(items.sum()), *spec.row_shape)
        values = torch.full(size, fill, dtype=dtype)
        if name in JSON_COLUMNS:
            _write_empty_objects(values, items)
        return Column(spec.kind, values, torch.from_numpy(items))


def _write_empty_objects(text: Tensor, items: np.ndarray) -> None:
    """Write {} and blanks into every row of a text column with room for it, in place."""
    text.fill_(ord(" "))
    starts = torch.from_numpy(items.cumsum() - items)[torch.from_numpy(items >= 2)]
    text[starts] = ord("{")
    text[starts + 1] = ord("}")


def _to_transfer(call: Call) -> Replies:
    """Return each rank's bytes sent and received, by the other rank, as ranks would count them.

    They follow from what each receiver is told to expect. header_bytes is 0.
    """
    replies: Replies = {r: {"sent": {}, "received": {}, "header_bytes": 0} for r in call.commands}
    for (source, rank), size in bytes_by_edge(row_edges([call])).items():
        replies[source]["sent"][rank] = replies[rank]["received"][source] = size
    return replies


def _form_of_routes(path: str) -> str:
    """The declaration of the column of routed experts, for the model in a folder."""
    routers = Routers.of(causal_lm_on_meta(path))
    assert routers is not None, path  # config.check_experts refuses a dense model
    dtype = str(route_dtype(routers.num_experts)).removeprefix("torch.")
    return f"{dtype}[{routers.num_layers},{routers.num_chosen}] like {ROWS}"
