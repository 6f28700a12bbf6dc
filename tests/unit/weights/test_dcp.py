"""Folders of torch.distributed.checkpoint are read by box; a pickle that names more is refused."""

from __future__ import annotations

import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from spmdflow.blocks.box import Box
from spmdflow.errors import ConfigError
from spmdflow.weights.dcp import METADATA, TorchCheckpoint
from spmdflow.weights.folder import HuggingFaceFolder

STATE: dict[str, Tensor] = {
    "model.embed_tokens.weight": torch.randn(12, 6, generator=torch.manual_seed(1)),
    "model.norm.weight": torch.arange(6.0, dtype=torch.bfloat16),
    "scale": torch.tensor(3.0),
}


def save(folder: Path, state: dict[str, Any]) -> Path:
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    optimizer = {"state": {name: {"exp_avg": x} for name, x in STATE.items()}, "lr": 1e-3}
    state = {"model": STATE, "optim": optimizer, "step": 7}
    return save(tmp_path_factory.mktemp("dcp") / "step-7", state)


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_names_are_those_of_the_state_dict(is_wrapped: bool, saved: Path, tmp_path: Path) -> None:
    folder = saved if is_wrapped else save(tmp_path / "flat", {**STATE, "step": 7})

    found = TorchCheckpoint(folder)

    assert sorted(found.keys()) == sorted(STATE)
    for name, values in STATE.items():
        assert torch.equal(found.get_tensor(name), values)
        assert found.get_tensor(name).dtype == values.dtype
        assert found.get_slice(name).get_shape() == tuple(values.shape)


@settings(deadline=None, max_examples=30)
@given(st.tuples(st.integers(0, 12), st.integers(0, 12)), st.tuples(st.integers(0, 6), st.just(6)))
def test_any_box_is_read(saved: Path, rows: tuple[int, int], columns: tuple[int, int]) -> None:
    name = "model.embed_tokens.weight"
    box = Box(((min(rows), max(rows)), columns))

    found = HuggingFaceFolder(saved, {name: (12, 6)}).read(name, box)

    assert torch.equal(found, STATE[name][box.slices()])


class Hostile:
    """What a pickle can do: run any function."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize(
    ("function", "argument"),
    [
        (os.system, "touch owned"),
        (exec, "open('owned', 'w')"),
        (torch.load, "owned"),
        (torch.hub.load, "owned"),
        (getattr, "owned"),
        (pickle.loads, b"owned"),
    ],
)
def test_pickle_that_would_run_something_is_refused_by_name(
    function: Any, argument: Any, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = shutil.copytree(saved, tmp_path / "copy")
    metadata = pickle.loads((saved / METADATA).read_bytes())
    metadata.planner_data = Hostile(function, argument)
    (folder / METADATA).write_bytes(pickle.dumps(metadata))

    with pytest.raises(
        ConfigError, match=rf"it names \S+{function.__name__}\).* nothing of it was"
    ):
        TorchCheckpoint(folder)

    assert not Path("owned").exists()


@pytest.mark.parametrize(
    "opcodes", [b"cos\nsystem\n", b"\x8c\x02os\x8c\x06system\x93", b"ios\nsystem\n"]
)
def test_every_way_to_name_a_function_is_refused(opcodes: bytes, tmp_path: Path) -> None:
    (tmp_path / METADATA).write_bytes(b"\x80\x04(" + opcodes + b"(S'touch owned'\ntR.")

    with pytest.raises(ConfigError, match=r"it names os\.system"):
        TorchCheckpoint(tmp_path)


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_damaged_metadata_is_refused_in_three_parts_or_reads_as_before(
    saved: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    whole = (saved / METADATA).read_bytes()
    at = data.draw(st.integers(0, len(whole) - 1))
    byte = data.draw(st.binary(max_size=3))
    folder = tmp_path_factory.mktemp("damaged")
    for path in saved.glob("*.distcp"):
        os.symlink(path, folder / path.name)
    (folder / METADATA).write_bytes(whole[:at] + byte + whole[at + 1 :])

    try:
        found = TorchCheckpoint(folder)
        for name in found.keys():
            found.get_tensor(name)
    except ConfigError as err:
        assert "got" in str(err) and "expected" in str(err)


@pytest.mark.parametrize("path", ["../__0_0.distcp", "/etc/passwd"])
def test_file_outside_of_the_folder_is_not_read(path: str, saved: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(saved, tmp_path / "copy")
    metadata = pickle.loads((saved / METADATA).read_bytes())
    for place in metadata.storage_data.values():
        place.relative_path = path
    (folder / METADATA).write_bytes(pickle.dumps(metadata))

    with pytest.raises(ConfigError, match="no metadata of tensors"):
        TorchCheckpoint(folder)


def test_item_with_a_pickle_of_its_own_choice_is_not_run(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = shutil.copytree(saved, tmp_path / "copy")
    (item,) = folder.glob("*.distcp")
    metadata = pickle.loads((saved / METADATA).read_bytes())
    torch.save(Hostile(os.system, "touch owned"), item)
    for place in metadata.storage_data.values():
        place.offset = 0
        place.length = item.stat().st_size
    (folder / METADATA).write_bytes(pickle.dumps(metadata))

    with pytest.raises(ConfigError, match=r"cannot be read \(UnpicklingError: Weights only load"):
        TorchCheckpoint(folder).get_tensor("scale")
    assert not Path("owned").exists()


def test_state_without_a_model_is_refused_with_where_its_tensors_are(tmp_path: Path) -> None:
    folder = save(tmp_path / "odd", {"policy": STATE})

    with pytest.raises(ConfigError, match=r"no tensors at its top or under 'model', but under"):
        TorchCheckpoint(folder)


def test_tensor_of_another_shape_than_config_json_is_refused(saved: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"model\.norm\.weight of shape \(6,\) .* expected \(7,\)"
    ):
        HuggingFaceFolder(saved, {"model.norm.weight": (7,)})
