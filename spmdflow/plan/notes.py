"""What a plan says of calls besides their seconds: bytes for attention, divided experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from spmdflow.mapping.context import attention_bytes_of_token
from spmdflow.mapping.dataflow import Model, Strategy
from spmdflow.mapping.placed import CallSeconds
from spmdflow.mapping.seconds import mean_micro_batch
from spmdflow.mapping.share import local_parameters
from spmdflow.mapping.unequal import tokens_of_update
from spmdflow.plan.record import Key, Trace
from spmdflow.plan.workload import Simulated, rows_by_rank
from spmdflow.runtime.call import Call


def attention_bytes(trace: Trace, step_calls: Sequence[Call], step: Simulated) -> dict[str, float]:
    """Return the bytes that all ranks of a trained model send in an optimizer step, by its name.

    Models whose ranks have whole rows are omitted. The tokens that make a micro-batch divisible do
    not count. Where the trace does not know all rows, all of a call have their mean length.
    """
    result = {}
    for call in step_calls:
        planned = step.calls.get(call.key)
        if planned is None or planned.kind != "train" or step.strategies[planned.model].cp == 1:
            continue
        assert step.dataflow is not None
        model = step.dataflow.model(planned.model)
        cut = step.strategies[planned.model]
        rows = rows_by_rank(trace, call, "train")
        if rows:
            tokens = tokens_of_update(model, rows)
        else:
            micro, num_micro = mean_micro_batch(model, planned.workload, cut, trains=True)
            tokens = float(cut.dp * num_micro * micro.tokens)
        result[planned.model] = tokens * float(attention_bytes_of_token(model, cut))
    return result


def add_attention_notes(
    estimates: dict[Key, CallSeconds], step: Simulated, sent: Mapping[str, float]
) -> None:
    """Add a note to the training calls of each model in `sent`, which has bytes."""
    for key, planned in step.calls.items():
        if planned.kind == "train" and planned.model in sent:
            size = sent[planned.model] / 1e9
            note = f"in an update all ranks send each other {size:.3g} GB for attention"
            estimates[key] = estimates[key] + CallSeconds({}, (note,))


def experts_note(model: Model, strategy: Strategy, seconds: float) -> str:
    """Return what divided experts change. seconds: of the call, were they not divided."""
    size = model.engine.element_bytes
    divided = float(local_parameters(model, strategy)) * size
    undivided = float(local_parameters(model, replace(strategy, ep=1))) * size
    return (
        f"a rank needs {divided / 1e9:.1f} GB of weights with e{int(strategy.ep)}; without it "
        f"{undivided / 1e9:.1f} GB, and the call would take {seconds:.4g} s"
    )
