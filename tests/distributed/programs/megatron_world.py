"""What the checks of the Megatron engine share: pools, engines, whole states, comparisons."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
import torch.distributed as dist
from engine_world import loss_of, split
from fsdp_reference import make_batch
from megatron_reference import Reference, reference_step
from torch import Tensor

from spmdflow.config.schema import EngineConfig, LoRAConfig, ModelConfig, OptimizerConfig
from spmdflow.objectives.log_prob import CausalOutput, ScalarOutput
from spmdflow.parallel.group import GroupSpec, GroupTable
from spmdflow.parallel.layout import Layout
from spmdflow.weights.folder import folder_tensors
from spmdflow.worker_api.worker import WorkerContext
from spmdflow.workers.lora import adapt_source
from spmdflow.workers.megatron import MegatronEngine
from spmdflow.workers.micro_batch import MicroBatch
from spmdflow.workers.model import open_model

LR = 1e-3
MAX_ROWS = 2
_AXES = ("tp", "pp", "dp", "replica", "embedding")


@dataclass(frozen=True)
class Case:
    """A model on a layout."""

    model: str
    p: int
    t: int
    d: int
    options: tuple[str, ...] = ()
    first: int = 0
    """Where the pool begins in the world."""
    step: int = 1
    """Distance of neighbouring ranks of the pool."""
    rows: int = 5
    virtual: int = 1

    @property
    def layout(self) -> Layout:
        ranks = tuple(self.first + self.step * i for i in range(self.p * self.t * self.d))
        sizes = {"pp_size": self.p, "tp_size": self.t, "dp_size": self.d}
        return Layout(ranks, **sizes, virtual_size=self.virtual)

    def __str__(self) -> str:
        virtual = f"v{self.virtual}" if self.virtual > 1 else ""
        sizes = f"p{self.p}{virtual}t{self.t}d{self.d}r{self.rows}"
        return "-".join([self.model, sizes, *self.options])


@dataclass
class World:
    """One rank's view of the run."""

    rank: int
    size: int
    groups: GroupTable
    folder: Path
    results: dict[str, Any] = field(default_factory=dict)
    references: dict[tuple[str, int], Reference] = field(default_factory=dict)
    read: Any = None
    """The reader of the last engine's weights."""

    def make_groups(self, layouts: list[Layout]) -> None:
        """Every rank of the world calls this with the same layouts."""
        wanted = [
            ranks
            for layout in layouts
            for ranks in (
                layout.ranks,
                *(group for axis in _AXES for group in layout.axis_groups(axis)),
                *((rank,) for rank in layout.ranks),
            )
        ]
        for backend in ("nccl", "gloo") if self.device.type == "cuda" else ("gloo",):
            self.groups.make([GroupSpec(ranks, "compute", backend) for ranks in wanted])

    @property
    def device(self) -> torch.device:
        """Of this rank: a GPU where there are some."""
        return torch.device("cuda", self.rank) if torch.cuda.is_available() else torch.device("cpu")

    def engine(
        self,
        case: Case,
        *,
        head: str = "",
        dtype: str = "float32",
        trains: bool = True,
        adopt: Any = None,
        lora: LoRAConfig | None = None,
        **optimizer: Any,
    ) -> MegatronEngine | None:
        """The case's engine; betas[0] = 0 keeps the gradient in exp_avg. None outside the pool."""
        if self.rank not in case.layout.ranks:
            return None
        context = WorkerContext(
            case.model, case.layout, self.rank, self.groups, self.device, seed=0
        )
        source = ModelConfig(path=str(self.folder / case.model), dtype=dtype)
        head = head or ("scalar" if case.model == "reward" else "causal_lm")
        settings = {"lr": LR, "betas": [0.0, 0.95], "weight_decay": 0.1, "clip_norm": 1e9}
        model = open_model(source, head=head)
        if lora is not None:
            model = adapt_source(model, lora, seed=3, key="actor.model.lora")
        self.read = model.read
        return MegatronEngine(
            model,
            EngineConfig(kind="megatron", options=list(case.options)),
            context,
            optimizer=OptimizerConfig(**{**settings, **optimizer}) if trains else None,
            total_optimizer_steps=4,
            adopt=adopt,
        )

    def share_read(self, engine: MegatronEngine) -> float:
        """Bytes of the folder that all ranks have read for the last engine, over its tensors'."""
        num_bytes = torch.tensor(self.read.__self__.bytes_read)
        dist.all_reduce(num_bytes)
        return int(num_bytes) / sum(x.nbytes for _, x in folder_tensors(engine.model.source))

    def train(self, engine: MegatronEngine, case: Case, *, seed: int = 0) -> dict[str, Any]:
        """One step on the case's rows."""
        share, parts = self.share(case, seed=seed)
        loss = loss_of("reward" if case.model == "reward" else "policy")
        return engine.train_step(share, loss, num_micro_batches=parts)

    def share(self, case: Case, *, seed: int = 0) -> tuple[Any, int]:
        """This rank's rows and the number of micro-batches."""
        coordinate = case.layout.coordinate(self.rank)
        return split(make_batch(case.rows, seed=seed), case.d, coordinate.dp, MAX_ROWS, None)

    def reference(self, case: Case) -> Reference:
        """A plain step, kept for other layouts."""
        key = (case.model, case.rows)
        if key not in self.references:
            batch = make_batch(case.rows)
            self.references[key] = reference_step(self.folder, case.model, batch, LR)
        return self.references[key]

    def note(self, name: str, value: Any) -> None:
        """Record a result; those of all ranks are joined."""
        self.results[name] = value


def whole_outputs(engine: MegatronEngine, case: Case, world: World) -> dict[int, Tensor]:
    """Row of the batch -> (R, V) logits or (R,) values of its response, on the last stage."""
    found: dict[int, Tensor] = {}
    start = [0]
    for dp in range(case.layout.coordinate(world.rank).dp):
        start.append(split(make_batch(case.rows), case.d, dp, MAX_ROWS, None)[0].batch_size[0])

    def keep(output: Any, micro: MicroBatch) -> dict[str, Tensor]:
        rows = _joined(output, micro).split(micro.response_lengths.tolist())
        for row, whole in zip(micro.index.tolist(), rows):
            found[sum(start) + row] = whole.clone()
        return {"any": micro.spread(micro.targets.float())}

    share, parts = world.share(case)
    answer = engine.forward(share, keep, num_micro_batches=parts)
    assert (answer is None) == (case.layout.coordinate(world.rank).pp < case.p - 1)
    assert answer is None or answer.batch_size[0] == share.batch_size[0]
    return found


def largest(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """Largest absolute difference over the tensors that b names."""
    return max(float((a[name].float() - b[name].float()).abs().max()) for name in b)


def _joined(output: CausalOutput | ScalarOutput, micro: MicroBatch) -> Tensor:
    """(n, V) logits or (n,) values where a response token is predicted."""
    if isinstance(output, ScalarOutput):
        return output.at(micro.predicting)
    assert output.weight is not None
    logits = output.hidden @ output.weight.T
    parts = [logits]
    if output.group is not None:
        parts = [torch.empty_like(logits) for _ in range(output.group.size())]
        dist.all_gather(parts, logits, group=output.group)
    return torch.cat(parts, -1)[..., : output.vocab_size]
