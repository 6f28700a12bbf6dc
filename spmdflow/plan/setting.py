"""What the settings' own checks say of a plan; what only this machine lacks is no fault of it."""

from __future__ import annotations

from typing import Any

from spmdflow.config.check import faults
from spmdflow.plan.finding import Finding
from spmdflow.plan.record import Trace


def setting_findings(cfg: Any, trace: Trace) -> list[Finding]:
    """Faults that a run would refuse before it starts. Any: the script's settings."""
    found = faults(cfg, len(trace.world), here=False)
    return [Finding("settings", str(fault)) for fault in found]


def missing_here(cfg: Any, world_size: int) -> str | None:
    """Why a run would be refused on this machine, though the plan is fine; None if it would not."""
    planned = {str(fault) for fault in faults(cfg, world_size, here=False)}
    return next((str(f) for f in faults(cfg, world_size) if str(f) not in planned), None)
