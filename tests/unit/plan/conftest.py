"""Traces that several files of this folder change and check; nobody writes into them."""

from __future__ import annotations

import pytest

from spmdflow.plan.record import Trace
from tests.unit.planned import grouped_trace, layered_trace


@pytest.fixture(scope="session")
def layered() -> Trace:
    """With tensor and pipeline parallel models and peers that hold the same rows."""
    return layered_trace()


@pytest.fixture(scope="session")
def grouped() -> Trace:
    """With samples of one prompt that stay together: two prompts fill a mini-batch."""
    return grouped_trace()
