"""Trackers beside metrics.jsonl: TensorBoard and W&B, each imported only on request."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from spmdflow.errors import ConfigError


class Sink(Protocol):
    """Where finite metrics go as well."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of a step."""

    def cut_back(self, step: int) -> None:
        """Forget what was recorded after `step`, as far as the service can."""

    def close(self) -> None:
        """Flush and end."""


class TensorBoardSink:
    """Event files in RUN_DIR/tensorboard."""

    def __init__(self, run_dir: Path) -> None:
        # Any: torch ships the writer, tensorboard the types
        self._module: Any = _imported("tensorboard", "torch.utils.tensorboard")
        self._folder = run_dir / "tensorboard"
        self._writer = self._module.SummaryWriter(self._folder)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """One scalar for each metric."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def cut_back(self, step: int) -> None:
        """Have readers hide the events after `step`."""
        self._writer.close()
        self._writer = self._module.SummaryWriter(self._folder, purge_step=step + 1)

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


class WandbSink:
    """One W&B run for each RUN_DIR, continued on resume: its id is in RUN_DIR/wandb_id.

    Project, entity and mode come from W&B's own variables (WANDB_PROJECT, WANDB_MODE, ...).
    Points of steps that a resumed run repeats stay beside the new ones.
    """

    def __init__(self, run_dir: Path) -> None:
        wandb: Any = _imported("wandb", "wandb")  # Any: the extra may be absent
        id_path = run_dir / "wandb_id"
        if not id_path.exists():
            id_path.write_text(secrets.token_hex(8))
        try:
            self._run = wandb.init(
                name=run_dir.name, dir=run_dir, id=id_path.read_text().strip(), resume="allow"
            )
        except wandb.Error as err:
            raise ConfigError(
                f"run.trackers: wandb does not start ({err}), expected an account it can reach; "
                f"log in with `wandb login`, set WANDB_MODE=offline or leave wandb out"
            ) from err
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """One row; `step` is its x axis."""
        self._run.log({"step": step, **metrics})

    def cut_back(self, step: int) -> None:
        """Nothing: W&B cannot forget rows."""

    def close(self) -> None:
        """Upload what is left."""
        self._run.finish()


SINKS: dict[str, type[TensorBoardSink] | type[WandbSink]] = {
    "tensorboard": TensorBoardSink,
    "wandb": WandbSink,
}


def _imported(extra: str, module: str) -> Any:
    try:
        return import_module(module)
    except ImportError as err:
        raise ConfigError(
            f"run.trackers: {extra} is asked for but cannot be imported ({err}), expected the "
            f"package; pip install 'spmdflow[{extra}]' or leave it out"
        ) from err
