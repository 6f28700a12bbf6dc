"""Sinks of `Tracker`: TensorBoard, W&B, MLflow, Trackio and SwanLab, each imported when used.

Only TensorBoard can hide the numbers of steps that a resumed run repeats. The others keep the old
numbers next to the new ones.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from html import escape
from importlib import import_module
from pathlib import Path
from typing import Any

from spmdflow.errors import ConfigError
from spmdflow.requirement import install_command
from spmdflow.tracking.progress import Sample, printable
from spmdflow.tracking.tracker import Sink

PROJECT = "spmdflow"
"""Project or experiment, unless the library's own variables set another."""
_SHOWN = ("phase", "group", "prompt", "response", "score", "advantage", "turns")


def table_of(samples: Sequence[Sample]) -> tuple[list[str], list[list[Any]]]:
    """Return (column names, rows) of a table of samples, without their tokens.

    The columns are phase, group, prompt, response, score, advantage and turns, as far as samples
    have them, and the terms, in the order in which they first occur. A missing value is None.
    """
    rows = []
    for sample in samples:
        plain = sample.to_plain()
        shown = {}
        for name in _SHOWN:
            if name in plain:
                shown[name] = plain[name]
        rows.append(shown | {name: x for name, x in sample.terms.items() if name not in shown})
    columns = list(dict.fromkeys(name for row in rows for name in row))
    return columns, [[row.get(name) for name in columns] for row in rows]


class TensorBoardSink(Sink):
    """Event files in RUN_DIR/tensorboard; readers hide earlier events after last_step."""

    def __init__(self, run_dir: Path, last_step: int) -> None:
        super().__init__(run_dir, last_step)
        # Any: torch ships the writer, tensorboard the types
        module: Any = _import_extra("tensorboard", "torch.utils.tensorboard")
        self._writer = module.SummaryWriter(run_dir / "tensorboard", purge_step=last_step + 1)

    def describe(self, facts: Mapping[str, Any]) -> None:
        """Write the facts as a table (text "run") at step last_step, or 0 for a new run.

        Values are shown as JSON.
        """
        rows = []
        for name, value in facts.items():
            rows.append([name, json.dumps(value)])
        self._write_table("run", ["fact", "value"], rows, max(self.last_step, 0))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one scalar for each metric."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def write_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Write a text, `samples`, with a table."""
        self._write_table("samples", *table_of(samples), step)

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()

    def _write_table(self, name: str, columns: list[str], rows: list[list[Any]], step: int) -> None:
        """Write a Markdown table in which texts of a model are escaped."""
        lines = [columns, ["---"] * len(columns), *rows]
        text = "\n".join("|".join(map(_markdown_cell, line)) for line in lines)
        self._writer.add_text(name, text, step)


def _markdown_cell(value: object) -> str:
    """A value as a cell of a Markdown table, with an entity for every ASCII punctuation mark."""
    text = printable(str("" if value is None else value))
    return re.sub(r"[^\w\s-]", lambda match: f"&#{ord(match[0])};", escape(text, quote=False))


class WandbSink(Sink):
    """One W&B run; project, entity and mode come from its own variables (WANDB_PROJECT, ...)."""

    advice = "log in with `wandb login`, set WANDB_MODE=offline"

    def __init__(self, run_dir: Path, last_step: int) -> None:
        """Create the W&B run, or resume the one of this RUN_DIR."""
        super().__init__(run_dir, last_step)
        self._wandb: Any = _import_extra("wandb", "wandb")  # Any: the extra may be absent
        self._run = self._wandb.init(name=run_dir.name, dir=run_dir, id=self.run_id, resume="allow")
        self._run.define_metric("*", step_metric="step")

    def describe(self, facts: Mapping[str, Any]) -> None:
        """Update the run's config."""
        self._run.config.update(dict(facts), allow_val_change=True)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log one row, with `step` as its x axis."""
        self._run.log({"step": step, **metrics})

    def write_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Log a table, `samples`."""
        columns, rows = table_of(samples)
        table = self._wandb.Table(columns=columns, data=rows, allow_mixed_types=True)
        self._run.log({"step": step, "samples": table})

    def close(self) -> None:
        """Upload the remaining data and end the run."""
        self._run.finish()


class MlflowSink(Sink):
    """One MLflow run, in RUN_DIR/mlflow.db unless MLFLOW_TRACKING_URI gives a server.

    The experiment is MLFLOW_EXPERIMENT_NAME or `spmdflow`. The tag `spmdflow.run_id` identifies the
    run. A parameter keeps its first value, because MLflow does not allow changes.
    """

    advice = "set MLFLOW_TRACKING_URI to a server that answers, unset it"
    _MOST = 100
    """Parameters per request, MLflow's limit (1000 for metrics)."""
    _RETRY_LIMITS = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": 2, "MLFLOW_HTTP_REQUEST_TIMEOUT": 20}
    """An unreachable server delays a step by a minute instead of an hour, MLflow's default."""

    def __init__(self, run_dir: Path, last_step: int) -> None:
        """Connect to the server or open the database; find the run by its tag, or create it."""
        super().__init__(run_dir, last_step)
        mlflow: Any = _import_extra("mlflow", "mlflow")  # Any: the extra may be absent
        self._entities = mlflow.entities
        variables = mlflow.environment_variables
        for name, value in self._RETRY_LIMITS.items():
            variable = getattr(variables, name)
            if not variable.is_set():
                variable.set(value)
        uri = artifacts = None
        if not mlflow.tracking.is_tracking_uri_set():
            _import_extra("mlflow", "sqlalchemy")
            uri = f"sqlite:///{run_dir.absolute() / 'mlflow.db'}"
            artifacts = (run_dir.absolute() / "mlflow").as_uri()
        self._client = mlflow.MlflowClient(tracking_uri=uri)
        name = variables.MLFLOW_EXPERIMENT_NAME.get() or PROJECT
        known_experiment = self._client.get_experiment_by_name(name)
        if known_experiment:
            experiment = known_experiment.experiment_id
        else:
            experiment = self._client.create_experiment(name, artifacts)
        tag = f"{PROJECT}.run_id"
        runs = self._client.search_runs([experiment], f"tags.`{tag}` = '{self.run_id}'")
        if runs:
            run = runs[0]
        else:
            run = self._client.create_run(
                experiment, run_name=run_dir.name, tags={tag: self.run_id}
            )
        self._run = run.info.run_id
        self._params = set(run.data.params)
        self._client.update_run(self._run, status="RUNNING")

    def describe(self, facts: Mapping[str, Any]) -> None:
        """Log new facts as parameters, and all facts of this start as the artifact facts.json.

        A parameter that the run has keeps its first value. Values are cut to 6000 characters. A
        request has at most 100 parameters.
        """
        new = [
            self._entities.Param(name, str(value)[:6000])  # MLflow's limit
            for name, value in facts.items()
            if name not in self._params
        ]
        for start in range(0, len(new), self._MOST):
            self._client.log_batch(self._run, params=new[start : start + self._MOST])
        self._client.log_dict(self._run, dict(facts), "facts.json")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log all metrics in one request.

        In a name, characters other than letters, digits and _ . - / : space, which MLflow rejects,
        become `_`.
        """
        now = int(time.time() * 1000)
        points = []
        for name, value in metrics.items():
            points.append(
                self._entities.Metric(re.sub(r"[^\w.\- :/]", "_", name), value, now, step)
            )
        self._client.log_batch(self._run, metrics=points)

    def write_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Log an artifact, samples/step-N.json, with columns and data."""
        columns, rows = table_of(samples)
        table = {"columns": columns, "data": rows}
        self._client.log_dict(self._run, table, f"samples/step-{step}.json")

    def close(self) -> None:
        """Mark the run as finished."""
        self._client.set_terminated(self._run)


class TrackioSink(Sink):
    """One Trackio run of the project `spmdflow`, in its local database.

    TRACKIO_DIR is the folder of databases. TRACKIO_SPACE_ID or TRACKIO_SERVER_URL give a server.
    """

    advice = "unset TRACKIO_SPACE_ID and TRACKIO_SERVER_URL"

    def __init__(self, run_dir: Path, last_step: int) -> None:
        super().__init__(run_dir, last_step)
        self._trackio: Any = _import_extra("trackio", "trackio")  # Any: the extra may be absent
        self._run = self._trackio.init(
            PROJECT,
            name=f"{run_dir.name}-{self.run_id}",  # Trackio identifies a run by its name
            resume="allow",
            embed=False,
            auto_log_cpu=False,
            auto_log_gpu=False,
        )

    def describe(self, facts: Mapping[str, Any]) -> None:
        """Update the run's config, which Trackio writes with the first metrics."""
        self._run.config.update(facts)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log one row."""
        self._run.log(dict(metrics), step=step)

    def write_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Log a table, `samples`."""
        columns, rows = table_of(samples)
        self._run.log({"samples": self._trackio.Table(columns=columns, data=rows)}, step=step)

    def close(self) -> None:
        """Write the remaining data and end the run."""
        self._run.finish()


class SwanLabSink(Sink):
    """One SwanLab run, in RUN_DIR/swanlab. It is offline without an account and SWANLAB_MODE.

    Every start of an offline run has its own folder; `swanlab sync` joins them by their id.
    """

    advice = "log in with `swanlab login`, set SWANLAB_MODE=offline"

    def __init__(self, run_dir: Path, last_step: int) -> None:
        """Create the SwanLab run, or resume the one of this RUN_DIR."""
        super().__init__(run_dir, last_step)
        self._swanlab: Any = _import_extra("swanlab", "swanlab")  # Any: the extra may be absent
        settings = self._swanlab.Settings()  # reads variables, files and the log-in
        chosen = "mode" in settings.model_fields_set or settings.api_key
        self._run = self._swanlab.init(
            mode=None if chosen else "offline",
            project=settings.project.name or PROJECT,
            name=run_dir.name,
            log_dir=str(run_dir / "swanlab"),
            id=self.run_id,
            resume="allow",
        )

    def describe(self, facts: Mapping[str, Any]) -> None:
        """Update the run's config."""
        self._run.config.update(dict(facts))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log one row."""
        self._run.log(dict(metrics), step=step)

    def write_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Log a table, `samples`."""
        columns, rows = table_of(samples)
        self._run.log({"samples": self._swanlab.echarts.Table().add(columns, rows)}, step=step)

    def close(self) -> None:
        """Write or upload the remaining data and end the run."""
        self._run.finish()


def _import_extra(extra: str, module: str) -> Any:
    """The imported module; ConfigError with the extra to install."""
    try:
        return import_module(module)
    except ImportError as err:
        raise ConfigError(
            f"run.trackers: {extra} is set but cannot be imported ({err}); "
            f"{install_command(extra)}, or remove {extra} from run.trackers"
        ) from err
