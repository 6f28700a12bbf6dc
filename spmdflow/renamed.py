"""Old names of public things: they work for one numbered release, with a FutureWarning.

The warning gives the new name. `config/old_forms.py` does the same for settings.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from importlib import import_module

GONE_NAMES = {
    "row_maths": "@map_function",
    "MapSpec": "the decorator @map_function",
    "PromptStream": "flow.prompts(cfg.data)",
}
"""Public names of before 0.2.0 that scripts may still import -> what replaces them."""


def moved_names(module: str, homes: Mapping[str, str]) -> Callable[[str], object]:
    """Return a `__getattr__` for a module whose names are in other modules now.

    module: its `__name__`. homes: name -> the module that has it now. The function imports that
    module, warns and returns the object; AttributeError for a name that is not in homes.
    """

    def find_moved(name: str) -> object:
        """Return an object of `homes`, with a warning that gives its new module."""
        if name not in homes:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        message = f"{module}.{name} has moved; import it from {homes[name]}"
        warnings.warn(message, FutureWarning, stacklevel=2)
        return getattr(import_module(homes[name]), name)

    return find_moved


def warn_renamed(old: str, new: str) -> None:
    """Warn, at the line of the caller's caller, that an attribute has another name now."""
    message = f"{old} is now {new}; the old name works until 0.3.0"
    warnings.warn(message, FutureWarning, stacklevel=3)
