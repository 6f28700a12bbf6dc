"""Runs layouts one after another on the first ranks of this torchrun.

    torchrun --nproc-per-node 4 _layouts.py WORK.json

WORK.json: {"root": checkout, "runs": [{"name", "script": path, "num_ranks", "settings"}]}.
A run that fails is reported, and the next one starts. Only the public functions of spmdflow are
used, as they are the same at both commits.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch.distributed as dist

import spmdflow


def main() -> None:
    """What every rank does."""
    work = json.loads(Path(sys.argv[1]).read_text())
    root = Path(work["root"])
    assert Path(spmdflow.__file__).is_relative_to(root), spmdflow.__file__
    dist.init_process_group("gloo")
    for run in work["runs"]:
        if dist.get_rank() == 0:
            print(f"---- {run['name']}", flush=True)
        try:
            spmdflow.launch(
                root / run["script"],
                settings=run["settings"],
                ranks=tuple(range(run["num_ranks"])),
            )
        except (spmdflow.RunFailed, spmdflow.ConfigError) as err:
            if dist.get_rank() == 0:
                print(f"---- {run['name']} failed: {err}", flush=True)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
