"""Families of models on one device, next to plain transformers in float32 on the CPU.

Every function runs on the one rank of run_ranks, as those of rounds.py.
"""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed" / "programs"))

import torch
from family_gradients import Expected, build, one_step, routed_log_probs

from scripts.families.tiny import save_tiny_model
from spmdflow.errors import ConfigError
from spmdflow.parallel.group import GroupTable
from spmdflow.parallel.layout import Layout


def gradients(
    device: str, folder: Path, kind: str, dtype: str, families: list[str]
) -> dict[str, dict[str, Any]]:
    """The gaps of one optimizer step of each family.

    gradient: of the whole gradient, over the norm of that of transformers; norm and balance: of the
    two metrics; replay: largest gap of log-probs with random routes. error: what was raised.
    unknown: why the installed transformers does not have the family as it is here.
    """
    place = torch.device(device, 0) if device == "cuda" else torch.device(device)
    if device == "cuda":
        torch.cuda.set_device(place)
    layout = Layout.data_parallel((0,))
    groups = GroupTable(0, timeout_seconds=600)
    found = {}
    for family in families:
        try:
            model = save_tiny_model(family, folder / family)
        except Exception as err:  # of a newer transformers than the installed one
            found[family] = {"unknown": str(err)}
            continue
        try:  # the other families are measured too
            expected = Expected(model)
            engine = build(model, kind, layout, 0, groups, device=place, dtype=dtype)
            routed = routed_log_probs(engine, 0)
            state, metrics = one_step(engine, 0)
        except ConfigError as err:
            found[family] = {"unknown": str(err)}
        except Exception:
            found[family] = {"error": traceback.format_exc()}
        else:
            found[family] = {"replay": expected.replay_gap(routed), **expected.gaps(state, metrics)}
    return found
