"""The programs whose servers a run can use: how each is spoken to, and how it gets weights."""

from __future__ import annotations

from dataclasses import dataclass

from spmdflow.serving.client import ServerClient
from spmdflow.serving.link import OpenLink, ServerLink


@dataclass(frozen=True)
class Dialect:
    """One program."""

    client: type[ServerClient]
    open_link: OpenLink


DIALECTS = {"vllm": Dialect(ServerClient, ServerLink.open)}
"""By the value of actor.rollout.server.dialect."""
