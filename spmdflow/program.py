"""Runs started by a Python program: `load_settings` and `launch`. `spmdflow.run` builds on it too.

Torch is imported late, so that `load_settings` and `spmdflow.run` report most invalid settings
without it.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, overload

from spmdflow.config.check import check_open
from spmdflow.config.leaf import parts_of
from spmdflow.config.load import Loaded, complete, load
from spmdflow.config.location import run_dir_of
from spmdflow.config.resolve import Choice, PreviousRun, Settings, choices_text, resolve
from spmdflow.config.schema import EngineConfig, RolloutConfig, RunConfig
from spmdflow.config.script import SCRIPT_MODULE, load_script
from spmdflow.config.source import find_file
from spmdflow.errors import ConfigError
from spmdflow.kind.engine import Backend, engine_kind
from spmdflow.kind.generator import generator_kind
from spmdflow.mapping.hardware import load_hardware
from spmdflow.requirement import (
    UNTESTED_VERSIONS,
    refuse_untested_versions,
    untested_versions,
)
from spmdflow.tracking.scrape import check_address

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from spmdflow.runtime.launch import Outcome, Surroundings

_MOST_STOPPED_RANKS = 64
"""Larger runs that are asked to stop write no prediction.txt: torchrun soon sends SIGKILL."""


def load_settings(
    script: str | Path,
    config: str | Path | None = None,
    overrides: Sequence[str] = (),
    *,
    num_ranks: int | None = None,
) -> Any:
    """Return the settings of a script as `spmdflow.run` would load them, as its settings class.

    script and config are paths or bundled names; config overrides the script's own YAML, and
    overrides ("dotted.key=value") both. num_ranks: also check them for a run on so many ranks, and
    choose what is `auto`, the placement included. Changes made afterwards are checked by
    `spmdflow.launch`. Settings in an old form are logged as warnings. ConfigError for anything that
    does not fit.
    """
    loaded = load(script, config, overrides)
    for warning in loaded.warnings:
        logger.warning("%s", warning)
    if num_ranks is None:
        return loaded.cfg
    return prepare(loaded, num_ranks)[0].cfg


def prepare(
    loaded: Loaded,
    world_size: int,
    *,
    node_size: int | None = None,
    serves_page: bool = False,
) -> tuple[Loaded, str | None]:
    """Choose all `auto` values and check settings for a run on world_size ranks.

    Returns the completed settings, and a text that says what each `auto` setting became, and why
    (None if there was none). Every rank computes the same result, without communication.
    ConfigError if something does not fit.
    node_size: ranks of one node; all ranks by default. serves_page: whether this process is going
    to serve the page of run.metrics_port, and so must be able to listen there.
    """
    check_open(loaded.cfg, world_size)
    if serves_page:
        check_metrics_port(loaded.cfg.run)
    hardware_name = loaded.cfg.run.hardware
    if hardware_name is not None:
        load_hardware(hardware_name)
    from spmdflow.parallel.device import own_device  # late: errors so far need no torch

    settings = Settings(
        cfg=loaded.cfg,
        script=loaded.script,
        world_size=world_size,
        node_size=node_size or world_size,
        device=own_device().type,
        search_placement=_search_placement,
        fit_memory=_fit_memory,
        examples=loaded.assume,
        previous=_previous_run(loaded.cfg.run),
    )
    settings, reasons = resolve(settings)
    return replace(loaded, cfg=settings.cfg), choices_text(reasons) or None


def check_versions(cfg: Any) -> list[str]:
    """Raise ConfigError if a package that this run needs is installed in a version never tested.

    Checks torch, transformers and the packages of the run's engines and generators against the
    ranges of the installed spmdflow. With SPMDFLOW_UNTESTED_VERSIONS=1 it returns warnings instead.
    """
    kinds: list[Backend] = []
    for key, engine in parts_of(cfg, EngineConfig):
        kinds.append(engine_kind(engine.kind, key=f"{key}.kind"))
    for key, rollout in parts_of(cfg, RolloutConfig):
        kinds.append(generator_kind(rollout.generator, key=f"{key}.engine"))
    extras = []
    for kind in kinds:
        if kind.extra:
            extras += kind.extra.split(",")
    if os.environ.get(UNTESTED_VERSIONS) != "1":
        refuse_untested_versions(extras)
        return []
    return [f"warning: {sentence}" for sentence in untested_versions(extras)]


def check_metrics_port(run: RunConfig) -> None:
    """ConfigError if this process, as rank 0, could not serve the page of run.metrics_port now."""
    if run.metrics_port is not None:
        check_address(run.metrics_address, run.metrics_port)


def _previous_run(run: RunConfig) -> PreviousRun | None:
    """Return settings and ranks of the run whose checkpoint this one resumes.

    None if it starts from scratch: run.resume=never, or no checkpoint in its RUN_DIR.
    """
    from spmdflow.checkpoint.run_dir import load_previous_settings  # late: it needs torch

    if run.resume == "never":
        return None
    previous = load_previous_settings(run_dir_of(run))
    if previous is None:
        return None
    return PreviousRun(*previous)


def _search_placement(settings: Settings) -> list[Choice]:
    """The planner's placement; it is imported here, so that other runs start sooner."""
    from spmdflow.plan.placement import search_placement

    return search_placement(settings)


def _fit_memory(settings: Settings) -> list[Choice]:
    """The planner's choices for memory; it is imported here, so that other runs start sooner."""
    from spmdflow.plan.fit import fit_memory

    return fit_memory(settings)


@overload
def launch(
    script: ModuleType | str | Path,
    cfg: Any = None,
    *,
    settings: Sequence[str] = (),
    ranks: tuple[int, ...] | None = None,
    inproc: bool = False,
    wait: Literal[True] = True,
) -> int:
    """Return the exit status at the end of the run."""


@overload
def launch(
    script: ModuleType | str | Path,
    cfg: Any = None,
    *,
    settings: Sequence[str] = (),
    ranks: tuple[int, ...] | None = None,
    inproc: bool = False,
    wait: Literal[False],
) -> Outcome:
    """Return an `Outcome`; on ranks outside of the run, before the run has begun."""


def launch(
    script: ModuleType | str | Path,
    cfg: Any = None,
    *,
    settings: Sequence[str] = (),
    ranks: tuple[int, ...] | None = None,
    inproc: bool = False,
    wait: bool = True,
) -> int | Outcome:
    """Run a script's main(flow, cfg) on `ranks` (default: all); return 0 if finished, 3 if stopped.

    Collective over the default process group, which must exist unless inproc. On accelerators every
    rank must have called torch.accelerator.set_device_index. cfg is of the script's settings class,
    made by `load_settings` or in Python; or settings are "dotted.key=value" over the script's own
    YAML. They are completed and checked before anything starts: ConfigError on every rank.

    Every rank returns when the run has ended, also ranks outside of it. With wait=False these get
    an `Outcome` as soon as the run's process groups exist, and can ask it later. 3 means stopped by
    a signal (SIGTERM, SIGHUP, Ctrl-C). If the run fails, every rank gets RunFailed and the program
    can go on; only if a process is lost (dead, or stuck in a call that others have left) are the
    processes of the run ended. After a run, also one that was stopped, its first rank writes
    RUN_DIR/prediction.txt.
    """
    import torch.distributed as dist

    from spmdflow.runtime.launch import check_ranks

    loaded = _load(script, cfg, settings)
    world_size = 1 if inproc else dist.get_world_size()
    members = tuple(range(world_size)) if ranks is None or inproc else tuple(ranks)
    check_ranks(members, world_size)
    node_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    ready, _ = prepare(
        loaded,
        len(members),
        node_size=min(node_size, len(members)),
        serves_page=inproc,  # of several ranks only the first could refuse: it warns later
    )
    for warning in check_versions(ready.cfg):
        logger.warning("%s", warning)
    outcome = run_prepared(ready.script, ready.cfg, ranks=members, inproc=inproc)
    if wait:
        return outcome.wait()
    return outcome


def _load(script: ModuleType | str | Path, cfg: Any, settings: Sequence[str]) -> Loaded:
    """Return `launch`'s script with its completed settings.

    cfg None: load the script by its path, with `settings`. Otherwise complete cfg; a script that
    this process has imported already is not imported again. ConfigError for cfg and settings
    together, or for an imported module without cfg.
    """
    if cfg is None:
        if isinstance(script, ModuleType):
            got = f"module {script.__name__} without settings"
            do = "pass its settings as an object, or the script's path and settings"
            raise ConfigError.of("launch", got, "cfg", do)
        loaded = load(script, None, settings)
        for warning in loaded.warnings:
            logger.warning("%s", warning)
        return loaded
    if settings:
        raise ConfigError.of(
            "launch", f"cfg and settings {list(settings)}", "one of them", "set them in cfg"
        )
    cfg = complete(cfg)
    if not isinstance(script, ModuleType):
        known = sys.modules.get(SCRIPT_MODULE)
        path = find_file(script, ".py").resolve()
        is_known = known is not None and Path(known.__file__ or "").resolve() == path
        script = known if known is not None and is_known else load_script(script)
    elif script.__name__ == SCRIPT_MODULE:
        sys.modules[SCRIPT_MODULE] = script  # ranks find its functions by that name
    return Loaded(cfg, script)


def run_prepared(
    script: ModuleType,
    cfg: Any,
    *,
    ranks: tuple[int, ...],
    inproc: bool = False,
    surroundings: Surroundings | None = None,
) -> Outcome:
    """Run a script with checked settings on these ranks, and return its Outcome.

    All ranks of the default process group call it together, unless inproc. When the run has ended,
    its first rank writes prediction.txt (finished, or stopped with at most 64 ranks) and, with
    run.view, view.html, which a failed run gets too; then it logs where the trained models are.
    Other ranks return the Outcome without waiting.
    cfg: an object of the script's settings class.
    """
    import torch.distributed as dist

    from spmdflow.controller import script as controller
    from spmdflow.runtime.launch import Outcome, Surroundings

    show = partial(_write_page, cfg)
    around = replace(surroundings or Surroundings(), show_failure=show)
    is_first = inproc or dist.get_rank() == ranks[0]
    try:
        if inproc:
            outcome = Outcome(controller.run_flow(script, cfg, inproc=True))
        else:
            outcome = controller.start_flow(script, cfg, ranks=ranks, surroundings=around)
    except ConfigError:
        raise
    except Exception:  # of a script in this process, or RunFailed
        if is_first:
            show()
        raise
    if not is_first:
        return outcome
    from spmdflow.plan.comparison import compare_run  # late: a run starts sooner without it

    if outcome.wait() == controller.FINISHED:
        compare_run(cfg)
    elif len(ranks) <= _MOST_STOPPED_RANKS and (
        threading.current_thread() is threading.main_thread()  # only it may set handlers
    ):
        repeated = (signal.SIGTERM, signal.SIGHUP)  # by launchers and shells
        earlier = {}
        for number in repeated:
            earlier[number] = signal.signal(number, signal.SIG_IGN)
        try:
            compare_run(cfg)
        finally:
            for number, handler in earlier.items():
                signal.signal(number, handler)
    show()
    if outcome.wait() == controller.FINISHED:
        _log_trained_models(cfg)
    return outcome


def _log_trained_models(cfg: Any) -> None:
    """Log where the models of a finished run are; nothing if it has saved none.

    The line suggests an evaluation if the settings have data, reward and rollout for one.
    """
    from spmdflow.checkpoint.summary import trained_models_text  # late, as above

    has_data = getattr(getattr(cfg, "data", None), "eval_path", None) is not None
    has_evaluation = (
        has_data and hasattr(cfg, "reward") and hasattr(getattr(cfg, "actor", None), "rollout")
    )
    text = trained_models_text(run_dir_of(cfg.run), has_evaluation=has_evaluation)
    if text is not None:
        logger.info("%s", text)


def _write_page(cfg: Any) -> None:
    if cfg.run.view:
        from spmdflow.view.html import view_run  # late, as above

        view_run(cfg)
