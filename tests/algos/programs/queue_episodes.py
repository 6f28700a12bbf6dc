"""queue_rows.py on episodes: every segment is a row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from spmdflow import Flow
from spmdflow.config.episode import AgentActorConfig
from spmdflow.config.leaf import part
from tests.algos.programs.queue_rows import QueueRowsConfig, train


@dataclass
class QueueEpisodesConfig(QueueRowsConfig):
    """The same settings, with an environment."""

    # Not a setting: environments score their episodes.
    reward: ClassVar[None] = None  # type: ignore[assignment, misc]

    actor: AgentActorConfig = part(AgentActorConfig)


def main(flow: Flow, cfg: QueueEpisodesConfig) -> None:
    train(flow, cfg)
