"""`ThroughputLog`: what an honest claim of tokens per second needs besides the metrics of a run.

RUN_DIR/launches.jsonl gets a line for each start: command, versions, git, devices, models, sizes.
RUN_DIR/throughput.jsonl gets a line for each step: its tokens (`token_count`), when it began, and
whether it evaluated or saved. `spmdflow report --throughput` reads both. docs/THROUGHPUT.md lists
the fields.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from spmdflow.config.parallel import ranges_of
from spmdflow.controller.group import WorkerGroup
from spmdflow.controller.observer import ObservedFlow, Observer, StepRecord
from spmdflow.controller.row_use import RowUse
from spmdflow.controller.token_count import CountedRows, count_tokens
from spmdflow.errors import ConfigError
from spmdflow.tracking.origin import command_line, git_state, package_git_state, versions
from spmdflow.tracking.reading import LAUNCHES_FILE, THROUGHPUT_FILE
from spmdflow.tracking.tracker import append_lines, cut_back, read_lines, set_aside
from spmdflow.weights.architecture import Architecture
from spmdflow.worker_api.register import registered_methods

_SIZES = (
    "data.prompts_per_step",
    "data.samples_per_prompt",
    "data.max_prompt_tokens",
    "actor.rollout.max_new_tokens",
    "max_staleness",
    "run.hardware",
)
"""Settings that every start records, as far as its script has them."""
_MODEL_SIZES = (
    "update.mini_batch_size",
    "update.num_epochs",
    "engine.micro_batch_size_per_rank",
    "engine.max_micro_batch_tokens",
    "engine.options",
)
_FAILED_ROWS = ("dropped", "left_out")
"""Ends of the names of metrics that count rows without a score."""


class ThroughputLog(Observer):
    """Writes both files; exists only in the controller's process."""

    def __init__(
        self,
        run_dir: Path,
        cfg: Any,
        *,
        nodes: Sequence[int],
        device: str,
        script: Path,
        last_step: int,
    ) -> None:
        """cfg: the script's settings. nodes: the node of each rank of the run, in order.

        device: name of the first rank's device. last_step: of the checkpoint that the run continues
        from; -1: none, and files of an earlier run are renamed.
        """
        self._launches = run_dir / LAUNCHES_FILE
        self._steps = run_dir / THROUGHPUT_FILE
        if last_step < 0:
            set_aside(self._launches)
            set_aside(self._steps)
        for path in (self._launches, self._steps):
            if path.is_dir():
                set_aside(path)
        cut_back(self._steps, last_step)
        self._launch = len(read_lines(self._launches)) + 1
        self._cfg = cfg
        self._nodes = nodes
        self._device = device
        self._script = script
        self._flow: ObservedFlow | None = None
        self._models: dict[str, dict[str, Any]] = {}
        self._started = time.monotonic()
        self._began = 0.0

    def attach(self, flow: ObservedFlow) -> None:
        """Keep the flow."""
        self._flow = flow

    def begin_steps(self, first: int, last: int) -> None:
        """Write the line of this start; nothing if it has no step to do."""
        assert self._flow is not None
        if first > last:
            return
        for name, group in self._flow.spawned.items():
            self._models[name] = model_facts(group)
        record: dict[str, Any] = {"step": first, "launch": self._launch, "time": time.time()}
        record |= {"command": command_line(), "script": str(self._script)}
        record["versions"] = versions()
        record["git"] = {
            "package": package_git_state(),
            "script": git_state(self._script.absolute().parent),
        }
        record["device"] = self._device
        record["ranks"] = len(self._nodes)
        record["nodes"] = len(set(self._nodes))
        record["sizes"] = _values_of(self._cfg, _SIZES)
        record["models"] = self._models
        append_lines(self._launches, [record])
        self._started = time.monotonic()

    def begin_step(self, number: int) -> None:
        """Note the time."""
        self._began = time.monotonic() - self._started

    def end_step(self, step: StepRecord) -> None:
        """Write the line of a step; nothing for the evaluation before the first one."""
        if step.number < 1:
            return
        assert self._flow is not None
        caller = self._flow.caller
        has_failed = _has_failed_rows(step.metrics)
        counted = []
        for use in caller.uses.calls:
            valid = None
            if has_failed and use.marks:
                valid = self._fetch_valid(use)
            counted.append(CountedRows.of(use, valid))
        windows = {}
        for name, facts in self._models.items():
            if facts["weights"] is not None:
                windows[name] = facts["weights"]["window"]
        record: dict[str, Any] = {"step": step.number, "launch": self._launch}
        record["began"] = round(self._began, 6)
        record["seconds"] = step.metrics["time/step_seconds"]
        record["evaluates"] = any(call.call.phase == "eval" for call in step.calls)
        record["saves"] = any(call.call.operation == "save" for call in step.calls)
        record |= count_tokens(counted, caller.uses.ages, windows=windows, epochs=self._epochs_of)
        append_lines(self._steps, [record])

    def _fetch_valid(self, use: RowUse) -> np.ndarray:
        """Return (B,) bool: whether each row of an update counts; waits for the values.

        Only steps with failed rows fetch them.
        """
        assert self._flow is not None
        valid = np.ones(len(use.ids), dtype=bool)
        for name, ref in use.marks.items():
            column = self._flow.caller.column(name, ref, purpose="tokens")
            valid &= np.asarray(column.to_value(), dtype=bool)
        return valid

    def _epochs_of(self, model: str) -> int:
        """Passes over the rows of an update of a model."""
        return int(self._models[model]["sizes"].get("update.num_epochs", 1))


def model_facts(group: WorkerGroup) -> dict[str, Any]:
    """Return how a model is stored, divided and run, as data for JSON.

    weights: sizes for the FLOP formula; None for a model without weights, or of unknown sizes.
    Precisions and engines are None where the model has none.
    """
    target = group.target
    settings = target.settings
    methods = registered_methods(target.worker_class).values()
    trains = any(spec.minibatches for spec in methods)
    generates = any("responses" in spec.writes for spec in methods)
    facts: dict[str, Any] = {
        "class": target.worker_class.__name__,
        "ranks": ranges_of(target.layout.ranks),
        "layout": str(target.layout),
        "engine": None,
        "precision": None,
        "generator": None,
        "generator_precision": None,
        "adapters": False,
        "sizes": {},
        "weights": _weights_of(group),
    }
    model = getattr(settings, "model", None)
    if model is not None and (trains or not generates):
        facts["engine"] = getattr(getattr(settings, "engine", None), "kind", None)
        facts["precision"] = getattr(model, "precision", None)
        facts["adapters"] = getattr(model, "lora", None) is not None
    if trains:
        facts["sizes"] = _values_of(settings, _MODEL_SIZES)
    rollout = getattr(settings, "rollout", None)
    if generates and rollout is not None:
        facts["generator"] = rollout.generator
        facts["generator_precision"] = rollout.precision
    return facts


def _weights_of(group: WorkerGroup) -> dict[str, Any] | None:
    """Return the sizes of a model that the FLOP formula needs; None if they are not known.

    matrices: weights of all layers' matrices that a token is multiplied with, so of experts only
    the chosen ones. head: weights of the output layer. attention: layers times the width of the
    queries. window: tokens that a token attends to; null: all before it.
    """
    settings = group.target.settings
    path = getattr(getattr(settings, "model", None), "path", None)
    if path is None:
        return None
    own_head = getattr(group.target.worker_class, "head", "causal_lm")  # generators declare none
    is_scalar = own_head != "causal_lm"
    try:
        shape = Architecture.sizes_from_folder(path, head="scalar" if is_scalar else "causal_lm")
    except ConfigError:
        return None
    attention = shape.hidden_size * (2 * shape.q_size + 2 * shape.kv_size)
    network = (2 + shape.gated) * shape.hidden_size * shape.activated_size
    head = shape.hidden_size
    if not is_scalar:
        head *= shape.vocab_size
    if not shape.num_layers or not network or not shape.q_size:
        return None
    return {
        "family": shape.family,
        "parameters": shape.num_parameters,
        "matrices": round(shape.num_layers * (attention + network)),
        "head": head,
        "attention": shape.num_layers * shape.q_size,
        "window": shape.sliding_window,
    }


def _values_of(settings: Any, keys: Sequence[str]) -> dict[str, Any]:
    """Return key -> value of the dotted keys that the settings have."""
    values = {}
    for key in keys:
        value = settings
        for name in key.split("."):
            value = getattr(value, name, None)
        if value is not None:
            values[key] = value
    return values


def _has_failed_rows(metrics: Mapping[str, float]) -> bool:
    """Whether a step had rows whose reward, cost or episode failed."""
    for name, value in metrics.items():
        if name.rpartition("/")[2] in _FAILED_ROWS and value > 0:
            return True
    return False
