"""When a run ends before its last step: at run.max_seconds, or because a signal asked it to.

Both need a checkpoint in time, so both count with what was measured: the longest of the last steps
and the longest save. Knows no transport.
"""

from __future__ import annotations

import time
from collections import deque
from math import inf

_NOTICE_SECONDS = 2.0
"""The session may know so late that it was asked to end."""
_CLOSING_SECONDS = 10.0
"""For what comes after the last checkpoint: models are closed, prediction.txt is written."""
_NUM_STEPS = 10


class Ending:
    """Whether there is time for what comes next. Times are in seconds."""

    def __init__(self, max_seconds: float | None, *, age: float, shutdown: float = inf) -> None:
        """max_seconds: limit of a launch, of which `age` are over.

        shutdown: how long torchrun waits for ranks that are to end before it kills them; infinite
        where there is none.
        """
        now = time.monotonic()
        self._grace = max(0.0, shutdown - _NOTICE_SECONDS)
        self._limit = float("inf") if max_seconds is None else now - age + max_seconds
        self._steps = deque[float](maxlen=_NUM_STEPS)
        self._longest_step = 0.0
        self._began = now
        self._kill_at = float("inf")
        self.save_seconds = 0.0
        """Of the longest save, until it was sealed; 0: none was measured."""

    def begin_step(self) -> None:
        """A step begins."""
        self._began = time.monotonic()

    def end_step(self) -> None:
        """The step that began ends."""
        self._steps.append(time.monotonic() - self._began)
        self._longest_step = max(self._steps)

    def is_due(self) -> bool:
        """Return whether another step and its checkpoint might end after the limit.

        They are expected to take 1.25 times (longest of the last 10 steps + longest save), plus 10
        s to close. A save that was never measured counts as long as a step.
        """
        needed = self._longest_step + (self.save_seconds or self._longest_step)
        return time.monotonic() + 1.25 * needed + _CLOSING_SECONDS > self._limit

    def ask(self) -> str:
        """Note that the run was asked to end now; return a sentence on what will happen.

        May be called in any thread. From now on `can_save` counts the time until torchrun kills the
        ranks. The sentence promises a checkpoint if the rest of the running step, as long as the
        longest of the last 10, and the longest save end before that.
        """
        now = time.monotonic()
        self._kill_at = now + self._grace
        step = max(0.0, self._began + self._longest_step - now)
        needed = f"this step needs about {step:.0f} s more, saving {self.save_seconds:.0f} s"
        if step + self.save_seconds <= self._grace:
            return f"saving after this step and stopping ({needed})"
        return (
            f"{needed}, but torchrun kills all ranks in {self._grace:.0f} s: unless they are "
            f"faster, the next start continues from the last checkpoint; torchrun "
            f"--shutdown-timeout SECONDS gives more time"
        )

    def can_save(self) -> bool:
        """Whether a save that begins now ends before the ranks are killed."""
        return time.monotonic() + self.save_seconds <= self._kill_at
