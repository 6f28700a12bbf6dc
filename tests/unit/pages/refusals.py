"""The rows of docs/REFUSALS.md: how each is done, and what its message must name.

    .venv/bin/python -m tests.unit.pages.refusals     # writes the page with the messages of now

Each section of the page has its own way to do it; the first cell is taken literally, as a command
line, settings, lines of a file, Python. FOLDER stands for the current directory, FILE for the
file of prompts.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import shlex
import socket
import tempfile
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
from tests.unit.refusals import Parts

PAGE = Path(__file__).parents[3] / "docs" / "REFUSALS.md"


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


@contextlib.contextmanager
def folder_of_mistakes(tmp_path: Path) -> Iterator[None]:
    """In a folder with a valid configuration and everything that is wrong, outside of torchrun."""
    write_config_folder(tmp_path)
    write_model(tmp_path / "odd", {**ACTOR, "num_attention_heads": 3})
    write_model(tmp_path / "small", {**ACTOR, "vocab_size": 3})
    write_model(tmp_path / "foreign", ACTOR, {**TOKENS, "c": 4})
    write_model(tmp_path / "labels", {**SCORER, "id2label": {"0": "bad", "1": "good"}})
    write_model(tmp_path / "bare", ACTOR)
    (tmp_path / "bare/model.safetensors").unlink()
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "no_main.py").write_text("x = 1\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
            patch.delenv(name, raising=False)
        yield


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


def message_of(section: str, done: str) -> str:
    """What is said, with names instead of what differs between machines."""
    with pytest.raises(SpmdflowError) as caught:
        WAYS[section](done)
    said = str(caught.value).replace(str(Path.cwd()), "FOLDER")
    said = said.replace(f"node {socket.gethostname()},", "node here,")
    said = re.sub(r"\(process \d+\)", "(process 1234)", said)
    said = re.sub(r"sha256 [0-9a-f]{64}", "sha256 ...", said)
    return said.partition("\nTraceback")[0]


def cell(text: str) -> str:
    """A text as code spans of a table's cell, which `plain` reads."""
    spans = []
    for line in text.replace("|", "\\|").splitlines():
        spans.append(f"`` {line} ``" if "`" in line else f"`{line}`")
    return "<br>".join(spans)


def page() -> str:
    """The page with the messages as they are now, each row made in a folder of its own."""
    lines = []
    section = ""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            section = line.removeprefix("## ")
        cells = re.split(r"(?<!\\)\|", line)[1:-1] if line.startswith("|") else []
        if len(cells) == 2 and "`" in cells[0]:
            with tempfile.TemporaryDirectory() as folder, folder_of_mistakes(Path(folder)):
                line = f"|{cells[0]}| {cell(message_of(section, plain(cells[0])))} |"
        lines.append(line)
    return "\n".join(lines) + "\n"


PARTS: dict[str, dict[str, Parts]] = {
    "Command line": {
        "total_steps=1": ("command line", "SCRIPT", "--help"),
        "--improc ppo.py": ("command line", "--improc", "--inproc"),
        "ppo.py": ("command line", "torchrun", "--nproc-per-node"),
        "ppo.py total_steps --inproc": ("command line", "'total_steps'", "key=value"),
        "ppo.py a.yaml b.yaml --inproc": ("command line", "'b.yaml'", "key=value"),
        "pp0.py --inproc": ("script", "pp0.py", "ppo.py", "path"),
        "no_main.py --inproc": ("script", "no_main.py", "main(flow, cfg)", ""),
        "ppo.py none.yaml --inproc": ("config", "none.yaml", ""),
        "ppo.py --inproc run.metrics_port=9400 run.metrics_address=203.0.113.1": (
            "run.metrics_port",
            "9400 on 203.0.113.1",
            "run.metrics_port",
        ),
    },
    "Settings": {
        "actor.lr=1": ("command line", "actor.lr", "actor.optimizer.lr", "--help"),
        "xyzzy=1": ("command line", "xyzzy", "--help"),
        "actor.optimizer.lr=fast": (
            "command line",
            "actor.optimizer.lr",
            "'fast'",
            "actor.optimizer.lr=1e-05",
        ),
        "actor.optimizer.betas=[0.9]": (
            "actor.optimizer.betas",
            "[0.9]",
            "actor.optimizer.betas=[0.9,0.95]",
        ),
        "actor.optimizer.betas={}": (
            "command line",
            "actor.optimizer.betas",
            "{}",
            "actor.optimizer.betas=[0.9, 0.95]",
        ),
        "actor=3": ("command line", "actor", "3", "actor.model.path"),
        "run.seed=1.5": ("command line", "run.seed", "1.5", "run.seed=0"),
        "actor.optimizer.name=LBFGS": (
            "actor.optimizer.name",
            "LBFGS",
            "actor.optimizer.name=AdamW",
        ),
        "actor.optimizer.name=Rprop actor.optimizer.weight_decay=0.1": (
            "actor.optimizer.weight_decay",
            "0.1",
            "actor.optimizer.weight_decay=0",
        ),
        "actor.optimizer.total_steps=5 actor.optimizer.warmup_steps=10": (
            "actor.optimizer.total_steps",
            "5",
            "actor.optimizer.total_steps",
        ),
        "run.name=a/b": ("run.name", "'a/b'", "run.dir"),
        "run.name=[1": ("command line", "run.name=[1", ""),
        "run.resume=maybe": ("run.resume", "'maybe'", "run.resume=auto"),
        "run.metrics_port=70000": ("run.metrics_port", "70000", "at most 65535", ""),
        "run.metrics_port=9400 run.metrics_address=localhost": (
            "run.metrics_address",
            "'localhost'",
            "run.metrics_address=127.0.0.1",
        ),
        "run.trackers=[comet]": ("run.trackers", "'comet'", "wandb", "@register_tracker('comet')"),
        "actor.engine.kind=gpipe": ("actor.engine.kind", "'gpipe'", "actor.engine.kind=fsdp"),
        "actor.rollout.temperature=0": ("actor.rollout.temperature", "0.0", "more than 0", ""),
        "actor.rollout.top_p=1.5": ("actor.rollout.top_p", "1.5", "at most 1", ""),
        "data.prompts_per_step=0": ("data.prompts_per_step", "0", "at least 1", ""),
    },
    "Sizes": {
        "actor.update.mini_batch_size=48": (
            "actor.update.mini_batch_size",
            "48",
            "64",
            "16 or 32 or 64",
        ),
        "data.samples_per_prompt=4 actor.update.mini_batch_size=2": (
            "actor.update.mini_batch_size",
            "2",
            "256",
            "multiple of 4",
            "4 or 8 or 16",
        ),
        "actor.rollout.max_new_tokens=64": (
            "actor.model.path",
            "80",
            "32",
            "data.max_prompt_tokens",
        ),
        "actor.model.path=odd": ("actor.model.path", "3", "64", "odd/config.json"),
        "critic.model.path=small": ("critic.model.path", "3", "4", "tokenizer"),
        "critic.model.path=foreign": ("critic.model.path", "'c' is 4", "None", "tokenizer"),
        "actor.model.lora.rank=8 actor.engine.kind=megatron actor.engine.layout=p2": (
            "actor.model.lora",
            "adapters on 2 pipeline stages",
            "one stage",
            "actor.engine.layout",
        ),
        "actor.model.lora.rank=8 actor.rollout.weights=adapter": (
            "actor.rollout.weights",
            "adapter",
            "actor.rollout.engine=builtin",
            "vllm",
            "actor.rollout.weights=auto",
        ),
        "reference.shares=actor": (
            "reference.shares",
            "actor",
            "actor.model.lora",
            "reference.shares",
        ),
    },
    "Placement": {
        "placement=colocated": ("placement", "'colocated'", "standalone", "colocate"),
        "placement=split on 1 rank": ("placement", "1 rank", "2", "--nproc-per-node 2"),
        "placement=standalone on 2 ranks": ("placement", "2 ranks", "4", "--nproc-per-node 4"),
        "placement={a: {roles: [actor], ranks: [1, 0]}} on 2 ranks": (
            "placement.a.ranks",
            "[1, 0]",
            "[0, 1]",
        ),
        "placement={a: {roles: [actor], ranks: [0, 4]}} on 2 ranks": (
            "placement.a.ranks",
            "4",
            "0-1",
            "5 processes",
        ),
        "placement={a: {roles: [actor], ranks: [0]}, b: {roles: [critic], ranks: [0]}} on 2 ranks": (  # noqa: E501
            "placement",
            "rank 0",
            "a and b",
            "",
        ),
        "placement={a: {roles: [actr], ranks: [0]}} on 2 ranks": (
            "placement.a.roles",
            "actr",
            "critic",
            "actor",
        ),
        "placement={a: {roles: [actor, critic], ranks: [0]}} on 2 ranks": (
            "placement",
            "reference, reward",
            "roles",
        ),
    },
    "YAML": {
        "actor: {optimiser: {lr: 1}}": ("my.yaml", "actor.optimiser", "actor.optimizer", "--help"),
        "run: {seed: x}": ("my.yaml", "run.seed", "'x'", "int", "run.seed=0"),
        "[1, 2]": ("my.yaml", "list", ""),
        'run: {name: "${}"}': ("my.yaml", "run.name", "'${}'", ""),
    },
    "Files": {
        "data.train_path=nope.jsonl": ("data.train_path", "nope.jsonl", "FOLDER", "path"),
        "data.train_path=reward.py": ("data.train_path", "reward.py", ".jsonl", ""),
        "data.train_path=empty.jsonl": ("data.train_path", "empty.jsonl", ""),
        "data.eval_prompts=0": ("data.eval_prompts", "0", "at least 1", ""),
        "data.eval_path=null": ("data.eval_path", "eval_every 10", "eval_every=0"),
        "actor.model.path=nope": ("actor.model.path", "nope", "FOLDER", ""),
        "actor.model.path=bare": ("actor.model.path", "bare", "safetensors"),
        "reference.model.path=scorer": (
            "reference.model.path",
            "LlamaForSequenceClassification",
            "ForCausalLM",
            "scorer",
        ),
    },
    "Rewards": {
        "reward.function=null": ("reward", "model", "function", "reward.function=file.py:name"),
        "reward.per_token=true": ("reward.per_token", "true", "reward.model.path=FOLDER"),
        "reward.model.path=scorer": ("reward", "model", "weight", "1.0 * model"),
        "reward.function=score": (
            "reward.function",
            "'score'",
            "file.py:name",
            "my_reward.py:score(limit=100)",
        ),
        "reward.function=[a, b]": ("reward.function", "['a', 'b']", "file.py:name"),
        "reward.function={mean: reward.py:score}": ("reward.function", "'mean'", "score", ""),
        "reward.function={good: a lot * reward.py:score}": (
            "reward.function.good",
            "'a lot'",
            "0.5 * file.py:name",
        ),
        "reward.function={good: reward.py:score(3)}": ("reward.function.good", "(3)", "limit=100"),
        "reward.function={good: reward.py:score(limit=3)}": (
            "reward.function.good",
            "(limit)",
            "reward.py",
            "score",
        ),
        "reward.function={judge: 0.5 * model}": (
            "reward.function",
            "model",
            "reward.model.path=FOLDER",
        ),
        "reward.function={judge: model(x=1)}": (
            "reward.function.judge",
            "'model(x=1)'",
            "reward.function.judge=model",
        ),
        "reward.function=nope.py:score": ("reward.function", "nope.py", "FOLDER", "path"),
        "reward.function=reward.py:scor": ("reward.function", "scor", "reward.py", "score"),
        "reward.function=reward.py:short": (
            "reward.function",
            "short(prompt, response)",
            "short(prompt, response, row)",
            "",
        ),
        "reward.function=null reward.model.path=actor": (
            "reward.model.path",
            "LlamaForCausalLM",
            "ForSequenceClassification",
            "actor",
        ),
        "reward.function=null reward.model.path=labels": (
            "reward.model.path",
            "2",
            "1",
            "num_labels 1",
        ),
    },
    "Prompts": {
        "[1]": (
            "prompts.jsonl",
            "data.max_bad_rows",
            "prompts.jsonl:2",
            "list",
            "data.prompt_column",
        ),
        '{"text": "1"}': (
            "prompts.jsonl",
            "prompts.jsonl:2",
            "'prompt'",
            "'text'",
            "data.prompt_column",
        ),
        '{"prompt": 12}': (
            "prompts.jsonl",
            "prompts.jsonl:2",
            "'prompt' = number",
            "data.prompt_column",
        ),
        '{"prompt": null}': (
            "prompts.jsonl",
            "prompts.jsonl:2",
            "'prompt' = null",
            "data.prompt_column",
        ),
        '{"prompt": [{"role": "user", "content": "1"}]}': (
            "prompts.jsonl",
            "prompts.jsonl:2",
            "'prompt' = list",
            "data.chat_template=true",
            "data.prompt_column",
        ),
    },
    "Preferences": {
        "actor.loss.name=kto": ("actor.loss.name", "kto", "data.label_column=label"),
        "data.label_column=label": ("actor.loss.name", "dpo", "data.label_column=null"),
        "actor.loss.name=kto data.label_column=label data.prompts_per_step=1 actor.update.mini_batch_size=1": (  # noqa: E501
            "data.prompts_per_step",
            "1",
            "actor.loss.name=kto",
            "2",
            "",
        ),
        "actor.loss.name=ipo actor.loss.label_smoothing=0.1": (
            "actor.loss.label_smoothing",
            "0.1",
            "actor.loss.label_smoothing=0",
        ),
        "actor.loss.name=kto data.label_column=label actor.loss.per_token=true": (
            "actor.loss.per_token",
            "true",
            "actor.loss.per_token=false",
        ),
        "actor.loss.beta=0": ("actor.loss.beta", "0.0", "more than 0", ""),
    },
    "Pairs": {
        '{"prompt": "1", "chosen": "2"}': (
            "pairs.jsonl",
            "pairs.jsonl:2",
            "'rejected'",
            "data.prompt_column",
        ),
        '{"prompt": "1", "chosen": "2", "rejected": ["3"]}': (
            "pairs.jsonl",
            "pairs.jsonl:2",
            "'rejected' = list",
            "data.prompt_column",
        ),
        '{"prompt": "1", "chosen": "2", "rejected": ""}': (
            "pairs.jsonl",
            "pairs.jsonl:2",
            "empty 'rejected'",
            "data.prompt_column",
        ),
        '{"prompt": "1", "chosen": "2", "rejected": "2"}': (
            "pairs.jsonl",
            "pairs.jsonl:2",
            "'chosen'",
            "'rejected'",
            "data.prompt_column",
        ),
    },
    "Labels": {
        '{"prompt": "1", "completion": "2"}': (
            "labels.jsonl",
            "labels.jsonl:2",
            "'label'",
            "true or false",
            "data.prompt_column",
        ),
        '{"prompt": "1", "completion": "2", "label": "yes"}': (
            "labels.jsonl",
            "labels.jsonl:2",
            "'label' = text",
            "data.prompt_column",
        ),
        '{"prompt": "1", "label": true}': (
            "labels.jsonl",
            "labels.jsonl:2",
            "'completion'",
            "data.prompt_column",
        ),
    },
    "Dialogues": {
        '{"chosen": "1", "rejected": "2"}': (
            "dialogues.jsonl",
            "dialogues.jsonl:2",
            "'\\n\\nAssistant:'",
            "'chosen'",
            "data.prompt_end",
            "data.prompt_column",
        ),
        '{"chosen": "1\\n\\nAssistant: 2", "rejected": "1\\n\\nAssistant: "}': (
            "dialogues.jsonl",
            "dialogues.jsonl:2",
            "empty",
            "'rejected'",
            "data.prompt_column",
        ),
        '{"chosen": "1\\n\\nAssistant: 2", "rejected": "2\\n\\nAssistant: 2"}': (
            "dialogues.jsonl",
            "dialogues.jsonl:2",
            "'chosen'",
            "'rejected'",
            "prompts",
            "data.prompt_column",
        ),
    },
    "Scores": {
        "return None": (
            "reward.function 'mine.py:score'",
            "None",
            "0.75 s",
            "mine.py:2",
            "reward.on_error=drop",
        ),
        "return float('nan')": (
            "reward.function 'mine.py:score'",
            "nan",
            "0.75 s",
            "mine.py:2",
            "reward.on_error=drop",
        ),
        "return {'reward': 1}": (
            "reward.function 'mine.py:score'",
            "'reward'",
            "0.75 s",
            "mine.py:2",
            "reward.on_error=drop",
        ),
        "raise ValueError('no good')": (
            "reward.function 'mine.py:score'",
            "ValueError: no good",
            "0.75 s",
            "mine.py:2",
            "reward.on_error=drop",
        ),
        "time.sleep(60)": (
            "reward.function 'mine.py:score'",
            "reward.sample_seconds",
            "0.75 s",
            "mine.py:2",
            "reward.on_error=drop",
        ),
        "os._exit(7)": (
            "reward.function 'mine.py:score'",
            "exit status 7",
            "0.75 s",
            "mine.py:2",
            "reward.on_error=drop",
        ),
    },
    "Script": {
        "toy.add(batch.drop('number'))": ("toy.add", "['number']", "'number'"),
        "toy.ad(batch)": ("Toy.ad", "add, describe", "@register(transfer_mode=...)"),
        "toy.add(batch, waht=2)": ("toy.add", "'waht'", "what: 'float' = 1.0", "name"),
        "toy.add(3.0)": ("toy.add", "float", "Batch", "name"),
        "toy.add([1, 2])": ("toy.add", "list of 2", "['number']", "flow.prompts"),
        "toy.extend(batch | toy.extend(batch))": ("toy.extend", "'twin'", ""),
        "batch | toy.add(batch[:4])": ("batches", "6 and 4 rows", "4 row ids", ""),
        "batch | toy.add(batch) | toy.add(batch)": ("column 'next'", "toy.add and toy.add", ""),
        "batch | toy.measure(batch)": ("batch | Result", "Batch", "step.log"),
        "batch[2]": ("batch[2]", "slice", "batch.select([3])"),
        "batch.select([0, 9])": ("select", "0 to 9", "0 to 5", ""),
        "batch.select([1, 1])": ("select", "2 positions", "repeat"),
        "batch.repeat(0)": ("repeat", "0", "at least 1", "select"),
        "batch.drop('values')": ("no column 'values'", "'prompt_text'", "'values'"),
        "batch.map(lambda batch: batch)": ("map", "<lambda>", ""),
        "batch.map(unmarked_maths)": (
            "map",
            "unmarked_maths",
            "@map_function(reads=(...), writes=(...))",
            "",
        ),
        "batch.map(share, x=1)": ("map.share", "'x'", "scale: 'float' = 1.0", "name"),
        "next(prompts).map(count_tokens)": (
            "map.count_tokens",
            "['prompts', 'prompt_text', 'row']",
            "",
        ),
        "toy.describe()['mean']": ("toy.describe", "int", "metrics", "values_by_rank()"),
        "toy.return_one_of_two(batch)": (
            "toy.return_one_of_two",
            "['first']",
            "['first', 'second']",
            "`writes`",
        ),
        "toy.return_less(batch)": ("toy.return_less", "'number_or_less'", "4", "6", ""),
        "flow.prompts(cfg.data)  # twice": ("flow.prompts", "'prompts'", "name=..."),
        "flow.spawn(Toy, ToyConfig())": (
            "spawn Toy",
            "'toy'",
            "WorkerGroup(toy on ranks (0,))",
            "name=...",
        ),
        "flow.spawn(Toy, ToyConfig(), name='late')  # inside a step": (
            "spawn Toy",
            "step 1",
            "main",
        ),
        "flow.spawn(Other, ToyConfig())": ("model 'other'", "toy", "flow.pool('all')"),
        "flow.keep(prompts=prompts)": ("keep", "['prompts']", ""),
        "flow.pool('al')": ("pool 'al'", "['all']", ""),
        "flow.evaluate(toy)": ("evaluate", "data.eval_path", "eval_every=0"),
        "flow.queue(prompts, toy, max_staleness=-1)": (
            "flow.queue",
            "max_staleness=-1",
            "max_staleness=cfg.max_staleness",
        ),
        "flow.queue(prompts, toy, max_staleness=1, batches_per_step=0)": (
            "flow.queue",
            "batches_per_step=0",
            "leave it out",
        ),
    },
    "RUN_DIR and checkpoints": {
        "run.resume=never in a used folder": (
            "run.resume",
            "FOLDER/used",
            "metrics.jsonl",
            "run.dir",
        ),
        "a second run in the folder of a live one": (
            "run.dir",
            "FOLDER/live",
            "process 1234",
            "run.dir",
        ),
        "run.dir=/proc/none": ("run.dir", "/proc/none", "No such file or directory", "run.dir"),
        "save on nodes that do not share RUN_DIR": (
            "checkpoint",
            "step-3.tmp/critic/rank-0.safetensors",
            "node here",
            "rank 1",
            "node-of-1",
            "run.dir",
        ),
        "resume with a file cut off": (
            "checkpoint",
            "step-3/weights.safetensors",
            "3 bytes",
            "5 bytes",
            "checkpoints/latest",
        ),
        "resume with a changed byte": (
            "checkpoint",
            "step-3/weights.safetensors",
            "sha256",
            "5 bytes",
            "checkpoints/latest",
        ),
        "resume with a changed manifest": (
            "checkpoint",
            "step-3/manifest.json",
            "sha256",
            "checkpoints/latest",
        ),
        "resume with a checkpoint of another version": (
            "checkpoint",
            "spmdflow-checkpoint-1",
            "spmdflow-checkpoint-3",
            "RUN_DIR/export",
        ),
        "resume on other ranks with a worker that keeps its state by rank": (
            "checkpoint",
            "fsdp t1p1d2 on ranks 0-1",
            "zero3 t1p1d4 on ranks 0-3",
            "CountingWorker.load_state",
            "docs/CHECKPOINTS.md",
        ),
        "resume without a model that was trained": (
            "checkpoint",
            "actor",
            "checkpoints/step-3",
            "run.dir",
        ),
    },
}
"""Section and what is done -> what the message must name."""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
