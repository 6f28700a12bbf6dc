"""A plan as text of at most 100 columns: sections, tables, paragraphs, ranks, bytes and seconds."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from spmdflow.plan.record import COMPUTE, TRANSFER, Tokens
from spmdflow.plan.report import PlanReport

WIDTH = 100
_MOST_LINES = 24
_ROUNDED_UP = 0.9995
"""From here on three digits read 1."""


def table(rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> Iterator[str]:
    """Columns side by side, the first row their heads; the last column is cut at the width."""
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    for number, row in enumerate(rows):
        if number > _MOST_LINES and number < len(rows) - 1:
            if number == _MOST_LINES + 1:
                yield f"  ... {len(rows) - _MOST_LINES - 2} more"
            continue
        cells = [
            cell.rjust(width) if place in right else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        line = ("  " + "  ".join(cells)).rstrip()
        yield line if len(line) <= WIDTH else line[: WIDTH - 3] + "..."


def wrapped(head: str, text: str, *, colon: str = ":") -> Iterator[str]:
    """A paragraph that hangs below its head."""
    yield from textwrap.wrap(
        f"{head}{colon} {text}".rstrip(), WIDTH, subsequent_indent="      ", break_on_hyphens=False
    )


def spans(ranks: Sequence[int]) -> str:
    """Ascending ranks as ranges: [0, 1, 2, 5] -> "0-2, 5"; of many only the first and last."""
    found: list[list[int]] = []
    for rank in ranks:
        if found and rank == found[-1][-1] + 1:
            found[-1][1:] = [rank]
        else:
            found.append([rank])
    parts = [f"{span[0]}-{span[-1]}" if len(span) > 1 else f"{span[0]}" for span in found]
    if len(parts) > 4:
        parts = [*parts[:2], f"... {parts[-1]} ({len(ranks)} ranks)"]
    return ", ".join(parts)


def bytes_of(size: float) -> str:
    """1234567 -> 1.23 MB; the unit is that of the rounded number: 999999 -> 1 MB."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= _ROUNDED_UP * factor:
            return f"{_three_digits(size / factor)} {unit}"
    return f"{size:.0f} B"


def seconds_of(value: float) -> str:
    """0.0123 -> 12.3 ms."""
    if value < _ROUNDED_UP * 1e-3:
        return f"{value * 1e6:.0f} us"
    return f"{_three_digits(value * 1e3)} ms" if value < _ROUNDED_UP else f"{value:.4g} s"


def _three_digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 999.5 else f"{value:.3g}"


MOST_LISTED = 16
"""Ranks of a world of which every process group and transfer is printed."""
_MOST_EDGES = 16


def report_text(report: PlanReport) -> str:
    """All sections."""
    sections = [
        _head(report),
        _models(report),
        _calls(report),
        _routes(report),
        _weights(report),
        _memory(report),
        _groups(report),
        _orders_by_rank(report),
        _assumed(report),
        _proofs(report),
    ]
    return "\n".join("\n".join(lines) for lines in map(list, sections) if lines) + "\n"


def _head(report: PlanReport) -> Iterator[str]:
    prediction, nodes = report.prediction, len(set(report.trace.nodes))
    yield (
        f"plan   {report.script}: step {report.step} on {report.world_size} ranks of "
        f"{nodes} node{'s' * (nodes > 1)}, {prediction.hardware}"
    )
    if prediction.seconds:
        yield (
            f"       {seconds_of(prediction.seconds)} a step predicted, "
            f"{prediction.tokens_per_second:,.0f} tokens/s; {bytes_of(_moved(report))} of rows and "
            f"{bytes_of(_synced(report))} of weights move"
        )
    wrong = len(report.findings)
    verdict = f"{wrong} thing{'s' * (wrong > 1)} wrong, see the end" if wrong else "nothing wrong"
    yield f"       {verdict}; planned in {report.seconds:.1f} s"


def _models(report: PlanReport) -> Iterator[str]:
    trace = report.trace
    yield ""
    yield "pools"
    for name, pool in trace.pools.items():
        yield f"  {name:12} ranks {spans(pool.ranks)}: {', '.join(pool.roles)}"
    idle = set(trace.world) - {rank for pool in trace.pools.values() for rank in pool.ranks}
    if idle:
        yield f"  {'none':12} ranks {spans(sorted(idle))} have no work"
    rows = [("model", "class", "engine", "layout", "pool")]
    for model in trace.models.values():
        engine = getattr(model.cfg, "engine", None)
        held = getattr(model.cfg, "model", None) is not None
        kind = f"{engine.kind} {model.cfg.model.dtype}" if engine is not None and held else "-"
        name = model.worker_class.__name__
        rows.append((model.name, name, kind, str(model.layout), model.pool))
    yield ""
    yield from table(rows)


def _calls(report: PlanReport) -> Iterator[str]:
    """Calls in the order of the script, with what is known of each."""
    times = {call.place: call for call in report.prediction.calls}
    rows = [("line", "call", "ranks", "rows", "tokens", "starts", "takes", "most of it")]
    for order in report.orders:
        if order.lane != COMPUTE:
            continue
        tokens = report.trace.tokens.get(order.place)
        time = times.get(order.place)
        rows.append(
            (
                str(order.line or ""),
                order.label + " (eval)" * (order.phase == "eval"),
                spans(order.ranks),
                str(tokens.num_rows) if tokens else "",
                _tokens(tokens) if tokens else "",
                seconds_of(time.start) if time and report.prediction.seconds else "",
                seconds_of(time.seconds) if time and report.prediction.seconds else "",
                time.limit if time else "",
            )
        )
    yield ""
    yield f"calls of step {report.step}, in the order of their numbers"
    yield from table(rows, right=(0, 3, 5, 6))
    stages = report.prediction.stage_seconds().items()
    if report.prediction.seconds and stages:
        shown = ", ".join(f"{stage} {seconds_of(seconds)}" for stage, seconds in stages)
        yield from wrapped("  by stage", shown)
    for call in report.prediction.calls:
        for note in call.notes:
            yield f"  {call.label}: {note}"
    for why in report.prediction.without.values():
        yield from wrapped("  not predicted", why)


def _tokens(tokens: Tokens) -> str:
    """Of the prompt + of the response, where the call has them."""
    if not tokens.prompts + tokens.responses:
        return ""
    return f"{tokens.prompts:.5g}+{tokens.responses:.5g}"


def _routes(report: PlanReport) -> Iterator[str]:
    yield ""
    if not report.routes:
        yield "rows between ranks: none"
        return
    yield f"rows between ranks: {bytes_of(_moved(report))} over {len(report.edge_bytes)} edges"
    rows = [("from", "to", "edges", "in node", "between", "columns")]
    for route in report.routes:
        rows.append(
            (
                route.producer,
                route.consumer,
                str(route.num_edges),
                bytes_of(route.intra_bytes),
                bytes_of(route.inter_bytes),
                " ".join(route.columns),
            )
        )
    yield from table(rows, right=(2, 3, 4))
    ranked = sorted(report.edge_bytes.items(), key=lambda item: (-item[1], item[0]))
    shown = ", ".join(f"{a} -> {b} {bytes_of(size)}" for (a, b), size in ranked[:5])
    yield from wrapped("  largest edges", shown)


def _weights(report: PlanReport) -> Iterator[str]:
    if not report.weights:
        return
    yield ""
    yield "weights from trainer to generator"
    rows = [("from", "to", "way", "among", "a rank receives", "edges", "all", "between", "syncs")]
    for way in report.weights:
        sizes = list(way.received.values()) or [0]
        mean = bytes_of(sum(sizes) / len(sizes))
        spread = mean if min(sizes) == max(sizes) else f"{mean} (most {bytes_of(max(sizes))})"
        far = bytes_of(way.inter_bytes) if way.inter_bytes >= 0 else "?"
        everything = bytes_of(sum(sizes))
        edges = str(len(way.edges)) if way.edges or not sum(sizes) else "?"
        how = way.mode, way.scope, spread, edges
        rows.append((way.source, way.target, *how, everything, far, str(way.syncs)))
    yield from table(rows, right=(4, 5, 6, 7, 8))
    for way in report.weights:
        if way.note:
            yield from wrapped(f"  {way.target}", way.note)


def _memory(report: PlanReport) -> Iterator[str]:
    phases = report.prediction.memory
    if not phases:
        return
    yield ""
    yield f"memory of a rank in GB, of {phases[0].budget / 1e9:.2f} that a plan may fill"
    names = list(dict.fromkeys(part for phase in phases for part in phase.parts))
    names = [name for name in names if any(phase.parts.get(name) for phase in phases)]
    short = {
        "parameters": "params",
        "gradients": "grads",
        "optimizer": "optim",
        "activations": "activ",
        "generation_weights": "gen.wts",
        "kv_cache": "kv",
    }
    digits = 1 if max(phase.total for phase in phases) > 1e10 else 3
    methods = {phase.phase: phase.phase.partition(".")[2] for phase in phases}
    methods_differ = len(set(methods.values())) == len(methods)
    heads = (short.get(name, name) for name in names)
    rows = [("while", "all", "of it", *heads)]
    for phase in phases:
        parts = [f"{phase.parts.get(name, 0.0) / 1e9:.{digits}f}" for name in names]
        share = f"{100 * phase.total / phase.budget:.0f} %"
        title = methods[phase.phase] if methods_differ else phase.phase
        rows.append((title, f"{phase.total / 1e9:.{digits}f}", share, *parts))
    yield from table(rows, right=tuple(range(1, len(rows[0]))))


def _groups(report: PlanReport) -> Iterator[str]:
    yield ""
    yield f"process groups: {len(report.groups)}"
    rows = [("made by", "what", "lane", "backend", "groups", "ranks each")]
    for kind in report.group_kinds:
        rows.append(
            (kind.made_by, kind.axis, kind.lane, kind.backend, str(kind.count), str(kind.size))
        )
    yield from table(rows, right=(4, 5))
    if report.world_size > MOST_LISTED:
        yield "  --json lists every one with its ranks"
        return
    for kind in report.group_kinds:
        everyone = ", ".join(str(list(ranks)) for ranks in kind.members)
        yield from wrapped(f"  {kind.made_by} {kind.axis} ({kind.lane}, {kind.backend})", everyone)


def _orders_by_rank(report: PlanReport) -> Iterator[str]:
    """Ranks with the same calls together; their transfers counted."""
    calls: dict[int, list[str]] = {}
    transfers: dict[int, int] = {}
    for order in report.orders:
        for rank in order.commands:
            if order.lane == COMPUTE:
                calls.setdefault(rank, []).append(f"{order.number} {order.label}")
            else:
                transfers[rank] = transfers.get(rank, 0) + 1
    alike: dict[tuple[str, ...], list[int]] = {}
    for rank in sorted({*calls, *transfers}):
        alike.setdefault(tuple(calls.get(rank, ())), []).append(rank)
    released = sum(order.lane == TRANSFER for order in report.orders)
    yield ""
    yield f"order of commands by rank (and {released} transfers, in the order of their release)"
    for labels, ranks in alike.items():
        counts = [transfers.get(rank, 0) for rank in ranks]
        many = f"{min(counts)}-{max(counts)}" if min(counts) != max(counts) else str(counts[0])
        yield from wrapped(f"  ranks {spans(ranks)}, {many} transfers", ", ".join(labels) or "none")
    if released and report.world_size > MOST_LISTED:
        yield "  --json lists the transfers of every rank"
        return
    edges: dict[int, list[str]] = {}
    for edge in sorted(report.edges, key=lambda e: (e.release, e.source, e.destination)):
        size = bytes_of(edge.num_bytes)
        edges.setdefault(edge.release, []).append(f"{edge.source} -> {edge.destination} {size}")
    for place, shown in edges.items():
        more = [f"... {len(shown) - _MOST_EDGES} more"] if len(shown) > _MOST_EDGES else []
        label = report.trace.orders[place].label
        yield from wrapped(f"  {label}", ", ".join(shown[:_MOST_EDGES] + more))


def _assumed(report: PlanReport) -> Iterator[str]:
    trace = report.trace
    if trace.assumptions or trace.reads or report.missing_here:
        yield ""
        yield "assumed"
    if report.missing_here:
        yield from wrapped("  - not on this machine", report.missing_here)
    for sentence in trace.assumptions:
        yield from wrapped("  -", sentence, colon="")
    for read in trace.reads:
        again = "; inside a loop, traced as often as the examples say" if read.in_loop else ""
        what = f"waits for data ({read.what}){again}" if read.waits else f"repeats ({read.what})"
        yield from wrapped(f"  - line {read.line}", what)


def _proofs(report: PlanReport) -> Iterator[str]:
    yield ""
    yield "checks"
    for proof in report.proofs:
        verdict = f"{len(proof.findings)} wrong" if proof.findings else "ok"
        yield f"  {verdict:8} {proof.name:9} {proof.what}"
    if report.findings:
        yield ""
        yield "wrong"
    for number, finding in enumerate(report.findings, 1):
        yield from wrapped(f"  {number}. {finding.check}", finding.text)


def _moved(report: PlanReport) -> int:
    return sum(report.edge_bytes.values())


def _synced(report: PlanReport) -> int:
    return sum(sum(way.received.values()) * way.syncs for way in report.weights)
