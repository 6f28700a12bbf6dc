"""A step once more, with rows that differ in length: what a run with real lengths takes.

If the trace already has rows of different lengths (`--assume responses=[...]`, a replayed run, a
data file), these count, row by row. Otherwise the script is traced again with responses of the
usual spread (`plan.spread`), so that the controller's own code assigns and balances the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

from spmdflow.errors import PlanError
from spmdflow.mapping.hardware import Hardware
from spmdflow.plan.example import RESPONSES
from spmdflow.plan.prediction import Prediction, predict
from spmdflow.plan.record import Tokens, Trace
from spmdflow.plan.spread import MEAN_SHARE, Spread
from spmdflow.plan.trace import TraceSettings, longest_rows, trace
from spmdflow.plan.weight import WeightPlan


@dataclass(frozen=True)
class VariedPrediction:
    """Seconds of a step whose rows differ in length."""

    lengths: str
    """Where the lengths are from."""
    prediction: Prediction


def predict_varied(
    script: ModuleType,
    cfg: Any,
    settings: TraceSettings,
    hardware: Hardware,
    traced: Trace,
    *,
    weights: Sequence[WeightPlan],
    variation: float,
) -> VariedPrediction | None:
    """Return the prediction of the last traced step with rows of different lengths.

    None without calls that have rows; if all responses have the largest length because somebody
    assumed that; or if the script cannot be traced with other lengths.
    variation: coefficient of variation of the usual spread.
    """
    if _differ(traced):
        text = "the rows' own lengths"
        return _predict(traced, hardware, weights, text)
    generated = _generated_tokens(traced)
    if not generated:
        return None
    most = longest_rows(cfg)[RESPONSES]
    mean = max(tokens.responses for tokens in generated)
    is_assumed = any(text.startswith(f"{RESPONSES} = ") for text in traced.assumptions)
    if mean >= most and is_assumed:
        return None
    if mean >= most:
        mean = MEAN_SHARE * most
    spread = Spread(mean, most, variation)
    lengths = spread.lengths(max(tokens.num_rows for tokens in generated))
    examples = {**settings.examples, RESPONSES: lengths.tolist()}
    try:
        again = trace(script, cfg, replace(settings, examples=examples))
    except PlanError:  # the script cannot run on responses of different lengths
        return None
    text = str(spread)
    if not is_assumed:
        text += "; nothing is assumed: rows of one length have the most, here the mean is half"
    return _predict(again, hardware, weights, text)


def _predict(
    traced: Trace, hardware: Hardware, weights: Sequence[WeightPlan], text: str
) -> VariedPrediction:
    step_calls = tuple(traced.in_step())
    return VariedPrediction(
        text, predict(traced, step_calls, hardware, weights=weights, by_row=True)
    )


def _differ(traced: Trace) -> bool:
    """Whether responses differ in length, or prompts if nothing is generated."""
    generated = _generated_tokens(traced)
    if generated:
        each = [tokens.by_row.responses for tokens in generated if tokens.by_row]
    else:
        calls = [traced.tokens.get(call.key) for call in traced.in_step()]
        each = []
        for tokens in calls:
            if tokens is not None and tokens.by_row is not None:
                each.append(tokens.by_row.prompts + tokens.by_row.responses)
    return any(len(items) and items.min() != items.max() for items in each)


def _generated_tokens(traced: Trace) -> list[Tokens]:
    """The rows of each generation of the last traced step."""
    result = []
    for call in traced.in_step():
        model = traced.models.get(call.model)
        tokens = traced.tokens.get(call.key)
        if call.operation != "call" or model is None or tokens is None or not tokens.num_rows:
            continue
        if model.kind_of(call.method) == "generate":
            result.append(tokens)
    return result
