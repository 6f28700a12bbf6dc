"""`launch`: a run inside a program whose process group exists, such as `spmdflow.run` itself."""

from __future__ import annotations

import signal
import threading
from types import ModuleType
from typing import Any

import torch.distributed as dist

from spmdflow.controller import launch as controller
from spmdflow.plan.comparison import compare_run

_MOST_STOPPED_RANKS = 64
"""Of a run that is compared after SIGTERM: torchrun kills 30 s after it."""


def launch(
    script: ModuleType,
    cfg: Any,
    *,
    ranks: tuple[int, ...] | None = None,
    inproc: bool = False,
    surroundings: controller.Surroundings | None = None,
) -> int:
    """Run script.main(flow, cfg) on `ranks` (default: all). Exit status: 0 finished, 3 stopped.

    Collective over the default process group, which must exist unless inproc. On GPUs every rank
    has called torch.cuda.set_device before. After a run, also one that was stopped, the first of
    its ranks writes RUN_DIR/prediction.txt before it returns. ConfigError if the script has no
    main or ranks are no ascending ranks of the group; other failures end the processes of the
    session with status 1.

    Any: an object of the script's Config class.
    """
    status = controller.launch(script, cfg, ranks=ranks, inproc=inproc, surroundings=surroundings)
    members = (0,) if inproc else tuple(range(dist.get_world_size())) if ranks is None else ranks
    if not inproc and dist.get_rank() != members[0]:
        return status
    if status == controller.FINISHED:
        compare_run(cfg)
    elif len(members) <= _MOST_STOPPED_RANKS:
        _compare_stopped(cfg)
    return status


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
