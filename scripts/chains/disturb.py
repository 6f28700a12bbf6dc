"""The disturbances of generation servers, and the fleet of a chain."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from chains.servers import Proxy, ServerProcess, ServerSetup

STOP_SECONDS = 20.0
SLOW_SECONDS = 12.0
START_SECONDS = 240.0


@dataclass
class Member:
    """A server and its proxy."""

    server: ServerProcess
    proxy: Proxy


class ChainFleet:
    """The servers of a chain. The run knows the proxies' addresses alone."""

    def __init__(
        self, setup: ServerSetup, *, num_servers: int, num_joining: int, seed: int
    ) -> None:
        """num_joining: servers that are known to the run, but not started at the beginning."""
        self._random = random.Random(seed)
        self.members: list[Member] = []
        for index in range(num_servers + num_joining):
            server = ServerProcess(setup, index)
            self.members.append(Member(server, Proxy(server.port, seed * 100 + index)))
        for member in self.members[:num_servers]:
            member.server.start()
        self._waiting: list[threading.Thread] = []

    def wait(self) -> None:
        """Wait until all started servers answer."""
        for member in self.members:
            if member.server.is_running:
                member.server.wait(START_SECONDS)

    @property
    def urls(self) -> list[str]:
        """What the run is given."""
        return [member.proxy.url for member in self.members]

    def disturb(self, name: str) -> str:
        """Carry out one disturbance on a random server; return what was done."""
        running = [member for member in self.members if member.server.is_running]
        if name == "join":
            return self._join()
        if not running:
            return f"{name}: no server is running"
        index = self.members.index(self._random.choice(running))
        member = self.members[index]
        DISTURBANCES[name](self, member)
        return f"{name} server {index}"

    def close(self) -> None:
        """End everything."""
        for thread in self._waiting:
            thread.join()
        for member in self.members:
            member.server.kill()
            member.proxy.close()

    def _join(self) -> str:
        """Start a server that is not running, if there is one."""
        for index, member in enumerate(self.members):
            if not member.server.is_running:
                member.server.start()
                return f"join server {index}"
        return "join: all are running"

    def kill(self, member: Member) -> None:
        """SIGKILL; the server starts again some seconds later."""
        member.server.kill()
        self._later(self._random.uniform(1, 6), member.server.start)

    def restart(self, member: Member) -> None:
        """SIGTERM, and start it again at once."""
        member.server.signal(signal.SIGTERM)
        time.sleep(1.0)
        member.server.kill()
        member.server.start()

    def stop(self, member: Member) -> None:
        """SIGSTOP for 20 s."""
        member.server.signal(signal.SIGSTOP)
        self._later(STOP_SECONDS, lambda: member.server.signal(signal.SIGCONT))

    def lie(self, mode: str) -> Callable[[Member], None]:
        """A mode of the proxy for some seconds."""

        def begin(member: Member) -> None:
            member.proxy.mode = mode
            self._later(SLOW_SECONDS, lambda: setattr(member.proxy, "mode", "pass"))

        return begin

    def set_old_weights(self, member: Member) -> None:
        """Let the server believe that it has the weights of an earlier version of this run.

        A second trainer, which knows the key, switches it without sending anything.
        """
        facts = member.server.ask("facts")
        if not facts or facts["weights_version"] < 1:
            return
        member.server.ask("connect", {"transport": "gloo", "facts": [_own_store()], "seconds": 5})
        number = self._random.randrange(1 << 20, 1 << 30)
        if member.server.ask("receive", {"number": number, "messages": [[]]}) is None:
            return
        body = {"number": number, "version": facts["weights_version"] - 1, "verify": False}
        body |= {"epoch": facts["epoch"], "mode": "abort", "seconds": 5}
        member.server.ask("switch", body)

    def _later(self, seconds: float, work: Callable[[], object]) -> None:
        """Do something later, in a thread."""

        def wait_and_work() -> None:
            time.sleep(seconds)
            work()

        thread = threading.Thread(target=wait_and_work, daemon=True)
        thread.start()
        self._waiting.append(thread)


_STORES: list[object] = []


def _own_store() -> dict[str, object]:
    """Facts of a connection that nobody serves, but whose store answers."""
    from spmdflow.serving.transport import GlooSender

    sender = GlooSender("127.0.0.1", seconds=5.0)
    threading.Thread(target=lambda: sender.connect({}), daemon=True).start()
    _STORES.append(sender)
    return sender.facts


DISTURBANCES: dict[str, Callable[[ChainFleet, Member], None]] = {
    "kill": ChainFleet.kill,
    "stop": ChainFleet.stop,
    "restart": ChainFleet.restart,
    "old-weights": ChainFleet.set_old_weights,
    "slow": lambda fleet, member: fleet.lie("slow")(member),
    "half-closed": lambda fleet, member: fleet.lie("half")(member),
    "garbage": lambda fleet, member: fleet.lie("garbage")(member),
}
NAMES = (*DISTURBANCES, "join")
