"""What the settings' own checks say of a plan, files that are not here apart."""

from __future__ import annotations

from typing import Any

from spmdflow.config.check import check
from spmdflow.errors import ConfigError
from spmdflow.plan.finding import Finding
from spmdflow.plan.record import Trace


def setting_findings(cfg: Any, trace: Trace) -> list[Finding]:
    """Faults that a run would refuse before it starts. Any: the script's settings."""
    try:
        check(cfg, len(trace.world))
    except ConfigError as err:
        return [Finding("settings", str(err))]
    return []
