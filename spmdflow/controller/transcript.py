"""`Transcript`: what ranks were told and what they answered in the first steps of a launch.

RUN_DIR/transcript has every order, by rank, as a dry run records it, with what the ranks said of
the rows (numbers of rows and tokens, values that the script fetched, plain answers), and the bytes
of every edge. The prediction after a run is made from it; a plan of the script can be held against
it. Recording stops at a size limit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from spmdflow.controller.result import Ids
from spmdflow.controller.transfers import EdgeBytes
from spmdflow.errors import DataError, MessageError
from spmdflow.runtime.message import decode, encode
from spmdflow.runtime.order import Order, Pending, Replies, Transport

logger = logging.getLogger(__name__)

TRANSCRIPT_FILE = "transcript"
NUM_STEPS = 3
"""Steps of a launch that are kept, the evaluation before the first not counted."""
MOST_BYTES = 16 << 20
"""A step after which the transcript would be larger is left out, and those after it."""
_ANSWERED = ("scan", "call", "map", "join", "fetch")
_LEFT_OUT = ("free", "sends")
"""Parts of commands that no later reader needs."""
_NO_IDS = np.zeros(0, dtype=np.int64)


class Transcript:
    """A transport that listens: `Transport`'s surface, and a file at the end of the last step."""

    def __init__(self, transport: Transport, path: Path, ranks: tuple[int, ...]) -> None:
        """path: of the file; ranks: of the run."""
        self._transport, self._path = transport, path
        self._nodes = [transport.node_of(rank) for rank in ranks]
        self._ranks = ranks
        self._orders: list[dict[str, Any]] = []
        self._steps: list[dict[str, Any]] = []
        self._start: dict[str, Any] | None = None
        self._before: dict[tuple[int, int], int] = {}
        self._step = 0
        self._is_open, self._is_between_steps = True, False

    # The transport's surface

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._transport.world_size

    @property
    def stop_requested(self) -> bool:
        """Whether the run was asked to save and end."""
        return self._transport.stop_requested

    def submit(self, order: Order) -> Pending:
        """Send an order; it is written down, and what comes back."""
        if not self._is_open or self._is_between_steps:
            return self._transport.submit(order)
        entry = _recorded(order, self._step)
        pending = self._transport.submit(_listening(order, entry))
        self._orders.append(entry)  # compute orders in the order of the script
        return pending

    def post(self, function: Callable[[], None]) -> None:
        """Run function in the io thread, after everything submitted before."""
        self._transport.post(function)

    def node_of(self, rank: int) -> int:
        """The machine that a rank runs on."""
        return self._transport.node_of(rank)

    def close(self) -> None:
        """Wait for all orders, then end every rank's lanes."""
        self._transport.close()

    # Steps

    def continue_from(self, state: Mapping[str, Any]) -> None:
        """The flow's part of the checkpoint that this launch continues from."""
        self._start = dict(state)

    def begin_step(self, number: int) -> None:
        """Orders belong to a step again; those between steps show samples and save."""
        self._step, self._is_between_steps = number, False

    def end_step(self, number: int, metrics: Mapping[str, float], edges: EdgeBytes) -> None:
        """A step is over and everything has arrived."""
        self._is_between_steps = True
        if not self._is_open:
            return
        moved = {
            edge: size - self._before.get(edge, 0)
            for edge, size in edges.moved.items()
            if size > self._before.get(edge, 0)
        }
        self._before = dict(edges.moved)
        rows = [[source, destination, size] for (source, destination), size in moved.items()]
        self._steps.append({"step": number, "edges": rows, "metrics": dict(metrics)})
        data = self._encoded()
        first = 0 if self._start is None else int(self._start["step"])
        self._is_open = number < first + NUM_STEPS and data is not None
        if not self._is_open:
            self._orders = []
        if data is not None:
            self._write(data)

    def _write(self, data: bytes) -> None:
        """Keep the file; a run goes on without it, but cannot be predicted afterwards."""
        try:
            self._path.write_bytes(data)
        except OSError as err:
            logger.warning("cannot write %s: %s; free some space there", self._path, err.strerror)
            self._is_open = False

    def _encoded(self) -> bytes | None:
        """The file; None: it is too large, or something in it is no plain data."""
        content = {
            "ranks": list(self._ranks),
            "nodes": self._nodes,
            "start": self._start,
            "steps": self._steps,
            "orders": self._orders,
        }
        try:
            data = encode(content)
        except MessageError:
            return None
        return data if len(data) <= MOST_BYTES else None


def read_transcript(path: Path) -> dict[str, Any]:
    """What a run wrote; DataError if there is nothing that can be read."""
    try:
        content = decode(path.read_bytes())
    except (OSError, MessageError) as err:
        raise DataError(
            f"{path}: got no transcript ({err}), expected that of a launch's first steps; give "
            f"the RUN_DIR of a run that finished a step"
        ) from err
    assert isinstance(content, dict), path
    return content


def _recorded(order: Order, step: int) -> dict[str, Any]:
    """An order as plain data; ranks that are told the same stand together."""
    alike: dict[Any, tuple[list[int], dict[str, Any]]] = {}
    for rank, plain in order.commands.items():
        kept = {name: value for name, value in plain.items() if name not in _LEFT_OUT}
        key = tuple((name, id(value)) for name, value in kept.items())
        alike.setdefault(key, ([], kept))[0].append(rank)
    return {
        "number": order.number,
        "lane": order.lane,
        "label": order.label,
        "step": step,
        "phase": order.phase,
        "commands": list(alike.values()),
    }


def _listening(order: Order, entry: dict[str, Any]) -> Order:
    """The order, which adds the ranks' answers to its entry."""
    operation = next(iter(order.commands.values())).get("operation")
    if operation not in _ANSWERED:
        return order
    done = order.on_done

    def on_done(replies: Replies) -> None:
        entry["answer"] = _answer(str(operation), order.commands, replies)
        if done is not None:
            done(replies)

    return replace(order, on_done=on_done)


def _answer(
    operation: str, commands: Mapping[int, Mapping[str, Any]], replies: Replies
) -> dict[str, Any]:
    if operation == "scan":
        return {"report": next(iter(replies.values()))["report"]}
    if operation == "fetch":
        ids = {rank: plain["input"]["ids"] for rank, plain in commands.items()}
        return {"fetched": [[ids[rank], reply["column"]] for rank, reply in replies.items()]}
    holds = {rank: plain.get("holds", plain.get("ids")) for rank, plain in commands.items()}
    if any("columns" in reply for reply in replies.values()):
        return {"columns": _columns(holds, replies)}
    return {"values": {rank: reply.get("value") for rank, reply in replies.items()}}


def _columns(holds: Mapping[int, Ids | None], replies: Replies) -> dict[str, Any]:
    """Kind and items of every column, rows in the order of their ids."""
    rows: dict[int, Ids] = {}
    seen: set[bytes] = set()
    for rank, ids in holds.items():
        if ids is not None and replies[rank]["columns"] and ids.tobytes() not in seen:
            seen.add(ids.tobytes())  # peers hold the same rows
            rows[rank] = ids
    first = np.unique(np.concatenate([_NO_IDS, *rows.values()]), return_index=True)[1]
    found: dict[str, Any] = {}
    for rank in rows:
        for name, (spec, _) in replies[rank]["columns"].items():
            if name not in found:
                parts = [replies[r]["columns"][name][1] for r in rows]
                found[name] = [spec, None if parts[0] is None else np.concatenate(parts)[first]]
    return found
