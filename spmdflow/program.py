"""`launch`: a run inside a program whose process group exists, such as `spmdflow.run` itself."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Mapping
from types import FrameType, ModuleType
from typing import Any

import torch.distributed as dist

from spmdflow.controller import launch as controller
from spmdflow.plan.comparison import compare_run

logger = logging.getLogger(__name__)

_STOPPED_SECONDS = 5.0
"""Of a comparison after SIGTERM; torchrun kills 30 s after it."""
_MOST_STOPPED_RANKS = 64


def launch(
    script: ModuleType,
    cfg: Any,
    *,
    ranks: tuple[int, ...] | None = None,
    inproc: bool = False,
    surroundings: controller.Surroundings | None = None,
    examples: Mapping[str, Any] | None = None,
) -> int:
    """Run script.main(flow, cfg) on `ranks` (default: all). Exit status: 0 finished, 3 stopped.

    Collective over the default process group, which must exist unless inproc. On GPUs every rank
    has called torch.cuda.set_device before. After a run, also one that was stopped, the first of
    its ranks writes RUN_DIR/prediction.txt before it returns. ConfigError if the script has no
    main or ranks are no ascending ranks of the group; other failures end the processes of the
    session with status 1.

    Any: an object of the script's Config class; examples of what only a run knows, by name, for
    the prediction (`flow.assume`).
    """
    status = controller.launch(script, cfg, ranks=ranks, inproc=inproc, surroundings=surroundings)
    members = (0,) if inproc else tuple(range(dist.get_world_size())) if ranks is None else ranks
    if not inproc and dist.get_rank() != members[0]:
        return status
    if status == controller.FINISHED:
        compare_run(script, cfg, tuple(members), examples)
    elif len(members) <= _MOST_STOPPED_RANKS:
        _compare_in_haste(script, cfg, tuple(members), examples)
    return status


class _TooLateError(BaseException):
    """The time of a stopped run is over; no Exception, so that nothing on the way answers it."""


def _compare_in_haste(
    script: ModuleType, cfg: Any, ranks: tuple[int, ...], examples: Mapping[str, Any] | None
) -> None:
    """Compare a run that was stopped, for a few seconds: launchers kill what does not end.

    They also repeat SIGTERM when other ranks have ended, which is ignored meanwhile. Signals belong
    to the main thread; a run in another one is not compared.
    """
    if threading.current_thread() is not threading.main_thread():
        return

    def give_up(number: int, frame: FrameType | None) -> None:
        raise _TooLateError

    earlier = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    alarm = signal.signal(signal.SIGALRM, give_up)
    try:
        signal.setitimer(signal.ITIMER_REAL, _STOPPED_SECONDS)
        compare_run(script, cfg, ranks, examples)
    except _TooLateError:
        logger.warning("no prediction: a stopped run has %s s for it", _STOPPED_SECONDS)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, alarm)
        signal.signal(signal.SIGTERM, earlier)
