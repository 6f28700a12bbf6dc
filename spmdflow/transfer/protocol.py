"""Transfer protocols by name: which rows each rank is given, holds afterwards, and who answers.

The eight of the table in the room's docstring, and what a script registers. Knows no tensors and
no row ids. HybridFlow section 4.1, Table 3.
"""

from __future__ import annotations

import difflib

from spmdflow.errors import ProtocolError
from spmdflow.transfer.chunk import balanced_chunks, chunks, grouped_chunks
from spmdflow.transfer.protocol_rule import Answer, Protocol, Shares
from spmdflow.transfer.protocol_table import BUILT_IN

__all__ = [
    "Answer",
    "Protocol",
    "Shares",
    "balanced_chunks",
    "chunks",
    "grouped_chunks",
    "protocol",
    "protocol_names",
    "register_protocol",
]

_REGISTRY = {rules.name: rules for rules in BUILT_IN}


def protocol(name: str) -> Protocol:
    """The protocol of that name; ProtocolError names the nearest."""
    if name in _REGISTRY:
        return _REGISTRY[name]
    nearest = difflib.get_close_matches(name, _REGISTRY, n=1, cutoff=0)
    raise ProtocolError(
        f"transfer_mode: got {name!r}, expected one of {', '.join(_REGISTRY)}; "
        f"did you mean {nearest[0]!r}? A new one needs register_protocol(Protocol(...))"
    )


def protocol_names() -> list[str]:
    """Names of every registered protocol, the built-in ones first."""
    return list(_REGISTRY)


def register_protocol(new: Protocol) -> Protocol:
    """Make a protocol known by its name; every rank does so when it imports the script.

    A module may register its own again (it is imported twice in tests); ProtocolError if the
    name belongs to another module.
    """
    taken = _REGISTRY.get(new.name)
    if taken is not None and taken.home != new.home:
        raise ProtocolError(
            f"protocol {new.name}: got a definition in {new.home}, expected a name that is not "
            f"taken by {taken.home}; choose another name"
        )
    _REGISTRY[new.name] = new
    return new
