"""What a run recorded: `Replay` has its orders, and the lengths and values that ranks reported;
`recorded_trace` makes the trace of that run from them, without calling its script.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from spmdflow.config.placement import Pool
from spmdflow.controller.transcript import TRANSCRIPT_FILE, read_transcript
from spmdflow.data.column import Column, ColumnSpec, join, read_message
from spmdflow.datasets.scan import ScanReport
from spmdflow.plan.example import PROMPTS, RESPONSES
from spmdflow.plan.record import (
    Key,
    RowTokens,
    Tokens,
    Trace,
    bytes_by_edge,
    links_of,
    models_of,
    row_edges,
)
from spmdflow.runtime.call import Call, names_in
from spmdflow.runtime.executor import COMPUTE, TRANSFER

Plain = Mapping[str, Any]
Commands = Mapping[int, Plain]
"""Command by rank."""

_MOST_FILE_ROWS = 1 << 40
"""More rows than a data file has: numbers of prompts of several files then differ."""
_NO_IDS = np.zeros(0, dtype=np.int64)
_ITEMS = ColumnSpec("ragged", "int64", ())
_WITH_PROMPTS = (PROMPTS, "segment_tokens")
"""Columns that have the prompts of rows, or of the segments that rows are made of."""
"""Of lengths that several columns gave."""


class Replay:
    """What a run recorded: its orders, and answers by label in the order of the script."""

    def __init__(self, content: Plain) -> None:
        """content: of a transcript."""
        self.orders: Sequence[Plain] = content["orders"]
        """Every order of the steps that were kept and before them, as `Transcript` writes it."""
        self.start: Plain | None = content["start"]
        """The flow's part of the checkpoint that the steps follow; None: they are the first."""
        self.ranks: tuple[int, ...] = tuple(content["ranks"])
        self.nodes: Mapping[int, int] = dict(zip(self.ranks, content["nodes"], strict=True))
        """The node of each rank."""
        self._steps = {int(step["step"]): step for step in content["steps"]}
        self._answers: dict[str, deque[Plain]] = {}
        for order in self.orders:
            if "answer" in order:
                self._answers.setdefault(order["label"], deque()).append(order["answer"])

    @classmethod
    def of_run(cls, run_dir: str | Path) -> Replay:
        """The transcript of a run; DataError if it has none."""
        return cls(read_transcript(Path(run_dir) / TRANSCRIPT_FILE))

    @property
    def steps(self) -> tuple[int, ...]:
        """Numbers of the steps that were kept; 0 is the evaluation before the first."""
        return tuple(self._steps)

    def edges(self, step: int) -> dict[tuple[int, int], int]:
        """Row bytes that the run counted in a step, by (source, destination)."""
        result = {}
        for source, to, size in self._steps[step]["edges"]:
            result[(source, to)] = size
        return result

    def metrics(self, step: int) -> dict[str, float]:
        """What the run measured in a step."""
        return dict(self._steps[step]["metrics"])

    def answer(self, label: str) -> Plain:
        """Return what the ranks answered to the next recorded call with this label, and use it up.

        {} if no answer is left. Its keys are among report, columns, values and fetched.
        """
        left = self._answers.get(label)
        if left:
            return left.popleft()
        return {}


def fetched_column(answer: Plain) -> Column | None:
    """Return the column that a recorded call fetched, with the rows of all ranks by ascending id.

    None if the answer has no fetched values.
    """
    parts = answer.get("fetched")
    if not parts:
        return None
    ids = np.concatenate([ids for ids, _ in parts])
    whole = join([read_message(plain) for _, plain in parts])
    return whole.take(torch.from_numpy(np.argsort(ids, kind="stable")))


@dataclass
class ColumnLengths:
    """One column of one result: its kind and, unless dense, items by row."""

    spec: ColumnSpec
    ids: np.ndarray = field(default_factory=lambda: _NO_IDS)
    """Ascending."""
    items: np.ndarray = field(default_factory=lambda: _NO_IDS)

    def of(self, ids: np.ndarray) -> np.ndarray:
        """(n,) int64: items of the rows ids."""
        return self.items[np.searchsorted(self.ids, ids)]

    def items_or_zeros(self, ids: np.ndarray) -> np.ndarray:
        """(n,) int64: items of the rows ids, 0 for a row that is not known."""
        items = np.zeros(len(ids), dtype=np.int64)
        if len(self.ids):
            at = np.minimum(np.searchsorted(self.ids, ids), len(self.ids) - 1)
            known = self.ids[at] == ids
            items[known] = self.items[at[known]]
        return items

    def add(self, ids: np.ndarray, items: np.ndarray) -> None:
        """Add the rows of one more rank; rows that are known keep their items."""
        joined, first = np.unique(np.concatenate([self.ids, ids]), return_index=True)
        self.ids = joined
        self.items = np.concatenate([self.items, items])[first]


class RowLengths:
    """Items of the rows that calls have made, and of those in data files."""

    def __init__(self) -> None:
        self.results: dict[int, dict[str, ColumnLengths]] = {}
        """By the call's number and column."""
        self.scans: dict[str, ScanReport] = {}
        """By the name of the data source."""
        self._prompt_ids: dict[int, ColumnLengths] = {}
        """Which prompt each row has, by the number of a call that wrote prompts (`prompt_ids`)."""

    def record_answer(self, number: int, label: str, commands: Commands, answer: Plain) -> bool:
        """Store what a recorded call answered; return whether it made columns.

        Stored are the lengths of its columns' rows (of all ranks, by ascending id) and, for a call
        that scans a data file, its report of the usable rows. number, label, commands: the call's.
        """
        if "report" in answer:
            self.scans[label.removesuffix(".scan")] = answer["report"]
        columns = answer.get("columns", {})
        result = self.results.setdefault(number, {}) if columns else {}
        ids = unique_ids(plain.get("holds", plain.get("ids")) for plain in commands.values())
        for name, (spec, items) in columns.items():
            known = (ids, items) if items is not None else ()
            result[name] = ColumnLengths(ColumnSpec.from_plain(spec), *known)
        return bool(columns)

    def of_input(self, name: str, part: Plain) -> np.ndarray | None:
        """Return (n,): the items of an input's rows, in the order of its ids; None if not known.

        They are not known for dense columns and for columns of a data file other than prompts and
        loss_mask.
        """
        if "source" not in part:
            written = self.results.get(part["result"], {}).get(name)
            if written is None or written.spec.kind == "dense":
                return None
            return written.of(part["ids"])
        if name not in ("prompts", "loss_mask"):
            return None
        return self.scans[part["source"]].tokens_of(part["rows"])

    def tokens(self, number: int, commands: Commands) -> Tokens | None:
        """Return the number of rows of a call and their mean prompt and response tokens.

        None for a call without row ids or inputs. The mean of a column is that of the rows that the
        call writes, otherwise of the rows that it reads, each id once. If the call continues
        responses, the tokens of the old response count as prompt, which no other row has.
        """
        by_inputs = {}
        for p in commands.values():
            if p.get("ids") is not None:
                by_inputs[id(p["inputs"])] = p
        if not by_inputs or "inputs" not in next(iter(by_inputs.values())):
            return None
        means = dict.fromkeys((PROMPTS, RESPONSES), 0.0)
        ids = unique_ids(plain["ids"] for plain in by_inputs.values())
        by_row: dict[str, np.ndarray] = {}
        prompt_ids = self._read_prompt_ids(ids, by_inputs.values())
        for name in means:
            read = _join_items(self._parts_of(name, by_inputs.values()))
            written = self.results.get(number, {}).get(name)
            means[name] = before = _mean(read.items)
            by_row[name] = read.items_or_zeros(ids)
            if written and len(written.ids):
                means[name] = float(written.items.mean())
                by_row[name] = written.items_or_zeros(ids)
                if name == RESPONSES:  # the model reads the response that goes on
                    means |= {PROMPTS: means[PROMPTS] + before, name: means[name] - before}
                    old = read.items_or_zeros(ids)
                    by_row |= {PROMPTS: by_row[PROMPTS] + old, name: by_row[name] - old}
                    prompt_ids = np.where(old > 0, _own_prompts(ids), prompt_ids)
                else:
                    prompt_ids = _of_equal_length(prompt_ids, by_row[PROMPTS], ids)
                    self._prompt_ids[number] = ColumnLengths(_ITEMS, ids, prompt_ids)
        rows = RowTokens(ids, by_row[PROMPTS], by_row[RESPONSES], prompt_ids)
        examples = self._with_answers(rows, list(by_inputs.values()))
        if examples is not None:
            return Tokens(len(ids), _mean(examples.prompts), _mean(examples.responses), examples)
        return Tokens(len(ids), means[PROMPTS], means[RESPONSES], rows)

    def _with_answers(self, rows: RowTokens, commands: Sequence[Plain]) -> RowTokens | None:
        """Return the sequences of rows that contain their answers; None if they are no such rows.

        Of a row whose loss_mask is read, the tokens of answers are responses. A pair has two
        sequences. So has a labelled row, except in an update: its own answer and another row's,
        whose length is not known and counts as its own.
        """
        seen = set()
        answers = []
        for plain in commands:
            for part in plain["inputs"]:
                names = {name for name, _ in names_in(part)}
                seen |= names
                if "source" in part and "loss_mask" in names:
                    scan = self.scans[part["source"]]
                    answers.append((part["ids"], scan.answers_of(part["rows"])))
        updates = any(plain.get("mini") for plain in commands)
        is_pair = "chosen_tokens" in seen
        has_second = is_pair or ("answers" in seen and not updates)
        if not answers and not has_second:
            return None
        answered = _join_items(answers).items_or_zeros(rows.ids)
        prompts = rows.prompts - answered
        responses = rows.responses + answered
        if has_second and not is_pair:
            prompts = 2 * prompts
            responses = 2 * responses
        return replace(
            rows, prompts=prompts, responses=responses, num_sequences=2 if has_second else 1
        )

    def _read_prompt_ids(self, ids: np.ndarray, commands: Iterable[Plain]) -> np.ndarray:
        """Return (n,) int64: a number for the prompt that each of the rows `ids` begins with.

        A segment of an episode counts as one that begins with the episode's prompt.

        Rows have the same number if their prompts come from the same row of a data file, also
        through a call that wrote prompts: there the prompts must also have the same length. Every
        other row has a number of its own.
        """
        result = _own_prompts(ids)
        sources = list(self.scans)
        for plain in commands:
            parts = []
            for part in plain["inputs"]:
                if any(seen in _WITH_PROMPTS for seen, _ in names_in(part)):
                    parts.append(part)
            if sum(len(part["ids"]) for part in parts) != len(plain["ids"]):
                continue  # the call reads no prompts
            start = 0
            for part in parts:  # several only where rows are joined
                rows = plain["ids"][start : start + len(part["ids"])]
                start += len(rows)
                if "source" in part:
                    numbers = part["rows"] + sources.index(part["source"]) * _MOST_FILE_ROWS
                elif part["result"] in self._prompt_ids:
                    numbers = self._prompt_ids[part["result"]].of(part["ids"])
                else:
                    continue
                result[np.searchsorted(ids, rows)] = numbers
        return result

    def _parts_of(
        self, name: str, commands: Iterable[Plain]
    ) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
        """Yield (ids, items or None) of each input of these commands that is seen as `name`."""
        for plain in commands:
            for part in plain["inputs"]:
                for seen, stored in names_in(part):
                    if seen == name:
                        yield part["ids"], self.of_input(stored, part)


def _join_items(parts: Iterable[tuple[np.ndarray, np.ndarray | None]]) -> ColumnLengths:
    """Return the items of all rows by ascending id, each id once; skip parts without items."""
    known = []
    for ids, items in parts:
        if items is not None and len(ids):
            known.append((ids, items))
    if not known:
        return ColumnLengths(_ITEMS)
    joined, first = np.unique(np.concatenate([ids for ids, _ in known]), return_index=True)
    return ColumnLengths(_ITEMS, joined, np.concatenate([items for _, items in known])[first])


def _own_prompts(ids: np.ndarray) -> np.ndarray:
    """Return (n,) int64: a negative number for the prompt of each row, which no other row has."""
    return -1 - ids


def _of_equal_length(prompt_ids: np.ndarray, lengths: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Return (n,): prompt_ids, but an own number for a row whose prompt has another length than the
    first with the same number.
    """
    _, first, index = np.unique(prompt_ids, return_index=True, return_inverse=True)
    same = lengths == lengths[first[index]]
    return np.where(same, prompt_ids, _own_prompts(ids))


def _mean(items: np.ndarray) -> float:
    """Return the mean; 0.0 if there are none."""
    if len(items):
        return float(items.mean())
    return 0.0


def unique_ids(parts: Iterable[np.ndarray | None]) -> np.ndarray:
    """Return the row ids of all parts, ascending, each once. Parts that are None are skipped.

    Peers that hold the same rows share an array, which is read once.
    """
    alone = {}
    for ids in parts:
        if ids is not None:
            alone[id(ids)] = ids
    return np.unique(np.concatenate([_NO_IDS, *alone.values()]))


def recorded_trace(replay: Replay) -> Trace:
    """Return what a dry run with these lengths would have recorded, for the steps in the record.

    The pool of a model is named by its ranks. Lines of the script, values that it read, and rows of
    updates are not known. `steps` omits the evaluation before step 1.
    """
    calls: list[Call] = []
    tokens: dict[Key, Tokens] = {}
    lengths = RowLengths()
    for entry in _in_dry_order(replay.orders):
        call = Call(
            entry["number"],
            entry["lane"],
            entry["label"],
            _commands(entry),
            step=entry["step"],
            phase=entry["phase"],
        )
        calls.append(call)
        lengths.record_answer(call.number, call.label, call.commands, entry.get("answer", {}))
        if call.lane == COMPUTE:
            known = lengths.tokens(call.number, call.commands)
            if known is not None:
                tokens[call.key] = known
    models = models_of(calls, {})
    edges_by_step = {}
    for step in replay.steps:
        of_step = [call for call in calls if call.step == step]
        edges_by_step[step] = bytes_by_edge(row_edges(of_step))
    return Trace(
        world=replay.ranks,
        nodes=tuple(replay.nodes.values()),
        pools={model.pool: Pool((), tuple(model.layout.ranks)) for model in models.values()},
        models=models,
        links=links_of(calls),
        calls=tuple(calls),
        tokens=tokens,
        steps=tuple(step for step in replay.steps if step),
        edges_by_step=edges_by_step,
    )


def _in_dry_order(entries: Sequence[Plain]) -> list[Plain]:
    """Return the recorded calls with each transfer just before the first call that reads its rows.

    This is the order of a dry run. Transfers whose rows no call reads come last.
    """
    waiting = []
    for entry in entries:
        if entry["lane"] == TRANSFER:
            waiting.append(entry)
    in_order: list[Plain] = []
    for entry in entries:
        if entry["lane"] == COMPUTE:
            commands = _commands(entry)
            ready = set()
            for transfer in waiting:
                if _reads(commands, transfer):
                    ready.add(id(transfer))
            in_order += [transfer for transfer in waiting if id(transfer) in ready] + [entry]
            waiting = [transfer for transfer in waiting if id(transfer) not in ready]
    return in_order + waiting


def _reads(commands: Commands, transfer: Plain) -> bool:
    """Return whether a recorded call reads the rows that a recorded transfer brings.

    Looks only at the first rows that one receiver gets. That rank's command must have an input that
    refers to the same earlier result and has at least these columns and row ids.
    """
    received = ((rank, plain) for rank, plain in _commands(transfer).items() if plain["receives"])
    rank, brought = next(received)
    _, columns, ids, *_ = brought["receives"][0]
    return any(
        part.get("result") == brought["result"]
        and set(columns) <= set(part["columns"])
        and bool(np.isin(ids, part["ids"]).all())
        for part in commands.get(rank, {}).get("inputs", ())
    )


def _commands(entry: Plain) -> dict[int, Plain]:
    """Return the command of each rank in one recorded call.

    The transcript stores [ranks, command] pairs, so that ranks with equal commands share one.
    """
    commands = {}
    for ranks, plain in entry["commands"]:
        for rank in ranks:
            commands[rank] = plain
    return commands
