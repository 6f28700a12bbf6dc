"""The environment variables that configure torch's allocator of device memory. Text, without torch.

torch reads them when the allocator is first asked for its settings, which is later than the import.
"""

from __future__ import annotations

from collections.abc import Mapping

VARIABLE = "PYTORCH_ALLOC_CONF"
"""The variable for every kind of device, since torch 2.9. torch also reads the older ones."""
_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", VARIABLE)
_KEY = "expandable_segments"
EXPANDABLE_SEGMENTS = f"{_KEY}:True"
"""The setting with which segments of device memory grow, instead of a new one for each large block.
Blocks of changing sizes then leave fewer gaps that nothing fits into."""
_EXACT_PINNED = "pinned_max_round_threshold_mb:1"
"""The setting with which torch rounds only small blocks of pinned host memory up to a power of two.
Without it, buffers of offloaded parts and copies for checkpoints take up to twice their size."""
_TORCH_WITH_EXACT_PINNED = (2, 13)
"""The first version in whose settings we have found it."""


def settings_for(torch_version: str, *, expandable: bool) -> str:
    """Return the allocator's settings for a run; "" for none. expandable: segments grow."""
    settings = []
    if expandable:
        settings.append(EXPANDABLE_SEGMENTS)
    major, minor = torch_version.split(".")[:2]
    if (int(major), int(minor)) >= _TORCH_WITH_EXACT_PINNED:
        settings.append(_EXACT_PINNED)
    return ",".join(settings)


def allocator_settings(variables: Mapping[str, str]) -> str:
    """Return what these environment variables set, as torch would choose among them; "" if nothing.

    An older variable hides PYTORCH_ALLOC_CONF (seen with torch 2.13 and 2.14).
    """
    for name in _VARIABLES:
        if name in variables:
            return variables[name]
    return ""


def has_expandable_segments(variables: Mapping[str, str]) -> bool:
    """Return whether these environment variables turn on expandable segments."""
    for setting in allocator_settings(variables).split(","):
        key, _, value = setting.partition(":")
        if key.strip() == _KEY:
            return value.strip() == "True"
    return False
