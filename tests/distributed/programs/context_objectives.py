"""Every objective on ranks that divide rows, next to one rank with whole rows.

Usage: torchrun --nproc-per-node N context_objectives.py FOLDER KIND ...
KIND: an engine's, and perhaps a kind of attention and options, such as fsdp-gather-padded. The
model has 8 heads, with `nine` it has 9, which neither 2 nor 4 ranks divide. With `lora` adapters
are trained, with `unshared` no rows share a prompt. KIND@LAYOUT is measured on that layout,
otherwise on c2, c4 and d2c2, Megatron also with tensor-parallel ranks and with stages. Rank 0
writes FOLDER/results.json: a list of cases, each with the gap of the loss, and of the gradient over
its norm.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
import torch.distributed as dist
import transformers
from engine_state import whole_state
from engine_world import engine_config
from tensordict import TensorDict
from torch import Tensor

from spmdflow.config.model import LoRAConfig, PolicyModelConfig
from spmdflow.config.offline import PreferenceLossConfig
from spmdflow.config.schema import (
    OptimizerConfig,
    PolicyLossConfig,
    ValueLossConfig,
)
from spmdflow.data.ragged import is_ragged, ragged_from_rows, rows_of
from spmdflow.kind.engine import engine_kind
from spmdflow.kind.registry import resolve
from spmdflow.objectives.loss import Loss
from spmdflow.objectives.policy import PolicyLoss, ValueLoss
from spmdflow.objectives.preference import LabelLoss, PairLoss, answer_log_probs, last_score
from spmdflow.objectives.supervised import PretrainedPolicyLoss, SupervisedLoss
from spmdflow.objectives.surrogate import POLICY_LOSSES
from spmdflow.parallel.group import GroupSpec, GroupTable
from spmdflow.parallel.layout import Layout
from spmdflow.worker_api.worker import WorkerContext
from spmdflow.workers.context_group import GATHER, RING, ULYSSES
from spmdflow.workers.engine import TrainEngine
from spmdflow.workers.model import load_model, open_model

LAYOUTS = {
    "c2": Layout((0, 1), dp_size=1, cp_size=2),
    "c4": Layout((0, 1, 2, 3), dp_size=1, cp_size=4),
    "d2c2": Layout((0, 1, 2, 3), dp_size=2, cp_size=2),
}
MORE_LAYOUTS = {
    "d2": Layout((0, 1), dp_size=2),
    "d2c4": Layout(tuple(range(8)), dp_size=2, cp_size=4),
}
CUT_LAYOUTS = {
    "t2c2": Layout((0, 1, 2, 3), dp_size=1, tp_size=2, cp_size=2),
    "p2c2": Layout((0, 1, 2, 3), dp_size=1, pp_size=2, cp_size=2),
}
"""For engines that divide the model."""
WHOLE = Layout((0,))
NUM_ROWS = 8
TEMPERATURE = 0.9


def main() -> None:
    """Measure every objective on every engine and layout."""
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    known = {**LAYOUTS, **MORE_LAYOUTS, **CUT_LAYOUTS}
    cases = []
    for word in sys.argv[2:]:
        kind, _, only = word.partition("@")
        cases += [(kind, name) for name in ([only] if only else layouts_of(kind))]
    groups = make_groups(rank, [WHOLE, *(known[name] for _, name in cases)])
    if rank == 0:
        write_models(folder)
    dist.barrier()
    found = []
    expected: dict[tuple[str, ...], dict[str, Step]] = {}
    for head in ("causal_lm", "critic"):
        for kind, name in cases:
            words = [word for word in ("nine", "lora", "unshared") if word in kind]
            model = folder / (head + "nine" * ("nine" in words))
            alike = (head, *words)
            if alike not in expected:
                whole = "-".join(["fsdp", *words])
                expected[alike] = run(model, whole, WHOLE, head, rank, groups)
            measured = run(model, kind, known[name], head, rank, groups)
            for objective, step in measured.items() if rank == 0 else ():
                reference = expected[alike][objective]
                gap, norm = compare(step.gradient, reference.gradient)
                case = {"objective": objective, "kind": kind, "layout": name, "gradient": gap}
                case |= {"loss": abs(step.loss - reference.loss), "norm": norm}
                found.append(case | {"bytes": step.num_bytes, "tokens": step.num_tokens})
            dist.barrier()
    if rank == 0:
        (folder / "results.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def layouts_of(kind: str) -> dict[str, Layout]:
    """The layouts on which a kind is measured, by name. Two ranks do not divide nine heads."""
    result = dict(LAYOUTS)
    if engine_kind(kind.partition("-")[0]).cuts_model:
        result |= CUT_LAYOUTS
    if "nine" in kind:
        result.pop("t2c2", None)
    return result


def write_models(folder: Path) -> None:
    """Tiny Llamas with 8 heads (2 for keys) and with 9 (3), and critics of the same form."""
    common: dict[str, Any] = {"vocab_size": 97, "intermediate_size": 96, "num_hidden_layers": 2}
    common["initializer_range"] = 0.1
    eight = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2}
    nine = {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3}
    for model, sizes in (("", eight), ("nine", nine)):
        torch.manual_seed(0)
        config = transformers.LlamaConfig(**common, **sizes)
        transformers.LlamaForCausalLM(config).save_pretrained(folder / f"causal_lm{model}")
        config = transformers.LlamaConfig(**common, **sizes, num_labels=1, pad_token_id=0)
        critic = transformers.LlamaForSequenceClassification(config)
        critic.save_pretrained(folder / f"critic{model}")


def whole_batch(*, shares: bool) -> TensorDict:
    """Eight rows of unequal lengths, of which three and two share a prompt, with all columns.

    shares: otherwise all prompts differ.
    """
    draw = torch.Generator().manual_seed(5)

    def random(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=draw)

    prompts = [torch.randint(1, 97, (size,), generator=draw) for size in (17, 3, 12, 5, 9)]
    chosen = [0, 0, 0, 1, 2, 2, 3, 4]
    if not shares:
        prompts = [prompt.roll(number) for number, prompt in enumerate(prompts[i] for i in chosen)]
        chosen = list(range(NUM_ROWS))
    lengths = (5, 11, 1, 8, 4, 6, 2, 13)
    columns: dict[str, list[Tensor]] = {"prompts": [prompts[index] for index in chosen]}
    columns["responses"] = [torch.randint(1, 97, (size,), generator=draw) for size in lengths]
    columns["response_mask"] = [random(size) < 0.8 for size in lengths]
    columns["covariant"] = [random(size) < 0.3 for size in lengths]
    for name in ("old_log_probs", "ref_log_probs"):
        columns[name] = [-4.6 + 0.3 * random(size) for size in lengths]
    for name in ("advantages", "values", "returns"):
        columns[name] = [2 * random(size) - 1 for size in lengths]
    dense = {
        "pair_losses": random(NUM_ROWS),
        "score_slopes": random(NUM_ROWS) - 0.5,
        "ref_answer_log_probs": -20 * random(NUM_ROWS, 2),
        "kl_log_ratios": random(NUM_ROWS),
        "desirable": torch.arange(NUM_ROWS) % 3 > 0,
        "is_text": torch.arange(NUM_ROWS) % 4 == 0,
    }
    ragged = {name: ragged_from_rows(values) for name, values in columns.items()}
    return TensorDict({**ragged, **dense}, batch_size=[NUM_ROWS])


def share_of(layout: Layout, rank: int, *, shares: bool) -> TensorDict:
    """The rows of a rank: a half of them with two data-parallel shares."""
    batch = whole_batch(shares=shares)
    each = NUM_ROWS // layout.dp_size
    first = layout.coordinate(rank).dp * each
    columns = {}
    for name, column in batch.items():
        if is_ragged(column):
            columns[name] = ragged_from_rows(rows_of(column)[first : first + each])
        else:
            columns[name] = column[first : first + each]
    return TensorDict(columns, batch_size=[each])


def losses(head: str) -> Iterator[tuple[str, Loss]]:
    """Every objective of a head, by name."""
    if head == "critic":
        yield "value", ValueLoss(ValueLossConfig())
        yield "score of pairs", PairLoss(last_score)
        return
    for name in POLICY_LOSSES:
        cfg = PolicyLossConfig(entropy_coef=0.01, kl_coef=0.05)
        cfg.surrogate = name
        cfg.dro_beta = 0.1
        yield name, PolicyLoss(cfg, TEMPERATURE, budget=16)
    policy = PolicyLoss(PolicyLossConfig(), TEMPERATURE, budget=16)
    yield "policy and texts", PretrainedPolicyLoss(policy, 0.5)
    yield "supervised", SupervisedLoss()
    yield "pairs", PairLoss(answer_log_probs)
    yield "labels", LabelLoss(PreferenceLossConfig(name="kto"))


@dataclass
class Step:
    """What a step of one objective did."""

    loss: float
    gradient: dict[str, Tensor]
    """Complete."""
    num_bytes: float
    """That all ranks have sent each other for attention."""
    num_tokens: int
    """That all ranks have computed together."""


def run(
    model: Path, kind: str, layout: Layout, head: str, rank: int, groups: GroupTable
) -> dict[str, Step]:
    """A step of each objective; {} on ranks outside of the layout."""
    if rank not in layout.ranks:
        return {}
    engine = build(model, kind, layout, head, rank, groups)
    share = share_of(layout, rank, shares="unshared" not in kind)
    own = sum(micro.input_ids.numel() for micro in engine.micro_batches(share, 2))
    tokens = int(engine.dp_sums({"tokens": own * layout.cp_size})["tokens"])
    result = {}
    for name, loss in losses(head):
        metrics = engine.train_step(share, loss, num_micro_batches=2)
        state = whole_state(engine)
        gradient = {key: value.clone() for key, value in state.items() if key.endswith(".exp_avg")}
        num_bytes = float(metrics.get("context_bytes", 0.0))
        result[name] = Step(float(metrics["loss"]), gradient, num_bytes, tokens)
    return result


def make_groups(rank: int, layouts: Iterable[Layout]) -> GroupTable:
    """The process groups of engines with these layouts; all ranks call it together."""
    groups = GroupTable(rank, timeout_seconds=600)
    for layout in layouts:
        axes = [(member,) for member in layout.ranks]
        for axis in ("tp", "pp", "dp", "cp", "weights", "shard", "replicate", "replica", "model"):
            axes += layout.axis_groups(axis)
        groups.make([GroupSpec(ranks, "compute", "gloo") for ranks in [layout.ranks, *axes]])
    return groups


def build(
    model: Path, kind: str, layout: Layout, head: str, rank: int, groups: GroupTable
) -> TrainEngine:
    """An engine whose steps leave their gradient in exp_avg, and the weights as they are."""
    name, *words = kind.split("-")
    options = [word for word in words if word in engine_kind(name).options]
    options += ["recompute"] * (layout.size == 4 and "saves" not in words)
    attention = next((word for word in words if word in (ULYSSES, GATHER, RING)), "auto")
    cfg = replace(engine_config(), kind=name, options=options, context_attention=attention)
    context = WorkerContext("actor", layout, rank, groups, torch.device("cpu"), seed=0)
    optimizer = OptimizerConfig(lr=1e-30, betas=[0.0, 0.95], weight_decay=0.0, clip_norm=1e9)
    adapters = LoRAConfig(rank=4) if "lora" in words else None
    source = PolicyModelConfig(path=str(model), dtype="float32", lora=adapters)
    open_folder = open_model if engine_kind(name).reads_folder else load_model
    engine: TrainEngine = resolve(engine_kind(name).implementation)(
        open_folder(source, head=head),
        cfg,
        context,
        optimizer=optimizer,
        total_optimizer_steps=100,
    )
    return engine


def compare(found: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[float, float]:
    """(norm of the difference over the norm, norm) of a gradient."""
    assert found.keys() == expected.keys()
    gap = sum(float((found[name] - expected[name]).double().square().sum()) for name in found)
    norm = sum(float(value.double().square().sum()) for value in expected.values())
    return (gap / norm) ** 0.5, norm**0.5


if __name__ == "__main__":
    main()
