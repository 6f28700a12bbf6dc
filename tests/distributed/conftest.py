"""Fixtures of the tests with ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.distributed.ranks import run_ranks


@pytest.fixture(scope="session")
def spawn_ranks() -> Callable[..., list[Any]]:
    """spawn_ranks(function, world_size, *arguments, seconds=840) -> result of every rank.

    function is module-level and runs in its own process on every rank of a gloo group, which is
    the default group; what any rank raises is raised here with every rank's traceback.
    """
    return run_ranks
