"""The cache of tables of weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from spmdflow.blocks.box import Box
from spmdflow.rollout.table_cache import CachedTable, read_table, table_path, write_table
from spmdflow.weights.table import LocalTensor, Piece

TABLE = CachedTable(
    {
        "w13": LocalTensor(
            (2, 3),
            (Piece("gate", Box(((4, 5), (0, 3), (1, 3))), Box(((0, 2), (0, 3))), (None, 1, 0)),),
        ),
        "padding": LocalTensor((8,), ()),
    },
    frozenset({"bias"}),
)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPMDFLOW_CACHE", str(tmp_path / "cache"))


def test_cached_table_is_read_again() -> None:
    path = table_path({"model": "a", "rank": 0})

    assert read_table(path) is None
    write_table(path, TABLE)

    assert read_table(path) == TABLE


def test_another_fact_has_another_table() -> None:
    write_table(table_path({"model": "a", "rank": 0}), TABLE)

    assert read_table(table_path({"model": "a", "rank": 1})) is None
    assert table_path({"rank": 0, "model": "a"}) == table_path({"model": "a", "rank": 0})


@pytest.mark.parametrize("text", ["", "{", "[]", '{"own": {"w": [1]}, "constants": []}'])
def test_damaged_table_is_derived_again(text: str, caplog: pytest.LogCaptureFixture) -> None:
    path = table_path({"model": "a"})
    path.parent.mkdir(parents=True)
    path.write_text(text)

    assert read_table(path) is None
    assert "the weights are numbered again" in caplog.text


def test_folder_that_cannot_be_written_does_not_stop_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SPMDFLOW_CACHE", str(tmp_path / "file" / "cache"))

    write_table(table_path({"model": "a"}), TABLE)


def test_cache_is_in_the_users_cache_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPMDFLOW_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/some/cache")

    assert table_path({}).parent == Path("/some/cache/spmdflow/tables")
