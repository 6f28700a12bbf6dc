"""Several errors in the settings as one: the first start shows all that is missing or wrong."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from spmdflow.errors import ConfigError

NOT_GIVEN = "(not given)"
"""Value of a required setting while the others are checked."""


class SettingErrors(ConfigError):
    """Some errors, in a list under one heading."""

    def __init__(self, errors: Sequence[ConfigError], partial: Any = None) -> None:
        """partial: the settings without what is wrong, for more checks (Any: the user's class)."""
        self.errors, self.partial = tuple(errors), partial
        shown = [str(error).replace("\n", "\n     ") for error in self.errors]
        lines = [f"{number:3}. {text}" for number, text in enumerate(shown, 1)]
        if len(lines) == 1:
            super().__init__(str(self.errors[0]))
        else:
            super().__init__("\n".join([f"{len(lines)} errors in the settings:", *lines]))


class Errors:
    """Errors as they are found, until `raise_all`."""

    def __init__(self) -> None:
        self._found: list[ConfigError] = []

    def add(self, error: ConfigError) -> None:
        """Note one, unless it was said before."""
        if str(error) not in map(str, self._found):
            self._found.append(error)

    @contextmanager
    def noted(self) -> Iterator[None]:
        """A ConfigError inside is noted, and what follows goes on."""
        try:
            yield
        except ConfigError as err:
            self.add(err)

    def raise_all(self, partial: Any = None) -> None:
        """Raise what was noted, if anything was. Any: see `SettingErrors`."""
        if self._found:
            raise SettingErrors(self._found, partial)
