"""`launch`: a run inside a program whose process group exists; `spmdflow.run` starts here too."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, overload

import torch.distributed as dist

from spmdflow.controller import script as controller
from spmdflow.plan.comparison import compare_run
from spmdflow.prepare import load_for_launch, prepare
from spmdflow.runtime.launch import Outcome, Surroundings, check_ranks

_MOST_STOPPED_RANKS = 64
"""Of a run that is compared after SIGTERM: torchrun kills 30 s after it."""


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
    """Return an `Outcome`, on ranks outside of the run before it has begun."""


def launch(
    script: ModuleType | str | Path,
    cfg: Any = None,
    *,
    settings: Sequence[str] = (),
    ranks: tuple[int, ...] | None = None,
    inproc: bool = False,
    wait: bool = True,
) -> int | Outcome:
    """Run a script's main(flow, cfg) on `ranks` (default: all). 0: finished, 3: stopped by SIGTERM.

    Collective over the default process group, which must exist unless inproc. On GPUs every rank
    has called torch.cuda.set_device before. cfg is of the script's settings class, made by
    `load_settings` or in Python; or settings are "dotted.key=value" over the script's own YAML.
    They are completed and checked first: ConfigError on every rank, and nothing was started.

    Every rank returns when the run has ended, ranks outside of it too. wait=False gives them an
    `Outcome` as soon as its groups are made, to be asked later. If the run fails, every rank gets
    RunFailed and the program can go on; only if a process is lost (dead, or stuck in a call that
    others have left) are the processes of the run ended. After a run, also one that was stopped,
    its first rank writes RUN_DIR/prediction.txt.
    """
    ready = load_for_launch(script, cfg, settings)
    if inproc:
        ready, _ = prepare(ready, 1)
        status = launch_prepared(ready.script, ready.cfg, inproc=True)
        return status if wait else Outcome(status)
    world_size = dist.get_world_size()
    members = tuple(range(world_size)) if ranks is None else tuple(ranks)
    check_ranks(members, world_size)
    node_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    ready, _ = prepare(ready, len(members), node_size=min(node_size, len(members)))
    outcome = controller.begin(ready.script, ready.cfg, ranks=members)
    if dist.get_rank() == members[0]:
        _compare(ready.cfg, outcome.wait(), len(members))
    return outcome.wait() if wait else outcome


def launch_prepared(
    script: ModuleType,
    cfg: Any,
    *,
    inproc: bool = False,
    surroundings: Surroundings | None = None,
) -> int:
    """Run on all ranks with settings that were checked; the exit status.

    Any: an object of the script's settings class.
    """
    status = controller.launch(script, cfg, inproc=inproc, surroundings=surroundings)
    if inproc or dist.get_rank() == 0:
        _compare(cfg, status, 1 if inproc else dist.get_world_size())
    return status


def _compare(cfg: Any, status: int, num_ranks: int) -> None:
    """Hold what the run recorded against the prediction."""
    if status == controller.FINISHED:
        compare_run(cfg)
    elif num_ranks <= _MOST_STOPPED_RANKS:
        _compare_stopped(cfg)


def _compare_stopped(cfg: Any) -> None:
    """Compare a run that was stopped: launchers repeat SIGTERM when other ranks have ended.

    Signals belong to the main thread; a run in another one is not compared.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    earlier = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        compare_run(cfg)
    finally:
        signal.signal(signal.SIGTERM, earlier)
