"""Code that a model folder brings along never runs; a folder that needs it is refused."""

from __future__ import annotations

import io
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from spmdflow.config.model_folder import read_model_folder
from spmdflow.config.schema import ModelConfig
from spmdflow.datasets.tokenizer import load_tokenizer
from spmdflow.errors import ConfigError
from spmdflow.parallel.device import CPU
from spmdflow.rollout.forward import causal_lm, end_tokens, forward_of, vocab_size
from spmdflow.weights.folder import HuggingFaceFolder, empty_module
from spmdflow.weights.own_code import refuse_own_code, unused_code_text
from spmdflow.workers.model import load_model

MODEL = Path(__file__).parents[3] / "algos" / "arithmetic" / "model"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model folder with a module of its own that leaves a trace; "y" stands on standard input."""
    copy = tmp_path / "model"
    shutil.copytree(MODEL, copy)
    (copy / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 9))
    return copy


def change(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_model_that_only_code_of_its_folder_knows_is_refused_with_key_and_file(
    folder: Path,
) -> None:
    config = folder / "config.json"
    change(config, model_type="own_model", auto_map={"AutoConfig": "own.Config"})

    with pytest.raises(
        ConfigError, match=r"actor\.model\.path: got .*config\.json, whose auto_map"
    ):
        read_model_folder("actor.model.path", str(folder))

    assert not (folder.parent / "ran").exists()


def test_tokenizer_that_only_code_of_its_folder_knows_is_refused_with_key_and_file(
    folder: Path,
) -> None:
    config = folder / "config.json"
    change(config, model_type="own_model")
    change(
        folder / "tokenizer_config.json",
        tokenizer_class="OwnTokenizer",
        auto_map={"AutoTokenizer": [None, "own.Tokenizer"]},
    )

    with pytest.raises(ConfigError, match=r"data\.tokenizer_path: got .*tokenizer_config\.json"):
        refuse_own_code("data.tokenizer_path", folder)
    with pytest.raises(ConfigError, match=r"data\.tokenizer_path"):
        load_tokenizer(str(folder))

    assert not (folder.parent / "ran").exists()


MODELS: dict[str, Callable[[str], object]] = {
    "empty module": lambda path: empty_module(AutoModelForCausalLM, path, torch.float32),
    "forward": lambda path: forward_of(path, dtype=torch.float32, device=CPU, empty=True),
    "causal model": lambda path: causal_lm(path, dtype=torch.float32, device=CPU),
    "value model": lambda path: load_model(ModelConfig(path=path), head="critic"),
}
READERS = MODELS | {"end tokens": end_tokens, "vocabulary": vocab_size}


def needs_own_code(folder: Path, model_type: str) -> None:
    """Let the folder have a class of its own for each that transformers lacks for model_type."""
    names = ("AutoConfig", "AutoModelForCausalLM", "AutoModelForSequenceClassification")
    auto_map = {name: f"own.{name}" for name in names}
    change(folder / "config.json", model_type=model_type, auto_map=auto_map)


@pytest.mark.parametrize("reader", READERS)
def test_whatever_reads_a_model_that_only_code_of_its_folder_knows_runs_none(
    folder: Path, reader: str
) -> None:
    needs_own_code(folder, "own_model")

    with pytest.raises((ConfigError, ValueError)):
        READERS[reader](str(folder))

    assert not (folder.parent / "ran").exists()


@pytest.mark.parametrize("reader", MODELS)
def test_whatever_reads_a_known_model_whose_head_only_code_of_its_folder_knows_runs_none(
    folder: Path, reader: str
) -> None:
    needs_own_code(folder, "siglip_vision_model")  # has neither of the two heads

    with pytest.raises((ConfigError, ValueError)):
        MODELS[reader](str(folder))

    assert not (folder.parent / "ran").exists()


def test_folder_whose_code_is_only_an_alternative_is_read_without_it_and_said_once(
    folder: Path,
) -> None:
    change(folder / "config.json", auto_map={"AutoModelForCausalLM": "own.Model"})
    change(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": [None, "own.Tokenizer"]})

    read_model_folder("actor.model.path", str(folder))
    load_tokenizer(str(folder))
    said = unused_code_text([str(folder), str(folder), str(MODEL)])

    assert [line.split(":")[0].split("/")[-1] for line in said.splitlines()] == [
        "config.json",
        "tokenizer_config.json",
    ]
    assert not (folder.parent / "ran").exists()


@pytest.mark.parametrize(
    ("index", "expected"),
    [
        ("{", r"in .*index\.json, expected JSON"),
        ("{}", r"index\.json without weight_map, expected weight_map"),
        ('{"weight_map": {"a": "gone.safetensors"}}', r"without gone\.safetensors, which"),
        ('{"weight_map": {"a": "../../x"}}', r"names '\.\./\.\./x' as a file of weights"),
    ],
)
def test_index_of_weights_that_cannot_be_right_is_refused_by_its_file(
    index: str, expected: str, folder: Path
) -> None:
    (folder / INDEX).write_text(index)

    with pytest.raises(ConfigError, match=expected):
        read_model_folder("actor.model.path", str(folder))
    with pytest.raises(ConfigError, match=expected):
        HuggingFaceFolder(folder, {}).names  # noqa: B018


def test_tensor_that_the_index_names_and_its_file_lacks_is_refused_by_name(folder: Path) -> None:
    save_file({"a": torch.zeros(1)}, folder / "part.safetensors")
    (folder / INDEX).write_text('{"weight_map": {"b": "part.safetensors"}}')

    with pytest.raises(ConfigError, match=r"part\.safetensors without b, expected that tensor"):
        HuggingFaceFolder(folder, {"b": (1,)})


def test_folder_with_a_pickle_alone_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")

    with pytest.raises(ConfigError, match=r"actor\.model\.path: no \*\.safetensors in"):
        read_model_folder("actor.model.path", str(folder))
