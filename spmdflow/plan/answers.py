"""What ranks would have answered: column kinds, lengths, examples. No values but examples.

A frame's lengths come, in this order, from the run that is replayed, from a column of the inputs
that is as long, from the data file, from `flow.assume`, from the settings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from spmdflow.data.column import Column, ColumnSpec, to_message
from spmdflow.datasets.scan import ScanReport
from spmdflow.plan.example import PROMPTS, RESPONSES, ColumnForm, Examples
from spmdflow.plan.record import Tokens, received_bytes
from spmdflow.plan.replay import Replay
from spmdflow.runtime.message import find
from spmdflow.runtime.order import Replies, names_in
from spmdflow.transfer.register import method_spec, row_maths_spec

Plain = Mapping[str, Any]
_NO_IDS = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True)
class Lengths:
    """Tokens of rows where neither data nor examples say: from the settings."""

    prompts: int
    responses: int


@dataclass
class _Facts:
    """One column of one frame: its form and, unless dense, items by row."""

    spec: ColumnSpec
    like: str
    ids: np.ndarray = field(default_factory=lambda: _NO_IDS)
    """Ascending."""
    items: np.ndarray = field(default_factory=lambda: _NO_IDS)

    def of(self, ids: np.ndarray) -> np.ndarray:
        """(n,) int64: items of the rows ids."""
        return self.items[np.searchsorted(self.ids, ids)]

    def add(self, ids: np.ndarray, items: np.ndarray) -> None:
        """Rows of one more rank; those that are known stay."""
        joined, first = np.unique(np.concatenate([self.ids, ids]), return_index=True)
        self.ids, self.items = joined, np.concatenate([self.items, items])[first]


class Answers:
    """The replies to every kind of order."""

    def __init__(
        self,
        examples: Examples,
        lengths: Lengths,
        scan: Callable[[Any, str], ScanReport],
        replay: Replay,
    ) -> None:
        self.examples, self._lengths, self._scan = examples, lengths, scan
        self._replay = replay
        self._classes: dict[str, type] = {}
        self._scans: dict[str, ScanReport] = {}
        self._frames: dict[int, dict[str, _Facts]] = {}

    def to(self, label: str, number: int, commands: Mapping[int, Plain]) -> Replies:
        """Reply payloads by rank."""
        operation = str(next(iter(commands.values()))["operation"])
        answer = {
            "scan": self._to_scan,
            "spawn": self._to_spawn,
            "source": self._to_source,
            "call": self._to_call,
            "map": self._to_map,
            "join": self._to_join,
            "fetch": self._to_fetch,
            "transfer": self._to_transfer,
        }.get(operation)
        if answer is None:
            return {rank: {} for rank in commands}
        if operation in ("scan", "call", "map", "join", "fetch"):
            self._replay.go_to(label)
        return answer(label, number, commands)

    def tokens(self, number: int, commands: Mapping[int, Plain]) -> Tokens | None:
        """Rows of a call and their mean tokens; None for orders without rows."""
        given = {id(p["inputs"]): p for p in commands.values() if p.get("ids") is not None}
        if not given or "inputs" not in next(iter(given.values())):
            return None
        rows = np.unique(np.concatenate([_NO_IDS, *(plain["ids"] for plain in given.values())]))
        means = {}
        for name in (PROMPTS, RESPONSES):
            parts = [
                (part["ids"], self._input_items(stored, part))
                for plain in given.values()
                for part in plain["inputs"]
                for seen, stored in names_in(part)
                if seen == name
            ]
            made = self._frames.get(number, {}).get(name)
            parts += [(made.ids, made.items)] if made else []
            known = [(ids, items) for ids, items in parts if items is not None]
            if known:
                first = np.unique(np.concatenate([i for i, _ in known]), return_index=True)[1]
                items = np.concatenate([n for _, n in known])[first]
                means[name] = float(items.mean()) if len(items) else 0.0
        return Tokens(len(rows), means.get(PROMPTS, 0.0), means.get(RESPONSES, 0.0))

    # Building

    def _to_scan(self, label: str, number: int, commands: Mapping[int, Plain]) -> Replies:
        replies: Replies = {}
        for rank, plain in commands.items():
            report = self._replay.report or self._scan(plain["data"], plain["path"])
            self._scans[label.removesuffix(".scan")] = report
            replies[rank] = {"report": report}
        return replies

    def _to_spawn(self, label: str, number: int, commands: Mapping[int, Plain]) -> Replies:
        plain = next(iter(commands.values()))
        self._classes[plain["name"]] = find(plain["class"])
        return {rank: {} for rank in commands}

    def _to_source(self, label: str, number: int, commands: Mapping[int, Plain]) -> Replies:
        return {rank: {} for rank in commands}

    # Rows

    def _to_call(self, label: str, number: int, commands: Mapping[int, Plain]) -> Replies:
        plain = next(iter(commands.values()))
        spec = method_spec(self._classes[plain["group"]], plain["method"])
        if plain.get("ids") is None or not spec.writes:
            said = self._replay.values
            value = self.examples.answer(label)
            return {rank: {"value": said.get(rank, value)} for rank in commands}
        return self._rows(label, number, commands, spec.writes)

    def _to_map(self, label: str, number: int, commands: Mapping[int, Plain]) -> Replies:
        plain = next(iter(commands.values()))
        writes = row_maths_spec(find(plain["function"])).writes
        holding = {rank: {**plain, "holds": plain["ids"]} for rank, plain in commands.items()}
        return self._rows(label, number, holding, writes)

    def _rows(
        self, label: str, number: int, commands: Mapping[int, Plain], writes: tuple[str, ...]
    ) -> Replies:
        frame = self._frames.setdefault(number, {})
        recorded = self._replay.columns
        everyone = self._all_ids(commands) if recorded else _NO_IDS
        known: dict[bytes, dict[str, Any]] = {}  # tensor-parallel peers hold the same rows
        replies: Replies = {}
        for rank, plain in commands.items():
            ids = plain["holds"]
            if ids is None:
                replies[rank] = {"columns": {}}
                continue
            key = ids.tobytes()
            if key not in known:
                columns = {}
                for name in writes:
                    at = np.atleast_1d(np.searchsorted(everyone, ids))
                    place = at if name in recorded else None
                    columns[name] = self._made(frame, name, plain, ids, place)
                known[key] = {"columns": columns}
            replies[rank] = known[key]
        return replies

    def _made(
        self,
        frame: dict[str, _Facts],
        name: str,
        plain: Plain,
        ids: np.ndarray,
        recorded_at: np.ndarray | None,
    ) -> list[Any]:
        """Kind and items of the rows ids of one column; recorded_at: their places in the run's."""
        recorded = self._replay.columns.get(name) if recorded_at is not None else None
        if name not in frame:
            form = self.examples.form(name)
            frame[name] = _Facts(recorded[0] if recorded else form.spec, form.like)
        facts = frame[name]
        if facts.spec.kind == "dense":
            return [facts.spec.to_plain(), None]
        if recorded and recorded[1] is not None:
            items = recorded[1][recorded_at]
        else:
            items = self._items(name, plain, ids)
        facts.add(ids, items)
        return [facts.spec.to_plain(), items]

    @staticmethod
    def _all_ids(commands: Mapping[int, Plain]) -> np.ndarray:
        parts = {
            plain["holds"].tobytes(): plain["holds"]
            for plain in commands.values()
            if plain["holds"] is not None
        }
        return np.unique(np.concatenate([_NO_IDS, *parts.values()]))

    def _items(self, name: str, plain: Plain, ids: np.ndarray) -> np.ndarray:
        """(n,) int64: items of the rows ids, which the command makes from its inputs."""
        form = self.examples.form(name)
        given = self._given_items(form, plain, ids)
        if given is None:
            otherwise = getattr(self._lengths, form.like)
            given = self.examples.tokens(form.like, ids, otherwise) * form.items_per_token
        return given

    def _given_items(self, form: ColumnForm, plain: Plain, ids: np.ndarray) -> np.ndarray | None:
        """Items of rows that are as long as an input's; None if no input is."""
        for part in plain["inputs"]:
            for seen, name in names_in(part):
                other = self.examples.form(seen)
                if other.like != form.like or other.spec.kind == "dense":
                    continue
                items = self._input_items(name, part)
                if items is None:
                    continue
                order = np.argsort(plain["ids"], kind="stable")
                place = np.searchsorted(plain["ids"], ids, sorter=order)
                place = order[np.minimum(place, len(order) - 1)] if len(ids) else order[:0]
                if not np.array_equal(plain["ids"][place], ids):
                    continue  # the rank holds rows that it was not given
                return items[place] // other.items_per_token * form.items_per_token
        return None

    def _input_items(self, name: str, part: Plain) -> np.ndarray | None:
        """Items of an input's rows, aligned with the ids of its command."""
        if "source" not in part:
            facts = self._frames[part["frame"]][name]
            return None if facts.spec.kind == "dense" else facts.of(part["ids"])
        if name not in ("prompts", "loss_mask"):
            return None
        return self._scans[part["source"]].tokens_of(part["rows"])

    def _to_join(self, label: str, number: int, commands: Mapping[int, Plain]) -> Replies:
        frame = self._frames.setdefault(number, {})
        replies: Replies = {}
        for rank, plain in commands.items():
            columns = {}
            for name, _ in names_in(plain["inputs"][0]):
                facts = frame.get(name) or self._joined_facts(name, commands)
                frame[name] = facts
                items = None
                if facts.spec.kind != "dense":
                    parts = [(dict(names_in(part))[name], part) for part in plain["inputs"]]
                    items = np.concatenate([self._known_items(n, part) for n, part in parts])
                    facts.add(plain["ids"], items)
                columns[name] = [facts.spec.to_plain(), items]
            replies[rank] = {"columns": columns}
        return replies

    def _joined_facts(self, name: str, commands: Mapping[int, Plain]) -> _Facts:
        """What a part that a call has made knows of a column."""
        for plain in commands.values():
            for part in plain["inputs"]:
                if "source" not in part:
                    made = self._frames[part["frame"]][dict(names_in(part))[name]]
                    return _Facts(made.spec, made.like)
        raise AssertionError(f"no part of {name} was made")  # controller/join.py sees to it

    def _known_items(self, name: str, part: Plain) -> np.ndarray:
        """Items of an input's rows; of a data file's column without lengths, from the settings."""
        items = self._input_items(name, part)
        if items is None:
            each = self._lengths.prompts * self.examples.form(name).items_per_token
            items = np.full(len(part["ids"]), each)
        return items

    # Values

    def _to_fetch(self, label: str, number: int, commands: Mapping[int, Plain]) -> Replies:
        recorded = self._replay.fetched
        ids = [plain["input"]["ids"] for plain in commands.values()]
        everyone = np.unique(np.concatenate([_NO_IDS, *ids]))
        replies: Replies = {}
        for rank, plain in commands.items():
            part = plain["input"]
            ((seen, name),) = names_in(part)
            if recorded is not None:
                place = torch.from_numpy(np.searchsorted(everyone, part["ids"]))
                column = recorded.take(place)
            else:
                column = self._example_column(name, part, seen)
            replies[rank] = {"column": to_message(column)}
        return replies

    def _example_column(self, name: str, part: Plain, seen: str) -> Column:
        """Example values of a stored column, which the script knows as `seen`."""
        ids, items = part["ids"], None
        if "source" in part:
            spec, items = self.examples.form(name).spec, self._known_items(name, part)
        else:
            facts = self._frames[part["frame"]][name]
            spec = facts.spec
            items = None if spec.kind == "dense" else facts.of(ids)
        dtype = getattr(torch, spec.dtype)
        if spec.kind == "dense":
            values = torch.from_numpy(self.examples.values(seen, ids, name)).to(dtype)
            shaped = values.view(-1, *[1] * len(spec.row_shape))
            return Column("dense", shaped.expand(-1, *spec.row_shape).contiguous())
        assert items is not None, name
        fill = ord("x") if spec.kind == "text" else 0
        size = (int(items.sum()), *spec.row_shape)
        return Column(spec.kind, torch.full(size, fill, dtype=dtype), torch.from_numpy(items))

    def _to_transfer(self, label: str, number: int, commands: Mapping[int, Plain]) -> Replies:
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
