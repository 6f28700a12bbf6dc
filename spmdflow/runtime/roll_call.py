"""Which ranks belong to this start: a part of torchrun's store that no other start has touched.

torchrun's agent keeps one store over all attempts of `--max-restarts`, and a store on a fixed port
can be reached by ranks of an earlier start or of a node that came back with another count of
restarts. Nothing in the environment is equal on all ranks of a start and on no other. So rank 0
draws a random name, and tells it only to ranks that ask now: each asks with a random number of its
own, and what dead ranks left behind in the store asks in vain.

All keys of the run, those of its process groups too, carry the name. Ranks of one node must come
from one torchrun: `origin` (torchrun's random folder for error files) tells two of them apart.
"""

from __future__ import annotations

import itertools
import json
import secrets
import time
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from torch.distributed import DistError, PrefixStore, Store

from spmdflow.errors import ConfigError, DeadlineError

_ROOT = "spmdflow/roll-call"


@dataclass(frozen=True)
class Attendant:
    """A rank that asks for the name of the run."""

    rank: int
    node: int
    """Number of its torchrun among those of the job (GROUP_RANK)."""
    origin: str
    """Differs between two torchruns of one node; empty if unknown."""
    nonce: str = field(default_factory=lambda: secrets.token_hex(8))


def own_store(store: Store, me: Attendant, world_size: int, *, seconds: float) -> Store:
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


def _ask(store: Store, me: Attendant, until: float) -> str:
    """Ask rank 0 for the name, and say that it was heard."""
    _append(store, vars(me))
    answer = f"{_ROOT}/answer/{me.nonce}"
    if not _arrives(store, answer, until):
        raise DeadlineError(
            f"start: rank {me.rank} got no answer from rank 0, expected one in time; see the log "
            f"of rank 0, or raise run.start_seconds"
        )
    name = store.get(answer).decode()
    _append(store, vars(me) | {"heard": name})
    return name


def _call_roll(store: Store, me: Attendant, name: str, world_size: int, until: float) -> None:
    """Answer whoever asks until every rank has heard the name."""
    heard = {me.rank: me}
    for number in itertools.count(1):
        if len(heard) == world_size:
            return
        key = f"{_ROOT}/asked/{number}"
        if not _arrives(store, key, until):
            missing = sorted(set(range(world_size)) - set(heard))
            raise DeadlineError(
                f"start: ranks {missing} did not come in time, expected all of {world_size}; see "
                f"their logs, or raise run.start_seconds"
            )
        said: dict[str, Any] = json.loads(store.get(key))
        name_heard = said.pop("heard", None)
        asking = Attendant(**said)
        if name_heard is None and not _is_stranger(asking, me):
            store.set(f"{_ROOT}/answer/{asking.nonce}", name)
        elif name_heard == name:
            _check_origin(asking, heard)
            heard[asking.rank] = asking


def _is_stranger(asking: Attendant, me: Attendant) -> bool:
    """Whether it was started by another torchrun of this node."""
    return asking.node == me.node and asking.origin != me.origin


def _check_origin(new: Attendant, heard: dict[int, Attendant]) -> None:
    """All ranks of a node are from one torchrun."""
    for other in heard.values():
        if other.node == new.node and other.origin != new.origin:
            raise ConfigError(
                f"start: got rank {new.rank} from {new.origin} and rank {other.rank} from "
                f"{other.origin}, expected one torchrun on node {new.node}; end the one that is "
                f"left over and start the command again"
            )


def _append(store: Store, said: dict[str, Any]) -> None:
    """Append to the list that rank 0 reads."""
    number = store.add(f"{_ROOT}/count", 1)
    store.set(f"{_ROOT}/asked/{number}", json.dumps(said))


def _arrives(store: Store, key: str, until: float) -> bool:
    """Wait for a key; False if the time is over."""
    try:
        store.wait([key], timedelta(seconds=max(0.001, until - time.monotonic())))
    except DistError:
        return False
    return True
