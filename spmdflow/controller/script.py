"""Runs a script: builds the flow that its `main` is given, over a transport of orders.

Every rank of the default process group calls `run_flow` or `start_flow`; the script itself runs
on the first rank of the run alone.
"""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from spmdflow.checkpoint.hub import open_repository, push
from spmdflow.checkpoint.lock import RunDirLock
from spmdflow.checkpoint.reading import ModelFolders
from spmdflow.checkpoint.run_dir import RunDir, open_run_dir
from spmdflow.config.location import to_yaml
from spmdflow.config.placement import pools_of
from spmdflow.controller.caller import Caller
from spmdflow.controller.capsule import Capsule
from spmdflow.controller.flow import Flow, Stopped
from spmdflow.controller.guarding import Guarding
from spmdflow.controller.metrics_page import MetricsPage
from spmdflow.controller.observer import CallList, Observer, Timeline
from spmdflow.controller.saving import Saving, find_unseen_folders, verify_on_ranks
from spmdflow.controller.step import Show
from spmdflow.controller.throughput_log import ThroughputLog
from spmdflow.controller.transcript import TRANSCRIPT_FILE, Transcript
from spmdflow.errors import ConfigError
from spmdflow.parallel.device import backend_of, device_name, own_device
from spmdflow.runtime import launch as runtime
from spmdflow.runtime.call import Transport
from spmdflow.runtime.launch import Outcome
from spmdflow.tracking.servers import remove_servers
from spmdflow.tracking.tracker import sync_records

logger = logging.getLogger(__name__)

FINISHED = 0
STOPPED = 3


def run_flow(
    script: ModuleType,
    cfg: Any,
    *,
    ranks: tuple[int, ...] | None = None,
    inproc: bool = False,
    surroundings: runtime.Surroundings | None = None,
) -> int:
    """Run script.main(flow, cfg) on `ranks` (default: all). Exit status: 0 finished, 3 stopped.

    Collective over the default process group, which must exist unless inproc; every rank waits
    for the end. Fails as `start_flow` does; RunFailed on ranks outside of the run too.
    """
    if inproc:
        return runtime.run_inproc(_control(script, cfg), cfg)
    return start_flow(script, cfg, ranks=ranks, surroundings=surroundings).wait()


def start_flow(
    script: ModuleType,
    cfg: Any,
    *,
    ranks: tuple[int, ...] | None = None,
    surroundings: runtime.Surroundings | None = None,
) -> Outcome:
    """The same, but ranks outside of the run get their `Outcome` once its groups are made.

    ConfigError if the script has no main; other errors as of `runtime.launch.start_run`.
    """
    restarts = surroundings.restarts if surroundings is not None else 0
    control = _control(script, cfg, restarts=restarts)
    return runtime.start_run(control, cfg, ranks=ranks, surroundings=surroundings)


def _control(script: ModuleType, cfg: Any, *, restarts: int = 0) -> runtime.Control:
    if not callable(getattr(script, "main", None)):
        raise ConfigError(
            f"{script.__name__}: defines no main, expected main(flow, cfg); add it to the script"
        )
    return partial(run_script, script, cfg, restarts=restarts)


def run_script(
    script: ModuleType,
    cfg: Any,
    transport: Transport,
    ranks: tuple[int, ...],
    has_outside: bool,
    lock: RunDirLock,
    *,
    restarts: int = 0,
) -> int:
    """Run script.main on the controller; return the exit status: 0 finished, 3 stopped.

    Opens RUN_DIR and finds the checkpoint to continue from, builds the flow, runs main, and waits
    for the last checkpoint. Then uploads the models if run.push_to_hub is set, and marks the run as
    finished. At the end closes the workers of all ranks. A stop by run.max_seconds also returns 0.
    An error of the script is raised after the checkpoint that is being written is finished.
    restarts: by torchrun, in this launch.
    """
    settings = to_yaml(cfg)
    repository = cfg.run.push_to_hub
    if repository is not None:
        open_repository(repository)
    run_dir = open_run_dir(
        cfg.run,
        settings,
        lock=lock,
        verify=partial(verify_on_ranks, transport, ranks, seconds=cfg.run.call_seconds),
    )
    run_dir.mark_unfinished()
    remove_servers(run_dir.path)
    folders = ModelFolders()
    if run_dir.checkpoint:
        before = run_dir.checkpoint.meta.get("models", {})
    else:
        before = {}
    seconds = cfg.run.call_seconds
    missing = partial(find_unseen_folders, transport, ranks, seconds=seconds)
    cfg = folders.resolve_links(cfg, before, missing)
    settings = to_yaml(cfg)
    caller = Caller(transport, cfg.run, ranks)
    file = Path(str(getattr(script, "__file__", script.__name__)))  # made in Python: no file
    show = Show(cfg, run_dir.path, last_step=run_dir.last_step, script=file)
    saving = Saving(
        run_dir.path,
        run_dir.checkpoint,
        cfg.run,
        settings,
        models=folders.resolved_links,
        lock=lock,
    )
    observers = _observers_of(cfg, run_dir, settings, file, transport, ranks, restarts=restarts)
    flow = Flow(
        caller,
        cfg,
        pools_of(cfg, ranks),
        run_dir.path,
        saving,
        show,
        backend=backend_of(own_device()),
        has_outside=has_outside,
        guarding=Guarding(cfg.run.guards, caller, run_dir.path),
        observers=observers,
    )
    try:
        with saving.finishing():
            script.main(flow, cfg)
            flow.end()
        status = FINISHED
        if repository is not None:
            logger.info("pushed to %s", push(run_dir.path, repository))
        sync_records(run_dir.path)
        run_dir.mark_finished(caller.step or caller.last_step)
    except Stopped as stop:
        logger.warning("%s", stop)
        status = FINISHED if stop.is_time_up else STOPPED
    finally:
        show.close()
        for observer in observers:
            observer.close()
        folders.release()
    caller.submit("close", {rank: {"operation": "close"} for rank in ranks}).result()
    return status


def _observers_of(
    cfg: Any,
    run_dir: RunDir,
    settings: str,
    script: Path,
    transport: Transport,
    ranks: tuple[int, ...],
    *,
    restarts: int,
) -> list[Observer]:
    """Return the observers that write transcript, trace.json, calls.jsonl and the tokens of steps.

    They write into RUN_DIR. With run.capture_step, also the one that keeps that step; with
    run.metrics_port, the one that serves the page for Prometheus.
    """
    nodes = [transport.node_of(rank) for rank in ranks]
    observers: list[Observer] = [
        Transcript(run_dir.path / TRANSCRIPT_FILE, ranks, nodes),
        Timeline(run_dir.path / "trace.json"),
        CallList(run_dir.path, last_step=run_dir.last_step),
    ]
    if cfg.run.capture_step:
        observers.append(Capsule(cfg.run, run_dir.path, settings, script))
    if cfg.run.metrics_port is not None:
        observers.append(MetricsPage(cfg.run, run_dir.path, restarts=restarts))
    observers.append(  # the last one: it may fetch values, which the others do not record
        ThroughputLog(
            run_dir.path,
            cfg,
            nodes=nodes,
            device=device_name(),
            script=script,
            last_step=run_dir.last_step,
        )
    )
    return observers
