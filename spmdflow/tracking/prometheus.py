"""The page of a run for Prometheus: its families of metrics, and their text.

`families_of` is pure: it turns the last records of a run into families. `page_text` also reads
status.json and RUN_DIR/servers, which are small, and writes the text with prometheus_client (the
extra `prometheus`). docs/TRACKERS.md lists the families.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from types import MappingProxyType
from typing import Any

from spmdflow.checkpoint.lock import STATUS_FILE
from spmdflow.tracking.servers import (
    STATES,
    ServerRecord,
    encodable,
    is_number,
    read_servers,
    read_small_json,
)

MAX_STATUS_BYTES = 8 << 20
_GAUGE = "gauge"
_COUNTER = "counter"


@dataclass(frozen=True)
class LastStep:
    """What the last finished step recorded. Nobody changes it, so any thread may read it."""

    number: int
    ended_at: float
    """Unix time."""
    metrics: Mapping[str, float]
    """Of metrics.jsonl, those that are finite."""
    queue_rows: int | None = None
    """Rows of later steps whose generation has begun; None: the script has no queue."""

    @classmethod
    def of(
        cls, number: int, metrics: Mapping[str, float], *, ended_at: float, queue_rows: int | None
    ) -> LastStep:
        """Return the record of a step, with a copy of the metrics that are finite."""
        finite = {}
        for name, value in metrics.items():
            if isfinite(value):
                finite[name] = float(value)
        return cls(number, ended_at, MappingProxyType(finite), queue_rows)


@dataclass(frozen=True)
class RunFacts:
    """What the page knows of a run; replaced as a whole after each step."""

    run: str
    """Name of RUN_DIR's folder, the label of every sample."""
    started_at: float
    """Unix time of this start."""
    restarts: int = 0
    """Restarts by torchrun in this launch."""
    total_steps: int = 0
    tokens: int = 0
    """Prompt and response tokens of all finished steps."""
    last_step: LastStep | None = None


@dataclass(frozen=True)
class MetricFamily:
    """A metric of the page with its samples."""

    name: str
    text: str
    """One sentence, the HELP line."""
    labels: tuple[str, ...] = ()
    """Names of the labels besides `run`."""
    samples: list[tuple[tuple[str, ...], float]] = field(default_factory=list)
    """(values of the labels, number)."""
    kind: str = _GAUGE


def step_tokens(metrics: Mapping[str, Any]) -> int:
    """Return the prompt and response tokens of a step's record; 0 if it has none."""
    tokens = 0
    for name in ("rollout/prompt_tokens", "rollout/response_tokens"):
        if is_number(metrics.get(name)):
            tokens += int(metrics[name])
    return tokens


def import_library() -> None:
    """Import prometheus_client now, so that no scrape waits for it. ImportError without it."""
    import prometheus_client  # noqa: F401


def page_text(run_dir: Path, facts: RunFacts) -> bytes:
    """Return the page in Prometheus' text format.

    Reads RUN_DIR/status.json and RUN_DIR/servers, as far as they are there and undamaged. Needs
    prometheus_client.
    """
    status = read_small_json(run_dir / STATUS_FILE, max_bytes=MAX_STATUS_BYTES)
    return write_families(families_of(facts, status, read_servers(run_dir)), run=facts.run)


def write_families(families: Iterator[MetricFamily], *, run: str) -> bytes:
    """Return the text of families, each sample with the label `run`. Needs prometheus_client."""
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    classes: dict[str, Any] = {_GAUGE: GaugeMetricFamily, _COUNTER: CounterMetricFamily}

    class RunCollector:
        """The families, for the library."""

        def describe(self) -> list[Any]:
            """Nothing: names are checked by this package's tests."""
            return []

        def collect(self) -> Iterator[Any]:
            """Yield each family as the library's own class."""
            for each in families:
                metric = classes[each.kind](each.name, each.text, labels=("run", *each.labels))
                for labels, value in each.samples:
                    metric.add_metric([encodable(label) for label in (run, *labels)], value)
                yield metric

    registry = CollectorRegistry()
    registry.register(RunCollector())
    text: bytes = generate_latest(registry)
    return text


def families_of(
    facts: RunFacts, status: Mapping[str, Any], servers: Sequence[ServerRecord]
) -> Iterator[MetricFamily]:
    """Yield the families of a run, in the order of the page; families without samples are omitted.

    status: content of status.json, {} without one.
    """
    for family in (
        *_run_families(facts),
        *_status_families(status),
        *_server_families(servers),
        *_record_families(facts.last_step),
    ):
        if family.samples:
            yield family


def _run_families(facts: RunFacts) -> Iterator[MetricFamily]:
    """Yield the families of the run as a whole and of its last step."""
    yield _single("spmdflow_start_timestamp_seconds", "Unix time of this start", facts.started_at)
    text = "Restarts of the ranks by torchrun in this launch"
    yield _single("spmdflow_restarts_total", text, facts.restarts, kind=_COUNTER)
    yield _single("spmdflow_steps", "Steps that the run takes", facts.total_steps)
    if facts.tokens:
        text = "Prompt and response tokens of all finished steps"
        yield _single("spmdflow_trained_tokens_total", text, facts.tokens, kind=_COUNTER)
    last = facts.last_step
    if last is None:
        return
    yield _single("spmdflow_step", "The last finished step", last.number)
    text = "Unix time at which the last step finished"
    yield _single("spmdflow_step_end_timestamp_seconds", text, last.ended_at)
    if last.queue_rows is not None:
        text = "Rows of later steps whose generation has begun"
        yield _single("spmdflow_queue_rows", text, last.queue_rows)
    for name, key, text in _STEP_FAMILIES:
        if key in last.metrics:
            yield _single(name, text, last.metrics[key])


_STEP_FAMILIES = (
    ("spmdflow_step_seconds", "time/step_seconds", "Duration of the last finished step"),
    (
        "spmdflow_token_age_mean",
        "rollout/age",
        "Weight versions between sampling a token and training on it, mean of the last step",
    ),
    ("spmdflow_token_age_max", "rollout/age_max", "The same, maximum of the last step"),
    (
        "spmdflow_weights_version",
        "rollout/weights_version",
        "How often the generator got weights",
    ),
)
"""Family, metric of metrics.jsonl, help."""


def _record_families(last: LastStep | None) -> Iterator[MetricFamily]:
    """Yield the family of all metrics of the last finished step."""
    if last is None:
        return
    family = MetricFamily("spmdflow_metric", "Metrics of the last finished step", ("key",))
    for key, value in sorted(last.metrics.items()):
        family.samples.append(((key,), value))
    yield family


def _status_families(status: Mapping[str, Any]) -> Iterator[MetricFamily]:
    """Yield the families of status.json: ranks, their silence, calls that run.

    Parts of a wrong type are omitted.
    """
    ranks = status.get("ranks")
    if isinstance(ranks, dict):
        silence = MetricFamily(
            "spmdflow_rank_silent_seconds",
            "Time since rank 0 last heard of a rank, when status.json was written",
            ("rank",),
        )
        for rank, facts in ranks.items():
            if isinstance(facts, list) and facts and is_number(facts[-1]):
                silence.samples.append(((str(rank),), facts[-1]))
        yield _single("spmdflow_ranks", "Ranks of the run", len(ranks))
        yield silence
    calls = MetricFamily(
        "spmdflow_open_call_seconds",
        "How long a call has run, when status.json was written",
        ("call", "phase"),
    )
    longest: dict[tuple[str, str], float] = {}
    running = status.get("open")
    for call in running if isinstance(running, list) else ():
        if isinstance(call, list) and len(call) > 2 and is_number(call[2]):
            key = (str(call[0]), str(call[1]))
            longest[key] = max(call[2], longest.get(key, 0.0))  # a sample of a label comes once
    calls.samples.extend(longest.items())
    yield calls
    if is_number(status.get("written")):
        text = "Unix time at which rank 0 last wrote status.json"
        yield _single("spmdflow_status_timestamp_seconds", text, status["written"])


def _server_families(servers: Sequence[ServerRecord]) -> Iterator[MetricFamily]:
    """Yield the families of the generation servers; of a server that a rank reports twice, once."""
    labels = ("rank", "server")
    by_labels: dict[tuple[str, ...], ServerRecord] = {}
    for each in servers:
        by_labels[(str(each.rank), each.url)] = each
    state_text = "1 for the state of a generation server, 0 for the other states"
    states = MetricFamily("spmdflow_server_state", state_text, (*labels, "state"))
    for key, server in by_labels.items():
        for state in STATES:
            states.samples.append(((*key, state), float(server.state == state)))
    yield states
    for name, field_name, text, kind in _SERVER_FAMILIES:
        family = MetricFamily(name, text, labels, kind=kind)
        for key, server in by_labels.items():
            family.samples.append((key, getattr(server, field_name)))
        yield family


_SERVER_FAMILIES = (
    (
        "spmdflow_server_weights_version",
        "weights_version",
        "Version of the weights that a generation server has",
        _GAUGE,
    ),
    (
        "spmdflow_server_running_rows",
        "running_rows",
        "Rows that a generation server generates at the moment",
        _GAUGE,
    ),
    (
        "spmdflow_server_restarts_total",
        "restarts",
        "How often a generation server was started again",
        _COUNTER,
    ),
    (
        "spmdflow_server_tokens_total",
        "tokens",
        "Tokens that a generation server has generated",
        _COUNTER,
    ),
    (
        "spmdflow_server_recomputed_tokens_total",
        "recomputed_tokens",
        "Tokens that had to be computed again",
        _COUNTER,
    ),
    (
        "spmdflow_server_report_timestamp_seconds",
        "time",
        "Unix time of the report about a generation server",
        _GAUGE,
    ),
)
"""Family, field of `ServerRecord`, help, kind."""


def _single(name: str, text: str, value: float, *, kind: str = _GAUGE) -> MetricFamily:
    """Return a family with one sample, without labels besides `run`."""
    return MetricFamily(name, text, samples=[((), value)], kind=kind)
