"""No-op calls through the controller: to real ranks, and to simulated ones up to 1024.

Real: torchrun starts the ranks, each round trip is one order to all of them (script thread to
compute lanes and back). Simulated: one process answers for all ranks, over a TCP connection
each, so that the controller's cost per extra rank can be seen on a small machine.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import zmq

ROOT = Path(__file__).parents[2]
if str(ROOT) not in sys.path:  # started by torchrun, without bench.py
    sys.path.insert(0, str(ROOT))

from spmdflow.data.store import RowCondition  # noqa: E402
from spmdflow.failure.peers import Peers  # noqa: E402
from spmdflow.failure.process import Process  # noqa: E402
from spmdflow.failure.settings import SessionSettings  # noqa: E402
from spmdflow.runtime.call import Call, Transport  # noqa: E402
from spmdflow.runtime.executor import Operation  # noqa: E402
from spmdflow.runtime.io import Io  # noqa: E402
from spmdflow.runtime.wire import RUN_ID_BYTES, Envelopes, Hub, Kind, RankSocket  # noqa: E402

WARM_UP = 300
PAYLOAD = {"operation": "nothing"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `bench.py rpc`."""
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 4], help="real ranks")
    parser.add_argument(
        "--simulated", type=int, nargs="*", default=[4, 64, 256, 1024], help="simulated ranks"
    )
    parser.add_argument("--calls", type=int, default=3000, help="round trips with real ranks")
    parser.add_argument("--busy", action="store_true", help="one more thread computes in rank 0")


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per number of ranks."""
    real = [
        _row("real", ranks, _real(ranks, arguments.calls, busy=arguments.busy))
        for ranks in arguments.ranks
    ]
    simulated = [
        _row("simulated", ranks, _simulated(ranks, max(100, arguments.calls // ranks)))
        for ranks in arguments.simulated
    ]
    for row in simulated[1:]:
        extra = row["ranks"] - simulated[0]["ranks"]
        row["per_extra_rank_ms"] = (row["p50_ms"] - simulated[0]["p50_ms"]) / extra
    return real + simulated


def _row(kind: str, ranks: int, seconds: list[float]) -> dict[str, Any]:
    ordered = sorted(seconds)
    at = {p: ordered[min(len(ordered) - 1, len(ordered) * p // 100)] * 1e3 for p in (50, 95)}
    return {
        "kind": kind,
        "ranks": ranks,
        "calls": len(ordered),
        "p50_ms": at[50],
        "p95_ms": at[95],
        "min_ms": ordered[0] * 1e3,
        "per_extra_rank_ms": None,
    }


def _round_trips(transport: Transport, calls: int) -> list[float]:
    """Seconds of each of `calls` orders to every rank."""
    everywhere = dict.fromkeys(range(transport.world_size), PAYLOAD)
    seconds = []
    for number in range(calls + WARM_UP):
        start = time.perf_counter()
        transport.submit(Call(number, "compute", "bench.nothing", everywhere, 60.0)).result()
        seconds.append(time.perf_counter() - start)
    return seconds[WARM_UP:]


# ---- real ranks


def _real(ranks: int, calls: int, *, busy: bool) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(ranks), __file__, "rank", folder, str(calls)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        subprocess.run(command + ["busy"] * busy, env=environment, check=True)
        return json.loads((Path(folder) / "seconds.json").read_text())


def _rank_main(folder: str, calls: str, *more: str) -> None:
    """One rank under torchrun."""
    import threading

    from torch import distributed as dist

    from spmdflow.runtime.session import run_session

    def main(transport: Transport) -> None:
        if "busy" in more:
            threading.Thread(target=_compute, daemon=True).start()
        seconds = _round_trips(transport, int(calls))
        (Path(folder) / "seconds.json").write_text(json.dumps(seconds))

    dist.init_process_group("gloo")
    ranks = tuple(range(dist.get_world_size()))
    run_session(main, _operations, SessionSettings(run_dir=Path(folder), ranks=ranks))
    dist.destroy_process_group()


def _operations(rank: int, arrival: RowCondition) -> Mapping[str, Operation]:
    return {"nothing": lambda payload, number: {}}


def _compute() -> None:
    """Python that holds the interpreter lock whenever it can."""
    while True:
        sum(range(1000))


# ---- simulated ranks


def _simulated(ranks: int, calls: int) -> list[float]:
    _allow_files()
    run_id = os.urandom(RUN_ID_BYTES)
    hub = Hub(run_id)
    command = [sys.executable, __file__, "endpoints", hub.bind("127.0.0.1"), run_id.hex()]
    process = subprocess.Popen([*command, str(ranks)])
    settings = SessionSettings(run_dir=Path(tempfile.gettempdir()), ranks=tuple(range(ranks)))
    elsewhere = Process(process.pid, 0, "another machine")  # as most of many ranks are
    peers = Peers(dict.fromkeys(range(ranks), elsewhere), own_rank=0)
    io = Io(hub, peers=peers, settings=settings)
    io.thread.start()
    io.met.result()
    seconds = _round_trips(io, calls)
    io.close()
    io.thread.join()
    hub.terminate()
    assert process.wait(30) == 0
    return seconds


def _endpoints_main(address: str, run_id: str, count: str) -> None:
    """Answer for `count` ranks until every one has been told to close."""
    _allow_files()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, 4 * int(count) + 100)
    envelopes = Envelopes(bytes.fromhex(run_id))
    poll = select.epoll()
    endpoints = {}
    for rank in range(int(count)):
        endpoint = RankSocket(address, rank, run_id=bytes.fromhex(run_id), context=context)
        endpoint.send(envelopes.seal(Kind.HELLO))
        endpoints[endpoint.descriptor] = endpoint
        poll.register(endpoint.descriptor, select.EPOLLIN)
    left = set(endpoints)
    while left:
        for descriptor, _ in poll.poll():
            if _answer(endpoints[descriptor], envelopes):
                left.discard(descriptor)
    for endpoint in endpoints.values():
        endpoint.close()
    context.term()


def _answer(endpoint: RankSocket, envelopes: Envelopes) -> bool:
    """Reply to what is there; True if the end was among it."""
    ended = False
    while (data := endpoint.receive()) is not None:
        envelope = envelopes.open(data, 0)
        assert envelope is not None
        kind, body = envelope
        if kind is Kind.COMMAND:
            endpoint.send(envelopes.seal(Kind.REPLY, [body[0], {}, [0.0, 0.0]]))
        elif kind is Kind.CLOSE:
            endpoint.send(envelopes.seal(Kind.BYE))
            ended = True
    return ended


def _allow_files() -> None:
    """A thousand sockets need more than the usual thousand files."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


if __name__ == "__main__":
    {"rank": _rank_main, "endpoints": _endpoints_main}[sys.argv[1]](*sys.argv[2:])
