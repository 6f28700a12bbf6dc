"""The worker process: reads chunks of samples, calls the functions and sends each result.

Messages are lines of JSON. In: {"functions": [[name, arguments], ...], "seconds": limit of a call,
"retries": number, "concurrency": number}, then chunks [[[function numbers], prompt, response, row],
...]. Out: {"concurrent": true} if a function is an `async def`; {"ready": [file:line, ...]},
{"refused": text} or {"broken": [name, text]}; then for each function of each sample
{"scores": {...}} or {"failed": text}, {"batch": true} before a call for many samples, and
{"forked": number} from a child that the function forked and that returned from it. It imports the
user's modules and little else, in particular no torch.

`load_function` finds a function by "path/file.py:name" or "module:name" and imports its module.
`scores_of` converts its result to numbers.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import importlib
import importlib.util
import inspect
import json
import math
import os
import resource
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from numbers import Real
from pathlib import Path
from types import FrameType, ModuleType, TracebackType
from typing import Any

from spmdflow.errors import ConfigError
from spmdflow.rewards.calling import CallLimits, Concurrent, RewardCaller, chunk_answers, is_async
from spmdflow.source_file import import_file

RewardFunction = Callable[[str, str, dict[str, Any]], Any]
_FORM = '"path/file.py:name" or "module:name"'
_TRACEBACK_LETTERS = 4000
_MEMORY_SHARE = 0.5  # of the node's memory: a function that needs more gets a MemoryError
_OUR_MODULES = (
    __name__,
    "importlib",
    "spmdflow.source_file",
    "spmdflow.rewards.calling",
    "spmdflow.episodes.child",
    "spmdflow.episodes.isolated",
)
# bound before the user's code is imported, which may replace json.dumps and json.loads
encode = json.JSONEncoder().encode
decode = json.JSONDecoder().decode


def main(socket_fd: int, stack_fd: int) -> None:
    """Load the functions, then score samples until the pool's end of the socket is closed.

    Answers each function of each sample with one message. Returns early if a function cannot be
    loaded. A child that a function forked, and that returns, reports itself and exits with status
    1.
    """
    channel = open_channel(socket_fd, stack_fd)
    lines = channel.makefile("rb")
    request = decode(lines.readline().decode())
    functions = _load_functions(request["functions"], channel)
    if functions is None:
        return
    limits = CallLimits(request["seconds"], request["retries"], request["concurrency"])
    callers = [RewardCaller(function, _answer_of, describe, limits) for function in functions]
    own_pid = os.getpid()

    def send_answer(number: int, answer: dict[str, Any]) -> None:
        """Send the answer of a function, or report a child that it forked, and that returned."""
        if os.getpid() != own_pid:
            _send(channel, {"forked": number})
            os._exit(1)
        _send(channel, answer)

    chunks = (decode(line.decode()) for line in lines)
    if any(caller.is_async for caller in callers):
        asyncio.run(Concurrent(callers, limits, send_answer).serve(chunks))
        return
    for chunk in chunks:
        for number, answer in chunk_answers(
            callers, chunk, partial(_send, channel, {"batch": True})
        ):
            send_answer(number, answer)


def open_channel(socket_fd: int, stack_fd: int) -> socket.socket:
    """Prepare this process: signals, stack dumps, memory limit, line-buffered output.

    Then send {"worker": pid} to the pool and return the socket, which children do not inherit. The
    keeper ends this process when the pool's process ends.
    """
    set_up_signals()
    _show_stacks(stack_fd)
    _limit_memory()
    # write whole lines; with PYTHONUNBUFFERED each piece of a line would be a separate write
    sys.stdout.reconfigure(line_buffering=True, write_through=False)  # type: ignore[union-attr]
    os.set_inheritable(socket_fd, False)
    channel = socket.socket(fileno=socket_fd)
    _send(channel, {"worker": os.getpid()})
    return channel


def set_up_signals() -> None:
    """Ignore SIGTERM and SIGINT in this process, and unblock all signals.

    A batch system may signal every process of a job and let the ranks save a checkpoint; this
    process must go on serving meanwhile. Children of the function can be terminated: exec drops the
    handler, and after a fork it restores the default. The mask is unblocked because a rank's is
    inherited.
    """
    own_pid = os.getpid()

    def ignore_in_worker(number: int, frame: FrameType | None) -> None:
        if os.getpid() != own_pid:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    signal.signal(signal.SIGTERM, ignore_in_worker)
    signal.signal(signal.SIGINT, ignore_in_worker)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _show_stacks(stack_fd: int) -> None:
    """Write the stack of the main thread to the pool on SIGUSR1 and on a crash.

    faulthandler writes from C, so it also shows a function that never releases the GIL.
    """
    os.set_inheritable(stack_fd, False)
    faulthandler.register(signal.SIGUSR1, file=stack_fd, all_threads=False)
    faulthandler.enable(file=stack_fd, all_threads=False)


def _limit_memory() -> None:
    """Limit this process's data to half of the node's memory; beyond it, MemoryError.

    A lower limit that is set already stays. Also makes the OOM killer pick this process before
    ranks, if /proc may be written.
    """
    limit = int(_MEMORY_SHARE * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limits = []
    for each in (limit, soft, hard):
        if each != resource.RLIM_INFINITY:
            limits.append(each)
    resource.setrlimit(resource.RLIMIT_DATA, (min(limits), hard))
    with contextlib.suppress(OSError):  # a /proc that may not be written
        Path("/proc/self/oom_score_adj").write_text("1000")


def _load_functions(
    wanted: list[tuple[str, dict[str, Any]]], channel: socket.socket
) -> list[RewardFunction] | None:
    """Load the functions in order and send {"ready": [file:line of each]} to the pool.

    If one is an `async def`, {"concurrent": true} is sent first. If one cannot be loaded, the cause
    is sent instead, and None is returned.
    """
    functions = []
    for name, arguments in wanted:
        function = load_or_report(load_function, name, arguments, partial(_send, channel))
        if function is None:
            return None
        functions.append(function)
    if any(map(is_async, functions)):
        _send(channel, {"concurrent": True})
    _send(channel, {"ready": [locate_definition(function) for function in functions]})
    return functions


def load_or_report(
    load: Callable[..., Callable[..., Any]],
    name: str,
    arguments: Mapping[str, Any],
    send: Callable[[dict[str, Any]], None],
) -> Callable[..., Any] | None:
    """Return load(name, arguments); if that raises, send the cause and return None.

    The cause is {"refused": text} for a ConfigError, otherwise {"broken": [name, text]}. Puts the
    folder of a file "path/file.py:name" at the front of sys.path first.
    """
    source = name.rpartition(":")[0]
    if source.endswith(".py"):
        sys.path.insert(0, str(Path(source).resolve().parent))  # as if it were a script
    function, error = _call_catching_errors(load, name, arguments)
    if error is not None:
        refused = isinstance(error, ConfigError)
        send({"refused": str(error)} if refused else {"broken": [name, describe(error)]})
    loaded: Callable[..., Any] | None = function
    return loaded


def _answer_of(value: Any) -> dict[str, Any]:
    """Return {"scores": ...} for what a function returned, or {"failed": why} if it is no score."""
    try:
        return {"scores": scores_of(value)}
    except InvalidScore as err:
        return {"failed": str(err)}


def _call_catching_errors(
    call: Callable[..., Any], *arguments: Any
) -> tuple[Any, BaseException | None]:
    """Call the user's code; return (result, None) or (None, the exception).

    Any exception is caught, even SystemExit and KeyboardInterrupt.
    """
    try:
        return call(*arguments), None
    except BaseException as err:
        return None, err


def describe(err: BaseException) -> str:
    """Return "TYPE: message" of an error, followed by its traceback from the user's first frame.

    The message is the first line of the error's text, of at most 4000 characters. The traceback is
    cut to its last 4000.
    """
    frame = err.__traceback__
    while frame is not None and _is_own_frame(frame):
        frame = frame.tb_next
    text = "".join(traceback.format_exception(type(err), err, frame))
    first, *_ = str(err).splitlines() or [""]
    first = first[:_TRACEBACK_LETTERS]
    line = f"{type(err).__name__}: {first}" if first else type(err).__name__
    return f"{line}\n{text[-_TRACEBACK_LETTERS:]}"


def _is_own_frame(frame: TracebackType) -> bool:
    module = frame.tb_frame.f_globals.get("__name__", "")
    return module in _OUR_MODULES or module.startswith("importlib.")


def _send(channel: socket.socket, message: dict[str, Any]) -> None:
    channel.sendall(encode(message).encode() + b"\n")


def load_function(name: str, arguments: Mapping[str, Any] | None = None) -> RewardFunction:
    """Return the function that `name` names, with its keyword arguments bound.

    Raises ConfigError if it is missing or cannot be called with (prompt, response, row) and these
    arguments. Exceptions of the user's module during its import are not caught.
    """
    function = find_function(name)
    _check_call(name, function, arguments or {})
    if arguments:
        return partial(function, **arguments)
    return function


def find_function(name: str, key: str = "reward.function") -> Callable[..., Any]:
    """Import "path/file.py:name" or "module:name" and return the callable.

    ConfigError, with the setting `key`, if the name has another form or there is no such callable.
    """
    source, colon, attribute = name.rpartition(":")
    if not (source and colon and attribute):
        do = "name the file or module and, after a colon, the function"
        raise ConfigError.of(key, repr(name), _FORM, do)
    is_file = source.endswith(".py")
    if is_file:
        module = _import_file(name, Path(source), key)
    else:
        module = _import_module(name, source, key)
    return _look_up_function(name, module, attribute, key)


def locate_definition(function: RewardFunction) -> str:
    """Return FILE:LINE where a function is defined, behind partials and decorators.

    "" for a builtin or other code that is not Python.
    """
    while isinstance(function, partial):
        function = function.func
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code:
        return f"{code.co_filename}:{code.co_firstlineno}"
    return ""


def _import_file(name: str, path: Path, key: str) -> ModuleType:
    """Import a file as the module spmdflow_reward_<file name>; ConfigError if it is missing.

    If that module has been imported from the same file, it is returned. The module is registered in
    sys.modules before it runs.
    """
    if not path.is_file():
        got = f"{name!r}, but there is no file {path} in {Path.cwd()}"
        raise ConfigError.of(key, got, _FORM, "correct the path")
    module_name = f"spmdflow_reward_{path.stem}"
    known = sys.modules.get(module_name)
    if known is not None and known.__file__ == str(path.resolve()):
        return known  # another function of the same file
    return import_file(module_name, path.resolve())


def _import_module(name: str, source: str, key: str) -> ModuleType:
    """Import a module by name; ConfigError if it, or a package above it, is missing.

    If the module exists but lacks one that it imports itself, that ModuleNotFoundError passes
    through.
    """
    try:
        return importlib.import_module(source)
    except ModuleNotFoundError as err:
        if err.name is None or not (source + ".").startswith(err.name + "."):
            raise  # the module exists, but a module that it imports is missing
        got = f"{name!r}, but there is no module {err.name!r}"
        do = "correct the name"
        do += ", or name the file instead"
        raise ConfigError.of(key, got, _FORM, do) from err


def _look_up_function(name: str, module: ModuleType, attribute: str, key: str) -> Any:
    """Return the callable of a dotted name in a module.

    ConfigError if it is missing or no callable; the message lists the functions defined there.
    """
    function: Any = module
    for part in attribute.split("."):
        function = getattr(function, part, None)
    if callable(function):
        return function
    names = sorted(
        member
        for member, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__
    )
    kind = "nothing of that name" if function is None else type(function).__name__
    got = f"{name!r}, but {attribute!r} is {kind}"
    do = "choose one of the module's: "
    do += ", ".join(names) or "it has none"
    raise ConfigError.of(key, got, "a function", do)


def _check_call(name: str, function: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """Raise ConfigError if (prompt, response, row), or the three as lists, do not fit.

    arguments: keyword arguments that are passed too. A builtin without a signature passes.
    """
    form = "fn(prompt, response, row) -> float | dict"
    try:
        signature = inspect.signature(function)
    except ValueError:  # a builtin without a signature: its first call shows whether it fits
        return
    try:
        signature.bind("", "", {}, **arguments)
    except TypeError as err:
        got = f"{name!r} with the parameters {signature}"
        do = f"give it these{' and its arguments' if arguments else ' three'} ({err})"
        raise ConfigError.of("reward.function", got, form, do) from err


class InvalidScore(ValueError):
    """The function's result is no score. The message completes "the function ..."."""


def scores_of(value: object) -> dict[str, Any]:
    """Convert a function's result to {"score": float, ...}; InvalidScore if that is impossible.

    The result is a finite number, or a dict with a finite "score". Further numbers in a dict must
    be finite too. "answer" becomes text (None: no answer): the final answer, normalised so that
    equal answers are equal texts, for majority voting in evaluations. Other entries are dropped.
    """
    if not isinstance(value, dict):
        return {"score": _read_number("", value)}
    if "score" not in value:
        keys = ", ".join(map(repr, value)) or "no keys"
        raise InvalidScore(f'returned a dict without "score" (it has {keys})')
    numbers: dict[str, Any] = {"score": _read_number("score=", value["score"])}
    for key, entry in value.items():
        if key == "answer":
            numbers[key] = None if entry is None else str(entry)
        elif key != "score" and isinstance(key, str) and isinstance(entry, Real):
            numbers[key] = _read_number(f"{key}=", entry)
    return numbers


def _read_number(label: str, value: object) -> float:
    """Return the value as a float; InvalidScore unless it is a finite real number.

    label: words before the value in the message.
    """
    if not isinstance(value, Real):
        raise InvalidScore(f"returned {label}{_shorten(repr(value))} ({type(value).__name__})")
    try:
        number = float(value)
    except OverflowError as err:
        raise InvalidScore(f"returned {label}a number beyond float") from err
    if not math.isfinite(number):
        raise InvalidScore(f"returned {label}{number}")
    return number


def _shorten(text: str) -> str:
    """Return the text on one line; if longer than 60 characters, its first 57 and "..."."""
    text = " ".join(text.split())
    if len(text) <= 60:
        return text
    return text[:57] + "..."
