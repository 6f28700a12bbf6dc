"""`RolloutQueue`: prompts are begun steps before they are learnt from, and trained in their order.

The batch of step s is begun when s - 1 - k updates are done, never earlier: no token that step s
learns from is older than k = max_staleness versions, however long it takes. Every row that is begun
is trained, oldest first, so long rows are as frequent among those trained as among those drawn. Row
numbers only; the tokens stay on the generator's ranks (models/ahead.py).

With k = 0 a batch is begun by the weights that learn from it and nothing else is under way. Script
thread.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from typing import Any

from spmdflow.controller.batch import Batch
from spmdflow.controller.caller import Caller
from spmdflow.controller.group import WeightLink
from spmdflow.controller.prompts import PromptStream
from spmdflow.errors import ProtocolError

logger = logging.getLogger(__name__)


class RolloutQueue(Iterator[Batch]):
    """`next(queue)` is the batch of a step, with the responses; the generator goes on with others.

    The batch is lazy. Its columns are those of `generate_sequences`, or of `run_episodes` if the
    generator's settings have an environment, and token_versions.
    """

    def __init__(
        self, prompts: PromptStream, link: WeightLink, caller: Caller, *, max_staleness: int
    ) -> None:
        """caller: knows the running step and the last one, beyond which nothing is begun."""
        if isinstance(max_staleness, bool) or not max_staleness >= 0:
            got = f"max_staleness={max_staleness!r}"
            do = "write max_staleness=cfg.max_staleness"
            raise ProtocolError.of("flow.queue", got, "a number of versions (0: none)", do)
        self._prompts = prompts
        self._link = link
        self._caller = caller
        self._max_staleness = max_staleness
        self._ahead: deque[Batch] = deque()
        """Prompts of the steps to come, in their order."""
        self._begun: deque[int] = deque()
        """Versions by which the first of them were begun."""
        rollout = getattr(link.generator.target.settings, "rollout", None)
        self._plays = getattr(rollout, "episode", None) is not None
        link.generator.open_queue()

    def __next__(self) -> Batch:
        self._link.refresh()
        left = self._caller.last_step - self._caller.step
        wanted = 1 + min(self._max_staleness, left)
        while len(self._ahead) < wanted:
            self._ahead.append(next(self._prompts))
        generator = self._link.generator
        plays = self._plays
        begin = generator.begin_episodes if plays else generator.begin_sequences
        for place in range(len(self._begun), wanted):
            begin(self._ahead[place], step=self._caller.step + place)
            self._begun.append(self._link.version)
        age = self._link.version - self._begun.popleft()
        if age > self._max_staleness:
            got = f"weights {age} versions newer than those that began a step's rows"
            expected = f"at most max_staleness={self._max_staleness}"
            do = "call next(queue) in every step, and sync() once after its updates"
            raise ProtocolError.of("flow.queue", got, expected, do)
        finish = generator.finish_episodes if plays else generator.finish_sequences
        made: Batch = finish(self._ahead.popleft(), version=self._link.version)
        if self._begun:
            self._link.go_on()
        return made

    def state_dict(self) -> dict[str, Any]:
        """The prompts of the steps to come, which are drawn already.

        begun: the versions by which the first of them were begun.
        """
        ahead = []
        for batch in self._ahead:
            ahead.append(self._prompts.describe(batch))
        return {
            "ahead": ahead,
            "version": self._link.next_version,
            "begun": list(self._begun),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Begin again what was under way.

        Warns of tokens that are older than max_staleness allows, as it was larger before.
        """
        self._ahead = deque(self._prompts.restore(batch) for batch in state["ahead"])
        self._begun.clear()
        self._link.version = int(state["version"])
        ages = []
        for place, version in enumerate(state.get("begun", ())):
            ages.append(self._link.version + place - version)
        too_old = []
        for place, age in enumerate(ages):
            if age > self._max_staleness:
                too_old.append(place)
        if too_old:
            logger.warning(
                "warning: the checkpoint holds responses that were begun under a larger "
                "max_staleness: in the next %s steps their oldest tokens are up to %s versions "
                "old; max_staleness=%s holds after these steps",
                too_old[-1] + 1,
                max(ages),
                self._max_staleness,
            )
