"""What a raw socket says to speak ZMTP 3.0 without a mechanism, as one that has no key."""

from __future__ import annotations

import struct

GREETING = b"\xff" + bytes(7) + b"\x01\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
COMMAND = 4
MORE = 1
LARGE = 2


def frame(body: bytes, flags: int = 0) -> bytes:
    """A frame of ZMTP 3.0."""
    if len(body) > 255:
        return bytes([flags | LARGE]) + struct.pack(">Q", len(body)) + body
    return bytes([flags, len(body)]) + body


def ready(rank: int) -> bytes:
    """What a DEALER says that calls itself the endpoint of a rank."""
    facts = {b"Socket-Type": b"DEALER", b"Identity": struct.pack(">cI", b"r", rank)}
    text = b"\x05READY"
    for name, value in facts.items():
        text += bytes([len(name)]) + name + struct.pack(">I", len(value)) + value
    return GREETING + frame(text, COMMAND)
