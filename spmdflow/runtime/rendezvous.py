"""How the ranks of one start find one another, and the controller, through torchrun's store.

`own_store` names the part of the store that no other start has touched. torchrun's agent keeps
one store over all attempts of `--max-restarts`, and a store on a fixed port can be reached by
ranks of an earlier start or of a node that came back with another count of restarts. Nothing in
the environment is equal on all ranks of a start and on no other. So rank 0 draws a random name,
and tells it to ranks that ask: each asks with a random number of its own, and must confirm the
name. Requests left in the store by dead ranks are never confirmed. All keys of the run, also of its
process groups, carry the name. Ranks of one node must come from one torchrun: `origin` (its random
folder for error files) tells two of them apart.

`meet`: every rank reads the run's key from RUN_DIR, writes down its process and how it is reached;
the controller binds the interfaces that reach the others, each on a port that the system chooses,
and publishes the addresses with the run's random id. Keys in the store carry the number of the
launch, so that a second launch in one process never reads an old address. Whoever reaches the store
can read and write these; the run's key is not among them. It is random, lies in RUN_DIR while
ranks meet, in a file that only this user can read, and without it no rank and no controller talks
to anybody (runtime/wire.py). SPMDFLOW_SECRET is a second key, for a RUN_DIR that others can read.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import DistError, PrefixStore, Store

from spmdflow.checkpoint.disk import read_key, shared_key
from spmdflow.checkpoint.lock import RunDirLock
from spmdflow.errors import ConfigError, DeadlineError, RunFailed, SpmdflowError
from spmdflow.failure.process import Process, node_identity
from spmdflow.parallel.message import decode, encode
from spmdflow.runtime.wire import LOCAL_ADDRESS, RUN_ID_BYTES, Hub

logger = logging.getLogger(__name__)

_LOOPBACKS = {socket.AF_INET: "127.0.0.1", socket.AF_INET6: "::1"}
"""The loopback address of each family; the first that this node has is used."""
_KEY_SECONDS = 5.0
"""What a network file system may take to show a new file on another node."""


@dataclass(frozen=True)
class SessionSettings:
    """Settings of a session; the same on every rank, except launcher and what is called."""

    run_dir: Path
    """Receives failure.json, failure-rank<k>.json and stacks-rank<k>.txt."""
    ranks: tuple[int, ...]
    """Global ranks that take part, ascending; the controller lives on the first."""
    start_seconds: float = 600.0
    """Limit for all ranks to connect."""
    call_seconds: float | None = None
    """Silence of the controller after which a rank gives up (it limits every call too).

    None: medians of earlier calls limit calls, and the controller may not stay stopped."""
    transfer_seconds: float = 60.0
    """Limit of one released transfer, for the operations that move bytes."""
    heartbeat_seconds: float = 120.0
    """Silence of a rank after which a warning is logged."""
    secret: str | None = None
    """Needed beside the run's key to connect; the same on every rank (SPMDFLOW_SECRET)."""
    launcher: int | None = None
    """Pid of the parent whose end ends this process (failure/launcher.py); None: of its parent."""
    on_met: Callable[[], None] = lambda: None
    """Called by the main thread when all ranks have met."""
    on_claimed: Callable[[RunDirLock], None] = lambda lock: None
    """Given the lock of RUN_DIR, on the controller's rank, before ranks meet."""
    owns_run_dir: Callable[[], bool] = lambda: True
    """Whether RUN_DIR is still the folder of this run: reports are written there only then.
    `run_session` sets it."""
    unwinds: bool = False
    """A failure that leaves every process alive ends the session (RunFailed), not the processes."""
    on_failure: Callable[[RunFailed], None] | None = None
    """Told why, on the controller's rank, before a failure ends the processes."""
    show_failure: Callable[[], None] = lambda: None
    """Called on the controller's rank, or on the next one if that is lost, once a failure has been
    written and the process is about to end."""

    @property
    def controller_rank(self) -> int:
        """The rank on which the script runs."""
        return self.ranks[0]

    @property
    def beat_seconds(self) -> float:
        """Seconds between two heartbeats."""
        return min(5.0, max(0.2, self.heartbeat_seconds / 10))


@dataclass(frozen=True)
class RankInfo:
    """What a rank publishes about itself."""

    process: Process
    host_ip: str | None
    """The address from which it reaches the store; None if that is a loopback address."""
    network: str
    """Node and network namespace: equal where loopback addresses mean the same."""
    has_key: bool = True
    """Whether it has read the run's key in RUN_DIR."""
    key_name: str = ""
    """The file of RUN_DIR in which it looked for that, as the store had it."""


@dataclass(frozen=True)
class Rendezvous:
    """What a rank knows after the rendezvous."""

    run_id: bytes
    address: str
    """Where this rank connects to the controller."""
    controller: Process
    key: bytes
    """What both ends of a connection must know."""
    hub: Hub | None = None
    """The controller's socket, on the controller's rank."""
    processes: Mapping[int, Process] = field(default_factory=dict)
    """Process of every rank, on the controller's rank."""
    lock: RunDirLock | None = None
    """The lock of RUN_DIR, on the controller's rank."""


class StartRefused(ConfigError):
    """A start that every rank of the session, or every rank of a node, refuses alike."""


def meet(
    store: Store, rank: int, settings: SessionSettings, claim: Callable[[], RunDirLock]
) -> Rendezvous:
    """Exchange addresses; every rank of the session calls it. DeadlineError names missing ranks.

    claim: called first on the controller's rank. What it refuses, every rank raises as
    StartRefused.
    """
    members = hashlib.blake2b(repr(settings.ranks).encode(), digest_size=6).hexdigest()
    launch = store.add(f"spmdflow/{members}/launches/{rank}", 1)  # every rank counts its own
    prefix = f"spmdflow/{members}/{launch}"
    store_host = _store_host(store)
    network = f"{node_identity()}/{os.readlink('/proc/self/ns/net')}"
    source_ip = _source_ip(store_host) if store_host else None
    info = RankInfo(Process.of(os.getpid()), source_ip, network)
    if rank == settings.controller_rank:
        return _refusing_everywhere(
            store, prefix, lambda: _claim_and_open(store, prefix, info, settings, store_host, claim)
        )
    _wait(store, {settings.controller_rank: f"{prefix}/key"}, settings.start_seconds)
    key_name = str(_read(store, f"{prefix}/key"))
    key = read_key(settings.run_dir, key_name, seconds=_KEY_SECONDS)
    told = replace(info, has_key=key is not None, key_name=key_name)
    _publish(store, f"{prefix}/info/{rank}", told)
    _wait(store, {settings.controller_rank: f"{prefix}/controller"}, settings.start_seconds)
    run_id, controller, addresses, refusal = _read(store, f"{prefix}/controller")
    if refusal or key is None:
        error = StartRefused if refusal and refusal[0] else RunFailed
        raise error(refusal[1] if refusal else f"start: rank {rank} has no key of this run")
    return Rendezvous(run_id, addresses[info.network], controller, _mix_key(key, settings.secret))


def _refusing_everywhere(store: Store, prefix: str, work: Callable[[], Rendezvous]) -> Rendezvous:
    """work(); what it refuses is also raised by the other ranks, which wait for the controller.

    So is any other error: this process may live on, in a host program, and they would wait for it.
    """
    try:
        return work()
    except ConfigError as err:
        _publish_refusal(store, prefix, StartRefused(str(err)))
        raise StartRefused(str(err)) from err
    except BaseException as err:
        _publish_refusal(store, prefix, err)
        raise


def _publish_refusal(store: Store, prefix: str, err: BaseException) -> None:
    """Tell the other ranks why there is no controller to connect to."""
    text = str(err)
    if not isinstance(err, SpmdflowError):
        text = f"start: the controller's rank failed ({type(err).__name__}: {err}); see its log"
    with contextlib.suppress(DistError):  # of a store that is gone: it is what has failed
        _publish(store, f"{prefix}/key", "")
        refusal = [isinstance(err, StartRefused), text]
        _publish(store, f"{prefix}/controller", [b"", None, {}, refusal])


def _claim_and_open(
    store: Store,
    prefix: str,
    info: RankInfo,
    settings: SessionSettings,
    store_host: str | None,
    claim: Callable[[], RunDirLock],
) -> Rendezvous:
    """Take RUN_DIR, then let the other ranks come."""
    lock = claim()
    return replace(_open_hub(store, prefix, info, settings, store_host), lock=lock)


def _mix_key(key: bytes, secret: str | None) -> bytes:
    """What both ends of a connection must know: the run's key, and SPMDFLOW_SECRET if it is set."""
    return hmac.digest((secret or "").encode(), key, hashlib.sha256)


def _open_hub(
    store: Store, prefix: str, info: RankInfo, settings: SessionSettings, store_host: str | None
) -> Rendezvous:
    """Bind where the others can reach it and publish the addresses."""
    keys = {}
    for rank in settings.ranks[1:]:
        keys[rank] = f"{prefix}/info/{rank}"
    with shared_key(settings.run_dir) as (name, key):
        _publish(store, f"{prefix}/key", name)
        _wait(store, keys, settings.start_seconds)
    others: dict[int, RankInfo] = {rank: _read(store, key) for rank, key in keys.items()}
    _check_shared(settings, replace(info, key_name=name), others)
    run_id = os.urandom(RUN_ID_BYTES)
    key = _mix_key(key, settings.secret)
    hub = Hub(run_id, key=key, most_ranks=len(settings.ranks))
    hosts: dict[str, str] = {}
    for other in others.values():
        if other.network == info.network:
            hosts[other.network] = _loopback()
        elif other.network not in hosts:
            peer = other.host_ip or store_host or socket.gethostname()
            hosts[other.network] = _source_ip(peer) or _own_ip()
    bound = {}
    for host in sorted(set(hosts.values())):
        bound[host] = hub.bind(host)
    addresses = {}
    for network, host in hosts.items():
        addresses[network] = bound[host]
    _publish(store, f"{prefix}/controller", [run_id, info.process, addresses, []])
    logger.info("controller listens on %s", ", ".join(bound.values()) or "no port")
    processes = {settings.controller_rank: info.process}
    processes |= {rank: other.process for rank, other in others.items()}
    return Rendezvous(run_id, LOCAL_ADDRESS, info.process, key, hub, processes)


def _check_shared(settings: SessionSettings, own: RankInfo, others: dict[int, RankInfo]) -> None:
    """ConfigError naming the ranks that do not see RUN_DIR as this process does.

    SpmdflowError if one was told to look for another file: then RUN_DIR is not to blame.
    """
    for rank, other in others.items():
        if other.key_name != own.key_name:
            raise SpmdflowError(
                f"start: rank {rank} was told by torchrun's store to look for {other.key_name!r}, "
                f"expected {own.key_name!r}, the file that rank {settings.controller_rank} wrote; "
                f"somebody else writes into that store: start again, on a network of the job's own"
            )
    node = {}
    for rank, other in others.items():
        node[rank] = other.process.node.rpartition("/")[2]
    blind = []
    for rank, x in others.items():
        if not x.has_key:
            blind.append(f"rank {rank} on node {node[rank]}")
    if blind:
        got = f"{settings.run_dir}, where {', '.join(blind)} cannot read the file that rank "
        got += f"{settings.controller_rank} on node {own.process.node.rpartition('/')[2]} wrote "
        expected = "one folder that every node shares (checkpoints are written into it)"
        do = "set run.dir to a shared folder"
        raise ConfigError.of("run.dir", f"{got}there", expected, do)


def _publish(store: Store, key: str, value: Any) -> None:
    store.set(key, encode(value).hex())


def _read(store: Store, key: str) -> Any:
    return decode(bytes.fromhex(store.get(key).decode("ascii")))


def _wait(store: Store, keys: Mapping[int, str], seconds: float) -> None:
    """Wait for all keys (by rank)."""
    start = time.monotonic()
    if not _arrive(store, list(keys.values()), start + seconds):
        missing = []
        for rank, key in keys.items():
            if not store.check([key]):
                missing.append(rank)
        raise DeadlineError(
            f"start: ranks {missing} did not come within {time.monotonic() - start:.0f} s; "
            f"expected every rank to start the session; see their logs, or raise "
            f"run.start_seconds (now {seconds:g})"
        )


def _arrive(store: Store, keys: list[str], until: float) -> bool:
    """Wait for keys; False on timeout."""
    try:
        if keys:
            store.wait(keys, timedelta(seconds=max(0.001, until - time.monotonic())))
    except DistError:
        return False
    return True


def _store_host(store: Store) -> str | None:
    """Host name of the node behind a store; None for stores without one."""
    while (inner := getattr(store, "underlying_store", None)) is not None:
        store = inner
    return getattr(store, "host", None)


def _source_ip(host: str) -> str | None:
    """This node's address on the route to host (nothing is sent); None if only a loopback."""
    with contextlib.suppress(OSError):
        for family, kind, _, _, target in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with socket.socket(family, kind) as probe, contextlib.suppress(OSError):
                probe.connect(target)
                own = str(probe.getsockname()[0])
                if not own.startswith("127.") and own != "::1":
                    return own
    return None


def _own_ip() -> str:
    """The address that this node's name stands for; all interfaces as the last resort."""
    with contextlib.suppress(OSError):
        return socket.gethostbyname(socket.gethostname())
    return "0.0.0.0"


def _loopback() -> str:
    """The loopback address of this node: 127.0.0.1, or ::1 where only IPv6 has one."""
    for family, address in _LOOPBACKS.items():
        with contextlib.suppress(OSError), socket.socket(family) as probe:
            probe.bind((address, 0))
            return address
    raise ConfigError(
        f"start: this node has no loopback address, expected {' or '.join(_LOOPBACKS.values())} "
        f"for the ranks that share it; run `ip link set lo up`"
    )


_GLOO_ADDRESS_WORDS = ("to a (local) address", "Unable to find address for")
"""What gloo says when it has no address to listen on, in torch 2.13."""


def refusal_without_address(err: RuntimeError, interface: str) -> StartRefused | None:
    """The refusal of a start in which gloo found no address to listen on; None: another error.

    interface: the value of GLOO_SOCKET_IFNAME; empty if it is not set.
    """
    if not any(words in str(err) for words in _GLOO_ADDRESS_WORDS):
        return None
    names = ", ".join(name for _, name in socket.if_nameindex())
    if interface:
        expected = f"an interface of this node with an address ({names})"
        do = "set it to the one that reaches the other ranks, or unset it"
        return StartRefused.of("GLOO_SOCKET_IFNAME", repr(interface), expected, do)
    return StartRefused(
        f"start: gloo found no address of this node to listen on ({err}); set GLOO_SOCKET_IFNAME "
        f"to the interface that reaches the other ranks (this node has {names}; lo serves where "
        f"all ranks are on it), and torchrun's --master-addr to an address of that interface"
    )


_ROOT = "spmdflow/roll-call"
_LOOK_SECONDS = 0.01
"""Between two looks for ranks that ask."""
_MOST_NEW = 1000
"""Entries that one look takes up: whoever reaches the store can write any number as their count."""


@dataclass(frozen=True)
class StartingRank:
    """A rank that asks for the name of the run."""

    rank: int
    node: int
    """Number of its torchrun among those of the job (GROUP_RANK)."""
    origin: str
    """Differs between two torchruns of one node; empty if unknown."""
    nonce: str = field(default_factory=lambda: secrets.token_hex(8))


def own_store(store: Store, me: StartingRank, world_size: int, *, seconds: float) -> Store:
    """The part of store that belongs to the ranks of this start alone; called by all of them.

    DeadlineError names the ranks that did not come in time; ConfigError if ranks of two starts
    meet.
    """
    until = time.monotonic() + seconds
    if me.rank == 0:
        name = secrets.token_hex(8)
        _call_roll(store, me, name, world_size, until)
    else:
        name = _ask(store, me, until)
    return PrefixStore(f"spmdflow/{name}", store)


def _ask(store: Store, me: StartingRank, until: float) -> str:
    """Ask rank 0 for the name, and say that it was heard."""
    _append(store, vars(me))
    answer = f"{_ROOT}/answer/{me.nonce}"
    if not _arrive(store, [answer], until):
        raise DeadlineError(
            f"start: rank {me.rank} got no answer from rank 0, expected one in time; see the log "
            f"of rank 0, or raise run.start_seconds"
        )
    name = store.get(answer).decode()
    _append(store, vars(me) | {"heard": name})
    return name


def _call_roll(store: Store, me: StartingRank, name: str, world_size: int, until: float) -> None:
    """Answer whoever asks until every rank has heard the name."""
    heard = {me.rank: me}
    entries = _entries(store, until)
    while len(heard) < world_size:
        key = next(entries, None)
        if key is None:
            missing = sorted(set(range(world_size)) - set(heard))
            raise DeadlineError(
                f"start: ranks {missing} did not come in time, expected all of {world_size}; see "
                f"their logs, or raise run.start_seconds"
            )
        found = _read_asking(store.get(key), world_size)
        if found is None:
            logger.warning(
                "start: torchrun's store has something under %s that no rank of this run wrote; it "
                "is left out: does another program use that store?",
                key,
            )
            continue
        asking, name_heard = found
        is_stranger = asking.node == me.node and asking.origin != me.origin  # of another torchrun
        if name_heard is None and not is_stranger:
            store.set(f"{_ROOT}/answer/{asking.nonce}", name)
        elif name_heard == name:
            _check_origin(asking, heard)
            heard[asking.rank] = asking


def _entries(store: Store, until: float) -> Iterator[str]:
    """Keys of the list that ranks append to, as they are written, until that time.

    An entry may lack its text for ever: of a rank that was killed while it wrote. So entries behind
    one are not held up.
    """
    awaited: list[str] = []
    num_known = 0
    while time.monotonic() < until:
        num_entries = min(store.add(f"{_ROOT}/count", 0), num_known + _MOST_NEW)
        awaited += [_entry(number) for number in range(num_known + 1, num_entries + 1)]
        num_known = num_entries
        written = [key for key in awaited if store.check([key])]
        awaited = [key for key in awaited if key not in written]
        yield from written
        if not written:
            time.sleep(_LOOK_SECONDS)


def _read_asking(data: bytes, world_size: int) -> tuple[StartingRank, str | None] | None:
    """Who asks, and the name that it has heard; None for what no rank of a run writes."""
    try:
        said = json.loads(data)
        heard = said.pop("heard", None)
        asking = StartingRank(**said)
    except (ValueError, TypeError, AttributeError, LookupError, RecursionError):
        return None
    texts = (asking.origin, asking.nonce, heard or "")
    is_rank = type(asking.rank) is int and 0 <= asking.rank < world_size
    if not is_rank or type(asking.node) is not int or not all(type(x) is str for x in texts):
        return None
    return asking, heard


def _check_origin(new: StartingRank, heard: dict[int, StartingRank]) -> None:
    """ConfigError unless all ranks of a node come from one torchrun."""
    for other in heard.values():
        if other.node == new.node and other.origin != new.origin:
            got = f"rank {new.rank} from {new.origin} and rank {other.rank} from "
            got += f"{other.origin}"
            do = "end the one that is left over and start the command again"
            raise ConfigError.of("start", got, f"one torchrun on node {new.node}", do)


def _append(store: Store, said: dict[str, Any]) -> None:
    """Append to the list that rank 0 reads."""
    number = store.add(f"{_ROOT}/count", 1)
    store.set(_entry(number), json.dumps(said))


def _entry(number: int) -> str:
    """Key of an entry of that list."""
    return f"{_ROOT}/asked/{number}"
