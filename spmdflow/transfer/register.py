"""The place of `register` and `map_function` before 0.2.0.

They are in `spmdflow.worker_api.register` now. This module goes with 0.3.0.
"""

from __future__ import annotations

import warnings
from importlib import import_module

_MOVED = ("map_function", "register")


def __getattr__(name: str) -> object:
    """Return one of `_MOVED`, with a warning that gives its new module."""
    if name not in _MOVED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = "spmdflow.worker_api.register"
    message = f"{__name__}.{name} has moved; import it from {home}"
    warnings.warn(message, FutureWarning, stacklevel=2)
    return getattr(import_module(home), name)
