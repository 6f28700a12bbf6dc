"""Resource pools and worker groups: where a model runs, and how the script calls it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from spmdflow.controller.assignment import Target
from spmdflow.controller.batch import Batch
from spmdflow.controller.caller import Caller
from spmdflow.controller.planning import Method, too_many
from spmdflow.controller.result import Result
from spmdflow.errors import ConfigError, ProtocolError
from spmdflow.runtime.call import Call, Replies
from spmdflow.runtime.executor import COMPUTE, TRANSFER
from spmdflow.transfer.protocol import protocol
from spmdflow.worker_api.register import method_spec
from spmdflow.worker_api.worker import Worker


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
        self._caller = caller
        self.target = target
        self._methods: dict[str, Method] = {}
        """Those that were called, by name."""

    @property
    def name(self) -> str:
        """Name of the group, such as "actor"."""
        return self.target.name

    def __getattr__(self, method: str) -> Callable[..., Any]:
        """A registered method as a function; ProtocolError for one that is not registered."""
        if method.startswith("_"):
            raise AttributeError(method)
        if method not in self._methods:
            spec = method_spec(self.target.worker_class, method)
            spec = spec.with_settings(self.target.settings)
            self._methods[method] = Method(method, spec, protocol(spec.transfer_mode))

        def call(*positional: Any, **arguments: Any) -> Batch | Result:
            """Call the method: a batch (or a list) by position, all other arguments by name.

            Returns a lazy answer. ProtocolError for more than one argument by position, or if that
            is neither a Batch nor a list.
            """
            if len(positional) > 1:
                function = getattr(self.target.worker_class, method)
                raise too_many(f"{self.name}.{method}", function, positional)
            batch = arguments.pop("batch", None) if not positional else positional[0]
            if batch is not None and not isinstance(batch, Batch | list):
                raise ProtocolError(
                    f"{self.name}.{method}: got {type(batch).__name__} first, expected a Batch "
                    f"(or a list, one item for each rank); pass plain values by name"
                )
            return self._caller.invoke(self.target, self._methods[method], batch, arguments)

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
        self._caller = caller
        self._policy = policy
        self.generator = generator
        self.version = 0
        """Of the generator's weights: how often they were other ones than before."""
        self._synced: int | None = None
        """Updates that the generator's weights have seen; None: not synced in this launch."""
        self._turn = 0
        self.ranks = frozenset(generator.target.layout.ranks)
        """Those of the generator."""
        policy.open_weights(peer=asdict(generator.target.layout))
        generator.open_weights(peer=asdict(policy.target.layout))

    def sync(self) -> None:
        """Copy the weights after the policy's earlier calls, for the generator's later calls.

        Sends one command to every rank of both, and does not wait. First halts the generation that
        `go_on` began. `version` grows by one if the policy was updated since the last sync.
        """
        self.halt()
        self.version = self.next_version
        self._synced = self._caller.num_updates[self._policy.name]
        ends: tuple[tuple[WorkerGroup, str, dict[str, int]], ...] = (
            (self._policy, "send_weights", {}),
            (self.generator, "receive_weights", {"version": self.version}),
        )
        head = {"operation": "call", "step": self._caller.step}
        commands = {}
        for group, method, arguments in ends:
            for rank in group.target.layout.ranks:
                commands[rank] = head | {
                    "group": group.name,
                    "method": method,
                    "arguments": arguments,
                }
        label = f"{self.generator.name}.receive_weights"
        self._caller.submit(label, commands, reply_ranks=tuple(commands))

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
        """Have the generator generate for rows of later steps until `halt`.

        Does not wait. Until then its ranks count as busy: a call that they get interrupts them.
        """
        self._turn = self._turn + 1
        self.generator.go_on(turn=self._turn)
        self._caller.ahead.generations.append(self)

    def halt(self) -> None:
        """End `go_on`, if it is running, once the policy has run all calls that were sent before.

        Does not wait. The end of a step needs it, because it waits for every call: otherwise it
        would wait until the generator has finished all rows of later steps.
        """
        self.interrupt(after=self._policy.target.layout.ranks)

    def interrupt(self, *, after: Iterable[int] = ()) -> None:
        """End `go_on`, if it is running, once some ranks have run all calls that were sent before.

        Does not wait. The rows that are generated keep their tokens and their places in the
        generator. after: these ranks; without any, it ends at once. Sends "reach" to their compute
        lanes. When all have replied, sends "halt" to the generator's transfer lanes. The
        generator's ranks no longer count as busy at once.
        """
        caller = self._caller
        if self not in caller.ahead.generations:
            return
        caller.ahead.generations.remove(self)
        halt = self._call_of_turn(self.generator.name, "halt", TRANSFER, self.ranks)
        if not after:
            caller.transport.submit(halt)
            return

        def are_there(_: Replies) -> None:
            caller.transport.submit(halt)

        reach = self._call_of_turn(self._policy.name, "reach", COMPUTE, after)
        caller.transport.submit(reach, are_there)

    def _call_of_turn(self, name: str, operation: str, lane: str, ranks: Iterable[int]) -> Call:
        """Return a call without rows to these ranks, about the turn of `go_on`."""
        caller = self._caller
        command = {"operation": operation, "group": self.generator.name, "turn": self._turn}
        commands = dict.fromkeys(ranks, command)
        label = f"{name}.{operation}"
        limit = caller.transfers.seconds
        return Call(caller.next_number(), lane, label, commands, limit, step=caller.step)
