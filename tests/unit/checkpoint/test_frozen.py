"""The hash of a frozen model: of its content alone, and of what training changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from spmdflow.checkpoint.tensors import check_frozen, model_hash
from spmdflow.errors import CheckpointError


def model(folder: Path, weights: bytes = b"weights", config: str = "{}") -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(config)
    (folder / "model.safetensors").write_bytes(weights)
    return folder


def test_the_same_content_under_another_path_is_the_same_model(tmp_path: Path) -> None:
    one = model(tmp_path / "one")
    other = model(tmp_path / "other")
    (other / "README.md").write_text("moved")

    assert model_hash(one) == model_hash(other)
    check_frozen("reference", ("one", model_hash(one)), ("other", model_hash(other)), tmp_path)


def test_other_weights_another_config_and_another_file_are_another_model(tmp_path: Path) -> None:
    found = {
        model_hash(model(tmp_path / "first")),
        model_hash(model(tmp_path / "weights", b"weighty")),
        model_hash(model(tmp_path / "config", config="{ }")),
    }
    more = model(tmp_path / "more")
    (more / "model-2.safetensors").write_bytes(b"")

    assert len(found | {model_hash(more)}) == 4


@pytest.mark.parametrize("at", [0, 8, 32 << 20, (65 << 20) + 6])
def test_a_large_file_is_told_apart_at_its_ends_and_by_its_size(tmp_path: Path, at: int) -> None:
    size = (65 << 20) + 7
    one, other, longer = (model(tmp_path / name) for name in ("one", "other", "longer"))
    for folder in (one, other, longer):
        with (folder / "model.safetensors").open("wb") as file:
            file.truncate(size + (folder == longer))
    with (other / "model.safetensors").open("r+b") as file:
        file.seek(at)
        file.write(b"x")

    assert len({model_hash(one), model_hash(other), model_hash(longer)}) == 3


def test_another_model_is_refused_with_both_and_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        check_frozen("reference", ("new", "a" * 64), ("old", "b" * 64), tmp_path / "step-3")

    assert str(caught.value) == (
        f"checkpoint: {tmp_path}/step-3 was written with the reference model of old (hash "
        f"bbbbbbbbbbbb), got new (hash aaaaaaaaaaaa), expected the same model; set "
        f"reference.model.path to it, or run.resume=reload_frozen to continue with the new one"
    )
