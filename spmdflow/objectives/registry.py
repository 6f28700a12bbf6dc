"""What a setting chooses by name, to which a script may add its own with a decorator."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from spmdflow.errors import ConfigError

T = TypeVar("T")


class Registry(dict[str, T]):
    """Name -> entry; `find` and `add` tell what is wrong with a name."""

    def __init__(self, noun: str, key: str, *, decorator: str = "") -> None:
        """noun: of an entry; key: the setting; decorator: a script's way to add an entry."""
        super().__init__()
        self._noun, self._key, self._decorator = noun, key, decorator
        self._modules: dict[str, str] = {}

    def add(self, name: str, entry: T, function: Callable[..., object]) -> None:
        """Make an entry known, defined by this function; the last one of a module's own wins.

        ConfigError if the name belongs to a function of another module.
        """
        module = function.__module__
        owner = self._modules.setdefault(name, module)
        if owner != module:
            raise ConfigError(
                f"{self._noun} {name!r}: got a definition in {module}, expected a name that is "
                f"not taken by {owner}; choose another"
            )
        self[name] = entry

    def find(self, name: str, *, key: str = "") -> T:
        """The entry of that name; ConfigError naming the choices. key: of another setting."""
        if name not in self:
            own = f" or add yours with @{self._decorator}({name!r})" if self._decorator else ""
            raise ConfigError(
                f"{key or self._key}: got {name!r}; expected one of {sorted(self)}; choose one{own}"
            )
        return self[name]
