"""The programs whose servers a run can use: how each is spoken to, and how it gets weights."""

from __future__ import annotations

from dataclasses import dataclass

from spmdflow.serving.client import ServerClient
from spmdflow.serving.link import OpenLink, ServerLink
from spmdflow.serving.sglang import SglangClient
from spmdflow.serving.sglang_link import SglangLink


@dataclass(frozen=True)
class Dialect:
    """One program."""

    client: type[ServerClient]
    open_link: OpenLink


DIALECTS = {
    "vllm": Dialect(ServerClient, ServerLink.open),
    "sglang": Dialect(SglangClient, SglangLink.open),
}
"""By the value of actor.rollout.server.dialect."""
