"""The batch algebra as integers: prompts -> samples -> mini-batches -> micro-batches per rank.

samples         = prompts_per_step * samples_per_prompt        (one step)
mini-batches    = samples / mini_batch_size                    (must divide)
optimizer steps = mini-batches * num_epochs                    (per step)
rows per rank   = ceil or floor of mini_batch_size / ranks     (may be uneven)
micro-batches   = ceil(most rows of a rank / rows of engine.micro_batch)
"""

from __future__ import annotations

from dataclasses import dataclass

from spmdflow.config.schema import DataConfig, EngineConfig, UpdateConfig
from spmdflow.errors import ConfigError


@dataclass(frozen=True)
class Algebra:
    """One role's way from samples to optimizer steps."""

    samples: int
    mini_batch_size: int
    mini_batches: int
    num_epochs: int
    rows_per_rank: tuple[int, int]
    """Fewest and most rows of a mini-batch on one rank."""
    micro_batches: int
    """Forward passes of a mini-batch on every rank, cut by rows."""

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps of one step of the run."""
        return self.mini_batches * self.num_epochs


def batch_algebra_of(
    role: str, data: DataConfig, update: UpdateConfig, engine: EngineConfig, *, num_ranks: int
) -> Algebra:
    """The algebra of one trained role on `num_ranks` data-parallel ranks; refuses what has a rest.

    Rows over ranks may be uneven; mini-batches may not, and groups of samples stay whole.
    """
    samples = data.prompts_per_step * data.samples_per_prompt
    size, group = update.mini_batch_size, data.samples_per_prompt
    if samples % size or size % group:
        groups = f" that is a multiple of {group}" if group > 1 else ""
        raise ConfigError(
            f"{role}.update.mini_batch_size: got {size}, expected a divisor of the {samples} "
            f"samples of a step ({data.prompts_per_step} prompts x {group}){groups}; "
            f"choose {_nearest_sizes(samples, group, size)}"
        )
    most = -(-size // num_ranks)
    return Algebra(
        samples=samples,
        mini_batch_size=size,
        mini_batches=samples // size,
        num_epochs=update.num_epochs,
        rows_per_rank=(size // num_ranks, most),
        micro_batches=-(-most // engine.micro_batch_size_per_rank),
    )


def _nearest_sizes(samples: int, group: int, size: int) -> str:
    """The allowed sizes around a refused one, at most three."""
    allowed = [group * d for d in range(1, samples // group + 1) if (samples // group) % d == 0]
    nearest = sorted(sorted(allowed, key=lambda other: abs(other - size))[:3])
    return " or ".join(map(str, nearest))
