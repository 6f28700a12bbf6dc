"""How the ranks of one start find each other and the controller through torchrun's store.

`own_store` returns a part of the store that no other start uses. torchrun's agent keeps one store
over all attempts of `--max-restarts`, and ranks of an earlier start, or of a node that came back
with another restart count, can reach a store on a fixed port. No environment variable is equal on
all ranks of a start and different on all others. So rank 0 draws a random name and sends it to
ranks that request it. Each rank requests it with a random number of its own, and must confirm the
name. Requests that dead ranks left in the store are never confirmed. All keys of the run, including
those of its process groups, begin with the name. All ranks of a node must come from one torchrun:
`origin` (the random folder of its error files) distinguishes two of them.

In `meet`, each rank reads the run's key from RUN_DIR and publishes its process and how it can be
reached. The controller binds the interfaces that reach the others, each on a port that the system
chooses, and publishes the addresses with the run's random id. Keys in the store contain the number
of the launch, so that a second launch in one process never reads an old address. Anyone who can
reach the store can read and write these entries, but the run's key is not among them. It is random,
and while ranks meet it is in a file of RUN_DIR that only this user can read. Without it, neither
ranks nor the controller exchange messages (runtime/wire.py). SPMDFLOW_SECRET is a second key, for a
RUN_DIR that others can read.
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
from typing import Any

from torch.distributed import DistError, PrefixStore, Store

from spmdflow.checkpoint.disk import read_key, shared_key
from spmdflow.checkpoint.lock import RunDirLock
from spmdflow.errors import ConfigError, DeadlineError, RunFailed, SpmdflowError
from spmdflow.failure.process import Process, node_identity
from spmdflow.failure.settings import SessionSettings
from spmdflow.message import decode, encode
from spmdflow.parallel.device import device_uuid
from spmdflow.runtime.wire import LOCAL_ADDRESS, RUN_ID_BYTES, Hub

logger = logging.getLogger(__name__)

_LOOPBACKS = {socket.AF_INET: "127.0.0.1", socket.AF_INET6: "::1"}
"""The loopback address of each family; the first that this node has is used."""
_KEY_SECONDS = 5.0
"""Time that a network file system may need to show a new file on another node."""


@dataclass(frozen=True)
class RankInfo:
    """What a rank publishes about itself."""

    process: Process
    host_ip: str | None
    """Its address on the route to the store; None if that is a loopback address."""
    network: str
    """Node and network namespace. Equal for ranks that reach each other by loopback addresses."""
    has_key: bool = True
    """Whether it has read the run's key from RUN_DIR."""
    key_name: str = ""
    """The file of RUN_DIR in which it looked for the key, as named in the store."""
    device: str = ""
    """UUID of its device; empty on a CPU."""


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
    """A start that every rank of the session, or of a node, refuses with the same error."""


def meet(
    store: Store, rank: int, settings: SessionSettings, claim: Callable[[], RunDirLock]
) -> Rendezvous:
    """Exchange addresses and keys through the store. All ranks of the session call it together.

    The controller's rank calls claim() first, which locks RUN_DIR; then it writes the key file and
    binds its sockets. The other ranks read the key from RUN_DIR and publish their process. If claim
    raises ConfigError, RUN_DIR is not shared, or two ranks use one device, every rank raises
    StartRefused. If the controller's rank fails otherwise, the other ranks raise RunFailed.
    DeadlineError names the ranks that did not arrive within settings.start_seconds.
    """
    members = hashlib.blake2b(repr(settings.ranks).encode(), digest_size=6).hexdigest()
    launch = store.add(f"spmdflow/{members}/launches/{rank}", 1)  # every rank counts its own
    prefix = f"spmdflow/{members}/{launch}"
    store_host = _store_host(store)
    network = f"{node_identity()}/{os.readlink('/proc/self/ns/net')}"
    source_ip = _source_ip(store_host) if store_host else None
    info = RankInfo(Process.of(os.getpid()), source_ip, network, device=device_uuid())
    if rank == settings.controller_rank:
        return _publish_errors(
            store, prefix, lambda: _claim_and_open(store, prefix, info, settings, store_host, claim)
        )
    _wait(store, {settings.controller_rank: f"{prefix}/key"}, settings.start_seconds)
    key_name = str(_read(store, f"{prefix}/key"))
    key = read_key(settings.run_dir, key_name, seconds=_KEY_SECONDS)
    info = replace(info, has_key=key is not None, key_name=key_name)
    _publish(store, f"{prefix}/info/{rank}", info)
    _wait(store, {settings.controller_rank: f"{prefix}/controller"}, settings.start_seconds)
    run_id, controller, addresses, refusal = _read(store, f"{prefix}/controller")
    if refusal or key is None:
        error = StartRefused if refusal and refusal[0] else RunFailed
        raise error(refusal[1] if refusal else f"start: rank {rank} has no key of this run")
    return Rendezvous(run_id, addresses[info.network], controller, _mix_key(key, settings.secret))


def _publish_errors(store: Store, prefix: str, work: Callable[[], Rendezvous]) -> Rendezvous:
    """Return work(); publish any exception in the store before raising it, for the waiting ranks.

    ConfigError is raised as StartRefused, here and on the other ranks. For any other exception,
    which is raised unchanged here, the other ranks raise RunFailed. They cannot notice it
    otherwise, because this process may continue in a host program.
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
    """Write into the store why there is no controller, for the ranks that wait for it.

    Uses the keys that they wait for. The text is that of a SpmdflowError; any other exception is
    described with its type. A lost store is ignored.
    """
    text = str(err)
    if not isinstance(err, SpmdflowError):
        text = f"start: the controller's rank failed ({type(err).__name__}: {err}); see its log"
    with contextlib.suppress(DistError):  # if the store itself is lost, nobody can read it
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
    """Lock RUN_DIR, then publish the controller's addresses."""
    lock = claim()
    return replace(_open_hub(store, prefix, info, settings, store_host), lock=lock)


def _mix_key(key: bytes, secret: str | None) -> bytes:
    """The key that both ends of a connection need: the run's, mixed with SPMDFLOW_SECRET if set."""
    return hmac.digest((secret or "").encode(), key, hashlib.sha256)


def _open_hub(
    store: Store, prefix: str, info: RankInfo, settings: SessionSettings, store_host: str | None
) -> Rendezvous:
    """Bind the controller's sockets where the other ranks reach them, and publish the addresses.

    Waits for the `RankInfo` of all other ranks, during which the key file is in RUN_DIR. Each
    network of ranks gets one address: loopback for this node, otherwise this node's address on the
    route to the rank. DeadlineError for missing ranks. ConfigError if a rank cannot read the key
    file, or two ranks use one device.
    """
    keys = {}
    for rank in settings.ranks[1:]:
        keys[rank] = f"{prefix}/info/{rank}"
    with shared_key(settings.run_dir) as (name, key):
        _publish(store, f"{prefix}/key", name)
        _wait(store, keys, settings.start_seconds)
    others: dict[int, RankInfo] = {rank: _read(store, key) for rank, key in keys.items()}
    _check_shared(settings, replace(info, key_name=name), others)
    _check_devices({settings.controller_rank: info} | others)
    run_id = os.urandom(RUN_ID_BYTES)
    key = _mix_key(key, settings.secret)
    hub = Hub(run_id, key=key, max_ranks=len(settings.ranks))
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
    if bound:
        logger.info("controller listens on %s", ", ".join(bound.values()))
    processes = {settings.controller_rank: info.process}
    processes |= {rank: other.process for rank, other in others.items()}
    return Rendezvous(run_id, LOCAL_ADDRESS, info.process, key, hub, processes)


def _check_shared(settings: SessionSettings, own: RankInfo, others: dict[int, RankInfo]) -> None:
    """Raise ConfigError unless all other ranks could read the key file of this process in RUN_DIR.

    It names the ranks and their nodes. SpmdflowError instead if a rank was sent to another file:
    then another program writes to the store, and RUN_DIR is not the cause.
    """
    for rank, other in others.items():
        if other.key_name != own.key_name:
            raise SpmdflowError(
                f"start: torchrun's store sent rank {rank} to the key file {other.key_name!r}, "
                f"expected {own.key_name!r}, which rank {settings.controller_rank} wrote; another "
                f"program writes to that store: start again, on a network that only this job uses"
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


def _check_devices(infos: Mapping[int, RankInfo]) -> None:
    """Raise ConfigError if two ranks use one device, which NCCL refuses much later.

    infos: by rank.
    """
    ranks_of_device: dict[str, list[int]] = {}
    for rank, info in sorted(infos.items()):
        if info.device:
            ranks_of_device.setdefault(info.device, []).append(rank)
    for device, ranks in ranks_of_device.items():
        if len(ranks) > 1:
            node = infos[ranks[0]].process.node
            on_node = {x.device for x in infos.values() if x.process.node == node and x.device}
            names = ", ".join(map(str, ranks))
            raise ConfigError(
                f"devices: ranks {names} use one device ({device}) of node "
                f"{node.rpartition('/')[2]}, expected a device for each rank; lower "
                f"--nproc-per-node (`spmdflow run -n`) to {len(on_node)}, or let the ranks see "
                f"more devices (CUDA_VISIBLE_DEVICES)"
            )


def _publish(store: Store, key: str, value: Any) -> None:
    """Write plain data into the store."""
    store.set(key, encode(value).hex())


def _read(store: Store, key: str) -> Any:
    """What `_publish` wrote under a key."""
    return decode(bytes.fromhex(store.get(key).decode("ascii")))


def _wait(store: Store, keys: Mapping[int, str], seconds: float) -> None:
    """Wait until the store has all keys (by rank).

    DeadlineError after `seconds` with the ranks whose keys are missing.
    """
    start = time.monotonic()
    if not _arrive(store, list(keys.values()), start + seconds):
        missing = []
        for rank, key in keys.items():
            if not store.check([key]):
                missing.append(rank)
        raise DeadlineError(
            f"start: ranks {missing} did not arrive within {time.monotonic() - start:.0f} s; see "
            f"their logs, or raise run.start_seconds (now {seconds:g})"
        )


def _arrive(store: Store, keys: list[str], until: float) -> bool:
    """Wait until the store has all keys; return False if they are not there at `until`.

    until: in time.monotonic(). Any error of the store counts as a timeout. True at once without
    keys.
    """
    try:
        if keys:
            store.wait(keys, timedelta(seconds=max(0.001, until - time.monotonic())))
    except DistError:
        return False
    return True


def _store_host(store: Store) -> str | None:
    """Host name of the node that runs a store; None for stores without one."""
    while (inner := getattr(store, "underlying_store", None)) is not None:
        store = inner
    return getattr(store, "host", None)


def _source_ip(host: str) -> str | None:
    """Return this node's address on the route to host; None if there is only a loopback address.

    Also None if host cannot be resolved. Sends nothing: it connects a UDP socket.
    """
    with contextlib.suppress(OSError):
        for family, kind, _, _, target in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with socket.socket(family, kind) as probe, contextlib.suppress(OSError):
                probe.connect(target)
                address = str(probe.getsockname()[0])
                if not address.startswith("127.") and address != "::1":
                    return address
    return None


def _own_ip() -> str:
    """The address of this node's host name; 0.0.0.0 (all interfaces) if it has none."""
    with contextlib.suppress(OSError):
        return socket.gethostbyname(socket.gethostname())
    return "0.0.0.0"


def _loopback() -> str:
    """Return this node's loopback address: 127.0.0.1, or ::1 if only IPv6 has one.

    ConfigError if neither can be bound.
    """
    for family, address in _LOOPBACKS.items():
        with contextlib.suppress(OSError), socket.socket(family) as probe:
            probe.bind((address, 0))
            return address
    raise ConfigError(
        f"start: this node has no loopback address, expected {' or '.join(_LOOPBACKS.values())} "
        f"for the ranks that share it; run `ip link set lo up`"
    )


_GLOO_ADDRESS_WORDS = ("to a (local) address", "Unable to find address for")
"""Parts of gloo's error when it has no address to listen on (torch 2.13)."""


def refusal_without_address(err: RuntimeError, interface: str) -> StartRefused | None:
    """Return a clearer error if gloo found no address to listen on; None if err is another error.

    It is recognised by parts of gloo's message. The error asks to set or unset GLOO_SOCKET_IFNAME
    and lists this node's interfaces. interface: its value; empty if it is not set.
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
        f"to the interface that reaches the other ranks (this node has {names}; use lo if all "
        f"ranks are on this node), and torchrun's --master-addr to an address of that interface"
    )


_ROOT = "spmdflow/roll-call"
_LOOK_SECONDS = 0.01
"""Interval at which rank 0 checks for requests."""
_MAX_NEW = 1000
"""New entries per check. Anyone who reaches the store can write any number as their count."""


@dataclass(frozen=True)
class StartingRank:
    """A rank that requests the name of the start."""

    rank: int
    node: int
    """Number of its torchrun among those of the job (GROUP_RANK)."""
    origin: str
    """Different for two torchruns on one node; empty if unknown."""
    nonce: str = field(default_factory=lambda: secrets.token_hex(8))


def own_store(store: Store, me: StartingRank, world_size: int, *, seconds: float) -> Store:
    """Return a part of the store that only the ranks of this start use. All ranks call it together.

    Rank 0 draws a random name, the prefix of all keys, and gives it to the others. DeadlineError if
    ranks do not arrive within `seconds`, on rank 0 with their numbers. ConfigError if ranks of one
    node come from two torchruns.
    """
    until = time.monotonic() + seconds
    if me.rank == 0:
        name = secrets.token_hex(8)
        _call_roll(store, me, name, world_size, until)
    else:
        name = _request_name(store, me, until)
    return PrefixStore(f"spmdflow/{name}", store)


def _request_name(store: Store, me: StartingRank, until: float) -> str:
    """Request the name of this start from rank 0, confirm it, and return it.

    DeadlineError if rank 0 has not answered at the time `until`.
    """
    _append(store, vars(me))
    answer = f"{_ROOT}/answer/{me.nonce}"
    if not _arrive(store, [answer], until):
        raise DeadlineError(
            f"start: rank {me.rank} got no answer from rank 0 in time; see the log of rank 0, or "
            f"raise run.start_seconds"
        )
    name = store.get(answer).decode()
    _append(store, vars(me) | {"heard": name})
    return name


def _call_roll(store: Store, me: StartingRank, name: str, world_size: int, until: float) -> None:
    """Answer requests for the name of this start until every rank has confirmed it (rank 0).

    Requests of another torchrun on this node are not answered, and entries that no rank can have
    written are logged. DeadlineError names the ranks that have not confirmed it at the time
    `until`. ConfigError if ranks of two torchruns on one node confirm it.
    """
    confirmed = {me.rank: me}
    entries = _entries(store, until)
    while len(confirmed) < world_size:
        key = next(entries, None)
        if key is None:
            missing = sorted(set(range(world_size)) - set(confirmed))
            raise DeadlineError(
                f"start: ranks {missing} of {world_size} did not arrive in time; see their logs, "
                f"or raise run.start_seconds"
            )
        request = _parse_request(store.get(key), world_size)
        if request is None:
            logger.warning(
                "start: ignored an entry of torchrun's store that no rank of this run "
                "wrote (%s); does another program use that store?",
                key,
            )
            continue
        sender, confirmed_name = request
        is_of_other_torchrun = sender.node == me.node and sender.origin != me.origin
        if confirmed_name is None and not is_of_other_torchrun:
            store.set(f"{_ROOT}/answer/{sender.nonce}", name)
        elif confirmed_name == name:
            _check_origin(sender, confirmed)
            confirmed[sender.rank] = sender


def _entries(store: Store, until: float) -> Iterator[str]:
    """Yield the keys of the entries that ranks append to the store's list, until the time `until`.

    Polls every 0.01 s. A rank that is killed while it writes leaves a number without an entry,
    which does not delay the entries after it. At most 1000 new numbers are considered at a time.
    """
    awaited: list[str] = []
    num_known = 0
    while time.monotonic() < until:
        num_entries = min(store.add(f"{_ROOT}/count", 0), num_known + _MAX_NEW)
        awaited += [_entry(number) for number in range(num_known + 1, num_entries + 1)]
        num_known = num_entries
        written = [key for key in awaited if store.check([key])]
        awaited = [key for key in awaited if key not in written]
        yield from written
        if not written:
            time.sleep(_LOOK_SECONDS)


def _parse_request(data: bytes, world_size: int) -> tuple[StartingRank, str | None] | None:
    """Return (the rank that wrote an entry, the name that it confirms).

    The name is None if the rank requests one. None instead of both if no rank of a run can have
    written the entry: it is not JSON, has other fields or types, or its rank is outside 0 to
    world_size - 1.
    """
    try:
        fields = json.loads(data)
        name = fields.pop("heard", None)
        sender = StartingRank(**fields)
    except (ValueError, TypeError, AttributeError, LookupError, RecursionError):
        return None
    texts = (sender.origin, sender.nonce, name or "")
    is_rank = type(sender.rank) is int and 0 <= sender.rank < world_size
    if not is_rank or type(sender.node) is not int or not all(type(x) is str for x in texts):
        return None
    return sender, name


def _check_origin(new: StartingRank, confirmed: dict[int, StartingRank]) -> None:
    """Raise ConfigError if a confirmed rank of `new`'s node comes from another torchrun."""
    for other in confirmed.values():
        if other.node == new.node and other.origin != new.origin:
            got = f"rank {new.rank} from {new.origin} and rank {other.rank} from "
            got += f"{other.origin}"
            do = "end the torchrun of the earlier start, then start the command again"
            raise ConfigError.of("start", got, f"one torchrun on node {new.node}", do)


def _append(store: Store, fields: dict[str, Any]) -> None:
    """Append an entry to the list that rank 0 reads."""
    number = store.add(f"{_ROOT}/count", 1)
    store.set(_entry(number), json.dumps(fields))


def _entry(number: int) -> str:
    """Key of an entry in the list that rank 0 reads."""
    return f"{_ROOT}/asked/{number}"
