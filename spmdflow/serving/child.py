"""The process of a server that a rank has started: reads its options, then runs the server."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys

from spmdflow.serving.start import ServerOptions, serve


def main(socket_fd: int, stack_fd: int) -> None:
    """Read the options from the rank, and run the server; never returns.

    socket_fd: of the socket from which one line with the options as JSON is read. stack_fd: not
    used.
    """
    os.close(stack_fd)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())
    with socket.socket(fileno=socket_fd) as channel, channel.makefile("rb") as file:
        facts = json.loads(file.readline())
    facts["others"] = tuple(facts["others"])
    sys.exit(serve(ServerOptions(**facts)))
