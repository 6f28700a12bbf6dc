"""The processor that a measurement was made on."""

from __future__ import annotations

import platform
from pathlib import Path


def processor_name() -> str:
    """Its name as Linux says it; elsewhere what Python says."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
