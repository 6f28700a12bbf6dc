"""A generation server in a process of its own, and a proxy in front of it that can disturb."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
_CHUNK = 1 << 16
_END_SECONDS = 20.0


@dataclass(frozen=True)
class ServerSetup:
    """What all servers of a chain have in common."""

    model: str
    key_file: Path
    folder: Path
    is_exact: bool


class ServerProcess:
    """A vLLM server (`spmdflow serve`) on a port of its own, with all its processes in a group."""

    def __init__(self, setup: ServerSetup, index: int) -> None:
        self._setup = setup
        self._index = index
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self._popen: subprocess.Popen[bytes] | None = None
        self.num_starts = 0

    @property
    def is_running(self) -> bool:
        """Whether its first process runs."""
        return self._popen is not None and self._popen.poll() is None

    def start(self) -> None:
        """Start it; returns at once."""
        setup = self._setup
        words = ["serve", setup.model, "--port", str(self.port), "--key-file", str(setup.key_file)]
        words += ["--dtype", "float32", "--kv-cache-memory-bytes", str(1 << 24)]
        words += ["--max-batch-size", "1" if setup.is_exact else "16"]
        variables = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
        self.num_starts += 1
        with (setup.folder / f"server-{self._index}.log").open("ab") as log:
            self._popen = subprocess.Popen(
                [sys.executable, "-m", "spmdflow", *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | variables | {"PYTHONPATH": str(ROOT)},
                start_new_session=True,
            )

    def signal(self, number: int) -> None:
        """Send a signal to all its processes."""
        if self._popen is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._popen.pid, number)

    def kill(self) -> None:
        """End all its processes with SIGKILL, and wait for the first."""
        self.signal(signal.SIGKILL)
        if self._popen is not None:
            self._popen.wait(_END_SECONDS)

    def ask(self, route: str, body: dict[str, Any] | None = None) -> dict[str, Any] | None:
        """Make a request to it, past the proxy; None if it does not answer."""
        key = self._setup.key_file.read_text(encoding="ascii").strip()
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        url = f"http://127.0.0.1:{self.port}/spmdflow/{route}"
        request = urllib.request.Request(url, data=data, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                value: dict[str, Any] = json.loads(answer.read())
                return value
        except (OSError, ValueError):
            return None

    def wait(self, seconds: float) -> None:
        """Wait until it answers. TimeoutError if it does not within the limit."""
        end = time.monotonic() + seconds
        while self.ask("facts") is None:
            if time.monotonic() > end or not self.is_running:
                raise TimeoutError(f"server {self._index} does not answer; see its log")
            time.sleep(0.5)


class Proxy:
    """A TCP proxy in front of a server: passes bytes on, or disturbs them. In a thread."""

    def __init__(self, target_port: int, seed: int) -> None:
        """target_port: on this host."""
        self.mode = "pass"
        """pass; slow: each piece of an answer comes late; half: after a while an answer stops and
        its connection stays open; garbage: answers are noise."""
        self._random = random.Random(seed)
        self._target_port = target_port
        self._loop = asyncio.new_event_loop()
        self._connections: set[asyncio.StreamWriter] = set()
        self.port = 0
        ready = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(ready,), daemon=True)
        self._thread.start()
        ready.wait()

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.port}"

    def close(self) -> None:
        """End it."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self, ready: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(
            asyncio.start_server(self._serve, "127.0.0.1", 0, limit=_CHUNK)
        )
        self.port = server.sockets[0].getsockname()[1]
        ready.set()
        self._loop.run_forever()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        server.close()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection."""
        try:
            upstream = await asyncio.open_connection("127.0.0.1", self._target_port)
        except OSError:
            writer.close()
            return
        forth = asyncio.create_task(self._pass(reader, upstream[1], disturbs=False))
        back = asyncio.create_task(self._pass(upstream[0], writer, disturbs=True))
        await asyncio.wait((forth, back), return_when=asyncio.FIRST_COMPLETED)
        for task in (forth, back):
            task.cancel()
        await asyncio.gather(forth, back, return_exceptions=True)
        for each in (writer, upstream[1]):
            each.close()

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, disturbs: bool
    ) -> None:
        """Pass bytes on until the connection ends, as the mode says."""
        while data := await reader.read(_CHUNK):
            mode = self.mode if disturbs else "pass"
            if mode == "slow":
                await asyncio.sleep(self._random.uniform(1.0, 4.0))
            if mode == "half":
                writer.write(data[: len(data) // 2])
                await writer.drain()
                await asyncio.sleep(3600)
            if mode == "garbage":
                data = self._noise(data)
            writer.write(data)
            await writer.drain()

    def _noise(self, data: bytes) -> bytes:
        """Bytes that look like an answer at first, or not at all."""
        kind = self._random.randrange(4)
        if kind == 0:
            return self._random.randbytes(len(data))
        if kind == 1:
            return data.replace(b'"token_ids":[', b'"token_ids":[99999999,')
        if kind == 2:
            return data.replace(b'"logprob":-', b'"logprob":')
        return data.replace(b"{", b"[[[[", 1)
