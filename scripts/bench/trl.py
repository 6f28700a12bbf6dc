"""GRPO side by side with TRL: the same model, prompts, updates, tokens and threads, runs by turns.

TRL lives in an environment of its own:

    python3.11 -m venv ~/trl
    ~/trl/bin/pip install 'torch==2.13.0' 'trl==1.16.*' \\
        --extra-index-url https://download.pytorch.org/whl/cpu
    scripts/bench.py trl --trl ~/trl/bin/python --data FOLDER

Settings: `stories`, the 0.7-million-parameter model in FOLDER/models/stories260K-hd64 with the
openings in FOLDER/tinystories, with 16 prompts x 8 samples x 64 new tokens a step; `vocabulary`, a
random Llama of 11.3 million with 32,000 words and prompts of 8 to 96 tokens, with 8 x 4 x 64;
`smollm2` (with --model FOLDER of scripts/make_smollm2.py), the real model of 134.5 million with
questions of FOLDER/gsm8k, with 8 x 4 x 64, in float32 or with --dtype bfloat16 (TRL: bf16=True,
which is autocast). Beta 0.04 or --beta, one update a step, AdamW with float32 weights. No response
ends early (bench/_trl_work.py). On a machine
that others use, give it real-time priority (`chrt -r 5`). The first round tries
TRL in three settings of its own (the batch whole, cut into micro-batches, over two processes) and
spmdflow in three: on one rank, on as many as threads under FSDP, and there under ZeRO 1, where
every rank has all weights, as under DDP; the following rounds run the fastest of each again.
A run's seconds are the median of its steps without the first two, from end to end; the table's are
the medians over rounds. CPU seconds are those of all processes: compare them where others use the
machine. `products_s` is what the step's matrix products alone take with as many threads, `shared_s`
the same with each prompt computed once for all its samples, as spmdflow does it where that saves an
eighth of the tokens; `of_products` and `of_shared` are a step's seconds divided by them. `peak_gb`
is the largest memory of all processes of a trainer together.

On a GPU (`--device cuda`, `--settings smollm2`) both run as one process with vLLM in it, TRL with
the batch whole and cut; it needs a version of vLLM that it takes. spmdflow also runs with its own
generation. The products are not measured there.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bench._products import products
from bench._steps import Moment, Watched, run_watched
from bench._trl_work import Work, smollm2, stories, vocabulary
from spmdflow.config.schema import EngineConfig

ROOT = Path(__file__).parents[2]
SIDE = Path(__file__).parent / "_trl"
SETTINGS = ("stories", "vocabulary", "smollm2")
ENGINES = ("actor", "reference")
MAX_PROMPT_TOKENS = 256
"""As in _trl/side.py."""
DEVICE_ROWS = 32
"""Rows of a forward on a GPU where TRL cuts its batch."""
SKIPPED = 2
"""First steps of a run that are not counted."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Where TRL is, and how much."""
    given = os.environ.get("SPMDFLOW_DATA")
    parser.add_argument("--trl", type=Path, default=Path("/tmp/trl/venv/bin/python"), metavar="PY")
    parser.add_argument("--data", type=Path, default=given and Path(given), metavar="FOLDER")
    parser.add_argument("--settings", nargs="*", choices=SETTINGS, default=SETTINGS[:2])
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="SmolLM2, for smollm2")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="cuda: both also with vLLM"
    )
    parser.add_argument("--prompts", type=int, help="of a step; default: the setting's")
    parser.add_argument("--samples", type=int, help="of a prompt; default: the setting's")
    parser.add_argument("--new-tokens", type=int, help="of a sample; default: the setting's")
    parser.add_argument("--beta", type=float, default=0.04, help="weight of the KL in the loss")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6, help="of a run, at least 3")
    parser.add_argument("--threads", type=int, default=2, help="of all processes of a trainer")
    parser.add_argument(
        "--also",
        action="append",
        default=[],
        metavar="NAME:KEY=VALUE[;KEY=VALUE]",
        help="another spmdflow with these settings, in every round",
    )
    parser.add_argument(
        "--checkout",
        action="append",
        default=[],
        metavar="NAME=FOLDER",
        help="another version of spmdflow, in every round",
    )
    parser.add_argument("--only", choices=("trl", "spmdflow"), help="leave the other one out")


@dataclass
class Contestant:
    """One trainer in one setting, and what a step took in each round."""

    trainer: str
    way: str
    run: Callable[[Path], Watched]
    stays: bool = False
    """Runs in every round, fastest or not."""
    steps: list[Moment] = field(default_factory=list)
    """Medians of each round."""
    peak_bytes: int = 0
    """Largest memory of any round."""

    @property
    def median(self) -> Moment:
        """Over rounds."""
        return _medians(self.steps)


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each setting and contestant."""
    if arguments.steps <= SKIPPED or arguments.data is None:
        sys.exit(
            f"trl: got --steps {arguments.steps} and --data {arguments.data}, expected at least "
            f"{SKIPPED + 1} steps and a folder with models and prompts; see --help"
        )
    rows = []
    for name in arguments.settings:
        with tempfile.TemporaryDirectory() as folder:
            rows += _compare(name, Path(folder), arguments)
    return rows


def _compare(name: str, folder: Path, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    sizes = {"threads": arguments.threads, "steps": arguments.steps}
    if name == "stories":
        work = stories(folder, arguments.data, **sizes)
    elif name == "vocabulary":
        work = vocabulary(folder, **sizes)
    elif arguments.model is None:
        sys.exit("trl: smollm2 needs --model, a folder of scripts/make_smollm2.py")
    else:
        dtype = arguments.dtype
        work = smollm2(folder, arguments.data, arguments.model, dtype=dtype, **sizes)
    work = replace(
        work,
        kl_coef=arguments.beta,
        device=arguments.device,
        num_prompts=arguments.prompts or work.num_prompts,
        num_samples=arguments.samples or work.num_samples,
        new_tokens=arguments.new_tokens or work.new_tokens,
        micro_rows=DEVICE_ROWS if arguments.device == "cuda" else work.micro_rows,
    )
    found = [x for x in _contestants(work, arguments) if arguments.only in (None, x.trainer)]
    product_seconds: dict[bool, list[float]] = {False: [], True: []}
    for number in range(arguments.rounds):
        for each in found if number == 0 else _finalists(found):
            with tempfile.TemporaryDirectory(dir=folder) as place:
                watched = each.run(Path(place))
            each.steps.append(_medians(watched.steps[SKIPPED - 1 :]))
            each.peak_bytes = max(each.peak_bytes, watched.peak_bytes)
            wall, cpu = each.steps[-1]
            told = f"{name} round {number + 1} {each.trainer} {each.way}"
            told += f": {wall:.3f} s, CPU {cpu:.3f} s, {watched.peak_bytes / 1e9:.2f} GB"
            print(told, flush=True)
        if work.device == "cpu":
            for shares, seconds in product_seconds.items():
                seconds.append(products(work, shares_prompts=shares).seconds)
    rows = _rows(work, found)
    if work.device == "cpu":
        _add_products(rows, {x: statistics.median(y) for x, y in product_seconds.items()})
    return rows


def _finalists(found: list[Contestant]) -> list[Contestant]:
    best = {
        trainer: min((x for x in found if x.trainer == trainer and not x.stays), key=_wall)
        for trainer in dict.fromkeys(x.trainer for x in found)
    }
    return [x for x in found if x.stays or x is best[x.trainer]]


def _wall(contestant: Contestant) -> float:
    return contestant.median.wall


def _medians(moments: list[Moment]) -> Moment:
    return Moment(*map(statistics.median, zip(*moments)))


def _add_products(rows: list[dict[str, Any]], seconds: dict[bool, float]) -> None:
    """Add the seconds of the products alone, with and without shared prompts, to every row."""
    for row in rows:
        row["products_s"] = seconds[False]
        row["of_products"] = row["step_s"] / seconds[False]
        row["shared_s"] = seconds[True]
        row["of_shared"] = row["step_s"] / seconds[True]


def _rows(work: Work, found: list[Contestant]) -> list[dict[str, Any]]:
    others = [x for x in found if x.trainer == "trl"] or found
    best = min(x.median.wall for x in others)
    least = min(x.median.cpu for x in others)
    tokens = work.tokens()
    return [
        {
            "setting": work.name,
            "trainer": each.trainer,
            "way": each.way,
            "rounds": len(each.steps),
            "step_s": each.median.wall,
            "tokens_per_s": round(tokens / each.median.wall),
            "ratio": best / each.median.wall,
            "cpu_s": each.median.cpu,
            "cpu_ratio": least / each.median.cpu,
            "peak_gb": each.peak_bytes / 1e9,
        }
        for each in found
    ]


def _contestants(work: Work, arguments: argparse.Namespace) -> list[Contestant]:
    if work.device == "cuda":
        return _on_device(work, arguments.trl)
    ranks = work.threads
    found = [
        Contestant("trl", way, lambda folder, way=way: _theirs(work, way, folder, arguments.trl))
        for way in ("whole", "micro", "ranks")
    ]
    for count in dict.fromkeys((1, ranks)):
        found.append(Contestant("spmdflow", f"{count} ranks", _own(work, count, [])))
    whole = [f"{role}.engine.kind=zero1" for role in ENGINES]
    found.append(Contestant("spmdflow", f"{ranks} ranks, zero1", _own(work, ranks, whole)))
    for text in arguments.also:
        name, _, settings = text.partition(":")
        run = _own(work, ranks, settings.split(";"))
        found.append(Contestant("spmdflow", f"{ranks} ranks, {name}", run, stays=True))
    for text in arguments.checkout:
        name, _, root = text.partition("=")
        run = _own(work, ranks, [], root=Path(root))
        found.append(Contestant("spmdflow", f"{ranks} ranks, {name}", run, stays=True))
    return found


def _on_device(work: Work, trl: Path) -> list[Contestant]:
    """Both on one GPU with vLLM; spmdflow also with its own generation."""
    found = [
        Contestant("trl", way, lambda folder, way=way: _theirs(work, way, folder, trl))
        for way in ("vllm", "vllm-micro")
    ]
    for engine in ("vllm", "builtin"):
        run = _own(work, 1, [f"actor.rollout.engine={engine}"])
        found.append(Contestant("spmdflow", f"1 rank, {engine}", run))
    return found


def _theirs(work: Work, way: str, folder: Path, python: Path) -> Watched:
    """TRL's steps; every response has as many tokens as it may."""
    watched = run_trl(work, way, folder, python)
    found = json.loads((folder / "trl.json").read_text())
    lengths = {log["completions/mean_length"] for log in found["logs"]}
    assert lengths == {float(work.new_tokens)}, lengths
    return watched


def run_trl(work: Work, way: str, folder: Path, python: Path) -> Watched:
    """Run TRL in one of its ways; what it says of its steps is in trl.json of the folder."""
    out = folder / "trl.json"
    count = work.threads if way == "ranks" else 1
    command = [str(python)]
    if count > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    command += [str(SIDE / "side.py"), str(work.write(folder / "work.json")), way, str(out)]
    return watch(command, folder / "steps", folder, threads=work.threads // count, path=SIDE)


def _own(
    work: Work, count: int, more: list[str], *, root: Path = ROOT
) -> Callable[[Path], Watched]:
    """What runs spmdflow on so many ranks and returns its steps."""

    def run(folder: Path) -> Watched:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={count}", "-m", "spmdflow.run", "algos/grpo.py"]
        words = [*command, "algos/grpo.yaml", *own_settings(work, folder), *more]
        lines = folder / "run" / "metrics.jsonl"
        watched = watch(words, lines, folder, threads=work.threads // count, path=root)
        texts = lines.read_text().splitlines()
        made = {json.loads(text)["rollout/response_tokens"] for text in texts}
        assert made == {work.rows * work.new_tokens}, made
        return watched

    return run


def own_settings(work: Work, folder: Path) -> list[str]:
    """The work in spmdflow's words; what is not here has its default."""
    return [
        f"run.dir={folder / 'run'}",
        f"total_steps={work.steps}",
        *(
            "eval_every=0",
            "save_every=0",
            "run.save_last=false",
            "run.sample_every=0",
            "data.eval_path=null",
        ),
        f"data.train_path={work.prompts}",
        *(f"data.prompts_per_step={work.num_prompts}", "data.shuffle=false"),
        f"data.samples_per_prompt={work.num_samples}",
        f"data.max_prompt_tokens={MAX_PROMPT_TOKENS}",
        f"actor.model.path={work.model}",
        *(f"actor.update.mini_batch_size={work.rows}", f"actor.optimizer.lr={work.lr}"),
        *("actor.optimizer.schedule=constant", "actor.optimizer.warmup_steps=0"),
        f"actor.rollout.max_new_tokens={work.new_tokens}",
        f"actor.loss.kl_coef={work.kl_coef}",
        *(f"actor.model.dtype={work.dtype}", f"actor.rollout.dtype={work.dtype}"),
        f"reference.model.dtype={work.dtype}",
        *(
            f"{role}.engine.micro_batch_tokens={EngineConfig().micro_batch_tokens}"
            for role in ENGINES
        ),
        f"reward.function={SIDE / 'reward.py'}:different_letters",
    ]


def watch(command: list[str], lines: Path, folder: Path, *, threads: int, path: Path) -> Watched:
    """Run a trainer in `path` to its end, with so many threads a process."""
    paths = [str(path), *filter(None, [os.environ.get("PYTHONPATH")])]
    more = {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    more["PYTHONPATH"] = os.pathsep.join(paths)
    more |= {"TOKENIZERS_PARALLELISM": "false", "OMP_WAIT_POLICY": "passive"}
    return run_watched(command, lines, folder / "log", cwd=path, more=more)
