"""What ranks would have answered: column kinds, lengths, examples. No values but examples.

A result's lengths come, in this order, from the run that is replayed, from a column of the inputs
that is as long, from the data file, from `flow.assume`, from the settings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from spmdflow.data.column import Column, to_message
from spmdflow.datasets.scan import ScanReport
from spmdflow.plan.example import PROMPTS, ColumnForm, Examples
from spmdflow.plan.record import received_bytes
from spmdflow.plan.replay import ColumnLengths, Columns, Plain, Replay, RowLengths, unique_ids
from spmdflow.runtime.message import find
from spmdflow.runtime.order import Replies, names_in
from spmdflow.transfer.register import map_spec, method_spec

Commands = Mapping[int, Plain]


class Answers:
    """The replies to every kind of order."""

    def __init__(
        self,
        examples: Examples,
        longest: Mapping[str, int],
        scan: Callable[[Any, str], ScanReport],
        replay: Replay,
    ) -> None:
        """longest: tokens of prompts and responses where neither data nor examples say."""
        self.examples, self._longest, self._scan = examples, longest, scan
        self._replay = replay
        self._classes: dict[str, type] = {}
        self.rows = RowLengths()

    def to(self, label: str, number: int, commands: Commands) -> Replies:
        """Reply payloads by rank."""
        plain = next(iter(commands.values()))
        operation = str(plain["operation"])
        if operation in ("scan", "call", "map", "join", "fetch"):
            self._replay.go_to(label)
        if operation == "spawn":
            self._classes[plain["name"]] = find(plain["class"])
        elif operation == "scan":
            report = self._replay.report or self._scan(plain["data"], plain["path"])
            self.rows.scans[label.removesuffix(".scan")] = report
            return {rank: {"report": report} for rank in commands}
        elif operation == "call":
            spec = method_spec(self._classes[plain["group"]], plain["method"])
            if plain.get("ids") is not None and spec.writes:
                return self._to_rows(number, commands, spec.writes)
            said, value = self._replay.values, self.examples.answer(label)
            return {rank: {"value": said.get(rank, value)} for rank in commands}
        elif operation == "map":
            writes = map_spec(find(plain["function"])).writes
            holding = {rank: {**given, "holds": given["ids"]} for rank, given in commands.items()}
            return self._to_rows(number, holding, writes)
        elif operation == "join":
            return self._to_join(number, commands)
        elif operation == "fetch":
            return self._to_fetch(commands)
        elif operation == "transfer":
            return self._to_transfer(commands)
        return {rank: {} for rank in commands}

    # Rows

    def _to_rows(self, number: int, commands: Commands, writes: tuple[str, ...]) -> Replies:
        recorded = self._replay.columns
        everyone = unique_ids(plain["holds"] for plain in commands.values()) if recorded else None
        known: dict[bytes, dict[str, Any]] = {}  # tensor-parallel peers hold the same rows
        replies: Replies = {}
        for rank, plain in commands.items():
            ids = plain["holds"]
            if ids is None:
                replies[rank] = {"columns": {}}
                continue
            key = ids.tobytes()
            if key not in known:
                at = None if everyone is None else np.searchsorted(everyone, ids)
                columns = {n: self._column(number, n, plain, ids, recorded, at) for n in writes}
                known[key] = {"columns": columns}
            replies[rank] = known[key]
        return replies

    def _column(
        self,
        number: int,
        name: str,
        plain: Plain,
        ids: np.ndarray,
        recorded: Columns,
        at: Any,
    ) -> list[Any]:
        """Kind and items of the rows ids of one column; at: their places in the run's (Any: an
        array, or None where nothing was recorded)."""
        result, form = self.rows.results.setdefault(number, {}), self.examples.form(name)
        spec, recorded_items = recorded.get(name, (form.spec, None))
        made = result.setdefault(name, ColumnLengths(spec))
        if made.spec.kind == "dense":
            return [made.spec.to_plain(), None]
        items = self._items(form, plain, ids) if recorded_items is None else recorded_items[at]
        made.add(ids, items)
        return [made.spec.to_plain(), items]

    def _items(self, form: ColumnForm, plain: Plain, ids: np.ndarray) -> np.ndarray:
        """(n,) int64: items of the rows ids, which the command makes from its inputs."""
        for part in plain["inputs"]:
            for seen, name in names_in(part):
                other = self.examples.form(seen)
                if other.like != form.like or other.spec.kind == "dense":
                    continue
                items = self.rows.of_input(name, part)
                if items is None:
                    continue
                order = np.argsort(plain["ids"], kind="stable")
                place = np.searchsorted(plain["ids"], ids, sorter=order)
                place = order[np.minimum(place, len(order) - 1)] if len(ids) else order[:0]
                if np.array_equal(plain["ids"][place], ids):  # else it holds rows it was not given
                    return items[place] // other.items_per_token * form.items_per_token
        tokens = self.examples.tokens(form.like, ids, self._longest[form.like])
        return tokens * form.items_per_token

    def _to_join(self, number: int, commands: Commands) -> Replies:
        result = self.rows.results.setdefault(number, {})
        replies: Replies = {}
        for rank, plain in commands.items():
            columns = {}
            for name, _ in names_in(plain["inputs"][0]):
                if name not in result:
                    result[name] = ColumnLengths(self._made_by_a_call(name, commands).spec)
                items, spec = None, result[name].spec
                if spec.kind != "dense":
                    parts = [(dict(names_in(part))[name], part) for part in plain["inputs"]]
                    items = np.concatenate([self._known_items(n, part) for n, part in parts])
                    result[name].add(plain["ids"], items)
                columns[name] = [spec.to_plain(), items]
            replies[rank] = {"columns": columns}
        return replies

    def _made_by_a_call(self, name: str, commands: Commands) -> ColumnLengths:
        """A part of a joined column that a call has made; controller/rows.py sees to it."""
        parts = (part for plain in commands.values() for part in plain["inputs"])
        part = next(part for part in parts if "source" not in part)
        return self.rows.results[part["result"]][dict(names_in(part))[name]]

    def _known_items(self, name: str, part: Plain) -> np.ndarray:
        """Items of an input's rows; of a data file's column without lengths, from the settings."""
        items = self.rows.of_input(name, part)
        if items is None:
            each = self._longest[PROMPTS] * self.examples.form(name).items_per_token
            items = np.full(len(part["ids"]), each)
        return items

    # Values

    def _to_fetch(self, commands: Commands) -> Replies:
        recorded = self._replay.fetched
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
        """Example values of a stored column, under the name that the script knows."""
        ids, ((seen, name),) = part["ids"], names_in(part)
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
        return Column(spec.kind, torch.full(size, fill, dtype=dtype), torch.from_numpy(items))

    def _to_transfer(self, commands: Commands) -> Replies:
        """Bytes that would have been counted, from what each receiver is told to expect."""
        sent: dict[int, dict[int, int]] = {}
        headers: dict[int, int] = {}
        replies: Replies = {}
        for rank, plain in commands.items():
            received: dict[int, int] = {}
            for edge in plain["receives"]:
                source, columns, ids = edge[:3]
                size = received_bytes(edge)
                if source == rank or not len(ids):
                    continue
                headers[source] = headers.get(source, 0) + 8 * (1 + len(columns))
                if size:
                    received[source] = received.get(source, 0) + size
                    to = sent.setdefault(source, {})
                    to[rank] = to.get(rank, 0) + size
            replies[rank] = {"received": received}
        for rank, reply in replies.items():
            reply["sent"], reply["header_bytes"] = sent.get(rank, {}), headers.get(rank, 0)
        return replies
