"""What ranks would have answered: column kinds, lengths, examples. No values but examples.

A result's lengths come, in this order, from the run that is replayed, from a column of the inputs
that is as long, from the data file, from `flow.assume`, from the settings.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from spmdflow.data.column import Column, to_message
from spmdflow.datasets.scan import ScanReport
from spmdflow.plan.example import PROMPTS, ColumnForm, Examples, scan_or_assume
from spmdflow.plan.replay import (
    ColumnLengths,
    Commands,
    Plain,
    Replay,
    RowLengths,
    fetched_column,
    unique_ids,
)
from spmdflow.runtime.message import find
from spmdflow.runtime.order import Order, Replies, names_in
from spmdflow.transfer.register import map_spec, method_spec


class Answers:
    """The replies to every kind of order."""

    def __init__(self, examples: Examples, replay: Replay, *, read_data: bool) -> None:
        """read_data: whether prompt lengths come from the data file, if it is there and small."""
        self.examples, self._replay, self._read_data = examples, replay, read_data
        self._classes: dict[str, type] = {}
        self.rows = RowLengths()
        self.notes: list[str] = []
        """Where the lengths of prompts come from."""

    def to(self, order: Order) -> Replies:
        """Reply payloads by rank."""
        commands, number = order.commands, order.number
        plain, said = next(iter(commands.values())), self._replay.answer(order.label)
        known = self.rows.learn(number, order.label, commands, said)
        match plain["operation"]:
            case "spawn":
                self._classes[plain["name"]] = find(plain["class"])
            case "scan":
                return dict.fromkeys(commands, {"report": self._scan(order.label, plain)})
            case "call":
                spec = method_spec(self._classes[plain["group"]], plain["method"])
                if plain.get("ids") is not None and spec.writes:
                    return self._to_rows(number, commands, spec.writes, known=known)
                value, values = self.examples.answer(order.label), said.get("values", {})
                return {rank: {"value": values.get(rank, value)} for rank in commands}
            case "map":
                writes = map_spec(find(plain["function"])).writes
                return self._to_rows(number, commands, writes, known=known)
            case "join":
                return self._to_join(number, commands)
            case "fetch":
                return self._to_fetch(commands, fetched_column(said))
        return {rank: {} for rank in commands}

    def _scan(self, label: str, plain: Plain) -> ScanReport:
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
        """known: the lengths of the rows are those of a run."""
        made = self.rows.results.setdefault(number, {})
        for name in writes:
            form = self.examples.form(name)
            made.setdefault(name, ColumnLengths(form.spec))
        told: dict[bytes, dict[str, Any]] = {}  # tensor-parallel peers hold the same rows
        replies: Replies = {}
        for rank, plain in commands.items():
            ids = plain.get("holds", plain["ids"])
            if ids is None:
                replies[rank] = {"columns": {}}
                continue
            key = ids.tobytes()
            if key not in told:
                columns = {n: self._column(made[n], n, plain, ids, known=known) for n in writes}
                told[key] = {"columns": columns}
            replies[rank] = told[key]
        return replies

    def _column(
        self, made: ColumnLengths, name: str, plain: Plain, ids: np.ndarray, *, known: bool
    ) -> list[Any]:
        """Kind and items of the rows ids of one column."""
        items = None
        if made.spec.kind != "dense":
            items = made.of(ids) if known else self._items(self.examples.form(name), plain, ids)
            if not known:
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
        return self.examples.tokens(form.like, ids) * form.items_per_token

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
        """A part of a joined column that a call has made; `Caller.join` sees to it."""
        parts = (part for plain in commands.values() for part in plain["inputs"])
        part = next(part for part in parts if "source" not in part)
        return self.rows.results[part["result"]][dict(names_in(part))[name]]

    def _known_items(self, name: str, part: Plain) -> np.ndarray:
        """Items of an input's rows; of a data file's column without lengths, from the settings."""
        items = self.rows.of_input(name, part)
        if items is None:
            each = self.examples.longest[PROMPTS] * self.examples.form(name).items_per_token
            items = np.full(len(part["ids"]), each)
        return items

    # Values

    def _to_fetch(self, commands: Commands, recorded: Column | None) -> Replies:
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
