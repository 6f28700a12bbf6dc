"""Runs started by a Python program: `load_settings` and `launch`. `spmdflow.run` builds on it too.

Torch is imported late, so that `load_settings` and `spmdflow.run` report most invalid settings
without it.
"""

from __future__ import annotations

import copy
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

from spmdflow.config.auto import choices_text, choose_by_device, needs_plan
from spmdflow.config.check import check, problems
from spmdflow.config.leaf import SettingErrors, flat
from spmdflow.config.load import SCRIPT_MODULE, Loaded, complete, load, load_script
from spmdflow.config.location import run_dir_of
from spmdflow.config.source import find_file
from spmdflow.errors import ConfigError
from spmdflow.mapping.hardware import load_hardware

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
    """The settings of a script as `spmdflow.run` would load them: an object of its settings class.

    script and config are paths or bundled names; config lies over the script's own YAML.
    overrides are "dotted.key=value". num_ranks: also check them for a run on so many ranks, and
    place it if placement=auto. Changes made afterwards are checked by `spmdflow.launch`.
    ConfigError for anything that does not fit.
    """
    loaded = load(script, config, overrides)
    if num_ranks is None:
        return loaded.cfg
    return prepare(loaded, num_ranks)[0].cfg


def prepare(
    loaded: Loaded, world_size: int, *, node_size: int | None = None
) -> tuple[Loaded, str | None]:
    """Place and check settings for a run on world_size ranks, node_size on each node.

    Also returns a text: what each `auto` setting became, and why; None without any. Every rank
    computes the same result by itself. ConfigError if something does not fit.
    """
    _refuse_anywhere(loaded.cfg, world_size)
    from spmdflow.checkpoint.run_dir import load_previous_settings
    from spmdflow.parallel.device import own_device

    cfg = copy.deepcopy(loaded.cfg)
    device = own_device().type
    if cfg.run.resume == "never":
        before = None
    else:
        before = load_previous_settings(run_dir_of(cfg.run))
    saved, num_ranks = before or ({}, 0)
    choices = choose_by_device(cfg, device, kept=flat(saved))
    loaded = replace(loaded, cfg=cfg)
    placed = ""
    hardware_name = cfg.run.hardware
    if hardware_name is not None:
        load_hardware(hardware_name)
    if getattr(loaded.cfg, "placement", None) == "auto":
        from spmdflow.plan.auto import keep_placed, placed_text, resolve
        from spmdflow.plan.workload import hardware_of

        if before is not None:
            placed = keep_placed(cfg, saved, num_ranks, world_size)
        if cfg.placement == "auto":
            hardware = hardware_of(hardware_name, node_size or world_size, world_size=world_size)
            found = resolve(loaded.script, cfg, world_size, hardware, examples=loaded.assume)
            loaded = replace(loaded, cfg=found.cfg)
            placed = "\n".join(filter(None, (placed, placed_text(found))))
    cfg = loaded.cfg
    check(cfg, world_size)
    if needs_plan(cfg, on_cpu=device == "cpu"):
        from spmdflow.plan.residency import choose_by_plan, hardware_here

        hardware = hardware_here(hardware_name, node_size or world_size, world_size)
        found_parts = choose_by_plan(
            loaded.script, cfg, world_size, hardware, examples=loaded.assume
        )
        choices = [*choices, *found_parts]
    text = "\n".join(filter(None, (choices_text(choices), placed)))
    return loaded, text or None


def _refuse_anywhere(cfg: Any, world_size: int) -> None:
    """ConfigError for settings that are wrong on every device, before torch (slow) is loaded."""
    if getattr(cfg, "placement", None) == "auto":
        return
    found = []
    for device in ("cpu", "an accelerator"):
        choose_by_device(settled := copy.deepcopy(cfg), device)
        found.append({str(problem): problem for problem in problems(settled, world_size)})
        if not found[-1]:
            return
    if common := [problem for text, problem in found[0].items() if text in found[1]]:
        raise SettingErrors(common)


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
    """Run a script's main(flow, cfg) on `ranks` (default: all). 0: finished, 3: stopped by a
    signal (SIGTERM, SIGHUP, Ctrl-C).

    Collective over the default process group, which must exist unless inproc. On accelerators
    every rank must have called torch.accelerator.set_device_index. cfg is of the script's settings
    class, made by `load_settings` or in Python; or settings are "dotted.key=value" over the
    script's own YAML. They are completed and checked before anything starts: ConfigError on every
    rank.

    Every rank returns when the run has ended, also ranks outside of it. With wait=False these get
    an `Outcome` as soon as the run's process groups exist, and can ask it later. If the run fails,
    every rank gets RunFailed and the program can go on; only if a process is lost (dead, or stuck
    in a call that others have left) are the processes of the run ended. After a run, also one that
    was stopped, its first rank writes RUN_DIR/prediction.txt.
    """
    import torch.distributed as dist

    from spmdflow.runtime.launch import check_ranks

    loaded = _load(script, cfg, settings)
    world_size = 1 if inproc else dist.get_world_size()
    members = tuple(range(world_size)) if ranks is None or inproc else tuple(ranks)
    check_ranks(members, world_size)
    node_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    ready, _ = prepare(loaded, len(members), node_size=min(node_size, len(members)))
    outcome = run_prepared(ready.script, ready.cfg, ranks=members, inproc=inproc)
    if wait:
        return outcome.wait()
    return outcome


def _load(script: ModuleType | str | Path, cfg: Any, settings: Sequence[str]) -> Loaded:
    """`launch`'s script and completed settings; an imported script is not imported again."""
    if cfg is None:
        if isinstance(script, ModuleType):
            got = f"module {script.__name__} without settings"
            do = "pass its settings as an object, or the script's path and settings"
            raise ConfigError.of("launch", got, "cfg", do)
        return load(script, None, settings)
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
    """Run with checked settings on these ranks; then the first one writes prediction.txt and, if
    asked, view.html, which a failed run has too. Last it says where the trained models are.

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
    """The last line of a run: where its models are. Nothing if it has saved none."""
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
