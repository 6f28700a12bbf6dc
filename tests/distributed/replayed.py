"""Holds a run against the plan of its script: the same bytes on every edge of every step."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import ModuleType
from typing import Any

from spmdflow.config.load import load
from spmdflow.plan.comparison import compare
from spmdflow.plan.record import Trace
from spmdflow.plan.replay import Replay
from spmdflow.plan.weight import weight_plans
from tests.distributed.programs.old_log_probs import MODES
from tests.unit.planned import trace_replayed

PPO = Path(__file__).parents[2] / "algos" / "ppo.py"


def settings_of_run(run_dir: Path, script: Path = PPO) -> Any:
    """The settings that a run of a bundled script wrote down."""
    return load(script, run_dir / "config.yaml", []).cfg


def planned_as_counted(script: ModuleType, cfg: Any, run_dir: Path) -> Trace:
    """The plan of a run; AssertionError names the edges whose bytes differ.

    The plan is made here, in one process, from the settings and the lengths that the run reported.
    """
    replay = Replay.of_run(run_dir)
    planned = trace_replayed(script, cfg, replay)
    assert len(replay.steps) == 3 and sorted(planned.edges_by_step) == sorted(replay.steps)
    for step in replay.steps:
        assert planned.edges_by_step[step] == replay.edges(step), f"step {step}"
    return planned


def check_planned_bytes(script: Path, run_dir: Path) -> None:
    """Rows on every edge, and weights of every sync, had the bytes that are planned.

    Of the run's first steps: of what the run recorded, and of a dry run with its lengths.
    """
    loaded = load(script, run_dir / "config.yaml", [])
    found = compare(loaded.cfg, run_dir)
    assert found.steps, found.notes
    dry = trace_replayed(loaded.script, loaded.cfg, Replay.of_run(run_dir))
    replay = found.steps
    counted = Replay.of_run(run_dir)
    assert all(dry.edges_by_step[step] == counted.edges(step) for step in replay)
    assert [edge for edge in found.edges if edge.planned != edge.counted] == []
    assert [sync for sync in found.syncs if sync.planned != sync.counted] == []


def reported_weight_bytes(planned: Trace, model: str = "actor") -> int:
    """What rollout/synced_bytes of one sync is to be: of the ranks that answer for a replica."""
    (way,) = weight_plans(planned)
    layout = planned.models[model].layout
    return sum(way.received[group[0]] for group in layout.axis_groups("gen_replica"))


_TIMED = ("time/", "perf/", "transfer/", "rollout/sync")
_SUMMED = ("actor/entropy", "actor/reference_kl", "rollout/drift")
_FETCHED = "controller/fetched_bytes"
_LEARNT = ("actor/loss", "actor/grad_norm", "critic/loss", "reward/mean")


def check_old_log_probs(folder: Path) -> None:
    """What `programs.old_log_probs` ran: auto learns bit for bit what recompute does, without its
    forward; rollout to the differences between generator and trainer. Metrics that are summed in
    another order: to 1e-6. The samples of recompute have one column more: the old log-probs."""
    runs = [(folder / mode / "metrics.jsonl").read_text().splitlines() for mode in MODES]
    for recompute, auto, rollout in zip(*([*map(json.loads, run)] for run in runs), strict=True):
        assert "time/compute_log_prob_seconds" in recompute
        assert "time/compute_log_prob_seconds" not in auto.keys() | rollout.keys()
        assert rollout["rollout/weight_clipped"] == 0
        assert auto[_FETCHED] <= recompute[_FETCHED]
        names = {n for n in auto.keys() & recompute.keys() if not n.startswith(_TIMED)}
        for name in names - {_FETCHED}:
            close = 1e-6 if name.startswith(_SUMMED) else 0
            assert math.isclose(auto[name], recompute[name], rel_tol=close), name
        for name in _LEARNT:
            assert math.isclose(rollout[name], recompute[name], rel_tol=1e-3, abs_tol=1e-5), name
