"""One line per step with the numbers that matter. Pure text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import isfinite

SHOWN_SHARE = 0.05
"""Stages shorter than this share of a step are left out of the line (metrics.jsonl has all)."""


def progress_line(step: int, total: int, metrics: Mapping[str, float]) -> str:
    """Step, the metrics of FIELDS that are there, seconds of the step and of its stages.

    "step  12/100  reward 1.234  approx_kl 0.0012  ...  3.4s: generate 1.2, actor 0.91".
    """
    parts = [f"step {step:>{len(str(total))}}/{total}"]
    parts += [
        f"{label} {_shown(metrics[name], form)}" for name, label, form in FIELDS if name in metrics
    ]
    if "perf/tokens_per_second" in metrics:
        parts.append(f"{_shown(metrics['perf/tokens_per_second'], _rounded)} tok/s")
    return "  ".join(parts + _seconds(metrics))


def stage_seconds(metrics: Mapping[str, float]) -> dict[str, float]:
    """Seconds by stage, in the metrics' order, under short names: compute_values is values."""
    stages: dict[str, float] = {}
    for name, seconds in metrics.items():
        if name.startswith("time/") and name.endswith("_seconds") and name != _STEP:
            stage = name.removeprefix("time/").removesuffix("_seconds")
            for verb in ("compute_", "update_"):
                stage = stage.removeprefix(verb)
            short = stage.removesuffix("_sequences")
            stages[short] = stages.get(short, 0.0) + seconds
    return stages


def _seconds(metrics: Mapping[str, float]) -> list[str]:
    """["3.4s: generate 1.2, actor 0.91"]; [] without the step's seconds."""
    if _STEP not in metrics:
        return []
    whole = metrics[_STEP]
    stages = [
        f"{name} {_small(seconds)}"
        for name, seconds in stage_seconds(metrics).items()
        if seconds >= SHOWN_SHARE * whole
    ]
    return [f"{_small(whole)}s: {', '.join(stages)}" if stages else f"{_small(whole)}s"]


def _shown(value: float | None, form: Callable[[float], str]) -> str:
    return form(value) if value is not None and isfinite(value) else "nan"


def _signed(value: float) -> str:
    return f"{value:.3f}"


def _percent(value: float) -> str:
    return f"{100 * value:.1f}%"


def _small(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.2g}"


def _rounded(value: float) -> str:
    return f"{value:.0f}" if value < 10_000 else f"{value / 1000:.1f}k"


_STEP = "time/step_seconds"
FIELDS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("reward/mean", "reward", _signed),
    ("eval/accuracy", "eval", _percent),
    ("actor/loss", "loss", _signed),
    ("reward_model/loss", "loss", _signed),
    ("eval/loss", "eval_loss", _signed),
    ("eval/mean", "eval_reward", _signed),
    ("actor/approx_kl", "approx_kl", _small),
    ("actor/reference_kl", "kl_ref", _small),
    ("actor/clip_fraction", "clip", _percent),
    ("critic/explained_variance", "ev", _signed),
    ("rollout/drift", "drift", _small),
)
"""Metric, label in the line, form; explained in docs/METRICS.md."""
