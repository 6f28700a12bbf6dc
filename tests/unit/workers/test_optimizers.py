"""Classes of torch.optim by name, against the class itself over the whole tensors."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from spmdflow.config.schema import OptimizerConfig
from spmdflow.errors import ConfigError
from spmdflow.kind.table import OPTIMIZERS, optimizer_kind
from spmdflow.workers.optimizer import (
    ShardedOptimizer,
    clip_,
    squared_norm,
    undecayed_of,
)
from spmdflow.workers.schedule import learning_rate

_REFUSED = {"LBFGS", "SparseAdam", "Adafactor", "Muon"}
STEPS = 6


def settings_of(name: str) -> OptimizerConfig:
    """A schedule that changes the rate at every step."""
    decay = 0.1 if optimizer_kind(name).decays else 0.0
    return OptimizerConfig(
        name=name, lr=0.05, weight_decay=decay, schedule="cosine", warmup_steps=2
    )


def plain_steps(cfg: OptimizerConfig, start: Tensor, gradients: Sequence[Tensor]) -> nn.Parameter:
    """The class as anybody would use it: no state of ours, no fused kernel."""
    weight = nn.Parameter(start.clone())
    found = {
        "AdamW": {"betas": (0.9, 0.95)},
        "Adam": {"betas": (0.9, 0.95)},
        "Adamax": {"betas": (0.9, 0.95)},
        "NAdam": {"betas": (0.9, 0.95)},
        "RAdam": {"betas": (0.9, 0.95)},
        "SGD": {"momentum": 0.9},
        "RMSprop": {"momentum": 0.9, "alpha": 0.95},
        "Adadelta": {"rho": 0.95},
    }.get(cfg.name, {})
    decay = {"weight_decay": cfg.weight_decay} if cfg.weight_decay else {}
    rate = learning_rate(cfg, 0, STEPS)
    optimizer = getattr(torch.optim, cfg.name)([weight], lr=rate, **found, **decay)
    for step, gradient in enumerate(gradients):
        optimizer.param_groups[0]["lr"] = learning_rate(cfg, step, STEPS)
        weight.grad = gradient.clone()
        optimizer.step()
    return weight


def cut(tensor: Tensor) -> dict[str, Tensor]:
    """Rows of two shards and none of a third."""
    return {"first": tensor[:2].clone(), "second": tensor[2:].clone(), "none": tensor[:0].clone()}


def test_every_class_of_torch_is_offered_or_refused() -> None:
    classes = {
        name
        for name, found in vars(torch.optim).items()
        if inspect.isclass(found) and issubclass(found, torch.optim.Optimizer)
    }

    assert classes - {"Optimizer"} == {*OPTIMIZERS, *_REFUSED}


@pytest.mark.parametrize("name", sorted(_REFUSED))
def test_class_that_is_not_elementwise_is_refused_with_its_reason(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"got {name}, which .*, expected .*AdamW.*; set "):
        optimizer_kind(name)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_private_method_of_torch_makes_the_state_of_a_first_step(name: str) -> None:
    """`TorchOptimizer` leans on `_init_group`: no public method makes state without a step."""
    weights = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    made, fresh = (getattr(torch.optim, name)([weight], lr=0.1) for weight in weights)
    for weight in weights:
        weight.grad = torch.arange(3.0)
    group, *lists = inspect.signature(made._init_group).parameters

    made._init_group(made.param_groups[0], *([] for _ in lists))
    started = weights[0].tolist()
    for optimizer in (made, fresh):
        optimizer.step()

    assert group == "group" and started == [1.0, 1.0, 1.0]
    assert torch.equal(*weights)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_of_shards_are_those_of_the_class_over_the_whole_tensor(name: str) -> None:
    torch.manual_seed(0)
    cfg = settings_of(name)
    start = torch.randn(5, 3)
    gradients = torch.randn(STEPS, 5, 3)
    shards = cut(start)
    ours = ShardedOptimizer(shards, cfg, STEPS)

    for gradient in gradients:
        ours.step(cut(gradient))

    expected = plain_steps(cfg, start, gradients)
    torch.testing.assert_close(  # fused kernels round once less
        torch.cat([shards["first"], shards["second"]]), expected.detach(), rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_that_goes_on_is_that_of_steps_without_a_break(name: str) -> None:
    torch.manual_seed(0)
    cfg = settings_of(name)
    start = torch.randn(5, 3)
    gradients = torch.randn(STEPS, 5, 3)
    whole = cut(start)
    begun = cut(start)
    ours, first = (ShardedOptimizer(shards, cfg, STEPS) for shards in (whole, begun))
    for gradient in gradients:
        ours.step(cut(gradient))
    for gradient in gradients[:3]:
        first.step(cut(gradient))

    resumed = {key: shard.clone() for key, shard in begun.items()}
    second = ShardedOptimizer(resumed, cfg, STEPS)
    for key in resumed:
        for moment, values in second.moments_of(key).items():
            values.copy_(first.moments_of(key)[moment])
    second.mark_restored(3)
    for gradient in gradients[3:]:
        second.step(cut(gradient))

    assert all(torch.equal(resumed[key], whole[key]) for key in whole)
    assert second.next_lr == ours.next_lr


def test_decay_of_matrices_is_that_of_two_groups_of_torch() -> None:
    torch.manual_seed(0)
    names = {"embed": (5, 3), "matrix": (4, 3), "norm": (3,), "bias": (4,), "stack": (2, 2, 3)}
    cfg = OptimizerConfig(lr=0.05, weight_decay=0.3, decay_parameters="matrices")
    start = {name: torch.randn(shape) for name, shape in names.items()}
    undecayed = undecayed_of(cfg, {name: len(shape) for name, shape in names.items()}, ["embed"])
    shards = {name: value.clone() for name, value in start.items()}
    ours = ShardedOptimizer(shards, cfg, STEPS, undecayed=undecayed)
    plain = {name: nn.Parameter(value.clone()) for name, value in start.items()}
    groups = [
        {"params": [plain["matrix"], plain["stack"]]},
        {"params": [plain["embed"], plain["norm"], plain["bias"]], "weight_decay": 0.0},
    ]
    theirs = torch.optim.AdamW(groups, lr=0.05, betas=(0.9, 0.95), weight_decay=0.3, fused=True)

    for _ in range(3):
        gradients = {name: torch.randn(shape) for name, shape in names.items()}
        for name, parameter in plain.items():
            parameter.grad = gradients[name].clone()
        ours.step(gradients)
        theirs.step()

    assert undecayed == {"embed", "norm", "bias"}
    assert all(torch.equal(shards[name], plain[name]) for name in names)
    everywhere = OptimizerConfig(weight_decay=0.3)
    assert undecayed_of(everywhere, {"norm": 1}, ["embed"]) == frozenset()


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_number_of_moments_is_what_the_plan_counts(name: str, momentum: float) -> None:
    cfg = OptimizerConfig(name=name, betas=[momentum, 0.95])
    ours = ShardedOptimizer({"w": torch.randn(4, 3)}, cfg, 0)
    before = {moment: values.data_ptr() for moment, values in ours.moments_of("w").items()}

    ours.step({"w": torch.randn(4, 3)})

    moments = ours.moments_of("w")
    assert len(moments) == optimizer_kind(name).moments_with(cfg.betas)
    assert {moment: values.data_ptr() for moment, values in moments.items()} == before
    tensors = [x for x in ours.inner.state[ours._parameters["w"]].values() if torch.is_tensor(x)]
    assert sum(x.numel() for x in tensors if x.ndim) == len(moments) * 12
    assert {values.shape for values in moments.values()} <= {(4, 3)}


def test_norm_and_clipping_of_many_tensors_are_those_of_one() -> None:
    torch.manual_seed(0)
    whole = torch.randn(1000)
    parts = [part.clone() for part in whole.split([1, 0, 400, 599])]

    square = squared_norm(parts, torch.device("cpu"))
    clip_(parts, float(square.sqrt()), 0.5)

    assert square.dtype == torch.float64
    assert float(square) == pytest.approx(float(whole.double().square().sum()), rel=1e-14)
    assert float(torch.cat(parts).norm()) == pytest.approx(0.5)
    assert float(squared_norm([], torch.device("cpu"))) == 0.0
    clip_([], 2.0, 1.0)
