"""The block of one run as text: a word in front of each line says what it is about."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from spmdflow.config.parallel import count_of
from spmdflow.throughput.distribution import Lengths, Quartiles
from spmdflow.throughput.flops import KINDS
from spmdflow.throughput.summary import Rates, Summary

_LABEL = 12
_WIDTH = 100
_NOT_RECORDED = "not recorded"


def block_text(summary: Summary) -> str:
    """Return the block, at most 100 columns wide, with a newline at its end."""
    lines = [f"throughput of {summary.run_dir}"]
    for label, text in _entries(summary):
        lines += textwrap.wrap(
            text,
            width=_WIDTH,
            initial_indent=f"{label:<{_LABEL}}",
            subsequent_indent=" " * _LABEL,
            break_on_hyphens=False,
        )
    lines += summary.warnings
    return "\n".join(lines) + "\n"


def _entries(summary: Summary) -> Iterator[tuple[str, str]]:
    """Yield (label, text) of each entry; further entries of a label have "" in its place."""
    yield from _step_entries(summary)
    yield from _token_entries(summary)
    yield "lengths", f"prompts {_lengths_text(summary.prompt_lengths)}"
    yield "", f"responses {_lengths_text(summary.response_lengths)}"
    yield from _setup_entries(summary.launch)
    yield from _compute_entries(summary)
    yield from _learning_entries(summary)
    yield from _origin_entries(summary.launch)


def _step_entries(summary: Summary) -> Iterator[tuple[str, str]]:
    """Yield the state of the run, which steps are measured, and their seconds."""
    starts = count_of(summary.num_launches, "start")
    steps = f"steps {summary.first_step} to {summary.last_step}"
    yield "run", f"{steps} in {starts}; {summary.state}"
    omitted = [f"the first {summary.num_warm_up} (warm-up: {summary.warm_up} of each start)"]
    if summary.num_other_setup:
        omitted.append(
            f"{summary.num_other_setup} of starts with other devices, models, sizes or versions"
        )
    measured = f"{summary.num_measured} of {count_of(summary.num_steps, 'step')}"
    yield "measured", f"{measured}, without {' and '.join(omitted)}"
    seconds_text = "no measured step only trains"
    if summary.plain_seconds is not None:
        seconds_text = (
            f"whole steps, weight sync included: {_quartiles_text(summary.plain_seconds)}"
        )
    yield "seconds", seconds_text
    for what, seconds in (
        ("evaluation", summary.evaluating_seconds),
        ("saving", summary.saving_seconds),
    ):
        if seconds is not None:
            apart = "not counted above"
            if summary.counts_all:
                apart = "counted below"
            yield "", f"steps with {what} ({apart}): {_quartiles_text(seconds)}"


def _token_entries(summary: Summary) -> Iterator[tuple[str, str]]:
    """Yield the rates of tokens: trained, per device, then what was not trained or was old."""
    rates = summary.rates
    if rates.trained is None:
        yield "tokens/s", f"trained: {_NOT_RECORDED}; generated: {_rate_text(rates.generated)}"
        return
    parts = f"prompts {_rate_text(rates.trained_prompts)}, "
    parts += f"responses {_rate_text(rates.trained_responses)}"
    yield "tokens/s", f"{_rate_text(rates.trained)} trained ({parts}), {_steps_text(rates)}"
    if summary.num_ranks:
        each = rates.trained / summary.num_ranks
        yield "", f"{_rate_text(each)} per device ({count_of(summary.num_ranks, 'rank')})"
    if rates.by_step is not None:
        yield "", f"of single steps: {_quartiles_text(rates.by_step)}"
    every = summary.all_rates
    if every.num_steps > rates.num_steps:
        yield "", f"{_rate_text(every.trained)} with evaluation and saving, {_steps_text(every)}"
    yield "not trained", f"generated and dropped: {_share_text(rates, rates.dropped)}"
    yield "", f"skipped as failed: {_share_text(rates, rates.failed)}"
    if rates.stale is None:
        yield "stale", "none recorded, as the script has no flow.queue"
    else:
        ages = f"age of tokens: mean {summary.mean_age or 0:.3g}, at most {summary.max_age or 0:g}"
        yield "stale", f"rows begun with older weights: {_share_text(rates, rates.stale)}; {ages}"


def _setup_entries(launch: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield devices, models and sizes of the last start."""
    if not launch:
        yield "devices", _NOT_RECORDED
        return
    nodes = count_of(launch["nodes"], "node")
    yield "devices", f"{count_of(launch['ranks'], 'rank')} on {nodes}, each on {launch['device']}"
    label = "models"
    for name, model in launch["models"].items():
        yield label, f"{name}: {_model_text(model)}"
        label = ""
    sizes = launch["sizes"]
    yield "batch", _batch_text(sizes)
    bound = "none recorded, as the script has no max_staleness"
    if "max_staleness" in sizes:
        bound = f"max_staleness {sizes['max_staleness']}"
    yield "off-policy", f"bound: {bound}"


def _model_text(model: Mapping[str, Any]) -> str:
    """Return engine, layout, ranks, precisions and batch sizes of a model."""
    ranks = []
    for first, last in model["ranks"]:
        ranks.append(f"{first}-{last}" if last > first else f"{first}")
    text = f"ranks {', '.join(ranks)}, layout {model['layout']}"
    if model["engine"] is not None and model["precision"] is not None:
        text += f", {model['engine']} in {model['precision']}"
    if model["adapters"]:
        text += " with adapters"
    if model["generator"] is not None:
        text += f", generates with {model['generator']} in {model['generator_precision']}"
    if model["weights"] is not None:
        text += f", {model['weights']['parameters']:,} parameters"
    for key, value in model["sizes"].items():
        if value != []:
            text += f", {key} {value}"
    return text


def _batch_text(sizes: Mapping[str, Any]) -> str:
    """Return prompts of a step, group size, their product, and the limits of lengths."""
    group = sizes.get("data.samples_per_prompt", 1)
    prompts = sizes.get("data.prompts_per_step")
    longest = []
    for key in ("data.max_prompt_tokens", "actor.rollout.max_new_tokens"):
        if key in sizes:
            longest.append(f"{key} {sizes[key]}")
    if prompts is None:
        return "; ".join([_NOT_RECORDED, *longest])
    rows = f"{prompts} prompts a step, group size {group}: {prompts * group:,} rows"
    return "; ".join([rows, *longest])


def _compute_entries(summary: Summary) -> Iterator[tuple[str, str]]:
    """Yield model FLOPs, their utilization, and the formula."""
    compute = summary.compute
    devices = summary.num_ranks or 1
    if compute.by_kind and summary.rates.seconds:
        each = compute.total / summary.rates.seconds / devices
        parts = []
        for kind in KINDS:
            parts.append(f"{kind} {compute.by_kind[kind] / compute.total:.0%}")
        yield "FLOPs", f"{each / 1e12:.4g} TFLOP/s per device ({', '.join(parts)})"
    if compute.mfu is None:
        yield "MFU", f"unknown, because {compute.unknown}"
    else:
        yield "MFU", f"{compute.mfu:.1%} of the whole step; peak of a device: {compute.peak}"
    yield "formula", f"{summary.formula} ({summary.formula_source})"


def _learning_entries(summary: Summary) -> Iterator[tuple[str, str]]:
    """Yield first and last means of reward and KL."""
    label = "learning"
    for window in summary.learning:
        steps = count_of(window.num_steps, "step")
        text = f"{window.metric}: first {steps} {window.first:.4g}, last {window.last:.4g}"
        yield label, text
        label = ""


def _origin_entries(launch: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield commit, versions and command line of the last start."""
    if not launch:
        yield "versions", _NOT_RECORDED
        return
    git = launch["git"]
    version = launch["versions"].get("spmdflow", "of unknown version")
    yield "commit", f"spmdflow {version}, {_commit_text(git['package'])}"
    if git["script"] != git["package"]:
        yield "", f"script {launch['script']}: {_commit_text(git['script'])}"
    versions = []
    for name, number in launch["versions"].items():
        if name != "spmdflow":
            versions.append(f"{name} {number}")
    yield "versions", ", ".join(versions)
    yield "command", launch["command"]


def _commit_text(state: Mapping[str, Any]) -> str:
    if not state:
        return "not from a git checkout"
    if state["dirty"]:
        return f"commit {state['commit']} with changes that are not committed"
    return f"commit {state['commit']}"


def _quartiles_text(quartiles: Quartiles) -> str:
    return (
        f"median {_number(quartiles.median)}, middle half {_number(quartiles.lower_quartile)} to "
        f"{_number(quartiles.upper_quartile)}, least {_number(quartiles.least)}, most "
        f"{_number(quartiles.most)} ({count_of(quartiles.count, 'step')})"
    )


def _lengths_text(lengths: Lengths | None) -> str:
    if lengths is None:
        return f"{_NOT_RECORDED}, or none"
    return (
        f"mean {lengths.mean:.1f}, p50 {lengths.p50}, p90 {lengths.p90}, p99 {lengths.p99}, "
        f"max {lengths.most} tokens ({lengths.rows:,} trained rows)"
    )


def _share_text(rates: Rates, rate: float | None) -> str:
    """Return a rate of tokens, and what it is in percent of the trained ones."""
    if rate is None:
        return _NOT_RECORDED
    text = f"{_rate_text(rate)} tokens/s"
    if rates.trained:
        text += f", {rate / rates.trained:.1%} of the trained ones"
    return text


def _steps_text(rates: Rates) -> str:
    return f"over {count_of(rates.num_steps, 'step')} in {rates.seconds:.4g} s"


def _rate_text(rate: float | None) -> str:
    if rate is None:
        return _NOT_RECORDED
    if rate < 100:
        return f"{rate:.3g}"
    return f"{rate:,.0f}"


def _number(value: float) -> str:
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def joined_blocks(summaries: Sequence[Summary]) -> str:
    """Return the blocks of several runs, with an empty line between them."""
    return "\n".join(block_text(summary) for summary in summaries)
