"""docs/REFUSALS.md, row by row: what stands on the left is done, what stands on the right is said.

Each section of the page has its own way to do it; the first cell is taken literally, as a command
line, settings, lines of a file, Python. FOLDER stands for the current directory, FILE for the
file of prompts. A message must also have our three parts: got, expected, do.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import shlex
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from spmdflow import run
from spmdflow.checkpoint.manifest import CheckpointInfo, moved_groups
from spmdflow.checkpoint.run_dir import Checkpoints, find_latest, open_run_dir
from spmdflow.config.check import check
from spmdflow.config.load import load
from spmdflow.config.offline import PreferenceDataConfig
from spmdflow.config.schema import DataConfig, RunConfig
from spmdflow.datasets.scan import scan
from spmdflow.datasets.tokenizer import load_tokenizer
from spmdflow.errors import SpmdflowError
from spmdflow.rewards.pool import RewardPool
from tests.unit import toy_flow
from tests.unit.checkpoint_files import verify_checkpoint, write_as_rank
from tests.unit.config_folder import ACTOR, SCORER, TOKENS, accept, write_config_folder, write_model

PAGE = Path(__file__).parents[3] / "docs" / "REFUSALS.md"
NUM_ROWS_AT_LEAST = 25


def rows_of_page() -> Iterator[tuple[str, str, str]]:
    """(section, what is done, what is said) of every row of the page's tables."""
    section = ""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            section = line.removeprefix("## ")
        cells = re.split(r"(?<!\\)\|", line)[1:-1] if line.startswith("|") else []
        if len(cells) == 2 and "`" in cells[0]:
            done, said = (plain(cell) for cell in cells)
            yield section, done, said


def plain(cell: str) -> str:
    """The text of code spans; `<br>` between two is a new line."""
    lines = [line.strip() for line in cell.replace("\\|", "|").split("<br>")]
    return "\n".join(line[3:-3] if line.startswith("`` ") else line[1:-1] for line in lines)


ROWS = list(rows_of_page())


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with a valid configuration, and beside it everything that is wrong."""
    write_config_folder(tmp_path)
    write_model(tmp_path / "odd", {**ACTOR, "num_attention_heads": 3})
    write_model(tmp_path / "small", {**ACTOR, "vocab_size": 3})
    write_model(tmp_path / "foreign", ACTOR, {**TOKENS, "c": 4})
    write_model(tmp_path / "labels", {**SCORER, "id2label": {"0": "bad", "1": "good"}})
    write_model(tmp_path / "bare", ACTOR)
    (tmp_path / "bare/model.safetensors").unlink()
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "no_main.py").write_text("x = 1\n")
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


# One way for each section: it must raise, or return what was printed


def command_line(words: str) -> str:
    """Everything behind `python -m spmdflow.run`."""
    arguments = run.parse_arguments(shlex.split(words))
    run.prepare_rank(arguments, run.RankEnvironment.from_environment())
    return ""


def settings(words: str) -> str:
    """Overrides on four ranks, or as many as the cell says."""
    words, _, ranks = words.partition(" on ")
    pieces = [words] if "[" in words or "{" in words else shlex.split(words)
    accept(*pieces, world_size=int(ranks.split()[0]) if ranks else 4)
    return ""


def yaml_file(text: str) -> str:
    """The only line of a YAML file."""
    Path("my.yaml").write_text(text)
    needed = ["actor.model.path=actor", "data.train_path=prompts.jsonl"]
    check(load("ppo.py", "my.yaml", needed).cfg, 4)
    return ""


def prompts(lines: str) -> str:
    """Lines of prompts.jsonl behind a good one."""
    Path("prompts.jsonl").write_text('{"prompt": "1+2="}\n' + lines + "\n")
    cfg = DataConfig(train_path="prompts.jsonl")
    scan(cfg, cfg.train_path, load_tokenizer(str(toy_flow.TASK / "model")))
    return ""


def preference_settings(words: str) -> str:
    """Overrides of algos/dpo.py."""
    check(load(PAGE.parents[1] / "algos" / "dpo.py", None, shlex.split(words)).cfg, 1)
    return ""


def preferences(path: str, good: str, **settings: Any) -> Callable[[str], str]:
    """Lines of a file of preferences behind a good one."""

    def refuse(lines: str) -> str:
        Path(path).write_text(f"{good}\n{lines}\n")
        model = str(toy_flow.TASK / "model")
        cfg = PreferenceDataConfig(train_path=path, tokenizer_path=model, **settings)
        scan(cfg, cfg.train_path, load_tokenizer(model))
        return ""

    return refuse


def reward(line: str) -> str:
    """What a reward function does."""
    Path("mine.py").write_text(f"import os, time\ndef score(prompt, response, row):\n    {line}\n")
    with RewardPool("mine.py:score", 1, sample_seconds=0.75) as pool:
        pool.score(["1+2="], ["3"], [{}])
    return ""


def script(expression: str) -> str:
    """A line of a script; its names are explained on the page."""
    with toy_flow.rank_of_one(Path("run").absolute()) as rank:
        flow = rank.flow
        toy = flow.spawn(toy_flow.Toy, toy_flow.ToyConfig())
        stream = flow.prompts(rank.config.data)
        batch = next(stream)
        batch |= toy.make(batch)
        names = {"flow": flow, "toy": toy, "batch": batch, "prompts": stream, "cfg": rank.config}
        for _ in flow.steps(1) if "inside a step" in expression else [None]:
            eval(expression, names | vars(toy_flow))
    return ""


def folder(situation: str) -> str:
    """RUN_DIR and checkpoints; the cell names the situation."""
    SITUATIONS[situation]()
    return ""


def used_run_dir() -> None:
    Path("used").mkdir()
    Path("used/metrics.jsonl").write_text("{}\n")
    open_run_dir(RunConfig(dir="used", resume="never"), "run: {}\n")


def run_dir_in_use() -> None:
    with contextlib.closing(_Released(open_run_dir(RunConfig(dir="live"), "run: {}\n").lock)):
        open_run_dir(RunConfig(dir="live"), "run: {}\n")


class _Released:
    def __init__(self, lock: Any) -> None:
        self.close = lock.release


def run_dir_without_rights() -> None:
    open_run_dir(RunConfig(dir="/proc/none"), "run: {}\n")


def _checkpoint(file: str = "weights.safetensors") -> CheckpointInfo:
    checkpoints = Checkpoints(Path.cwd() / "run", keep=1)
    written = write_as_rank(checkpoints.begin(3), {file: b"12345"})
    was = {"actor": {"ranks": [0, 1], "dp_size": 2, "engine": "fsdp"}}
    return checkpoints.seal(3, {"layout": was}, [written])


def cut_off_file() -> None:
    _checkpoint()
    Path("run/checkpoints/step-3/weights.safetensors").write_bytes(b"123")
    find_latest(Path.cwd() / "run")


def changed_byte() -> None:
    info = _checkpoint()
    Path("run/checkpoints/step-3/weights.safetensors").write_bytes(b"12346")
    verify_checkpoint(info)


def changed_manifest() -> None:
    _checkpoint()
    manifest = Path("run/checkpoints/step-3/manifest.json")
    manifest.write_text(manifest.read_text().replace("3", "4", 1))
    find_latest(Path.cwd() / "run")


def earlier_version() -> None:
    _checkpoint()
    manifest = Path("run/checkpoints/step-3/manifest.json")
    body = json.loads(manifest.read_text()) | {"format": "spmdflow-checkpoint-1"}
    del body["sha256"]
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    manifest.write_text(json.dumps({**body, "sha256": digest}))
    find_latest(Path.cwd() / "run")


def other_layout() -> None:
    now = {"actor": {"ranks": [0, 1, 2, 3], "dp_size": 4, "engine": "zero3"}}
    moved_groups(_checkpoint("actor/count.json"), now, {"actor": "CountingWorker"})


def other_models() -> None:
    moved_groups(_checkpoint("actor/count.json"), {"critic": {"ranks": [0, 1]}}, {})


def unseen_file() -> None:
    checkpoints = Checkpoints(Path.cwd() / "run", keep=1, patience_seconds=0.0)
    written = write_as_rank(checkpoints.begin(3), {"critic/rank-0.safetensors": b"12345"}, rank=1)
    (checkpoints.folder / "step-3.tmp" / "critic").rename("on-another-disk")
    checkpoints.seal(3, {}, [written])


SITUATIONS: dict[str, Callable[[], None]] = {
    "run.resume=never in a used folder": used_run_dir,
    "a second run in the folder of a live one": run_dir_in_use,
    "run.dir=/proc/none": run_dir_without_rights,
    "save on nodes that do not share RUN_DIR": unseen_file,
    "resume with a file cut off": cut_off_file,
    "resume with a changed byte": changed_byte,
    "resume with a changed manifest": changed_manifest,
    "resume with a checkpoint of another version": earlier_version,
    "resume on other ranks with a worker that keeps its state by rank": other_layout,
    "resume without a model that was trained": other_models,
}
WAYS: dict[str, Callable[[str], str]] = {
    "Command line": command_line,
    "Settings": settings,
    "Sizes": settings,
    "Placement": settings,
    "YAML": yaml_file,
    "Files": settings,
    "Rewards": settings,
    "Prompts": prompts,
    "Preferences": preference_settings,
    "Pairs": preferences("pairs.jsonl", '{"prompt": "1", "chosen": "2", "rejected": "3"}'),
    "Labels": preferences(
        "labels.jsonl",
        '{"prompt": "1", "completion": "2", "label": true}',
        label_column="label",
    ),
    "Dialogues": preferences(
        "dialogues.jsonl",
        r'{"chosen": "1\n\nAssistant: 2", "rejected": "1\n\nAssistant: 3"}',
        prompt_column=None,
    ),
    "Scores": reward,
    "Script": script,
    "RUN_DIR and checkpoints": folder,
}


def refusal(section: str, done: str) -> str:
    """What is said, with names instead of what differs between machines."""
    with pytest.raises(SpmdflowError) as caught:
        WAYS[section](done)
    said = str(caught.value).replace(str(Path.cwd()), "FOLDER")
    said = said.replace(f"node {socket.gethostname()},", "node here,")
    said = re.sub(r"\(process \d+\)", "(process 1234)", said)
    said = re.sub(r"sha256 [0-9a-f]{64}", "sha256 ...", said)
    return said.partition("\nTraceback")[0]


@pytest.mark.parametrize(("section", "done", "said"), ROWS, ids=[f"{s}: {d}" for s, d, _ in ROWS])
def test_what_the_page_names_is_refused_as_it_says(section: str, done: str, said: str) -> None:
    assert refusal(section, done) == said


@pytest.mark.parametrize("said", [said for _, _, said in ROWS])
def test_message_says_what_was_expected_and_what_to_do(said: str) -> None:
    first = said.splitlines()[0]

    assert re.search(r"\bexpected\b|unknown key|registered methods are", first), first
    assert ";" in first, first


def test_page_has_many_rows_in_every_section_and_none_twice() -> None:
    assert len(ROWS) >= NUM_ROWS_AT_LEAST
    assert len({(section, done) for section, done, _ in ROWS}) == len(ROWS)
    assert {section for section, _, _ in ROWS} == set(WAYS)
    assert {done for section, done, _ in ROWS if section == "RUN_DIR and checkpoints"} == set(
        SITUATIONS
    )
