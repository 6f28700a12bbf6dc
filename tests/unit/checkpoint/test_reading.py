"""A model is read through a link to a live run's export: from one checkpoint, which stays."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import save

from spmdflow.blocks.box import Box
from spmdflow.checkpoint.reading import ModelFolders
from spmdflow.checkpoint.run_dir import Checkpoints, find_latest
from spmdflow.config.load import load
from spmdflow.config.location import MODEL, _Finder
from spmdflow.config.schema import RunConfig
from spmdflow.controller.flow import Flow
from spmdflow.controller.script import run_flow
from spmdflow.weights.folder import HuggingFaceFolder
from tests.unit.checkpoint_files import write_as_rank

ROOT = Path(__file__).parents[3]
SHARDS = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
SHAPES = {"a": (4,), "b": (4,)}


def save_step(run_dir: Path, step: int, *, keep: int = 1) -> None:
    """A checkpoint with an actor in two shards; every number is the step's."""
    values = torch.full((4,), float(step))
    files = {f"actor/hugging_face/{file}": save({name: values}) for name, file in SHARDS.items()}
    index = {"weight_map": SHARDS}
    files["actor/hugging_face/model.safetensors.index.json"] = json.dumps(index).encode()
    checkpoints = Checkpoints(run_dir, keep=keep)
    checkpoints.seal(step, {}, [write_as_rank(checkpoints.begin(step), files)])


def steps_of(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").glob("step-*"))


def run_reader(run_dir: Path, link: Path, main: Callable[[Flow, Any], None]) -> None:
    """A run of one step whose models are given as the link, with another main."""
    words = [f"actor.model.path={link}", f"run.dir={run_dir}", "data.eval_path=null"]
    loaded = load(ROOT / "algos" / "grpo.py", None, words)
    script = ModuleType("reader")
    script.main = main  # type: ignore[attr-defined]
    assert run_flow(script, loaded.cfg, inproc=True) == 0


def value_of(folder: HuggingFaceFolder, name: str) -> float:
    return float(folder.read(name, Box.of_shape((4,)))[0])


def see_all(folders: object) -> dict[str, list[int]]:
    return {}


def test_model_whose_link_moves_between_two_shards_is_read_from_one_checkpoint(
    tmp_path: Path,
) -> None:
    writer = tmp_path / "writer"
    seen = dict[str, float]()
    save_step(writer, 1)

    def main(flow: Flow, cfg: Any) -> None:
        folder = HuggingFaceFolder(cfg.actor.model.path, SHAPES)
        folder._files.clear()  # as if the check of the shapes had not opened the files
        seen["a"] = value_of(folder, "a")
        save_step(writer, 2)
        seen["b"] = value_of(folder, "b")

    run_reader(tmp_path / "reader", writer / "export" / "actor", main)

    assert seen == {"a": 1.0, "b": 1.0}


def test_checkpoint_that_a_run_reads_is_removed_only_after_that_run(tmp_path: Path) -> None:
    writer = tmp_path / "writer"
    during = list[list[str]]()
    save_step(writer, 1)

    def main(flow: Flow, cfg: Any) -> None:
        for step in (2, 3):
            save_step(writer, step)
        during.append(steps_of(writer))

    run_reader(tmp_path / "reader", writer / "export" / "actor", main)
    save_step(writer, 4)

    assert during == [["step-1", "step-3"]]
    assert steps_of(writer) == ["step-4"]


def test_every_setting_that_gives_the_link_gets_the_same_folder_and_the_run_says_which(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = tmp_path / "writer"
    found = list[str]()
    save_step(writer, 1)
    link = writer / "export" / "actor"

    def main(flow: Flow, cfg: Any) -> None:
        found.extend([cfg.actor.model.path, cfg.reference.model.path, cfg.data.tokenizer_path])
        found.append(cfg.reward.tokenizer_path)

    with caplog.at_level(logging.INFO):
        run_reader(tmp_path / "reader", link, main)

    folder = writer / "checkpoints" / "step-1" / "actor" / "hugging_face"
    assert found == [str(folder)] * 4
    assert caplog.messages.count(f"reading {link} from {folder}") == 1


def begin_and_go_on(
    tmp_path: Path, before_going_on: Callable[[Path], None], *, given: str = "export/actor"
) -> list[str]:
    """The actor's folder in a run of one step, and in its continuation after the link has moved.

    given: the model path of both, in the folder of the run that writes the models.
    """
    writer = tmp_path / "writer"
    found = list[str]()
    save_step(writer, 1, keep=2)

    def main(flow: Flow, cfg: Any) -> None:
        found.append(cfg.actor.model.path)
        for _ in flow.steps(1):
            flow.save(every=1)

    run_reader(tmp_path / "reader", writer / given, main)
    before_going_on(writer)
    run_reader(tmp_path / "reader", writer / given, main)
    return [str(Path(path).relative_to(writer / "checkpoints")) for path in found]


def test_resumed_run_reads_the_folder_that_it_began_with_though_the_link_has_moved(
    tmp_path: Path,
) -> None:
    found = begin_and_go_on(tmp_path, lambda writer: save_step(writer, 2, keep=2))

    assert found == ["step-1/actor/hugging_face"] * 2
    checkpoint = find_latest(tmp_path / "reader")
    assert checkpoint is not None
    link = str(tmp_path / "writer" / "export" / "actor")
    folder = str(tmp_path / "writer" / "checkpoints" / found[0])
    assert checkpoint.meta["models"]["actor.model.path"] == [link, folder]
    assert f"path: {folder}" in checkpoint.meta["settings"]


@pytest.mark.parametrize("given", ["", "checkpoints", "checkpoints/latest"])
def test_resumed_run_reads_the_step_of_another_run_that_it_began_with(
    tmp_path: Path, given: str
) -> None:
    found = begin_and_go_on(tmp_path, lambda writer: save_step(writer, 2, keep=2), given=given)

    assert found == ["step-1/actor/hugging_face"] * 2


def test_all_settings_that_name_a_run_read_one_step_though_it_saves_meanwhile(
    tmp_path: Path,
) -> None:
    save_step(tmp_path, 1, keep=2)
    finder = _Finder(RunConfig(dir=str(tmp_path / "reader")), download=False)

    actor = finder.model("actor.model.path", str(tmp_path), MODEL)
    save_step(tmp_path, 2, keep=2)
    reference = finder.model("reference.model.path", str(tmp_path), MODEL)

    assert reference == actor == str(tmp_path / "checkpoints/step-1/actor/hugging_face")


def test_resumed_run_whose_first_folder_is_gone_says_so_and_reads_what_the_link_leads_to(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def move_on(writer: Path) -> None:
        save_step(writer, 2)
        assert steps_of(writer) == ["step-2"]

    found = begin_and_go_on(tmp_path, move_on)

    assert found == ["step-1/actor/hugging_face", "step-2/actor/hugging_face"]
    assert "actor.model.path: this run began with" in caplog.text
    assert "step-1/actor/hugging_face, which is gone" in caplog.text


def settings_with(path: Path) -> Any:
    return load(ROOT / "algos" / "grpo.py", None, [f"actor.model.path={path}"]).cfg


def test_link_of_any_kind_is_followed_and_a_plain_folder_stays_as_it_was_written(
    tmp_path: Path,
) -> None:
    (tmp_path / "v3" / "actor").mkdir(parents=True)
    (tmp_path / "current").symlink_to("v3")
    given = settings_with(tmp_path / "current" / "actor")
    plain = settings_with(tmp_path / "v3" / "actor")

    followed = ModelFolders().resolve_links(given, {}, see_all)

    assert followed.actor.model.path == str(tmp_path / "v3" / "actor")
    assert given.actor.model.path == str(tmp_path / "current" / "actor")
    assert ModelFolders().resolve_links(plain, {}, see_all) is plain


def test_link_to_a_folder_that_other_nodes_do_not_see_is_left_to_every_node_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "disk-of-this-node").mkdir()
    (tmp_path / "models").symlink_to("disk-of-this-node")
    given = settings_with(tmp_path / "models")
    folders = ModelFolders()

    followed = folders.resolve_links(given, {}, lambda changed: dict.fromkeys(changed, [1, 3]))

    assert followed.actor.model.path == str(tmp_path / "models")
    assert folders.resolved_links == {}
    assert "disk-of-this-node here, which ranks 1, 3 do not see" in caplog.text


def test_another_link_on_resume_is_followed_instead_of_the_one_before(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / f"link-{name}").symlink_to(name)
    before = {"actor.model.path": [str(tmp_path / "link-one"), str(tmp_path / "one")]}

    followed = ModelFolders().resolve_links(settings_with(tmp_path / "link-two"), before, see_all)

    assert followed.actor.model.path == str(tmp_path / "two")
