"""The optimizers: classes of torch.optim that step each element by its own gradients."""

from __future__ import annotations

from dataclasses import dataclass

from spmdflow.errors import ConfigError


@dataclass(frozen=True)
class OptimizerKind:
    """What is known of a class without loading torch."""

    moments: int = 2
    """Float32 values that it keeps of each weight."""
    first: str = ""
    """Its argument for betas[0], a momentum, which is one value more of each weight unless it is 0;
    a class of two betas takes them as they are."""
    second: str = ""
    """Its argument for betas[1]."""
    fused: bool = False
    """Torch has one kernel for its whole step, on CPU and on CUDA."""
    decays: bool = True
    """It has a weight decay."""

    def moments_with(self, betas: list[float]) -> int:
        """Float32 values of each weight under these settings."""
        return self.moments + (self.first == "momentum" and betas[0] > 0)


_OPTIMIZERS = {
    "AdamW": OptimizerKind(fused=True),
    "Adam": OptimizerKind(fused=True),
    "SGD": OptimizerKind(0, "momentum", fused=True),
    "RMSprop": OptimizerKind(1, "momentum", "alpha"),
    "Adagrad": OptimizerKind(1),
    "Adadelta": OptimizerKind(2, second="rho"),
    "Adamax": OptimizerKind(),
    "NAdam": OptimizerKind(),
    "RAdam": OptimizerKind(),
    "ASGD": OptimizerKind(1),
    "Rprop": OptimizerKind(decays=False),
}
_NOT_ELEMENTWISE = {
    "LBFGS": "which evaluates the loss several times a step",
    "SparseAdam": "which takes sparse gradients",
    "Adafactor": "which needs rows and columns of whole tensors",
    "Muon": "which needs whole tensors",
}


def optimizer_names() -> tuple[str, ...]:
    """Every class that can be chosen; the default first."""
    return tuple(_OPTIMIZERS)


def optimizers_doc() -> str:
    """The choices in words."""
    return (
        f"Class of torch.optim: {', '.join(_OPTIMIZERS)}. betas are also the momentum of SGD and "
        f"RMSprop, RMSprop's alpha and Adadelta's rho; only AdamW's weight decay is decoupled."
    )


def optimizer_kind(name: str, *, key: str = "optimizer.name") -> OptimizerKind:
    """Facts of a class; ConfigError naming the setting and the choices."""
    if name not in _OPTIMIZERS:
        got = ", ".join(filter(None, (name, _NOT_ELEMENTWISE.get(name))))
        expected = "a class of torch.optim that steps each element by its own gradients: "
        raise ConfigError.of(key, got, expected + ", ".join(_OPTIMIZERS), f"set {key}=AdamW")
    return _OPTIMIZERS[name]
