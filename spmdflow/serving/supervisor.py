"""`OwnServer`: a server that a rank starts as its child, and starts again whenever it ends.

    rank -> keeper -> spmdflow serve (API process) -> vLLM's engine processes

The keeper (`rewards.keeper`) ends the server and all that it has started when the rank ends,
however that happens. The server's output is in RUN_DIR/servers.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from spmdflow.config.schema import ServerConfig
from spmdflow.errors import ConfigError
from spmdflow.rewards.keeper import BOOT
from spmdflow.serving.start import ServerOptions

logger = logging.getLogger(__name__)

CHILD = "spmdflow.serving.child"
_LOOK_SECONDS = 0.2
_FIRST_PAUSE = 1.0
_MOST_PAUSE = 60.0
_STABLE_SECONDS = 120.0
"""A server that ran for so long begins again with the shortest pause."""
_END_SECONDS = 8.0


def free_port(host: str) -> int:
    """A port that is free now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


class OwnServer:
    """A running server, and the thread that starts it again."""

    def __init__(
        self, options: ServerOptions, *, log_path: Path, variables: Mapping[str, str]
    ) -> None:
        """Start the server. options: its port is 0, and is chosen here. variables: environment of
        the server in addition to this process's."""
        self._options = replace(options, port=free_port(options.host))
        self._log_path = log_path
        self._variables = dict(variables)
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self.num_starts = 0
        self._popen: subprocess.Popen[bytes] | None = None
        self._lifeline = -1
        self._start()
        self._thread = threading.Thread(target=self._watch, name="spmdflow-server", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://{self._options.host}:{self._options.port}"

    def close(self) -> None:
        """End the server and everything that it has started; wait for that, at most 8 s."""
        with self._lock:
            self._closing.set()
            self._end()
        self._thread.join()

    def _watch(self) -> None:
        """Start the server again when it has ended, with pauses that grow; runs in a thread."""
        pause = _FIRST_PAUSE
        began = time.monotonic()
        while not self._closing.wait(_LOOK_SECONDS):
            if self._popen is None or self._popen.poll() is None:
                continue
            status = self._popen.returncode
            if time.monotonic() - began > _STABLE_SECONDS:
                pause = _FIRST_PAUSE
            text = "warning: generation server %s ended with status %d; it starts again (log: %s)"
            logger.warning(text, self.url, status, self._log_path)
            self._closing.wait(pause)
            pause = min(2 * pause, _MOST_PAUSE)
            with self._lock:
                if self._closing.is_set():
                    return
                self._end()
                began = time.monotonic()
                try:
                    self._start()
                except OSError as err:  # no memory or descriptors now: the next round tries again
                    logger.warning("warning: generation server %s: %s", self.url, err)

    def _start(self) -> None:
        """Start the keeper, which starts the server."""
        self.num_starts += 1
        ours, theirs = socket.socketpair()
        watched, lifeline = os.pipe()
        unused, stack = os.pipe()
        environment = {**os.environ, **self._variables}
        environment.pop("SPMDFLOW_SECRET", None)
        path = [entry for entry in sys.path if isinstance(entry, str)]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, path))
        descriptors = (theirs.fileno(), watched, stack)
        self._log_path.parent.mkdir(exist_ok=True)
        try:
            with self._log_path.open("ab") as log:
                self._popen = subprocess.Popen(
                    [sys.executable, "-c", BOOT, json.dumps(path), CHILD, *map(str, descriptors)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=descriptors,
                    env=environment,
                    start_new_session=True,  # torchrun signals the rank's whole group
                )
            ours.sendall(json.dumps(vars(self._options)).encode() + b"\n")
            self._lifeline = lifeline
        except OSError:
            os.close(lifeline)
            raise
        finally:
            for descriptor in (watched, unused, stack):
                os.close(descriptor)
            theirs.close()
            ours.close()

    def _end(self) -> None:
        """End the keeper and so the server, if they run."""
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1
        if self._popen is not None:
            try:
                self._popen.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(self._popen.pid, signal.SIGKILL)
                self._popen.wait()


def device_variables(server: ServerConfig, index: int, device: torch.device) -> dict[str, str]:
    """The environment that shows a server its devices.

    ConfigError if a rank's own device is not enough for its servers, and no others are named.
    """
    if device.type == "cpu":
        return {}
    if server.devices:
        return {"CUDA_VISIBLE_DEVICES": server.devices[index]}
    if server.count * server.tp_size > 1:
        raise ConfigError.of(
            "actor.rollout.server.devices",
            f"none for {server.count} servers of {server.tp_size} devices",
            "the devices of each server, as a rank has one",
            "set actor.rollout.server.devices=['0,1','2,3'], or one server of one device",
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    own = visible.split(",") if visible else []
    number = device.index or 0
    return {"CUDA_VISIBLE_DEVICES": own[number] if number < len(own) else str(number)}
