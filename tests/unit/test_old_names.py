"""Names of before 0.2.0 still work, with a warning that says where they are now."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch

from spmdflow.data.row_id import RowGroups
from spmdflow.parallel.group import GroupTable
from spmdflow.parallel.layout import Layout
from spmdflow.worker_api.worker import Worker, WorkerContext


@pytest.mark.parametrize(
    ("module", "name", "home"),
    [
        ("spmdflow.transfer.worker", "Worker", "spmdflow.worker_api.worker"),
        ("spmdflow.transfer.worker", "any_layout", "spmdflow.worker_api.worker"),
        ("spmdflow.transfer.worker", "Mean", "spmdflow.worker_api.metric"),
        ("spmdflow.transfer.register", "register", "spmdflow.worker_api.register"),
        ("spmdflow.transfer.register", "map_function", "spmdflow.worker_api.register"),
        ("spmdflow.checkpoint", "StateFiles", "spmdflow.checkpoint.state"),
        ("spmdflow.checkpoint", "write_tensors", "spmdflow.checkpoint.tensors"),
    ],
)
def test_old_module_gives_the_same_object_and_warns(module: str, name: str, home: str) -> None:
    with pytest.warns(FutureWarning, match=f"{module}.{name} has moved; import it from {home}"):
        old = getattr(import_module(module), name)

    assert old is getattr(import_module(home), name)


def test_old_module_has_nothing_else() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'find_worker_class'"):
        import_module("spmdflow.transfer.worker").find_worker_class  # noqa: B018


def test_result_of_an_early_method_has_its_old_name_too() -> None:
    cpu = torch.device("cpu")
    context = WorkerContext("w", Layout.data_parallel((0,)), 0, GroupTable(0), cpu, seed=0)
    worker = Worker(None, context)

    with pytest.warns(FutureWarning, match="Worker.begun is now Worker.early_result"):
        assert worker.begun is None
    with pytest.warns(FutureWarning, match="until 0.3.0"):
        worker.begun = None


def test_position_of_rows_in_their_group_has_its_old_name_too() -> None:
    position = torch.tensor([0, 1])
    groups = RowGroups(torch.tensor([0, 0]), 1, lambda x: x, position, 2)

    with pytest.warns(FutureWarning, match="RowGroups.place is now RowGroups.position"):
        assert groups.place is position
