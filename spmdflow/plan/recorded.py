"""The trace of a run that was, from the orders that it recorded; the script is not called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from spmdflow.config.placement import Pool
from spmdflow.parallel.layout import Layout
from spmdflow.plan.answers import Answers, Lengths
from spmdflow.plan.edge import bytes_by_edge, row_edges
from spmdflow.plan.example import Examples
from spmdflow.plan.record import COMPUTE, TRANSFER, Tokens, Trace, TracedModel, TracedOrder
from spmdflow.plan.replay import Replay
from spmdflow.runtime.importing import find

Edge = tuple[int, Sequence[str], np.ndarray]
"""Frame, columns, row ids."""


def recorded_trace(replay: Replay) -> Trace:
    """What a dry run with these lengths would have recorded, of the steps that were kept.

    A pool is the ranks of its models. Lines of the script and rows of updates are not known.
    """
    orders = [_order(place, entry) for place, entry in enumerate(_sorted(replay.orders))]
    answers = Answers(Examples(is_replayed=True), Lengths(1, 1), _not_scanned, replay)
    tokens: dict[int, Tokens] = {}
    for order in orders:
        if order.lane == COMPUTE:
            answers.to(order.label, order.number, order.commands)
            found = answers.tokens(order.number, order.commands)
            tokens |= {} if found is None else {order.place: found}
    models = [_model(order) for order in orders if order.operation == "spawn"]
    opened = [order.label.partition(".")[0] for order in orders if _opens_weights(order)]
    by_step = {step: [order for order in orders if order.step == step] for step in replay.steps}
    return Trace(
        world=replay.ranks,
        nodes=tuple(replay.nodes[rank] for rank in replay.ranks),
        pools={model.pool: Pool((), tuple(model.layout.ranks)) for model in models},
        models={model.name: model for model in models},
        links=tuple(zip(opened[::2], opened[1::2], strict=True)),
        orders=tuple(orders),
        tokens=tokens,
        edges=bytes_by_edge(row_edges(orders)),
        steps=tuple(step for step in replay.steps if step),
        edges_by_step={n: bytes_by_edge(row_edges(orders)) for n, orders in by_step.items()},
    )


def _sorted(entries: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Every transfer just before the first call that reads its rows, as a dry run has it."""
    waiting = [(entry, *_an_edge(entry)) for entry in entries if entry["lane"] == TRANSFER]
    found: list[Mapping[str, Any]] = []
    for entry in entries:
        if entry["lane"] == COMPUTE:
            commands = _commands(entry)
            read = [_reads(commands.get(rank, {}), edge) for _, rank, edge in waiting]
            found += [each[0] for each, now in zip(waiting, read, strict=True) if now]
            waiting = [each for each, now in zip(waiting, read, strict=True) if not now]
            found.append(entry)
    return found + [entry for entry, _, _ in waiting]


def _an_edge(transfer: Mapping[str, Any]) -> tuple[int, Edge]:
    """A rank, and the frame, columns and rows that it receives: one edge tells what reads them."""
    received = ((rank, plain) for rank, plain in _commands(transfer).items() if plain["receives"])
    rank, plain = next(received)
    _, columns, ids, *_ = plain["receives"][0]
    return rank, (plain["frame"], columns, ids)


def _reads(plain: Mapping[str, Any], edge: Edge) -> bool:
    """Whether a command reads the rows of an edge."""
    frame, columns, ids = edge
    return any(
        part.get("frame") == frame
        and set(columns) <= set(part["columns"])
        and bool(np.isin(ids, part["ids"]).all())
        for part in plain.get("inputs", ())
    )


def _commands(entry: Mapping[str, Any]) -> dict[int, Mapping[str, Any]]:
    """Command by rank."""
    return {rank: plain for ranks, plain in entry["commands"] for rank in ranks}


def _order(place: int, entry: Mapping[str, Any]) -> TracedOrder:
    facts = {name: entry[name] for name in ("number", "lane", "label", "step", "phase")}
    return TracedOrder(place, **facts, line=None, commands=_commands(entry))


def _model(order: TracedOrder) -> TracedModel:
    plain = next(iter(order.commands.values()))
    layout = Layout(**plain["layout"] | {"ranks": tuple(plain["layout"]["ranks"])})
    return TracedModel(
        plain["name"], find(plain["class"]), plain["config"], layout, pool=str(layout.ranks)
    )


def _opens_weights(order: TracedOrder) -> bool:
    """Of a policy, then of its generator: how `flow.connect` begins."""
    return order.operation == "call" and order.label.endswith(".open_weights")


def _not_scanned(data: Any, path: str) -> Any:
    """A run has scanned its files; Any: what `Answers` is given."""
    raise AssertionError(f"{path}: scanned, but the run recorded no report of it")
