"""A user's first day from the wheel: README's commands and deliberate mistakes, with their seconds.

    python scripts/first_day.py [--folder FOLDER] [--page docs/lab/FIRST_DAY.md]

Builds the wheel, installs it into a new environment away from the checkout, and runs everything
there: README's commands, the quickstart, and MISTAKES. The page lists what each mistake printed,
its exit code and its seconds. Fails if a command fails, a mistake is not answered with its words
and exit code, or an answer is a Python traceback of the package. It took 2.5
minutes on 2 idle virtual cores.
"""

from __future__ import annotations

import argparse
import os
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from scripts.wheel_test import Environment, Failed, build, install_base, timed  # noqa: E402

LIMIT_SECONDS = 300
FILES = {
    "no_main.py": "def train(flow, cfg):\n    pass\n",
    "broken.py": "def main(flow, cfg):\n    for step in flow.steps(1)\n        pass\n",
    "waits.py": "async def main(flow, cfg):\n    pass\n",
    "tab.yaml": "actor:\n\tmodel: x\n",
    "list.yaml": "- total_steps: 4\n",
    "empty.jsonl": "",
    "torn.jsonl": '{"prompt": "1+1=", "answer": "2"}\n{"prompt": "1+2=", "ans\n',
    "reward.py": (
        "def score(prompt, response, row):\n"
        "    return 1 / (len(response) - len(response))\n\n\n"
        "def two(prompt, response):\n"
        "    return 0.0\n"
    ),
}
"""Files in the folder of the mistakes."""
SMALL = (
    "data.prompts_per_step=64 actor.update.mini_batch_size=32 critic.update.mini_batch_size=32 "
    "eval_every=0"
)


@dataclass(frozen=True)
class Mistake:
    """A command line with a mistake, and how it is to be answered."""

    kind: str
    command: str
    words: str
    """Words of the answer."""
    code: int = 2


MISTAKES = (
    Mistake("script", "spmdflow run pppo", "nearest is ppo"),
    Mistake("script", "spmdflow run mine.py", "mine.py"),
    Mistake("script", "spmdflow run no_main.py", "main"),
    Mistake("script", "spmdflow run broken.py", "line 2"),
    Mistake("script", "spmdflow run waits.py", "async function"),
    Mistake("script", "spmdflow run", "no SCRIPT"),
    Mistake("command", "spmdflow rum ppo", "run"),
    Mistake("key", "spmdflow run ppo actor.optimizer.learning_rate=1e-5", "actor.optimizer.lr"),
    Mistake("key", "spmdflow run ppo rollout.n=4", "data.samples_per_prompt"),
    Mistake("key", "spmdflow run ppo total_step=4", "total_steps"),
    Mistake("key", "spmdflow run ppo engine.kind=zero1", "actor.engine"),
    Mistake("key", "spmdflow run ppo total_steps 4", "total_steps"),
    Mistake("value", "spmdflow run ppo total_steps=three", "total_steps"),
    Mistake("value", "spmdflow run ppo total_steps=-1", "at least 1"),
    Mistake("value", "spmdflow run ppo actor.optimizer.lr=1e-4x", "1e-4x"),
    Mistake("value", "spmdflow run ppo actor.engine.kind=deepspeed", "zero1"),
    Mistake("value", "spmdflow run ppo actor.engine.kind=megatron actor.engine.layout=t3", "t3"),
    Mistake("value", "spmdflow run ppo placement=splitt", "split"),
    Mistake("value", "spmdflow run -n 3 ppo data.prompts_per_step=64", "64"),
    Mistake("value", "spmdflow run -n many ppo", "many"),
    Mistake("path", "spmdflow run ppo nowhere.yaml", "nowhere.yaml"),
    Mistake("path", "spmdflow run ppo tab.yaml", "line 2"),
    Mistake("path", "spmdflow run ppo list.yaml", "a list"),
    Mistake("path", "spmdflow run ppo data.train_path=nowhere.jsonl", "no file nowhere.jsonl"),
    Mistake("path", "spmdflow run ppo data.train_path=empty.jsonl", "empty"),
    Mistake("path", "spmdflow run ppo run.dir=/proc/run", "/proc/run"),
    Mistake("data", f"spmdflow run ppo data.train_path=torn.jsonl {SMALL}", "torn.jsonl", code=1),
    Mistake("model", "spmdflow run ppo actor.model.path=nowhere/model", "nowhere/model"),
    Mistake("model", "spmdflow run ppo actor.model.path=.", "config.json"),
    Mistake("reward", "spmdflow run ppo reward.function=reward.py:scor", "did you mean score"),
    Mistake("reward", "spmdflow run ppo reward.function=reward.py:two", "prompt, response, row"),
    Mistake(
        "reward",
        f"spmdflow run ppo reward.function=reward.py:score {SMALL}",
        "ZeroDivisionError",
        code=1,
    ),
    Mistake("extra", "spmdflow run ppo actor.rollout.engine=vllm", "pip install 'vllm"),
    Mistake("extra", "spmdflow run ppo actor.engine.kind=megatron", "pip install 'megatron-core"),
    Mistake("extra", "spmdflow run ppo 'run.trackers=[wandb]'", "pip install"),
    Mistake("extra", "spmdflow run ppo reward.function=spmdflow.rewards.math:score", "math-verify"),
    Mistake("port", "spmdflow run --nnodes 2 ppo", "--rdzv-endpoint"),
    Mistake(
        "port",
        f"spmdflow run ppo {SMALL} -- --rdzv-backend static --master-port {{port}}",
        "EADDRINUSE",
        code=1,
    ),
    Mistake("launch", "python -m spmdflow.run ppo", "torchrun"),
    Mistake("tool", "spmdflow sweep ppo total_steps=4", "separated by commas"),
    Mistake("tool", "spmdflow clean nowhere", "nowhere"),
    Mistake("tool", "spmdflow view nowhere", "nowhere"),
    Mistake("tool", "spmdflow status nowhere", "nowhere"),
    Mistake("tool", "spmdflow export nowhere --to model", "nowhere"),
    Mistake("tool", "spmdflow plan ppo --hardware h1000", "h100"),
    Mistake("finished", f"spmdflow run ppo {SMALL} total_steps=2 run.dir=runs/done", "step 2", 0),
    Mistake("finished", f"spmdflow run ppo {SMALL} total_steps=2 run.dir=runs/done", "finished", 0),
    Mistake(
        "finished",
        "spmdflow run grpo total_steps=2 run.dir=runs/done",
        "resume with the script",
        code=1,
    ),
)
README = (
    ("spmdflow --version", 0),
    ("spmdflow doctor", 0),
    ("spmdflow run ppo --help", 0),
    ("spmdflow run -n 2 ppo total_steps=4 run.dir=runs/first", 0),
    ("python -m spmdflow.report runs/first", 0),
    ("spmdflow view runs/first", 2),  # names the package that is missing
    ("pip install -q 'plotly>=7'", 0),
    ("spmdflow view runs/first", 0),
    ("spmdflow status runs/first", 4),  # finished
    ("spmdflow export runs/first --to model", 0),
    ("spmdflow plan ppo placement=auto --world 64 --hardware h100", 0),
    ("spmdflow run --inproc ppo total_steps=1 eval_every=0", 0),
    (
        "spmdflow sweep -n 1 grpo data.prompts_per_step=64 actor.update.mini_batch_size=32 "
        "eval_every=0 total_steps=2 actor.optimizer.lr=1e-5,3e-5",
        0,
    ),
)
"""README's and QUICKSTART's commands without GPUs and files of the user, and their exit codes."""
STOP_CODES = ((3,), (1, 3, -signal.SIGINT))
"""Exit codes after one Ctrl-C (saved) and after two. The second may come before the step is saved,
after it, or when the launcher has nothing left to do but exit."""


@dataclass(frozen=True)
class Answer:
    """What a command printed."""

    text: str
    code: int
    seconds: float


def main() -> int:
    """Run everything; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, help="work there and keep it (default: temporary)")
    parser.add_argument("--page", type=Path, help="Markdown file to write the answers to")
    parser.add_argument("--constraints", type=Path, default=ROOT / "constraints.txt")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="spmdflow-first-day-") as temporary:
        folder = (options.folder or Path(temporary)).absolute()
        try:
            environment = timed("environment", lambda: Environment(folder, sys.executable))
            wheel = timed("wheel", lambda: build(environment, folder))
            timed("install", lambda: install_base(environment, wheel, options.constraints))
            commands = [(line, call(environment, line)) for line, _ in README]
            answers = answer_mistakes(environment)
            stops = [press_ctrl_c(environment, times) for times in range(1, len(STOP_CODES) + 1)]
        except Failed as err:
            print(f"first day: {err}", file=sys.stderr)
            return 1
    if options.page:
        options.page.write_text(page(commands, answers, stops))
    wrong = []
    for (line, code), (_, answer) in zip(README, commands, strict=True):
        if answer.code != code:
            wrong.append(line)
    wrong += [mistake.command for mistake, answer in answers if not is_answered(mistake, answer)]
    for expected, stop in zip(STOP_CODES, stops, strict=True):
        if stop.code not in expected:
            wrong.append(f"Ctrl-C ended with {stop.code}, expected one of {expected}: {stop.text}")
    for line in wrong:
        print(f"first day: not as expected: {line}", file=sys.stderr)
    return 1 if wrong else 0


def call(environment: Environment, line: str) -> Answer:
    """Run a command line as a user of the environment does, in its empty folder."""
    begin = time.monotonic()
    done = subprocess.run(
        ["bash", "-c", line],
        cwd=environment.empty,
        env=variables(environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_SECONDS,
    )
    seconds = time.monotonic() - begin
    print(f"  {seconds:6.1f} s  {done.returncode}  {line}", flush=True)
    return Answer(done.stdout, done.returncode, seconds)


def variables(environment: Environment) -> dict[str, str]:
    """The variables of a shell in which the environment is active."""
    hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PYTHONDONTWRITEBYTECODE")
    kept = {name: value for name, value in os.environ.items() if name not in hidden}
    path = f"{environment.bin}{os.pathsep}{os.environ['PATH']}"
    return kept | {"PATH": path, "HF_HUB_OFFLINE": "1", "COLUMNS": "150"}


def answer_mistakes(environment: Environment) -> list[tuple[Mistake, Answer]]:
    """Make every mistake, and return the answers."""
    for name, text in FILES.items():
        (environment.empty / name).write_text(text)
    answers = []
    with socket.socket() as busy:
        busy.bind(("", 0))
        busy.listen()
        for mistake in MISTAKES:
            line = mistake.command.format(port=busy.getsockname()[1])
            answers.append((mistake, call(environment, line)))
    return answers


def is_answered(mistake: Mistake, answer: Answer) -> bool:
    """Whether the answer has the words and the code, and no traceback of the package."""
    own_traceback = re.search(r'File "[^"]*/spmdflow/(?!algos/)', answer.text)
    return mistake.words in answer.text and answer.code == mistake.code and not own_traceback


def press_ctrl_c(environment: Environment, times: int) -> Answer:
    """Press Ctrl-C in the third step of a run of two ranks, on a terminal of its own.

    The seconds are those from the first Ctrl-C to the end.
    """
    folder = f"runs/stopped-{times}"
    line = f"spmdflow run -n 2 ppo {SMALL} total_steps=200 run.dir={folder}"
    terminal, other_end = os.openpty()
    process = subprocess.Popen(
        ["bash", "-c", f"exec {line}"],
        cwd=environment.empty,
        env=variables(environment),
        stdin=other_end,
        stdout=other_end,
        stderr=other_end,
        start_new_session=True,
        preexec_fn=lambda: make_controlling(other_end),
    )
    os.close(other_end)
    text = ""
    pressed: list[float] = []
    try:
        while chunk := read(terminal):
            text += chunk
            if not pressed and " 3/200" in text:
                for _ in range(times):
                    os.write(terminal, b"\x03")
                    pressed.append(time.monotonic())
                    time.sleep(0.5)
        code = process.wait(LIMIT_SECONDS)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        os.close(terminal)
    if not pressed:
        raise Failed(f"{line} ended with {code} before its third step:\n{text[-3000:]}")
    seconds = time.monotonic() - pressed[0]
    after = text[text.rindex("3/200") :].partition("\n")[2]
    print(f"  {seconds:6.1f} s  {code}  Ctrl-C, {times} times", flush=True)
    return Answer(after, code, seconds)


def make_controlling(terminal: int) -> None:
    """Make a terminal that of this session, so that Ctrl-C becomes SIGINT."""
    import fcntl
    import termios

    fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def read(terminal: int) -> str:
    """Return what was printed; "" once nobody prints any more. Failed if nothing comes in time."""
    ready, _, _ = select.select([terminal], [], [], LIMIT_SECONDS)
    if not ready:
        raise Failed(f"nothing was printed for {LIMIT_SECONDS} s")
    try:
        return os.read(terminal, 1 << 16).decode(errors="replace")
    except OSError:  # the other end was closed
        return ""


def page(
    commands: Sequence[tuple[str, Answer]],
    answers: Sequence[tuple[Mistake, Answer]],
    stops: Sequence[Answer],
) -> str:
    """Return the answers as a page in Markdown."""
    lines = [
        "# The first day",
        "",
        "Written by `python scripts/first_day.py --page docs/lab/FIRST_DAY.md`: a wheel in a new",
        "environment away from the checkout, on 2 virtual cores. Seconds are those of the whole",
        "command, the start of Python included.",
        "",
        "## Commands",
        "",
        "| command | exit code | seconds |",
        "|---|---|---|",
    ]
    for line, answer in commands:
        lines.append(f"| `{line}` | {answer.code} | {answer.seconds:.1f} |")
    lines += ["", "## Mistakes", ""]
    refused = sorted(answer.seconds for mistake, answer in answers if mistake.code == 2)
    lines.append(
        f"{len(answers)} command lines. The {len(refused)} that were refused before a run took "
        f"{refused[0]:.1f} to {refused[-1]:.1f} s, the median {refused[len(refused) // 2]:.1f} s."
    )
    for mistake, answer in answers:
        lines += ["", f"{mistake.kind}: exit code {answer.code}, {answer.seconds:.1f} s", ""]
        lines += ["```", f"$ {mistake.command}", *excerpt(answer.text), "```"]
    lines += ["", "## Ctrl-C", ""]
    for times, answer in enumerate(stops, 1):
        outcome = f"exit code {answer.code} after {answer.seconds:.1f} s"
        lines += [f"Pressed {times} times in step 3: {outcome}", ""]
        lines += ["```", *excerpt(answer.text), "```", ""]
    return "\n".join(lines)


def excerpt(text: str) -> list[str]:
    """Return the last lines of an answer, at most 12, without the terminal's codes."""
    plain = re.sub(r"\x1b\[[0-9;]*m|\r", "", text).rstrip()
    return plain.splitlines()[-12:]


if __name__ == "__main__":
    sys.exit(main())
