"""Seconds of a call: the least, for what a device can do, or the mean, for what a run pays."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


def best_of(call: Callable[[], object], device: torch.device, *, least: int = 9) -> float:
    """Least seconds of a call in `least` runs after two to warm up: what other work does not
    disturb."""
    seconds = []
    for number in range(least + 2):
        wait(device)
        started = time.perf_counter()
        call()
        wait(device)
        if number > 1:
            seconds.append(time.perf_counter() - started)
    return min(seconds)


def shared(call: Callable[[], object], device: torch.device, *, seconds: float = 1.5) -> float:
    """Mean seconds of a call that is repeated for so long, after two to warm up.

    Not the least, in which a process has a core to itself: where more processes than cores compute
    at once, each has its share.
    """
    call()
    call()
    wait(device)
    number = 0
    started = time.perf_counter()
    while time.perf_counter() < started + seconds:
        call()
        wait(device)
        number += 1
    return (time.perf_counter() - started) / number


def usual(call: Callable[[], object], device: torch.device, *, times: int = 300) -> float:
    """Mean seconds of a call between computations, as ranks communicate.

    Not the least: where a rank waits, the system wakes it late now and then, and a run pays that.
    """
    left = torch.ones(256, 256, device=device)

    def compute() -> None:
        torch.mm(left, left)
        wait(device)

    def both() -> None:
        compute()
        call()
        wait(device)

    return max(_mean(both, times) - _mean(compute, times), 1e-7)


def _mean(call: Callable[[], object], times: int) -> float:
    for _ in range(3):
        call()
    started = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - started) / times


def wait(device: torch.device) -> None:
    """Until the device is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
