"""`WeightLink`: the script's handle of the way from a policy to a generator on other ranks."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from spmdflow.controller.caller import Caller
from spmdflow.controller.group import WorkerGroup
from spmdflow.errors import ConfigError


class WeightLink:
    """Made by `flow.connect`. `sync` is one call, in call order on both pools."""

    def __init__(self, caller: Caller, policy: WorkerGroup, generator: WorkerGroup) -> None:
        """ConfigError if the two share ranks."""
        both = sorted({*policy.target.layout.ranks} & {*generator.target.layout.ranks})
        if both:
            raise ConfigError(
                f"connect: got ranks {both} in {policy.name} and {generator.name}, expected pools "
                f"without common ranks; set placement=split, or spawn an ActorWorker, which "
                f"generates where it trains"
            )
        self._caller, self._policy, self._generator = caller, policy, generator
        policy.open_weights(peer=asdict(generator.target.layout))
        generator.open_weights(peer=asdict(policy.target.layout))

    def sync(self) -> None:
        """Bring the policy's weights, after its earlier calls, to the generator's later ones."""
        methods = ((self._policy, "send_weights"), (self._generator, "receive_weights"))
        commands = {
            rank: self._command(group, method)
            for group, method in methods
            for rank in group.target.layout.ranks
        }
        label, ranks = (
            f"{self._generator.name}.receive_weights",
            self._generator.target.layout.ranks,
        )
        self._caller.submit(label, commands, answering=ranks)

    def _command(self, group: WorkerGroup, method: str) -> dict[str, Any]:
        head = {"operation": "call", "group": group.name, "method": method}
        return head | {"step": self._caller.step, "arguments": {}}
