"""The FLOP formula, the peaks of devices, and model FLOPs utilization (MFU).

The formula is that of the PaLM paper (Chowdhery et al. 2022, arXiv 2204.02311, appendix B), applied
to each call on rows. There a token takes 6 N + 12 L H Q T FLOPs to train, a third of it forward.
Here it counts only what the model needs, so utilization comes out lower than by the paper's form:

    forward(call) = 2 M tokens + 2 V outputs + 4 A pairs
    FLOPs(call)   = f epochs forward(call)

    M   weights of the layers' matrices that a token is multiplied with: of experts the chosen ones,
        no embedding
    V   weights of the output layer; outputs: the response tokens, all tokens of rows without one
    A   layers times the width of the queries (L H Q); pairs: the sum over rows of n^2 / 2, as a
        token attends to those before it (with a window W: W n - W^2 / 2)
    f   1 for forwards and generation; 3 for training: forward, gradients of activations and of
        weights; 2 where adapters alone are trained

Activations that are computed again, padding and evaluations do not count. A prompt counts in each
of its rows, also where a cache computes it once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spmdflow.errors import ConfigError
from spmdflow.mapping.hardware import Hardware, load_hardware, packaged_hardware
from spmdflow.throughput.measured_step import MeasuredStep

FORMULA = (
    "FLOPs of a call = f epochs (2 M tokens + 2 V outputs + 4 A pairs); M: weights of the layers' "
    "matrices that a token uses, V: weights of the output layer, outputs: response tokens, A: "
    "layers times query width, pairs: sum over rows of n^2 / 2 (attention to earlier tokens); "
    "f: 1 forward and generation, 3 training, 2 training of adapters alone"
)
SOURCE = "PaLM, arXiv 2204.02311, appendix B, with causal attention and needed outputs only"
KINDS = ("generate", "forward", "train")


@dataclass(frozen=True)
class Compute:
    """What the models of a run computed in some steps."""

    by_kind: Mapping[str, float]
    """FLOPs of generation, of forwards and of training."""
    mfu: float | None
    """FLOPs by precision over their peaks, over seconds and devices; None: unknown."""
    peak: str
    """Of a device, by precision, with its source; empty if it is unknown."""
    unknown: str
    """Why FLOPs or MFU are not known; empty if both are."""

    @property
    def total(self) -> float:
        """FLOPs of all kinds."""
        return sum(self.by_kind.values())


def pass_flops(fact: Mapping[str, Any], model: Mapping[str, Any]) -> float:
    """Return the FLOPs of one call, by the formula of this module.

    fact: an entry of `passes` in throughput.jsonl. model: an entry of `models` in launches.jsonl.
    """
    weights = model["weights"]
    forward = 2.0 * weights["matrices"] * fact["tokens"]
    forward += 2.0 * weights["head"] * fact["head_tokens"]
    forward += 4.0 * weights["attention"] * fact["attended"]
    factor = 1
    if fact["kind"] == "train":
        factor = 2 if model["adapters"] else 3
    return forward * factor * fact["epochs"]


def compute_of(steps: Sequence[MeasuredStep], launch: Mapping[str, Any]) -> Compute:
    """Return FLOPs and utilization of some steps. launch: facts of their start."""
    models = launch.get("models", {})
    by_kind = dict.fromkeys(KINDS, 0.0)
    by_precision: dict[str, float] = {}
    for step in steps:
        for fact in step.tokens.get("passes", ()):
            model = models.get(fact["call"].partition(".")[0])
            if model is None or fact["tokens"] is None:
                return _unknown(f"the sizes or lengths of {fact['call']} were not recorded")
            flops = pass_flops(fact, model)
            precision = model["precision"]
            if fact["kind"] == "generate":
                precision = model["generator_precision"]
            by_kind[fact["kind"]] += flops
            by_precision[precision] = by_precision.get(precision, 0.0) + flops
    without = unsized_models(models)
    if not by_precision:
        return _unknown("RUN_DIR records no call of a model whose sizes are known")
    if without:
        return Compute(by_kind, None, "", f"the sizes of {', '.join(without)} are not known")
    try:
        hardware = _hardware_of(launch)
    except ConfigError as err:
        return Compute(by_kind, None, "", str(err))
    devices = _devices_at_peak(hardware, launch)
    ideal_seconds = 0.0
    peaks = []
    for precision, flops in sorted(by_precision.items()):
        peak = getattr(hardware, f"peak_flops_{precision}")
        source = dict(hardware.sources)[f"peak_flops_{precision}"]
        ideal_seconds += flops / (peak * devices)
        peaks.append(f"{peak / 1e12:.4g} TFLOP/s in {precision} ({hardware.name}: {source})")
    seconds = sum(step.seconds for step in steps)
    return Compute(by_kind, ideal_seconds / seconds, "; ".join(peaks), "")


def _unknown(why: str) -> Compute:
    return Compute({}, None, "", why)


def unsized_models(models: Mapping[str, Any]) -> list[str]:
    """Return the names of models with weights whose sizes are not known."""
    names = []
    for name, model in models.items():
        has_weights = model["precision"] is not None or model["generator"] is not None
        if has_weights and model["weights"] is None:
            names.append(name)
    return names


def _hardware_of(launch: Mapping[str, Any]) -> Hardware:
    """Return the hardware with the peaks of a run's devices.

    Of an accelerator: the packaged file of its name, otherwise run.hardware. Of a CPU: run.hardware
    alone, because CPUs differ. ConfigError says why there is none.
    """
    device = launch["device"]
    is_cpu = device.startswith("CPU")
    name = launch["sizes"].get("run.hardware")
    if not is_cpu:
        name = packaged_hardware(device) or name
    if name is None:
        if is_cpu:
            raise ConfigError(
                f"no peak of {device} is recorded; measure one with scripts/calibrate.py and set "
                f"run.hardware to its file"
            )
        raise ConfigError(f"no packaged file describes {device}; set run.hardware to one")
    hardware = load_hardware(name)
    if hardware.is_cpu != is_cpu:
        raise ConfigError(f"run.hardware={name} does not describe {device}")
    return hardware


def _devices_at_peak(hardware: Hardware, launch: Mapping[str, Any]) -> float:
    """Return how many devices reach the peak at once: all, but only as many ranks as a CPU has."""
    ranks = launch["ranks"]
    if not hardware.is_cpu:
        return float(ranks)
    return float(min(ranks, launch["nodes"] * hardware.gpus_per_node))
