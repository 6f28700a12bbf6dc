"""A terminal for tests: a program runs on it, keys are pressed, and it is closed."""

from __future__ import annotations

import fcntl
import os
import select
import subprocess
import termios
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

CTRL_C = b"\x03"


class Terminal:
    """A pseudo-terminal that controls the session of the program started on it."""

    def __init__(
        self, command: Sequence[str], *, folder: Path, variables: Mapping[str, str]
    ) -> None:
        self._master, slave = os.openpty()
        self._shown: list[bytes] = []
        self.process = subprocess.Popen(
            command,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            cwd=folder,
            env=variables,
            start_new_session=True,
            preexec_fn=partial(fcntl.ioctl, slave, termios.TIOCSCTTY, 0),
        )
        os.close(slave)
        self._open = threading.Lock()
        threading.Thread(target=self._read, daemon=True).start()

    def press(self, key: bytes) -> None:
        """The kernel makes a signal of it for the foreground processes, as for a user's key."""
        os.write(self._master, key)

    def close(self) -> None:
        """Hang up, as a closed window or a lost connection does."""
        with self._open:
            if self._master >= 0:
                os.close(self._master)
            self._master = -1

    def text(self) -> str:
        """What has been shown."""
        return b"".join(self._shown).decode(errors="replace")

    def _read(self) -> None:
        while True:
            with self._open:
                if self._master < 0:
                    return
                ready, _, _ = select.select([self._master], [], [], 0.02)
                if ready:
                    try:
                        self._shown.append(os.read(self._master, 4096))
                    except OSError:  # nobody has the other end any more
                        return
