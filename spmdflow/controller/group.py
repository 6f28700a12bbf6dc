"""Resource pools and worker groups: where a model runs, and how the script calls it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from spmdflow.controller.assignment import Target
from spmdflow.controller.batch import Batch
from spmdflow.controller.call import too_many
from spmdflow.controller.caller import Caller
from spmdflow.controller.result import Result, RowResult
from spmdflow.errors import ConfigError, ProtocolError
from spmdflow.runtime.order import Order, Replies
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
        self._caller, self._policy, self.generator = caller, policy, generator
        self.version = 0
        """Of the generator's weights: how often they were other ones than before."""
        self._synced: int | None = None
        """Updates that the generator's weights have seen; None: not synced in this launch."""
        self._turn = 0
        self.ranks = frozenset(generator.target.layout.ranks)
        """Of the generator."""
        policy.open_weights(peer=asdict(generator.target.layout))
        generator.open_weights(peer=asdict(policy.target.layout))

    def sync(self) -> None:
        """Copy the weights after the policy's earlier calls, for the generator's later calls."""
        self.halt()
        self.version = self.next_version
        self._synced = self._caller.num_updates[self._policy.name]
        ends: tuple[tuple[WorkerGroup, str, dict[str, int]], ...] = (
            (self._policy, "send_weights", {}),
            (self.generator, "receive_weights", {"version": self.version}),
        )
        head = {"operation": "call", "step": self._caller.step}
        commands = {
            rank: head | {"group": group.name, "method": method, "arguments": arguments}
            for group, method, arguments in ends
            for rank in group.target.layout.ranks
        }
        label = f"{self.generator.name}.receive_weights"
        self._caller.submit(label, commands, answering=tuple(commands))

    @property
    def next_version(self) -> int:
        """The version of the policy's weights as they are now."""
        is_new = self._synced not in (None, self._caller.num_updates[self._policy.name])
        return self.version + is_new

    def refresh(self) -> None:
        """Sync unless the generator has the policy's weights."""
        if self._synced is None or self.version != self.next_version:
            self.sync()

    def go_on(self) -> None:
        """Let the generator draw for rows under way until the policy is ready for a sync."""
        if self in self._caller.drawing:
            return
        self._turn += 1
        self.generator.go_on(turn=self._turn)
        self._caller.drawing.append(self)

    def pause(self, made_first: Sequence[RowResult] = ()) -> None:
        """End `go_on`, if it was begun, once these results are made.

        A call on the generator's ranks needs it, as it would wait until all rows under way are
        drawn. made_first: what the call reads; the generator draws until it could begin.
        """
        if self not in self._caller.drawing:
            return
        self._caller.drawing.remove(self)
        transport = self._caller.transport
        halt = self._order(self.generator, "halt", "transfer")

        def halt_once_made() -> None:
            unmade = [result for result in made_first if not result.done]
            if unmade:
                unmade[0].waiting.append(halt_once_made)
            else:
                transport.submit(halt)

        transport.post(halt_once_made)

    def halt(self) -> None:
        """End `go_on`, if it was begun, as soon as the policy has come as far as here.

        The end of a step needs it, as it waits for every call: without it, it would wait until all
        rows under way are drawn.
        """
        if self not in self._caller.drawing:
            return
        self._caller.drawing.remove(self)
        transport = self._caller.transport
        halt = self._order(self.generator, "halt", "transfer")
        reach = self._order(self._policy, "reach", "compute")

        def halt_generator(_: Replies) -> None:
            transport.submit(halt)

        transport.submit(replace(reach, on_done=halt_generator))

    def _order(self, group: WorkerGroup, operation: str, lane: str) -> Order:
        """An order to every rank of a group, about the turn of `go_on` that was begun last."""
        command = {"operation": operation, "group": self.generator.name, "turn": self._turn}
        commands = dict.fromkeys(group.target.layout.ranks, command)
        number, limit = self._caller.next_number(), self._caller.transfers.seconds
        return Order(number, lane, f"{group.name}.{operation}", commands, limit)
