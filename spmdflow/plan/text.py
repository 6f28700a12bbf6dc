"""A plan as text of at most 100 columns. Also formats tables, paragraphs, bytes and seconds."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence

from spmdflow.config.parallel import spans
from spmdflow.config.resolve import choices_text
from spmdflow.plan.prediction import Prediction
from spmdflow.plan.record import Key
from spmdflow.plan.report import PlanReport
from spmdflow.plan.workload import adapter_parameters
from spmdflow.runtime.executor import COMPUTE, TRANSFER

WIDTH = 100
MOST_LISTED = 16
"""Largest world size of which every process group and transfer is printed."""
_MOST_EDGES = 16
_INDENT = " " * 7
_MOST_LINES = 24
_ROUNDED_UP = 0.9995
"""Smallest value that rounds to 1 with three digits."""
_MEMORY_NAMES = {
    "parameters": "params",
    "gradients": "grads",
    "optimizer": "optim",
    "activations": "activ",
    "generation_weights": "gen.wts",
    "frozen_models": "frozen",
    "kv_cache": "kv",
}
_Rows = list[Sequence[object]]


def table(rows: Sequence[Sequence[object]], *, right: Iterable[int] = ()) -> Iterator[str]:
    """Yield the lines of a table whose first row is its head.

    Cells are left-aligned, in the columns `right` right-aligned. Lines are cut at 100 columns, with
    "..." at their end. Of more than 25 rows, the first 24 and the last are shown.
    """
    cells = []
    for row in rows:
        cells.append([str(cell) for cell in row])
    widths = []
    for column in zip(*cells, strict=True):
        widths.append(max(map(len, column)))
    adjust = []
    for index in range(len(widths)):
        adjust.append(str.rjust if index in right else str.ljust)
    lines = []
    for row in cells:
        fitted = []
        for fit, cell, width in zip(adjust, row, widths, strict=True):
            fitted.append(fit(cell, width))
        lines.append("  " + "  ".join(fitted).rstrip())
    if len(lines) > _MOST_LINES + 2:
        num_omitted = len(lines) - _MOST_LINES - 2
        lines[_MOST_LINES + 1 : -1] = [f"  ... {num_omitted} more"]
    yield from (line if len(line) <= WIDTH else line[: WIDTH - 3] + "..." for line in lines)


def wrap_paragraph(head: str, text: str, *, colon: str = ":") -> Iterator[str]:
    """Lines of a paragraph with a hanging indent below its head."""
    yield from textwrap.wrap(
        f"{head}{colon} {text}".rstrip(), WIDTH, subsequent_indent="      ", break_on_hyphens=False
    )


def bytes_of(size: float) -> str:
    """Format bytes with three digits and a decimal unit (B, kB, MB, GB, TB): 1234567 -> 1.23 MB.

    The unit is that of the rounded number: 999999 -> 1 MB.
    """
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= _ROUNDED_UP * factor:
            return f"{_three_digits(size / factor)} {unit}"
    return f"{size:.0f} B"


def seconds_of(value: float | None) -> str:
    """Format seconds in us, ms (from 1 ms on) or s (from 1 s on): 0.0123 -> 12.3 ms; None -> ""."""
    if value is None:
        return ""
    if value < _ROUNDED_UP * 1e-3:
        return f"{value * 1e6:.0f} us"
    if value < _ROUNDED_UP:
        return f"{_three_digits(value * 1e3)} ms"
    return f"{value:.4g} s"


def _three_digits(value: float) -> str:
    if value >= 999.5:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def plan_text(report: PlanReport) -> str:
    """Return the whole plan as text, its sections separated by empty lines.

    Sections without lines are omitted.
    """
    sections = (
        _pools,
        _chosen,
        _models,
        _calls,
        _routes,
        _weights,
        _memory,
        _groups,
        _orders_by_rank,
    )
    lines = [*_head(report)]
    for section in (*sections, _assumption_lines, _checks, _problems):
        text = list(section(report))
        if text:
            lines += ["", *text]
    return "\n".join(lines) + "\n"


def _head(report: PlanReport) -> Iterator[str]:
    """Yield script, ranks, hardware, predicted speed, bytes moved, and the number of problems.

    The line of speed and bytes is omitted if no seconds are predicted.
    """
    prediction = report.prediction
    nodes = len(set(report.trace.nodes))
    yield (
        f"plan   {report.script}: step {report.step} on {report.world_size} ranks of "
        f"{nodes} node{'s' * (nodes > 1)}, {prediction.hardware}"
    )
    if prediction.seconds:
        synced = sum(sum(plan.received.values()) * plan.syncs for plan in report.weights)
        yield (
            f"       {seconds_of(prediction.seconds)} a step predicted, "
            f"{prediction.tokens_per_second:,.0f} tokens/s; {_moved_text(report)} of rows and "
            f"{bytes_of(synced)} of weights move"
        )
    yield from _varied_lines(report)
    wrong = len(report.problems)
    if wrong:
        verdict = f"{wrong} problem{'s' * (wrong > 1)}, listed at the end"
    else:
        verdict = "no problems"
    yield f"       {verdict}; planned in {report.seconds:.1f} s"


def _varied_lines(report: PlanReport) -> Iterator[str]:
    """Yield what the same step takes with rows of different lengths, if that is predicted."""
    if report.varied is None:
        return
    prediction = report.varied.prediction
    text = (
        f"with rows of one length; with lengths that vary {seconds_of(prediction.seconds)}, "
        f"{prediction.tokens_per_second:,.0f} tokens/s ({report.varied.lengths})"
    )
    yield from textwrap.wrap(text, WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT)


def _pools(report: PlanReport) -> Iterator[str]:
    """Yield a line for each pool with its ranks and roles, then one for ranks without a pool."""
    trace = report.trace
    yield "pools"
    for name, pool in trace.pools.items():
        roles = (x if x in trace.models else f"{x} (not spawned)" for x in pool.roles)
        yield f"  {name:12} ranks {spans(pool.ranks)}: {', '.join(roles)}"
    idle = set(trace.world) - {rank for pool in trace.pools.values() for rank in pool.ranks}
    if idle:
        yield f"  {'none':12} ranks {spans(sorted(idle))} have no work"


def _chosen(report: PlanReport) -> Iterator[str]:
    for line in choices_text(report.choices).splitlines():
        yield from wrap_paragraph(*line.split(": ", 1))


def _models(report: PlanReport) -> Iterator[str]:
    """Yield a table of the worker groups: name, class, engine, layout, pool.

    The engine is given with its dtype and generator. Then follows a line for each model that trains
    adapters or uses another model's weights.
    """
    rows = [("model", "class", "engine", "layout", "pool")]
    for model in report.trace.models.values():
        engine = getattr(model.cfg, "engine", None)
        weights = getattr(model.cfg, "model", None)
        if engine is not None and weights is not None:
            kind = f"{engine.kind} {weights.precision}"
        else:
            kind = "-"
        if model.generates:
            kind += f", {model.cfg.rollout.generator}"
        name = model.worker_class.__name__
        rows.append((model.name, name, kind, str(model.layout), model.pool))
    yield from table(rows)
    for model in report.trace.models.values():
        weights = getattr(model.cfg, "model", None)
        lora = getattr(weights, "lora", None)
        if weights is not None and lora and not model.only_generates:
            count = adapter_parameters(weights)
            yield f"  {model.name} trains {count:,} parameters: adapters of rank {lora.rank}"
        if getattr(model.cfg, "shares", None):
            yield f"  {model.name} uses the weights of {model.cfg.shares} with adapters disabled"


def _calls(report: PlanReport) -> Iterator[str]:
    """Yield a line for each call in the order of the script, then seconds by stage, then notes.

    The last lines say which models are not predicted, and why.
    """
    prediction = report.prediction
    rows: _Rows = [("line", "call", "ranks", "rows", "tokens", "start", "seconds", "largest part")]
    for call in report.calls():
        prompts = call["prompt_tokens"] or 0
        responses = call["response_tokens"] or 0
        start = ""
        seconds = ""
        if prediction.seconds:
            start = seconds_of(call["start_seconds"])
            seconds = seconds_of(call["seconds"])
        rows.append(
            (
                call["line"] or "",
                call["label"] + " (eval)" * (call["phase"] == "eval"),
                spans(call["ranks"]),
                "" if call["rows"] is None else call["rows"],
                f"{prompts:.5g}+{responses:.5g}" if prompts + responses else "",
                start,
                seconds,
                call["limit"],
            )
        )
    yield f"calls of step {report.step}, in the order of their numbers"
    yield from table(rows, right=(0, 3, 5, 6))
    if prediction.seconds and prediction.stage_seconds():
        yield from wrap_paragraph("  by stage", _stages_text(prediction))
    yield from _notes(prediction)
    if report.varied is not None:
        varied = report.varied.prediction
        yield from wrap_paragraph("  if lengths vary", _stages_text(varied))
        yield from _notes(varied)
    for why in prediction.without.values():
        yield from wrap_paragraph("  not predicted", why)


def _stages_text(prediction: Prediction) -> str:
    stages = prediction.stage_seconds().items()
    return ", ".join(f"{stage} {seconds_of(value)}" for stage, value in stages)


def _notes(prediction: Prediction) -> Iterator[str]:
    """Yield the notes of each call, such as the waves of a generation."""
    for timed in prediction.calls:
        for note in timed.notes:
            yield from wrap_paragraph(f"  {timed.call.label}", note)


def _routes(report: PlanReport) -> Iterator[str]:
    """Yield row bytes by writing and reading call, then the five edges with the most bytes."""
    if not report.routes:
        yield "rows between ranks: none"
        return
    yield f"rows between ranks: {_moved_text(report)} over {len(report.edge_bytes)} edges"
    rows: _Rows = [("from", "to", "edges", "in node", "between nodes", "columns")]
    for route in report.routes:
        sizes = bytes_of(route.intra_bytes), bytes_of(route.inter_bytes)
        columns = " ".join(route.columns)
        rows.append((route.producer, route.consumer, route.num_edges, *sizes, columns))
    yield from table(rows, right=(2, 3, 4))
    ranked = sorted(report.edge_bytes.items(), key=lambda item: (-item[1], item[0]))
    shown = ", ".join(f"{a} -> {b} {bytes_of(size)}" for (a, b), size in ranked[:5])
    yield from wrap_paragraph("  largest edges", shown)


def _weights(report: PlanReport) -> Iterator[str]:
    """Yield a line for each weight sync from a trainer to a generator, then the notes.

    "?" means a number that is not planned. Without syncs there is no line.
    """
    if not report.weights:
        return
    yield "weights from trainer to generator"
    heads = (
        "from",
        "to",
        "mode",
        "scope",
        "a rank receives",
        "edges",
        "total",
        "between nodes",
        "syncs",
    )
    rows: _Rows = [heads]
    for plan in report.weights:
        sizes = list(plan.received.values()) or [0]
        mean = bytes_of(sum(sizes) / len(sizes))
        if min(sizes) == max(sizes):
            spread = mean
        else:
            spread = f"{mean} (max {bytes_of(max(sizes))})"
        edges = len(plan.edges) if plan.edges or not sum(sizes) else "?"
        far = bytes_of(plan.inter_bytes) if plan.inter_bytes >= 0 else "?"
        ends = plan.source, plan.target, plan.mode, plan.scope
        rows.append((*ends, spread, edges, bytes_of(sum(sizes)), far, plan.syncs))
    yield from table(rows, right=(4, 5, 6, 7, 8))
    for plan in report.weights:
        if plan.note:
            yield from wrap_paragraph(f"  {plan.target}", plan.note)


def _memory(report: PlanReport) -> Iterator[str]:
    """Yield a table in GB: a rank's memory in each phase, in all and by use.

    "+1.0h" is the size of a part that is offloaded to the host. Uses that are 0 in all phases are
    omitted. Without a memory prediction there is no line.
    """
    phases = report.prediction.memory
    if not phases:
        return
    legend = "; h: offloaded to the host" * any(phase.on_host for phase in phases)
    yield f"memory of a rank in GB, of {phases[0].budget / 1e9:.2f} that a plan may fill{legend}"
    names = list(dict.fromkeys(part for phase in phases for part in phase.parts))
    names = [name for name in names if any(phase.parts.get(name) for phase in phases)]
    digits = 1 if max(phase.total for phase in phases) > 1e10 else 3
    methods = [phase.phase.partition(".")[2] for phase in phases]
    methods_differ = len(set(methods)) == len(methods)
    rows = [("phase", "total", "used", *(_MEMORY_NAMES.get(name, name) for name in names))]
    for phase, method in zip(phases, methods, strict=True):
        sizes = phase.total, *(phase.parts.get(name, 0.0) for name in names)
        total, *parts = (f"{size / 1e9:.{digits}f}" for size in sizes)
        for index, name in enumerate(names):
            if size := phase.on_host.get(name):
                parts[index] += f"+{size / 1e9:.{digits}f}h"
        share = f"{100 * phase.total / phase.budget:.0f} %"
        rows.append((method if methods_differ else phase.phase, total, share, *parts))
    yield from table(rows, right=range(1, len(rows[0])))


def _groups(report: PlanReport) -> Iterator[str]:
    """Yield a table of process groups by kind. Up to 16 ranks, also the ranks of each group."""
    yield f"process groups: {len(report.groups)}"
    kinds = report.group_kinds()
    rows: _Rows = [("owner", "axis", "lane", "backend", "groups", "ranks each")]
    rows += [(*kind, len(groups), max(map(len, groups))) for kind, groups in kinds.items()]
    yield from table(rows, right=(4, 5))
    if report.world_size > MOST_LISTED:
        yield "  --json lists every group with its ranks"
        return
    for (owner, axis, lane, backend), groups in kinds.items():
        listed = ", ".join(str(list(ranks)) for ranks in groups)
        yield from wrap_paragraph(f"  {owner} {axis} ({lane}, {backend})", listed)


def _orders_by_rank(report: PlanReport) -> Iterator[str]:
    """Yield the calls of each rank, ranks with equal calls on one line; then each transfer's edges.

    Edges are listed up to 16 ranks, and at most 16 for each transfer.
    """
    alike: dict[tuple[str, ...], tuple[list[int], set[int]]] = {}
    for rank, lanes in report.lanes().items():
        labels = tuple(f"{call.number} {call.label}" for call in lanes[COMPUTE])
        ranks, counts = alike.setdefault(labels, ([], set()))
        ranks.append(rank)
        counts.add(len(lanes[TRANSFER]))
    released = sum(call.lane == TRANSFER for call in report.step_calls)
    yield f"order of commands by rank (and {released} transfers, in the order of their release)"
    for labels, (ranks, counts) in alike.items():
        many = f"{min(counts)}-{max(counts)}" if len(counts) > 1 else str(*counts)
        yield from wrap_paragraph(
            f"  ranks {spans(ranks)}, {many} transfers", ", ".join(labels) or "none"
        )
    if released and report.world_size > MOST_LISTED:
        yield "  --json lists the transfers of every rank"
        return
    edges: dict[Key, list[str]] = {}
    for edge in sorted(report.edges, key=lambda e: (e.release, e.source, e.destination)):
        size = bytes_of(edge.num_bytes)
        edges.setdefault(edge.release, []).append(f"{edge.source} -> {edge.destination} {size}")
    for key, shown in edges.items():
        if len(shown) > _MOST_EDGES:
            more = [f"... {len(shown) - _MOST_EDGES} more"]
        else:
            more = []
        label = report.trace.by_key[key].label
        yield from wrap_paragraph(f"  {label}", ", ".join(shown[:_MOST_EDGES] + more))


def _assumption_lines(report: PlanReport) -> Iterator[str]:
    """Yield what the plan assumed, and the lines of the script whose effect only a run can know.

    These are lines that wait for a value, and loops that repeat their calls.
    """
    trace = report.trace
    if trace.assumptions or trace.reads or report.missing_here:
        yield "assumed"
    if report.missing_here:
        yield from wrap_paragraph("  - missing on this node", report.missing_here)
    for sentence in trace.assumptions:
        yield from wrap_paragraph("  -", sentence, colon="")
    for read in trace.reads:
        if read.in_loop:
            again = "; in a loop, traced as often as the examples cause it to repeat"
        else:
            again = ""
        if read.waits:
            what = f"waits for data ({read.what}){again}"
        else:
            what = f"repeats ({read.what})"
        yield from wrap_paragraph(f"  - line {read.line}", what)


def _checks(report: PlanReport) -> Iterator[str]:
    """Yield a line for each check: "ok" or the number of problems, name, what it covered."""
    yield "checks"
    for check in report.checks:
        verdict = f"{len(check.problems)} wrong" if check.problems else "ok"
        yield f"  {verdict:8} {check.name:9} {check.covered}"


def _problems(report: PlanReport) -> Iterator[str]:
    """Yield every problem, numbered from 1; nothing if there is none."""
    if report.problems:
        yield "problems"
    for number, problem in enumerate(report.problems, 1):
        yield from wrap_paragraph(f"  {number}. {problem.check}", problem.text)


def _moved_text(report: PlanReport) -> str:
    return bytes_of(sum(report.edge_bytes.values()))
