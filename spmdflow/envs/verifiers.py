"""Environments of verifiers (pip install verifiers, 0.4 or later), played by the policy.

    environment: spmdflow.envs.verifiers:episode(taskset='gsm8k-v1')

A row is a task of the taskset. This writes rows, one a line of JSON:

    python -m spmdflow.envs.verifiers gsm8k-v1 train.jsonl --count 1000

verifiers runs the task with its own agent program (harness) and client, and its rewards are the
score. The program starts with uv in a process of its own. Where verifiers cannot be installed next
to the packages of a run, it may have its own virtual environment: python='/venv/bin/python'.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import sys
from collections.abc import Mapping
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

_LOADED: dict[str, asyncio.Task[Any]] = {}
"""Settings as JSON -> the environment, which serves until this process ends."""
_SERVING: set[asyncio.Task[None]] = set()
_TEXT_LETTERS = 2000
_BOOT = "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"
"""Program that runs this file alone, in whose folder `import verifiers` would find it. It needs no
other file of spmdflow."""


async def episode(
    row: dict[str, Any],
    *,
    base_url: str,
    model: str,
    api_key: str,
    taskset: str,
    harness: str = "null",
    config: Mapping[str, Any] | None = None,
    max_tokens: int | None = None,
    python: str | None = None,
) -> dict[str, float]:
    """Run one task with verifiers; return the sum of its weighted rewards, and its numbers.

    The result has "score", "turns", each reward as "reward_NAME" and each metric as "metric_NAME".
    RuntimeError if verifiers reports an error; a full context or too many turns are none:
    its program ends there.
    row: "task" is the data of the task, as `write_rows` writes it. taskset: id of an installed
    package, or a module. harness: id of verifiers' agent program; "null" only chats and calls the
    task's tools. config: further settings of verifiers' environment, such as {"taskset": {"split":
    "train"}}. python: interpreter that has verifiers; it is started for each episode.
    """
    call = {
        "task": row["task"],
        "base_url": base_url,
        "model": model,
        "api_key": api_key,
        "taskset": taskset,
        "harness": harness,
        "config": dict(config or {}),
        "max_tokens": max_tokens,
    }
    if python is None:
        return await _play(**call)
    return await _play_elsewhere(python, call)


async def _play_elsewhere(python: str, call: dict[str, Any]) -> dict[str, float]:
    """Run `_play` with another interpreter. RuntimeError with the end of its output if it fails."""
    process = await asyncio.create_subprocess_exec(
        python,
        *("-c", _BOOT, __file__, "--play"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        output, error_output = await process.communicate(json.dumps(call).encode())
    finally:
        if process.returncode is None:
            process.kill()
    if process.returncode:
        text = error_output.decode(errors="replace")[-_TEXT_LETTERS:]
        raise RuntimeError(f"{python} ended with status {process.returncode}: {text}")
    numbers: dict[str, float] = json.loads(output.splitlines()[-1])
    return numbers


async def _play(
    *,
    task: dict[str, Any],
    base_url: str,
    model: str,
    api_key: str,
    taskset: str,
    harness: str,
    config: dict[str, Any],
    max_tokens: int | None,
) -> dict[str, float]:
    """See `episode`. verifiers reads keys from variables: this one's exists during the episode."""
    verifiers = import_module("verifiers.v1")
    env = await _environment(taskset, harness, config)
    task_type = type(env.taskset).task_type()
    data = task_type.data_type().model_validate(task)
    variable = f"SPMDFLOW_EPISODE_KEY_{secrets.token_hex(8)}"
    os.environ[variable] = api_key
    try:
        context = verifiers.ModelContext(
            model=model,
            client=verifiers.EvalClientConfig(base_url=base_url, api_key_var=variable),
            sampling=verifiers.SamplingConfig(max_tokens=max_tokens),
        )
        played = await env.run_episode(task_type(data, env.config.taskset.task), context)
    finally:
        del os.environ[variable]
    return numbers_of(played)


def numbers_of(played: Any) -> dict[str, float]:
    """The score and numbers of a played episode of verifiers. RuntimeError if it failed.

    Numbers of several agents are added. played: an Episode of verifiers.v1.
    """
    errors = [*played.errors]
    numbers = {"score": 0.0, "turns": float(played.num_turns)}
    for trace in played.traces:
        if not trace.ok:
            errors += trace.errors
        numbers["score"] += float(trace.reward)
        for name, reward in trace.rewards.items():
            if reward is not None:
                key = f"reward_{name}"
                numbers[key] = numbers.get(key, 0.0) + float(reward.score)
        for name, metric in trace.metrics.items():
            if metric is not None:
                key = f"metric_{name}"
                numbers[key] = numbers.get(key, 0.0) + float(metric)
    if not played.ok:
        last = errors[-1] if errors else None
        what = "without an error" if last is None else f"with {last.type}: {last.message}"
        raise RuntimeError(f"verifiers ended the episode {what[:_TEXT_LETTERS]}")
    return numbers


async def _environment(taskset: str, harness: str, config: dict[str, Any]) -> Any:
    """verifiers' environment of these settings, loaded and serving. Made once in a process."""
    key = json.dumps([taskset, harness, config], sort_keys=True)
    if key not in _LOADED:
        _LOADED[key] = asyncio.create_task(_load(taskset, harness, config))
    return await asyncio.shield(_LOADED[key])


async def _load(taskset: str, harness: str, config: dict[str, Any]) -> Any:
    """Load an environment, and have it serve its tools and its client until the process ends."""
    env = environment_of(taskset, harness, config)
    is_serving = asyncio.Event()

    async def serve() -> None:
        async with env.serving():
            is_serving.set()
            await asyncio.Event().wait()

    serving = asyncio.create_task(serve())
    _SERVING.add(serving)
    waiting = asyncio.create_task(is_serving.wait())
    await asyncio.wait([serving, waiting], return_when=asyncio.FIRST_COMPLETED)
    if serving.done():
        waiting.cancel()
        await serving  # raises what went wrong
    return env


def environment_of(taskset: str, harness: str, config: Mapping[str, Any]) -> Any:
    """verifiers' environment of a taskset, whose agents run as processes of this machine.

    ValueError if it has several agents: all of them would be one player to the endpoint.
    """
    loaders = import_module("verifiers.v1.utils.loaders")
    settings = dict(config)
    settings["taskset"] = {"id": taskset} | dict(settings.get("taskset", {}))
    agent = {"harness": {"id": harness}, "runtime": {"type": "subprocess"}}
    settings["agent"] = agent | dict(settings.get("agent", {}))
    kind = loaders.env_config_type(taskset, settings.get("id", ""))
    names = import_module("verifiers.v1.configs.agent").agent_config_fields(kind())
    if list(names) != ["agent"]:
        raise ValueError(
            f"got the agents {', '.join(names)} of {taskset}, expected one that is named agent; "
            f"choose a taskset with one agent"
        )
    return loaders.load_environment(kind.model_validate(settings))


def write_rows(
    taskset: str, path: Path, *, count: int | None = None, config: Mapping[str, Any] | None = None
) -> int:
    """Write tasks of a taskset as rows, one JSON object a line; return their number.

    A row has "task", the task's data, and "prompt" or "messages", which it begins with. ValueError
    for a taskset without an end and no `count`. config: as of `episode`.
    """
    tasks = environment_of(taskset, "null", config or {}).taskset
    if count is None and not tasks.bounded:
        raise ValueError(f"{taskset} has no end; give a count")
    number = 0
    with path.open("w", encoding="utf-8") as file:
        for task in islice(tasks, count):
            file.write(json.dumps(row_of(task.data)) + "\n")
            number += 1
    return number


def row_of(data: Any) -> dict[str, Any]:
    """The row of a task. data: a TaskData of verifiers.v1."""
    messages = []
    if data.system_prompt:
        messages.append({"role": "system", "content": data.system_prompt})
    messages.append({"role": "user", "content": data.prompt_text})
    return {"messages": messages, "task": data.model_dump(mode="json", exclude_none=True)}


def main() -> None:
    """Write rows; with --play, run one episode whose call comes on standard input, as JSON."""
    if sys.argv[1:] == ["--play"]:
        numbers = asyncio.run(_play(**json.load(sys.stdin)))
        sys.stdout.write("\n" + json.dumps(numbers) + "\n")
        return
    parser = argparse.ArgumentParser("python -m spmdflow.envs.verifiers", description=__doc__)
    parser.add_argument("taskset", help="id of an installed package, or a module")
    parser.add_argument("path", type=Path, help="file of rows to write")
    parser.add_argument("--count", type=int, help="tasks; without it, all")
    parser.add_argument("--config", type=json.loads, default={}, help="further settings, as JSON")
    arguments = parser.parse_args()
    write_rows(arguments.taskset, arguments.path, count=arguments.count, config=arguments.config)


if __name__ == "__main__":
    main()
