"""The worker process of environments: runs many episodes in one event loop.

Messages are lines of JSON. In: {"functions": [[name, arguments]]}, then {"run": number, "seconds":
limit, "row": {...}, "base_url": ..., "model": ..., "api_key": ...} or {"cancel": number}. Out:
{"ready": [file:line]}, {"refused": text} or {"broken": [name, text]}; then for each episode
{"ended": number} with "scores", "failed", or neither if the environment returned None. Imports the
user's module and little else: no torch.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from spmdflow.errors import ConfigError
from spmdflow.rewards.child import (
    BadAnswer,
    describe,
    find_function,
    load_or_tell,
    open_channel,
    place_of,
    scores_of,
)

Environment = Callable[..., Any]
SETTING = "actor.rollout.episode.environment"
_FORM = "async def episode(row, *, base_url, model, api_key)"
_MOST_LINE_BYTES = 1 << 28  # of one row


def main(socket_fd: int, lifeline_fd: int, stack_fd: int) -> None:
    """Serve until the pool's end of the socket is closed."""
    channel = open_channel(socket_fd, lifeline_fd, stack_fd)
    asyncio.run(_serve(channel))


async def _serve(channel: Any) -> None:
    """Any: a socket; it stays blocking until the event loop has it."""
    reader, writer = await asyncio.open_connection(sock=channel, limit=_MOST_LINE_BYTES)

    def tell(message: Mapping[str, Any]) -> None:
        writer.write(json.dumps(message).encode() + b"\n")

    ((name, arguments),) = json.loads(await reader.readline())["functions"]
    function = load_or_tell(load_environment, name, arguments, tell)
    if function is None:
        await writer.drain()
        return
    tell({"ready": [place_of(function)]})
    running: dict[int, asyncio.Task[None]] = {}
    while line := await reader.readline():
        call = json.loads(line)
        if "cancel" in call:
            if task := running.get(call["cancel"]):
                task.cancel()
            continue
        number = call.pop("run")
        running[number] = asyncio.create_task(_run(function, number, call, tell))
        running[number].add_done_callback(partial(_drop, running, number))


def _drop(running: dict[int, asyncio.Task[None]], number: int, _: object) -> None:
    running.pop(number)


async def _run(
    function: Environment, number: int, call: dict[str, Any], tell: Callable[..., None]
) -> None:
    """One episode; whatever the environment does, its end is told."""
    seconds, row = call.pop("seconds"), call.pop("row")
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            value = await function(row, **call)
        answer: dict[str, Any] = {} if value is None else {"scores": scores_of(value)}
    except BadAnswer as err:
        answer = {"failed": str(err)}
    except BaseException as err:  # SystemExit and a cancelled task too
        late = limit.expired() and isinstance(err, TimeoutError)
        what = f"ran longer than actor.rollout.episode.seconds ({seconds:g} s)\n"
        answer = {"failed": what + describe(err) if late else "raised " + describe(err)}
    tell({"ended": number, **answer})


def load_environment(name: str, arguments: Mapping[str, Any] | None = None) -> Environment:
    """The environment of that name, with its keyword arguments bound.

    ConfigError if it is missing, is no coroutine function or cannot be called as episodes are.
    What the user's module raises while it is imported is not caught.
    """
    function = find_function(name, SETTING)
    if not inspect.iscoroutinefunction(function):
        raise ConfigError.of(SETTING, f"{name!r}, no async function", _FORM, "write async def")
    own = dict(arguments or {})
    try:
        inspect.signature(function).bind({}, base_url="", model="", api_key="", **own)
    except TypeError as err:
        got = f"{name!r} with the parameters {inspect.signature(function)}"
        raise ConfigError.of(SETTING, got, _FORM, f"give it these ({err})") from err
    return partial(function, **own) if own else function
