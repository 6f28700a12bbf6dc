"""A plan as plain data for --json: the same facts as the text, nothing left out but row ids."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from spmdflow.plan.record import COMPUTE
from spmdflow.plan.report import PlanReport
from spmdflow.plan.weight import WeightPlan


def report_plain(report: PlanReport) -> dict[str, Any]:
    """Everything, as dicts, lists, numbers and strings."""
    trace, prediction = report.trace, report.prediction
    node = dict(zip(trace.world, trace.nodes, strict=True))
    return {
        "script": report.script,
        "world_size": report.world_size,
        "nodes": len(set(trace.nodes)),
        "hardware": prediction.hardware,
        "step": report.step,
        "ok": not report.findings,
        "findings": [asdict(finding) for finding in report.findings],
        "checks": {proof.name: not proof.findings for proof in report.proofs},
        "pools": {
            name: {"ranks": list(pool.ranks), "roles": list(pool.roles)}
            for name, pool in trace.pools.items()
        },
        "models": [_model(model) for model in trace.models.values()],
        "groups": [
            {
                "ranks": list(group.spec.ranks),
                "lane": group.spec.lane,
                "backend": group.spec.backend,
                "made_by": group.made_by,
            }
            for group in report.groups
        ],
        "calls": _calls(report),
        "edges": [
            [source, destination, size, node[source] != node[destination]]
            for (source, destination), size in sorted(report.edge_bytes.items())
        ],
        "routes": [asdict(route) for route in report.routes],
        "weights": [_weights(way, node) for way in report.weights],
        "order": _order(report),
        "memory": [asdict(phase) | {"total": phase.total} for phase in prediction.memory],
        "seconds": {
            "step": prediction.seconds,
            "tokens_per_second": prediction.tokens_per_second,
            "stages": prediction.stage_seconds(),
        },
        "assumed": list(trace.assumptions),
        "missing_here": report.missing_here,
        "reads": [asdict(read) for read in trace.reads],
        "not_predicted": dict(prediction.without),
        "planning_seconds": report.seconds,
    }


def _model(model: Any) -> dict[str, Any]:
    layout = model.layout
    sizes = ("pp_size", "dp_size", "tp_size", "shard_size", "gen_tp_size", "gen_pp_size")
    return {
        "name": model.name,
        "class": model.worker_class.__name__,
        "pool": model.pool,
        "layout": {size: getattr(layout, size) for size in sizes},
        "ranks": list(layout.ranks),
    }


def _weights(way: WeightPlan, node: dict[int, int]) -> dict[str, Any]:
    edges = [
        [source, destination, size, node[source] != node[destination]]
        for (source, destination), size in sorted(way.edges.items())
    ]
    known = {name: value for name, value in vars(way).items() if name != "copies"}
    return {**known, "received": dict(way.received), "edges": edges}


def _calls(report: PlanReport) -> list[dict[str, Any]]:
    times = {call.place: call for call in report.prediction.calls}
    found = []
    for order in report.orders:
        if order.lane != COMPUTE:
            continue
        tokens, time = report.trace.tokens.get(order.place), times.get(order.place)
        found.append(
            {
                "number": order.number,
                "label": order.label,
                "line": order.line,
                "phase": order.phase,
                "ranks": list(order.ranks),
                "rows": tokens.num_rows if tokens else None,
                "prompt_tokens": tokens.prompts if tokens else None,
                "response_tokens": tokens.responses if tokens else None,
                "start_seconds": time.start if time else None,
                "seconds": time.seconds if time else None,
                "limit": time.limit if time else "",
            }
        )
    return found


def _order(report: PlanReport) -> list[dict[str, Any]]:
    """Numbers of calls and releases; ranks with the same ones together."""
    orders: dict[int, dict[str, list[int]]] = {}
    for order in report.orders:
        for rank in order.commands:
            lanes = orders.setdefault(rank, {"compute": [], "transfer": []})
            lanes[order.lane].append(order.number)
    alike: dict[str, dict[str, Any]] = {}
    for rank in sorted(orders):
        lanes = orders[rank]
        alike.setdefault(str(lanes), {"ranks": [], **lanes})["ranks"].append(rank)
    return list(alike.values())
