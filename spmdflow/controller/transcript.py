"""`Transcript`: the commands to ranks and their replies in the first steps of a launch.

RUN_DIR/transcript has every order, by rank, as a dry run records it, with what the ranks replied
(numbers of rows and tokens, values that the script fetched, plain answers), and the bytes of every
edge. The prediction after a run is made from it; a plan of the script can be compared with it.
Recording stops at a size limit.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spmdflow.checkpoint.disk import describe_disk_error
from spmdflow.controller.observer import Observer, StepRecord
from spmdflow.controller.result import facts_of
from spmdflow.errors import DataError, MessageError
from spmdflow.message import decode, encode
from spmdflow.runtime.call import CallRecord
from spmdflow.runtime.executor import COMPUTE, TRANSFER

logger = logging.getLogger(__name__)

TRANSCRIPT_FILE = "transcript"
NUM_STEPS = 3
"""Steps of a launch that are kept, the evaluation before the first not counted."""
MOST_BYTES = 16 << 20
"""A step that would make the transcript larger is not recorded, and no step after it."""
_LEFT_OUT = ("free", "sends")
"""Parts of commands that no later reader needs."""


class Transcript(Observer):
    """Records each step when it is over; the file is rewritten each time."""

    def __init__(self, path: Path, ranks: tuple[int, ...], nodes: list[int]) -> None:
        """path: of the file; ranks: of the run; nodes: of each of them."""
        self._path = path
        self._first_step = 0
        self._content: dict[str, Any] = {"ranks": list(ranks), "nodes": nodes, "start": None}
        self._content |= {"steps": [], "orders": []}
        self._before: Counter[tuple[int, int]] = Counter()
        self._is_open = True

    def continue_from(self, state: Mapping[str, Any]) -> None:
        """The flow's part of the checkpoint that this launch continues from."""
        self._content["start"] = dict(state)
        self._first_step = int(state["step"])

    def end_step(self, step: StepRecord) -> None:
        """Add the calls, transfers and bytes of a step, and rewrite the file.

        Records the first 3 steps of the launch, and the evaluation before them. Omits saves. A step
        that would make the file larger than 16 MiB, or is not plain data, is not written, and no
        later one is. If writing fails, warns and records no more.
        """
        if not self._is_open:
            return
        number = step.number
        moved = step.moved_bytes
        rows = []
        for edge, size in (moved - self._before).items():
            rows.append([*edge, size])
        self._before = moved.copy()
        metrics = dict(step.metrics)
        self._content["steps"].append({"step": number, "edges": rows, "metrics": metrics})
        entries = []
        for record in step.calls:
            if record.call.operation != "save":
                entries.append(_entry(record, record.call.step))
        self._content["orders"] += entries + [_entry(record, number) for record in step.transfers]
        data = _encode_content(self._content)
        self._is_open = data is not None and number < self._first_step + NUM_STEPS
        if not self._is_open:
            self._content["orders"] = []
        if data is not None:
            try:
                self._path.write_bytes(data)
            except OSError as err:  # a run goes on without it, but cannot be predicted afterwards
                logger.warning(
                    "cannot write %s: %s", self._path, describe_disk_error(err, self._path)
                )
                self._is_open = False


def _encode_content(content: Mapping[str, Any]) -> bytes | None:
    """Return the content of the file; None if it exceeds 16 MiB or is not plain data."""
    try:
        data = encode(content)
    except MessageError:
        return None
    if len(data) <= MOST_BYTES:
        return data
    return None


def read_transcript(path: Path) -> dict[str, Any]:
    """Return the content of a transcript.

    DataError if the file cannot be read or decoded, or does not have the records of steps.
    """
    try:
        content = decode(path.read_bytes())
    except (OSError, MessageError) as err:
        got = f"no transcript ({err})"
        do = "give the RUN_DIR of a run that finished a step"
        raise DataError.of(path, got, "that of a launch's first steps", do) from err
    if not isinstance(content, dict):
        got = f"{type(content).__name__} instead of the records of steps"
        do = "the file is damaged or of another program: give another RUN_DIR"
        raise DataError.of(path, got, "that of a launch's first steps", do)
    return content


def _entry(record: CallRecord, step: int) -> dict[str, Any]:
    """Return a call and what its ranks answered as plain data, as the transcript stores it.

    "commands" is a list of (ranks, command): ranks whose commands have the same values are grouped.
    The entries "free" and "sends" of commands are omitted.
    """
    call = record.call
    alike: dict[Any, tuple[list[int], dict[str, Any]]] = {}
    for rank, plain in call.commands.items():
        kept = {}
        for name, value in plain.items():
            if name not in _LEFT_OUT:
                kept[name] = value
        key = tuple((name, id(value)) for name, value in kept.items())
        alike.setdefault(key, ([], kept))[0].append(rank)
    entry = {"number": call.number, "label": call.label, "phase": call.phase}
    entry["lane"] = TRANSFER if call.operation == "transfer" else COMPUTE
    return entry | {"step": step, "commands": list(alike.values())} | _answer(record)


def _answer(record: CallRecord) -> dict[str, Any]:
    """Return {"answer": ...} with what the ranks replied, or {} if a plan needs nothing of it.

    The report of a scan; ids and values of a fetch; for call, map and join the kinds and lengths of
    the columns or, if no rows are made, the value of each rank.
    """
    call = record.call
    operation = call.operation
    commands = call.commands
    replies = record.replies
    first = next(iter(replies.values()))
    if operation == "scan":
        return {"answer": {"report": first["report"]}}
    if operation == "fetch":
        fetched = []
        for r, reply in replies.items():
            fetched.append([commands[r]["input"]["ids"], reply["column"]])
        return {"answer": {"fetched": fetched}}
    if operation not in ("call", "map", "join"):
        return {}
    if "columns" not in first:  # no rows are made
        values = {}
        for rank, reply in replies.items():
            values[rank] = reply.get("value")
        return {"answer": {"values": values}}
    answering = {}
    for rank in call.reply_ranks or commands:
        answering[rank] = commands[rank]
    rows = {rank: plain.get("holds", plain["ids"]) for rank, plain in answering.items()}
    columns = facts_of(replies, rows, label=call.label)
    plain = {}
    for name, fact in columns.items():
        plain[name] = [fact.spec.to_plain(), fact.lengths]
    return {"answer": {"columns": plain}}
