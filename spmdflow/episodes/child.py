"""The worker process of environments: runs many episodes in one event loop.

Messages are lines of JSON. In: {"functions": [[name, arguments]], "judge": [name, arguments] or
null, "certificate": path or null}, then {"run": number, "seconds": limit, "row": {...}, "base_url":
..., "model": ..., "api_key": ...}, with "judge": true for a call of the judge (judgement.py), or
{"cancel": number}. Out:
{"ready": [file:line]}, {"refused": text} or {"broken": [name, text]}; then for each episode
{"ended": number} with "scores" and "parts" (parts.py), with "failed", or neither if the environment
returned None, and {"forked": number} from a child process that an environment forked and that kept
running the event loop. Imports the user's module and little else: no torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import selectors
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

from spmdflow.envs.client import CERTIFICATE_VARIABLE
from spmdflow.episodes.judgement import load_judge
from spmdflow.episodes.parts import parts_of
from spmdflow.errors import ConfigError
from spmdflow.rewards.child import (
    InvalidScore,
    decode,
    describe,
    encode,
    find_function,
    load_or_report,
    locate_definition,
    open_channel,
    scores_of,
)

Environment = Callable[..., Any]
SETTING = "actor.rollout.episode.environment"
_FORM = "async def episode(row, *, base_url, model, api_key)"
_MOST_LINE_BYTES = 1 << 28  # of one row


_NUMBER: ContextVar[int | None] = ContextVar("episode", default=None)
"""The episode that the running code belongs to."""


def main(socket_fd: int, stack_fd: int) -> None:
    """Runs episodes until the pool's end of the socket is closed.

    Sets up this process first (see `open_channel`). stack_fd: where the stack is written on
    request. A child that an environment forks exits when it would enter the event loop.
    """
    channel = open_channel(socket_fd, stack_fd)
    forks = Forks(channel.fileno())
    with asyncio.Runner(
        loop_factory=lambda: asyncio.SelectorEventLoop(UnsharedSelector(forks))
    ) as runner:
        runner.run(_serve(channel, forks))


class Forks:
    """Ends a child process that an environment forked once it enters the event loop.

    It would share the event loop's descriptors, and end every episode a second time.
    """

    def __init__(self, socket_fd: int) -> None:
        """Registers a hook that remembers which episode forks."""
        self._own_pid = os.getpid()
        self._socket_fd = socket_fd
        self._number: int | None = None
        """The last episode that forked."""
        os.register_at_fork(before=self._remember_episode)

    def _remember_episode(self) -> None:
        self._number = _NUMBER.get()

    def leave_if_forked(self) -> None:
        """Reports the fork to the pool and exits with status 1, if this process is a forked child.

        Does nothing in the original process.
        """
        if os.getpid() == self._own_pid:
            return
        with contextlib.suppress(OSError):
            os.write(self._socket_fd, encode({"forked": self._number}).encode() + b"\n")
        os._exit(1)


class UnsharedSelector(selectors.DefaultSelector):
    """A selector that waits only in the process that created it, not in forked children."""

    def __init__(self, forks: Forks) -> None:
        super().__init__()
        self._forks = forks

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """See BaseSelector.select."""
        self._forks.leave_if_forked()
        return super().select(timeout)


async def _serve(channel: Any, forks: Forks) -> None:
    """Reads messages from the pool and runs an episode for each call, until the socket is closed.

    First loads the environment and sends {"ready": ...}; if that fails, sends the cause and
    returns. Episodes run at the same time, each as a task; {"cancel": number} cancels a running
    one. channel: a socket. It stays blocking until the event loop takes it over.
    """
    reader, writer = await asyncio.open_connection(sock=channel, limit=_MOST_LINE_BYTES)

    def tell(message: Mapping[str, Any]) -> None:
        forks.leave_if_forked()
        writer.write(encode(message).encode() + b"\n")

    request = decode((await reader.readline()).decode())
    functions = load_functions(request, tell)
    if functions is None:
        await writer.drain()
        return
    tell({"ready": [locate_definition(functions.environment)]})
    running: dict[int, asyncio.Task[None]] = {}
    while line := await reader.readline():
        call = decode(line.decode())
        if "cancel" in call:
            if task := running.get(call["cancel"]):
                task.cancel()
            continue
        number = call.pop("run")
        function = functions.of_call(call)
        running[number] = asyncio.create_task(run_episode(function, number, call, tell))
        running[number].add_done_callback(partial(_drop_task, running, number))


def _drop_task(running: dict[int, asyncio.Task[None]], number: int, _: object) -> None:
    running.pop(number)


class EpisodeFunctions(NamedTuple):
    """What the calls of a worker process run."""

    environment: Environment
    judge: Environment | None
    """See `load_judge`. None: there is none."""

    def of_call(self, call: dict[str, Any]) -> Environment:
        """The function that a call runs; removes "judge" from it."""
        if call.pop("judge", False):
            assert self.judge is not None, "the pool calls only a judge that it has named"
            return self.judge
        return self.environment


def load_functions(
    request: Mapping[str, Any], tell: Callable[[dict[str, Any]], None]
) -> EpisodeFunctions | None:
    """Loads the functions that the pool's first message names; None if that failed, which is told.

    Sets the environment variable for the certificate first.
    """
    if request["certificate"] is not None:
        os.environ[CERTIFICATE_VARIABLE] = request["certificate"]
    ((name, arguments),) = request["functions"]
    environment = load_or_report(load_environment, name, arguments, tell)
    if environment is None or request["judge"] is None:
        return environment and EpisodeFunctions(environment, None)
    name, arguments = request["judge"]
    judge = load_or_report(load_judge, name, arguments, tell)
    return judge and EpisodeFunctions(environment, judge)


async def run_episode(
    function: Environment, number: int, call: dict[str, Any], tell: Callable[..., None]
) -> None:
    """Runs one episode, and sends {"ended": number} with its scores or the cause of its failure.

    If the environment returned None, the message has neither. Every exception of the environment is
    a failure, also SystemExit and a cancelled task; so are an invalid score and running longer than
    `seconds`. call: "seconds", "row" and the environment's keyword arguments; "seconds" and "row"
    are removed from it.
    """
    _NUMBER.set(number)
    seconds = call.pop("seconds")
    row = call.pop("row")
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            value = await function(row, **call)
        answer: dict[str, Any] = {}
        if value is not None:
            answer = {"scores": scores_of(value), "parts": parts_of(value)}
    except InvalidScore as err:
        answer = {"failed": str(err)}
    except BaseException as err:  # SystemExit and a cancelled task too
        late = limit.expired() and isinstance(err, TimeoutError)
        what = f"ran longer than actor.rollout.episode.seconds ({seconds:g} s)\n"
        answer = {"failed": what + describe(err) if late else "raised " + describe(err)}
    tell({"ended": number, **answer})


def load_environment(name: str, arguments: Mapping[str, Any] | None = None) -> Environment:
    """Returns the environment of that name, with the keyword arguments in `arguments` bound.

    ConfigError if it is missing, is not a coroutine function, or cannot be called with a row,
    base_url, model, api_key and these arguments. Errors that the user's module raises on import are
    not caught.
    """
    function = find_function(name, SETTING)
    if not inspect.iscoroutinefunction(function):
        raise ConfigError.of(
            SETTING, f"{name!r}, which is not an async function", _FORM, "use async def"
        )
    own = dict(arguments or {})
    try:
        inspect.signature(function).bind({}, base_url="", model="", api_key="", **own)
    except TypeError as err:
        got = f"{name!r} with the parameters {inspect.signature(function)}"
        raise ConfigError.of(SETTING, got, _FORM, f"use these parameters ({err})") from err
    if own:
        return partial(function, **own)
    return function
