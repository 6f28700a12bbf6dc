"""An OpenEnv server: say the number that it shows, doubled; three rounds."""

from __future__ import annotations

import sys
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class SayAction(Action):
    message: str


class NumberObservation(Observation):
    text: str = ""
    round: int = 0


class Doubling(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._number = 0
        self._round = 0

    def reset(self, seed: int | None = None, **others: Any) -> NumberObservation:
        self._number = seed or 0
        self._round = 0
        return NumberObservation(text=str(self._number))

    def step(self, action: SayAction, **others: Any) -> NumberObservation:
        is_right = action.message.strip() == str(2 * self._number)
        self._number += 1
        self._round += 1
        return NumberObservation(
            text=str(self._number), reward=float(is_right), done=self._round == 3
        )

    @property
    def state(self) -> State:
        return State(episode_id="", step_count=self._round)


if __name__ == "__main__":
    app = create_fastapi_app(Doubling, SayAction, NumberObservation, max_concurrent_envs=8)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
