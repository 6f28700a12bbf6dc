"""Settings of every test."""

import logging
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.seconds import read_table

# Other work may hold a core. The same examples each time: whoever looks for new ones says
# --hypothesis-profile search.
settings.register_profile("search", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("shared-machine", settings.get_profile("search"), derandomize=True)
settings.load_profile("shared-machine")


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """A run inside of a test sets up its logging; later tests read their records from the root."""
    yield
    logger = logging.getLogger("spmdflow")
    logger.propagate = True
    for handler in [each for each in logger.handlers if type(each) is logging.StreamHandler]:
        logger.removeHandler(handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Workers that share the files begin with those that take longest (tests/seconds.py)."""
    if hasattr(config, "workerinput"):
        seconds = read_table()
        items.sort(key=lambda item: -seconds.get(item.nodeid.partition("::")[0], 0.0))
