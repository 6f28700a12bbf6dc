"""Which process writes which tensor of a Hugging Face folder, and what is in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from spmdflow.blocks.box import Box
from spmdflow.checkpoint import export, tensors
from spmdflow.checkpoint.export import ModelExport, plan_files
from spmdflow.checkpoint.state import StateFiles
from spmdflow.checkpoint.tensors import write_state
from spmdflow.weights.file import TensorInfo

BF16 = torch.bfloat16
WHOLE = {
    "wide": torch.randn(32, 12, generator=torch.Generator().manual_seed(0)),
    "score.weight": torch.randn(1, 12, generator=torch.Generator().manual_seed(1)),
    "norm": torch.arange(10.0) / 3,
}


def facts_of(count: int, *, wide: int = -1) -> list[TensorInfo]:
    """Tensors of 2 MiB in bfloat16; the one numbered wide in float32."""
    return [
        TensorInfo(f"w{n}", torch.float32 if n == wide else BF16, (1 << 20,)) for n in range(count)
    ]


def save(folder: Path, cuts: list[dict[str, Box]]) -> dict[str, Any]:
    """Ranks write these boxes of WHOLE, and moments; returns what lies beside them."""
    source = folder / "source"
    source.mkdir(parents=True)
    (source / "tokenizer.json").write_text("{}")
    model = {"config": {"model_type": "x"}, "dtype": "bfloat16", "source": str(source)}
    shapes = {name: list(values.shape) for name, values in WHOLE.items()}
    plain = {"steps_done": 3, "shapes": shapes, "model": model}
    for rank, boxes in enumerate(cuts):
        own = [(name, WHOLE[name][box.slices()], box) for name, box in boxes.items()]
        moments = [(f"{name}.exp_avg", values + 1, box) for name, values, box in own]
        write_state(folder / f"rank-{rank}.safetensors", [*own, *moments], plain)
    return plain


COLUMNS = [
    {"wide": Box(((0, 32), (0, 5))), "score.weight": Box(((0, 1), (0, 12)))},
    {"wide": Box(((0, 32), (5, 12))), "norm": Box(((0, 10),))},
]
ROWS = [
    {"wide": Box(((0, 3), (0, 12))), "norm": Box(((0, 4),))},
    {
        "wide": Box(((3, 32), (0, 12))),
        "norm": Box(((4, 10),)),
        "score.weight": Box(((0, 1), (0, 12))),
    },
]


@pytest.mark.parametrize("cuts", [COLUMNS, ROWS], ids=["columns", "rows"])
@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_any_number_of_processes_write_the_same_tensors_each_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cuts: list[dict[str, Box]], count: int
) -> None:
    monkeypatch.setattr(tensors, "_MAX_BOX_BYTES", 100)
    monkeypatch.setitem(plan_files.__kwdefaults__ or {}, "least_bytes", 1)
    plain = save(tmp_path, cuts)
    to = tmp_path / "to"
    names = [f"rank-{rank}.safetensors" for rank in range(len(cuts))]

    for place in range(count):
        state = StateFiles(tmp_path, index=place, count=count, unsealed=names)
        ModelExport(plain, index=place, count=count).write(state, to)

    found: dict[str, Tensor] = {}
    for path in to.glob("*.safetensors"):
        for name, values in load_file(path).items():
            assert name not in found
            found[name] = values
    assert found.keys() == WHOLE.keys()
    for name, values in WHOLE.items():
        dtype = torch.float32 if name == "score.weight" else BF16
        assert torch.equal(found[name], values.to(dtype)) and found[name].dtype == dtype
    assert (to / "tokenizer.json").is_file()


def test_a_tensor_in_the_files_is_read_once_and_rows_of_a_tensor_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensors, "_MAX_BOX_BYTES", 100)  # 5 rows of 5 columns, 3 of 7
    plain = save(tmp_path, COLUMNS)
    state = StateFiles(tmp_path, unsealed=["rank-0.safetensors", "rank-1.safetensors"])

    parts = list(export._read_by_rows(state, [TensorInfo("wide", torch.float32, (32, 12))], {}))

    assert torch.equal(torch.cat(parts), WHOLE["wide"])
    assert len(parts) == 3, "borders that both cuts share: 15 and 30"
    assert state.bytes_read == WHOLE["wide"].nbytes
    assert plain["shapes"]["wide"] == [32, 12]


def test_another_precision_is_written_and_named(tmp_path: Path) -> None:
    plain = save(tmp_path, ROWS)
    state = StateFiles(tmp_path, unsealed=["rank-0.safetensors", "rank-1.safetensors"])

    ModelExport(plain, torch.float32).write(state, tmp_path / "to")

    assert torch.equal(load_file(tmp_path / "to/model.safetensors")["wide"], WHOLE["wide"])
    assert '"dtype": "float32"' in (tmp_path / "to/config.json").read_text()


def test_a_small_model_is_one_file_and_a_large_one_is_cut_at_the_largest_size() -> None:
    facts = facts_of(8)

    small = plan_files(facts, 4)
    some = plan_files(facts, 4, least_bytes=8 << 20)
    large = plan_files(facts, 1, most_bytes=2 << 20)
    split = plan_files(facts, 4, least_bytes=1)

    assert [len(file) for file in small] == [8]
    assert [len(file) for file in some] == [4, 4]
    assert [len(file) for file in large] == [1] * 8
    assert [len(file) for file in split] == [2] * 4


def test_wider_tensors_come_first_over_all_files() -> None:
    files = plan_files(facts_of(8, wide=5), 4, least_bytes=1)

    names = [each.name for file in files for each in file]
    assert names == ["w5", "w0", "w1", "w2", "w3", "w4", "w6", "w7"] and len(files) > 1
