"""One step of the script: what was logged, and how a step's replies become its metrics."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from math import isfinite
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np

from spmdflow.config.leaf import flat, plain_tree
from spmdflow.controller.batch import Batch
from spmdflow.controller.caller import Caller
from spmdflow.controller.planning import script_line
from spmdflow.controller.result import Result
from spmdflow.controller.sample import first_of_groups, is_shown, samples_of
from spmdflow.errors import ProtocolError
from spmdflow.runtime.call import CallRecord
from spmdflow.tracking.metric import merge
from spmdflow.tracking.origin import git_state, versions
from spmdflow.tracking.progress import print_samples, progress_line
from spmdflow.tracking.tracker import Tracker
from spmdflow.worker_api.metric import Max, Mean, Metric, Min, Sum

logger = logging.getLogger(__name__)


class Step:
    """The step that is running; `flow.steps` yields it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.started = time.monotonic()
        self._logged: list[tuple[Result | Mapping[str, Metric], str]] = []

    def seconds(self) -> float:
        """Seconds since the step began."""
        return time.monotonic() - self.started

    def log(self, *results: Result | Mapping[str, Metric], **metrics: float) -> None:
        """Add metrics to the step: results of calls (still lazy), mappings of numbers, name=value.

        They are merged when the step ends: values of one name are averaged, or combined by their
        kind (Mean, Sum, Max, Min). ProtocolError for anything else; a value that is nan or infinite
        is logged with a warning.
        """
        line = script_line()
        for result in (*results, *([metrics] if metrics else ())):
            _check_logged(result, line)
            self._logged.append((result, line))

    def merge_logged(self) -> dict[str, float]:
        """Wait for the logged results; return all logged metrics merged, one number for each name.

        ProtocolError, with the line of step.log, for a result without metrics.
        """
        metrics = []
        for result, line in self._logged:
            try:
                metrics.append(dict(result))
            except ProtocolError as err:
                raise ProtocolError(f"step.log at {line}: {err}") from err
        return merge(metrics)

    def metrics(self, records: Iterable[CallRecord]) -> dict[str, float]:
        """Return all metrics of the step: reported by its calls, logged by the script, and times.

        A logged metric replaces a reported one of the same name. Of the calls of an evaluation only
        the metrics eval/... and, renamed to eval/..., reward/... count. Adds time/..._seconds,
        copied bytes and tokens per second. Waits for the logged results.
        """
        phases: dict[str, list[CallRecord]] = {"train": [], "eval": []}
        for record in records:
            phases[record.call.phase].append(record)
        train, evaluation = map(_merge_reports, phases.values())
        metrics = train | self.merge_logged() | _seconds_by_method(phases["train"])
        for name, value in evaluation.items():
            if name.startswith("eval/"):
                metrics[name] = value
            if name.startswith("reward/"):
                metrics["eval/" + name.removeprefix("reward/")] = value
        eval_seconds = sum(_seconds_by_method(phases["eval"]).values())
        if eval_seconds:
            metrics["time/evaluate_seconds"] = eval_seconds
        replies = []
        for record in phases["train"]:
            for reply in record.replies.values():
                replies.append(reply)
        copied = sum(reply.get("copied_bytes", 0) for reply in replies)
        metrics["transfer/copied_bytes"] = float(copied)
        seconds = self.seconds()
        metrics["time/step_seconds"] = seconds
        tokens = train.get("rollout/prompt_tokens", 0) + train.get("rollout/response_tokens", 0)
        if tokens:
            metrics["perf/tokens_per_second"] = tokens / seconds
        return metrics


def _check_logged(result: object, line: str) -> None:
    """Raise ProtocolError for what step.log does not take; warn of nan and infinite values.

    It takes results of calls, and mappings to numbers or to Mean, Sum, Max and Min. line: the
    script's line, for the warning.
    """
    if isinstance(result, Result):
        return
    if not isinstance(result, Mapping):
        what = f"{result!r} ({type(result).__name__})"
        advice = "write step.log(name=number)"
        if isinstance(result, Batch):
            advice = "its calls' metrics are logged already; write step.log(x=batch.mean('x'))"
        expected = "results of calls, mappings of numbers, or name=number"
        raise ProtocolError.of("step.log", what, expected, f"{advice}")
    for name, value in result.items():
        if isinstance(value, Mean | Sum | Max | Min):
            continue
        if not isinstance(value, Real | np.bool_):
            got = f"{name}={value!r} ({type(value).__name__})"
            do = "log its mean, or each item under a name of its own"
            raise ProtocolError.of("step.log", got, "a number", do)
        if not isfinite(float(value)):
            logger.warning("step.log: got %s=%s at %s, expected a number", name, value, line)


def _merge_reports(records: Iterable[CallRecord]) -> dict[str, float]:
    """Return the metrics that workers reported during calls, merged over the answering ranks."""
    reported = []
    for record in records:
        for reply in record.answers:
            reported.append(reply.get("metrics", {}))
    return merge(reported)


def _seconds_by_method(records: Iterable[CallRecord]) -> dict[str, float]:
    """Return time/<method>_seconds of each method that was called.

    A call counts with the rank that took longest, by its own clock, and calls are added. Fetches
    are omitted.
    """
    seconds: dict[str, float] = {}
    for record in records:
        method = record.call.method  # none: a fetch
        spans = []
        for reply in record.replies.values():
            if "span" in reply:
                spans.append(reply["span"])
        if spans and method:
            key = f"time/{method}_seconds"
            seconds[key] = seconds.get(key, 0.0) + max(end - start for start, end in spans)
    return seconds


def device_metrics(records: Iterable[CallRecord]) -> dict[str, float]:
    """Return perf/device_bytes: the highest peak of tensors on a rank's device; {} if unknown."""
    sizes = []
    for record in records:
        for reply in record.replies.values():
            if "device_bytes" in reply:
                sizes.append(reply["device_bytes"])
    return {"perf/device_bytes": float(max(sizes))} if sizes else {}


_SETTLING_STEPS = 5
"""Steps of a launch whose largest host memory is what later memory is compared with."""


class HostMemory:
    """Memory of the ranks' processes, and its growth since the first steps of the launch."""

    def __init__(self) -> None:
        self._first: Counter[int] = Counter()
        self._num_steps = 0

    def metrics(self, records: Iterable[CallRecord]) -> dict[str, float]:
        """Return perf/host_bytes: the memory of the process that has most; {} if no reply has it.

        The first 5 steps of the launch determine each rank's largest memory. Later steps add
        perf/host_growth, the largest ratio of a rank's memory to it, and perf/host_rank, that rank.
        Ranks that those steps did not measure have no growth.
        """
        replies = []
        for record in records:
            for item in record.replies.items():
                replies.append(item)
        now = Counter(
            {rank: reply["host_bytes"] for rank, reply in replies if "host_bytes" in reply}
        )
        if not now:
            return {}
        metrics = {"perf/host_bytes": float(max(now.values()))}
        self._num_steps += 1
        if self._num_steps <= _SETTLING_STEPS:
            self._first |= now
            return metrics
        growth = {rank: size / self._first[rank] for rank, size in now.items() if self._first[rank]}
        if not growth:
            return metrics
        rank = max(growth, key=lambda rank: growth[rank])
        return metrics | {"perf/host_growth": growth[rank], "perf/host_rank": float(rank)}


def counted_bytes(caller: Caller) -> Counter[str]:
    """Bytes that moved and that came to the controller since the run began, by metric."""
    transfers = caller.transfers
    fetched = caller.fetched_bytes
    return Counter(
        {
            "transfer/bytes": transfers.moved_bytes.total(),
            "transfer/planned_bytes": transfers.planned_bytes.total(),
            "transfer/header_bytes": transfers.header_bytes,
            "controller/tensor_bytes": fetched["script"],
            "controller/fetched_bytes": fetched.total() - fetched["script"],
        }
    )


def is_due(step: int, every: int) -> bool:
    """Whether something that happens every `every` steps (0: never) happens in this step."""
    return every > 0 and step % every == 0


def _facts_of(cfg: Any, script: Path) -> dict[str, Any]:
    """What a run is, as data for JSON: every setting, `versions.NAME`, git.commit and git.dirty."""
    origin = {"versions": versions(), "git": git_state(script.absolute().parent)}
    return flat(plain_tree(cfg)) | flat({name: x for name, x in origin.items() if x})


class Show:
    """Writes and prints what steps measured."""

    def __init__(self, cfg: Any, run_dir: Path, *, last_step: int, script: Path) -> None:
        """script: its file, in whose folder git is asked."""
        self._tracker = Tracker(run_dir, list(cfg.run.trackers), last_step=last_step)
        if cfg.run.trackers:
            self._tracker.describe(_facts_of(cfg, script))
        self._sample_every = cfg.run.sample_every
        self._total_steps = cfg.total_steps
        self._tokenizer_path = cfg.data.tokenizer_path

    def samples(self, step: int, scored: Mapping[str, Batch], learnt: Batch | None) -> None:
        """Fetch a few of the scored rows, append them to samples.jsonl, and print fewer.

        Does nothing except in step 1 and every run.sample_every steps (0: never), and without
        scored rows. scored: by phase. learnt: what an update was given. It replaces the rows of the
        phase train if it has texts and scores, because it also has the advantages. Prints rows of
        the last phase.
        """
        is_first = step == 1 and self._sample_every > 0
        if not scored or not (is_first or is_due(step, self._sample_every)):
            return
        if learnt is not None and is_shown(learnt):
            scored = {"train": learnt} | {p: b for p, b in scored.items() if p != "train"}
        samples = {}
        for phase, batch in scored.items():
            samples[phase] = samples_of(batch, phase, self._tokenizer_path)
        self._tracker.write_samples(step, [each for phase in samples for each in samples[phase]])
        print_samples(step, first_of_groups(list(samples.values())[-1]))

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """One line on the terminal, one in metrics.jsonl."""
        self._tracker.write_metrics(step, metrics)
        logger.info("%s", progress_line(step, self._total_steps, metrics))

    def close(self) -> None:
        """End the trackers."""
        self._tracker.close()
