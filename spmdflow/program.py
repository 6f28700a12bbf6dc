"""`launch`: a run inside a program whose process group exists, such as `spmdflow.run` itself."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch.distributed as dist

from spmdflow.controller import launch as controller
from spmdflow.plan.comparison import compare_run


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
    has called torch.cuda.set_device before. After a run that
    finished, the first of its ranks writes RUN_DIR/prediction.txt before it returns. ConfigError
    if the script has no main or ranks are no ascending ranks of the group; other failures end
    the processes of the session with status 1.

    Any: an object of the script's Config class.
    """
    status = controller.launch(script, cfg, ranks=ranks, inproc=inproc, surroundings=surroundings)
    if status != controller.FINISHED:
        return status
    if inproc:
        compare_run(script, cfg, (0,))
        return status
    members = tuple(range(dist.get_world_size())) if ranks is None else tuple(ranks)
    if dist.get_rank() == members[0]:
        compare_run(script, cfg, members)
    return status
