"""One strategy: `Estimate`, the seconds of a call by cause, and the memory of a pool by call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from spmdflow.errors import ConfigError
from spmdflow.mapping.dataflow import Call, Dataflow, Model, Workload
from spmdflow.mapping.machine import Hardware
from spmdflow.mapping.memory import call_bytes, resident_bytes, state_bytes, total
from spmdflow.mapping.seconds import (
    Parts,
    concurrency,
    generation_parts,
    inference_parts,
    rows_per_replica,
    training_parts,
)
from spmdflow.mapping.seconds import (
    transition_bytes as _transition_bytes,
)
from spmdflow.mapping.seconds import (
    transition_seconds as _transition_seconds,
)
from spmdflow.mapping.strategy import Cut, Strategy


@dataclass(frozen=True)
class Estimate:
    """Seconds of one call, by cause."""

    parts: Mapping[str, float]
    notes: tuple[str, ...] = ()
    """What else decides them, such as the waves of a generation."""

    @property
    def seconds(self) -> float:
        """All parts."""
        return sum(self.parts.values())

    @property
    def limit(self) -> str:
        """The largest part's name; compute, memory, weights, kv_read, tensor_parallel, ..."""
        return max(self.parts, key=lambda name: self.parts[name])

    def __add__(self, other: Estimate) -> Estimate:
        names = dict.fromkeys([*self.parts, *other.parts])
        parts = {name: self.parts.get(name, 0.0) + other.parts.get(name, 0.0) for name in names}
        return Estimate(parts, self.notes + other.notes)


def train_seconds(
    model: Model, workload: Workload, strategy: Strategy, hardware: Hardware
) -> Estimate:
    """One training call with all its updates (paper Appendix C, training simulator)."""
    return _only(training_parts(model, workload, Cut.of([strategy]), hardware))


def infer_seconds(
    model: Model, workload: Workload, strategy: Strategy, hardware: Hardware
) -> Estimate:
    """One forward call over all rows (paper Appendix C, inference simulator)."""
    return _only(inference_parts(model, workload, Cut.of([strategy]), hardware))


def generate_seconds(
    model: Model,
    workload: Workload,
    strategy: Strategy,
    hardware: Hardware,
    *,
    kv_bytes: float | None = None,
) -> Estimate:
    """One generation call (paper Appendix C, generation simulator).

    kv_bytes: cache of one rank; None: what the model alone would leave free. ConfigError if not
    one sequence fits.
    """
    cut = Cut.of([strategy])
    if kv_bytes is None:
        used = total(state_bytes(model, cut)) + total(call_bytes(model, "generate", workload, cut))
        kv_bytes = float(hardware.usable_bytes - used[0])
    free = np.array([kv_bytes])
    held = float(concurrency(model, workload, cut, free)[0])
    if held < 1:
        raise ConfigError(
            f"{model.name}: got {kv_bytes / 1e9:.2f} GB of KV cache a rank under {strategy}, "
            f"expected room for one sequence of {workload.tokens} tokens; raise the generation "
            f"sizes, use more ranks or share the pool with fewer models"
        )
    rows = float(rows_per_replica(workload, cut)[0])
    found = _only(generation_parts(model, workload, cut, hardware, kv_bytes=free))
    notes = (f"{int(rows)} sequences a replica in {int(-(-rows // held))} waves",)
    return Estimate(found.parts, notes)


def transition_seconds(model: Model, strategy: Strategy, hardware: Hardware) -> Estimate:
    """Weights from training's layout to generation's."""
    seconds = _transition_seconds(model, Cut.of([strategy]), hardware)
    return _only({"transition": seconds})


def transition_bytes(model: Model, strategy: Strategy) -> float:
    """Received by each rank in that transition, a mean where ranks differ (paper Table 2)."""
    return float(_transition_bytes(model, Cut.of([strategy]))[0])


def call_seconds(
    call: Call,
    model: Model,
    strategy: Strategy,
    hardware: Hardware,
    *,
    kv_bytes: float | None = None,
) -> Estimate:
    """One call by its kind; the transition is not part of it, offloading is."""
    if call.fixed_seconds is not None:
        return Estimate({"fixed": call.fixed_seconds})
    if call.kind == "generate":
        found = generate_seconds(model, call.workload, strategy, hardware, kv_bytes=kv_bytes)
    elif call.kind == "train":
        found = train_seconds(model, call.workload, strategy, hardware)
    else:
        found = infer_seconds(model, call.workload, strategy, hardware)
    moved = _only(offload_parts(model, Cut.of([strategy]), hardware))
    return found + moved if moved.seconds else found


def offload_parts(model: Model, cut: Cut, hardware: Hardware) -> Parts:
    """A model that lives on the host is loaded before a call, and put back if it was trained."""
    if not model.engine.offload:
        return {"offload": np.zeros(len(cut))}
    ways = 2 if model.trained else 1
    return {"offload": ways * total(state_bytes(model, cut)) / hardware.host_bandwidth}


def pool_memory(
    members: Sequence[tuple[Model, Strategy]], dataflow: Dataflow, hardware: Hardware
) -> dict[str, dict[str, float]]:
    """Bytes of a rank of a pool in each call (`model.method`), by what holds them.

    Residents of all members add; a call brings its own; a generation's KV cache is its
    `kv_cache_bytes`, whether or not it fits, else what is left of the usable memory. Of calls of
    one title, such as a greedy and a sampled generation, the one that needs most is kept.
    """
    resident: dict[str, float] = {}
    for model, strategy in members:
        for part, size in resident_bytes(model, Cut.of([strategy])).items():
            resident[part] = resident.get(part, 0.0) + float(size[0])
    names = {model.name: (model, strategy) for model, strategy in members}
    found: dict[str, dict[str, float]] = {}
    most: dict[str, float] = {}
    for call in dataflow.calls:
        if call.model not in names:
            continue
        model, strategy = names[call.model]
        parts = dict(resident)
        for part, size in call_bytes(model, call.kind, call.workload, Cut.of([strategy])).items():
            parts[part] = parts.get(part, 0.0) + float(np.ravel(size)[0])
        used = sum(parts.values())
        if used < most.get(call.title, 0.0):
            continue
        most[call.title] = used
        if call.kind == "generate":
            parts["kv_cache"] = _cache(model, hardware, used)
        found[call.title] = parts
    return found


def _only(parts: Parts) -> Estimate:
    return Estimate({name: float(np.ravel(seconds)[0]) for name, seconds in parts.items()})


def _cache(model: Model, hardware: Hardware, used: float) -> float:
    assert model.rollout is not None, model.name
    fixed = model.rollout.kv_cache_bytes
    return hardware.usable_bytes - used if fixed is None else fixed
