"""What a rank sets in its own process: streams, limits and priority. Knows no messages."""

from __future__ import annotations

import contextlib
import os
import resource
import sys
import threading

_LOWEST_PRIORITY = 19


def open_closed_streams() -> None:
    """Open /dev/null as each of stdin, stdout and stderr that this process was started without.

    Such a stream is recognised by None in `sys`. Sets sys.stdin and so on, and opens descriptors 0
    to 2 so that child processes inherit them. Otherwise the next file or socket would get the
    number of the closed descriptor.
    """
    missing = []
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            missing.append((number, name))
    for number, _ in missing:
        if not _is_open(number):
            null = os.open(os.devnull, os.O_RDWR)  # the lowest number, so mostly this one
            os.dup2(null, number)
            os.set_inheritable(number, True)
            if null != number:
                os.close(null)
    for number, name in missing:
        setattr(sys, name, open(os.devnull, "w" if number else "r"))  # noqa: SIM115


def _is_open(descriptor: int) -> bool:
    """Return whether this process has an open descriptor with this number."""
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def allow_open_files() -> None:
    """Raise the limit on open descriptors to the hard limit.

    A controller needs several for each rank, and the usual limit is 1,024.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def give_way() -> None:
    """Give this thread, and the threads it starts, the lowest CPU priority."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
