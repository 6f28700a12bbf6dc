"""The lengths and values that a run's ranks did report, in the place of declared ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from spmdflow.data.column import Column, ColumnSpec


class Replay:
    """Answers of a run by label and occurrence; an empty one knows nothing."""

    def __init__(self) -> None:
        self._seen: dict[str, int] = {}

    def columns(self, label: str) -> Mapping[str, tuple[ColumnSpec, np.ndarray]]:
        """Column -> kind and items by row, rows in the order of their ids; empty: not known."""
        return {}

    def values(self, label: str) -> Mapping[int, Any]:
        """Plain answers of the next call of that label, by rank."""
        return {}

    def fetched(self, label: str) -> Column | None:
        """The next fetched column of that label, rows in the order of their ids."""
        return None
