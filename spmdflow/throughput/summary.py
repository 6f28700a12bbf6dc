"""`Summary`: all numbers of the block of one run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from spmdflow.throughput.distribution import Lengths, Quartiles
from spmdflow.throughput.flops import FORMULA, SOURCE, Compute, compute_of
from spmdflow.throughput.measured_step import MeasuredStep, Selection, select_steps
from spmdflow.tracking.reading import Record, RunFiles

_WINDOW = 10
"""Most steps of the first and of the last window of reward and KL."""
_LEARNING = (
    "reward/mean",
    "eval/accuracy",
    "actor/reference_kl",
    "actor/reference_kl_per_response",
    "actor/approx_kl",
    "actor/loss",
)
"""Metrics that show what was learnt at this speed."""


@dataclass(frozen=True)
class Rates:
    """Tokens per second of some steps: the sum of tokens over the sum of whole seconds.

    A rate is None if RUN_DIR does not record these tokens.
    """

    num_steps: int
    seconds: float
    trained: float | None
    """Prompt and response tokens that an update learnt from; each row counts once a step."""
    trained_prompts: float | None
    trained_responses: float | None
    failed: float | None
    """Tokens of rows that updates skipped, as their reward, cost or episode failed."""
    dropped: float | None
    """Prompt and response tokens that were generated and given to no update of the step."""
    dropped_responses: float | None
    stale: float | None
    """Trained tokens of rows whose generation began with older weights; None: no queue."""
    generated: float | None
    """By rollout/prompt_tokens and rollout/response_tokens: trained or not."""
    by_step: Quartiles | None
    """Trained tokens per second of each step."""


@dataclass(frozen=True)
class Window:
    """Means of a metric over the first and the last steps that have it."""

    metric: str
    num_steps: int
    first: float
    last: float


@dataclass(frozen=True)
class Summary:
    """What a claim of tokens per second needs."""

    run_dir: str
    state: str
    first_step: int
    last_step: int
    num_steps: int
    num_launches: int
    warm_up: int
    num_warm_up: int
    num_other_setup: int
    num_measured: int
    plain_seconds: Quartiles | None
    """Whole seconds of the measured steps that only train."""
    evaluating_seconds: Quartiles | None
    saving_seconds: Quartiles | None
    counts_all: bool
    """Whether `rates` has all measured steps, as none of them only trains."""
    rates: Rates
    """Of the steps that only train."""
    all_rates: Rates
    """Of all measured steps, with evaluation and saving."""
    mean_age: float | None
    """Versions between sampling a token and training on it; None: no queue."""
    max_age: float | None
    prompt_lengths: Lengths | None
    response_lengths: Lengths | None
    compute: Compute
    formula: str
    formula_source: str
    learning: Sequence[Window]
    launch: Record
    """Command, versions, git, device, models and sizes of the last start."""
    warnings: Sequence[str]

    @property
    def num_ranks(self) -> int | None:
        """Ranks of the run, each with a device of its own; None: not recorded."""
        ranks: int | None = self.launch.get("ranks")
        return ranks

    def to_plain(self) -> dict[str, Any]:
        """As data for JSON, with the rates per device."""
        plain = asdict(self)
        plain["launch"] = dict(self.launch)
        plain["tokens_per_second_per_device"] = None
        if self.rates.trained is not None and self.num_ranks:
            plain["tokens_per_second_per_device"] = self.rates.trained / self.num_ranks
        plain["compute"]["flops"] = self.compute.total
        return plain


def summarize(run: RunFiles, *, warm_up: int) -> Summary:
    """Return the numbers of a run. Raises DataError if it has no finished step."""
    selection = select_steps(run, warm_up=warm_up)
    measured = selection.measured
    plain = [step for step in measured if step.is_plain]
    counted = plain or measured
    warnings = list(selection.warnings)
    if not plain:
        warnings.append(
            "warning: every measured step evaluates or saves, so all of them count; measure a run "
            "with larger eval_every and save_every"
        )
    ages = _values(counted, "rollout/age")
    return Summary(
        run_dir=str(run.path),
        state=run.run_state.value,
        first_step=selection.steps[0].number,
        last_step=selection.steps[-1].number,
        num_steps=len(selection.steps),
        num_launches=selection.num_launches,
        warm_up=warm_up,
        num_warm_up=selection.num_warm_up,
        num_other_setup=selection.num_other_setup,
        num_measured=len(measured),
        plain_seconds=_seconds_of(plain),
        evaluating_seconds=_seconds_of([step for step in measured if step.evaluates]),
        saving_seconds=_seconds_of([step for step in measured if step.saves]),
        counts_all=not plain,
        rates=rates_of(counted),
        all_rates=rates_of(measured),
        mean_age=_mean_or_none(ages),
        max_age=max(_values(counted, "rollout/age_max"), default=None),
        prompt_lengths=_lengths_of(counted, "prompt_lengths"),
        response_lengths=_lengths_of(counted, "response_lengths"),
        compute=compute_of(counted, selection.launch),
        formula=FORMULA,
        formula_source=SOURCE,
        learning=_windows(selection),
        launch=selection.launch,
        warnings=warnings,
    )


def rates_of(steps: Sequence[MeasuredStep]) -> Rates:
    """Return the tokens per second of some steps."""
    seconds = math.fsum(step.seconds for step in steps)
    generated = None
    if any("rollout/response_tokens" in step.metrics for step in steps):
        tokens = _values(steps, "rollout/prompt_tokens") + _values(steps, "rollout/response_tokens")
        generated = _rate(math.fsum(tokens), seconds)
    return Rates(
        num_steps=len(steps),
        seconds=seconds,
        trained=_rate(_tokens(steps, "trained", _BOTH), seconds),
        trained_prompts=_rate(_tokens(steps, "trained", _BOTH[:1]), seconds),
        trained_responses=_rate(_tokens(steps, "trained", _BOTH[1:]), seconds),
        failed=_rate(_tokens(steps, "failed", _BOTH), seconds),
        dropped=_rate(_tokens(steps, "dropped", _BOTH), seconds),
        dropped_responses=_rate(_tokens(steps, "dropped", _BOTH[1:]), seconds),
        stale=_rate(_tokens(steps, "stale", _BOTH), seconds),
        generated=generated,
        by_step=Quartiles.of(_step_rates(steps)),
    )


_BOTH = ("prompt_tokens", "response_tokens")


def _step_rates(steps: Sequence[MeasuredStep]) -> list[float]:
    """Return the trained tokens per second of each step that records them."""
    rates = []
    for step in steps:
        rate = _rate(_tokens([step], "trained", _BOTH), step.seconds)
        if rate is not None:
            rates.append(rate)
    return rates


def _tokens(steps: Sequence[MeasuredStep], part: str, names: Sequence[str]) -> int | None:
    """Return the sum of counts of a part of throughput.jsonl; None if a step lacks one.

    A step without a part that other steps have, such as stale rows, counts as 0 if that part is
    null: its rows came from no queue.
    """
    total = 0
    is_known = False
    for step in steps:
        counts = step.tokens.get(part)
        if counts is None:
            continue
        for name in names:
            if counts[name] is None:
                return None
            total += counts[name]
        is_known = True
    return total if is_known else None


def _rate(tokens: float | None, seconds: float) -> float | None:
    if tokens is None or seconds <= 0:
        return None
    return tokens / seconds


def _seconds_of(steps: Sequence[MeasuredStep]) -> Quartiles | None:
    return Quartiles.of([step.seconds for step in steps])


def _values(steps: Sequence[MeasuredStep], metric: str) -> list[float]:
    """Return the values of a metric in the steps that have it and where it was finite."""
    values = []
    for step in steps:
        value = step.metrics.get(metric)
        if value is not None:
            values.append(float(value))
    return values


def _mean_or_none(values: Sequence[float]) -> float | None:
    if not values:
        return None
    return math.fsum(values) / len(values)


def _lengths_of(steps: Sequence[MeasuredStep], name: str) -> Lengths | None:
    """Return the distribution of the lengths of trained rows; None if it is not recorded."""
    pairs: list[Sequence[int]] = []
    for step in steps:
        pairs += step.tokens.get(name) or ()
    return Lengths.of(pairs)


def _windows(selection: Selection) -> list[Window]:
    """Return first and last means of the metrics of `_LEARNING` that the run has.

    A window is at most 10 steps, and at most half of the steps that have the metric, rounded up.
    """
    windows = []
    for metric in _LEARNING:
        values = _values(selection.steps, metric)
        size = min(_WINDOW, (len(values) + 1) // 2)
        if size:
            first = math.fsum(values[:size]) / size
            last = math.fsum(values[-size:]) / size
            windows.append(Window(metric, size, first, last))
    return windows
