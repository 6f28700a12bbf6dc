"""Settings of every test."""

import logging
import os
import sys
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from spmdflow.kind.registry import Registry
from tests.seconds import read_table

# Other work may hold a core. The same examples each time: whoever looks for new ones says
# --hypothesis-profile search.
settings.register_profile("search", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("shared-machine", settings.get_profile("search"), derandomize=True)
settings.load_profile("shared-machine")


@pytest.fixture(autouse=True, scope="session")
def cache_of_the_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests, and the processes that they start, keep no tables in the user's cache."""
    before = os.environ.get("SPMDFLOW_CACHE")
    os.environ["SPMDFLOW_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    yield
    if before is None:
        del os.environ["SPMDFLOW_CACHE"]
    else:
        os.environ["SPMDFLOW_CACHE"] = before


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """A run inside of a test sets up its logging; later tests read their records from the root."""
    yield
    logger = logging.getLogger("spmdflow")
    logger.propagate = True
    for handler in [each for each in logger.handlers if type(each) is logging.StreamHandler]:
        logger.removeHandler(handler)


def registries() -> list[Registry[object]]:
    """All registries of the modules of the package that are imported."""
    by_id: dict[int, Registry[object]] = {}
    for name, module in list(sys.modules.items()):
        if name.startswith("spmdflow."):
            for value in vars(module).values():
                if isinstance(value, Registry):
                    by_id[id(value)] = value
    return list(by_id.values())


@pytest.fixture(autouse=True, scope="module")
def registries_as_they_were() -> Iterator[None]:
    """What a test's script registers is gone after its file: messages name what is registered."""
    names_before = {id(registry): set(registry) for registry in registries()}
    yield
    for registry in registries():
        for name in set(registry) - names_before.get(id(registry), set()):
            module = registry.modules.get(name, "spmdflow.")  # the package sets some directly
            if not module.startswith("spmdflow."):
                del registry[name]
                del registry.modules[name]
                sys.modules.pop(module, None)  # the next script that imports it registers again


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Workers that share the files begin with those that take longest (tests/seconds.py)."""
    if hasattr(config, "workerinput"):
        seconds = read_table()
        items.sort(key=lambda item: -seconds.get(item.nodeid.partition("::")[0], 0.0))
