"""Resource pools and worker groups: where a model runs, and how the script calls it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from spmdflow.controller.assignment import Target
from spmdflow.controller.batch import Batch
from spmdflow.controller.call import too_many
from spmdflow.controller.caller import Caller
from spmdflow.controller.result import Result
from spmdflow.errors import ConfigError, ProtocolError
from spmdflow.transfer.register import method_spec
from spmdflow.transfer.worker import Worker


@dataclass(frozen=True)
class ResourcePool:
    """A set of ranks. Models on one pool take turns; models on different pools overlap."""

    name: str
    ranks: tuple[int, ...]
    _spawn: Callable[..., WorkerGroup] = field(repr=False, compare=False)
    """`Flow.spawn`."""

    def spawn(
        self, worker_class: type[Worker], cfg: Any, *, name: str | None = None
    ) -> WorkerGroup:
        """Build the model on every rank of the pool (paper: `ActorWorker(config, pool)`)."""
        return self._spawn(worker_class, cfg, pool=self, name=name)


class WorkerGroup:
    """The script's handle of a model: registered methods are called as if it were local.

    A method that writes columns returns a lazy `Batch`, any other a lazy `Result`.
    """

    def __init__(self, caller: Caller, target: Target) -> None:
        self._caller, self.target = caller, target

    @property
    def name(self) -> str:
        """Name of the group, such as "actor"."""
        return self.target.name

    def __getattr__(self, method: str) -> Callable[..., Any]:
        if method.startswith("_"):
            raise AttributeError(method)
        method_spec(self.target.worker_class, method)

        def call(*given: Any, **arguments: Any) -> Batch | Result:
            """The method on every rank: a batch (or a list) by position, all else by name."""
            if len(given) > 1:
                function = getattr(self.target.worker_class, method)
                raise too_many(f"{self.name}.{method}", function, given)
            batch = arguments.pop("batch", None) if not given else given[0]
            if batch is not None and not isinstance(batch, Batch | list):
                raise ProtocolError(
                    f"{self.name}.{method}: got {type(batch).__name__} first, expected a Batch "
                    f"(or a list, one item for each rank); pass plain values by name"
                )
            return self._caller.invoke(self.target, method, batch, arguments)

        return call

    def __repr__(self) -> str:
        layout = self.target.layout
        return f"WorkerGroup({self.name} on ranks {layout.ranks})"


class WeightLink:
    """Copies weights between pools; made by `flow.connect`. `sync` keeps call order on both."""

    def __init__(self, caller: Caller, policy: WorkerGroup, generator: WorkerGroup) -> None:
        """ConfigError if the two share ranks."""
        both = sorted({*policy.target.layout.ranks} & {*generator.target.layout.ranks})
        if both:
            got = f"ranks {both} in {policy.name} and {generator.name}"
            do = "set placement=split, or spawn an ActorWorker, which generates where "
            do += "it trains"
            raise ConfigError.of("connect", got, "pools without common ranks", do)
        self._caller, self._policy, self._generator = caller, policy, generator
        policy.open_weights(peer=asdict(generator.target.layout))
        generator.open_weights(peer=asdict(policy.target.layout))

    def sync(self) -> None:
        """Copy the weights after the policy's earlier calls, for the generator's later calls."""
        ends = ((self._policy, "send_weights"), (self._generator, "receive_weights"))
        head = {"operation": "call", "step": self._caller.step, "arguments": {}}
        commands = {
            rank: head | {"group": group.name, "method": method}
            for group, method in ends
            for rank in group.target.layout.ranks
        }
        label = f"{self._generator.name}.receive_weights"
        self._caller.submit(label, commands, answering=tuple(commands))
