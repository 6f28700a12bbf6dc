"""A host program that launches many runs; what is left of each.

    torchrun --nproc-per-node 3 many_launches.py OUT_DIR ROUNDS [key=value ...]

Every round launches two runs: the toys of inside_torchrun.py on all ranks and algos/ppo.py on ranks
1 and 2. OUT_DIR/left-<k>.json: [descriptors, threads, process groups] of rank k after every round.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

import spmdflow
from spmdflow.config.load import load
from tests.distributed.programs.inside_torchrun import ROOT, script_of, toy_config, toy_main


def left(expected: Sequence[int] = ()) -> list[int]:
    """What this process holds now, once that is as expected or, if nothing is, has stayed the same.

    torch's own threads end a moment after the group that they served.
    """
    counts = held()
    num_same = 0
    until = time.monotonic() + 60
    while time.monotonic() < until and counts != list(expected) and num_same < 15:
        time.sleep(0.2)
        before = counts
        counts = held()
        num_same = 0 if expected or counts != before else num_same + 1
    return counts


def held() -> list[int]:
    """Descriptors, threads and process groups."""
    gc.collect()
    counts = [len(os.listdir(f"/proc/self/{name}")) for name in ("fd", "task")]
    return [*counts, len(dist.distributed_c10d._world.pg_map)]


def main() -> None:
    """Launch, count, launch again."""
    out = Path(sys.argv[1])
    rounds = int(sys.argv[2])
    dist.init_process_group("gloo")
    ppo = load(ROOT / "algos" / "ppo.py", None, [f"run.dir={out / 'ppo'}", *sys.argv[3:]])
    pools = {
        name: {"roles": [name], "ranks": on} for name, on in (("first", [0]), ("second", [1, 2]))
    }
    seen = [left()]
    for number in range(rounds):
        toys = toy_config(out / f"toys-{number}", pools)
        toys.total_steps = 1
        assert spmdflow.launch(script_of(toy_main), toys) == 0
        ppo.cfg.run.dir = str(out / f"ppo-{number}")
        assert spmdflow.launch(ppo.script, ppo.cfg, ranks=(1, 2)) == 0
        seen.append(left(seen[0]))
        (out / f"left-{dist.get_rank()}.json").write_text(json.dumps(seen))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
