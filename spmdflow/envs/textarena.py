"""Games of TextArena (pip install textarena), played by the policy.

    environment: spmdflow.envs.textarena:episode(game='TowerOfHanoi-v0')

A row may set its own "game" and "seed". Without a seed, it is derived from the prompt. All players
are the policy, and each one's conversation is a segment with its own reward as score. Games of
more than one player need actor.rollout.episode.credit=segment: a player is then compared with the
same player of other games. The score of the episode is the first player's reward.
"""

from __future__ import annotations

import random
import zlib
from contextlib import AsyncExitStack
from importlib import import_module
from typing import Any

from spmdflow.envs.client import ChatClient, EndpointError


async def episode(
    row: dict[str, Any],
    *,
    base_url: str,
    model: str,
    api_key: str,
    game: str = "TowerOfHanoi-v0",
    num_players: int = 1,
    max_tokens: int | None = None,
) -> dict[str, Any]:
    """Play one game; return its score, the score of each of several players, and its turns.

    All players are the policy, each with a separate conversation named player-0, player-1, ... The
    score is the first player's. If the context is full or the
    turns are used up, the game ends early with score 0; any other EndpointError is raised.
    row: "game" overrides `game`; "seed" seeds it, by default a checksum of the prompt.
    """
    seed = int(row.get("seed", zlib.crc32(str(row.get("prompt", "")).encode())))
    noise = _Noise(seed)
    with noise:
        env = import_module("textarena").make(str(row.get("game", game)))
        env.reset(num_players=num_players, seed=seed)
    conversations: dict[int, list[dict[str, Any]]] = {}
    turns = 0
    done = False
    limit = {} if max_tokens is None else {"max_tokens": max_tokens}
    async with AsyncExitStack() as stack:
        clients = []
        for player in range(num_players):
            client = ChatClient(base_url, model=model, api_key=api_key, name=f"player-{player}")
            clients.append(await stack.enter_async_context(client))
        while not done:
            with noise:
                player, observation = env.get_observation()
            messages = conversations.setdefault(player, [])
            # some wrappers show the complete game each time, others only the new part
            messages.append({"role": "user", "content": _new_part(messages, str(observation))})
            try:
                reply = await clients[player].chat(messages, **limit)
            except EndpointError as err:
                if err.code in ("context_length_exceeded", "max_turns"):
                    break
                raise
            messages.append(reply)
            with noise:
                done, _ = env.step(action=str(reply["content"]))
            turns += 1
    rewards = (env.close()[0] if done else None) or {}
    scores: dict[str, float] = {}
    for player in conversations:
        scores[f"player-{player}"] = float(rewards.get(player, 0.0))
    result: dict[str, Any] = {"score": scores.get("player-0", 0.0), "turns": float(turns)}
    if num_players > 1:
        result["segment_scores"] = scores
    return result


def _new_part(messages: list[dict[str, Any]], observation: str) -> str:
    """Return the observation without the text that the player was shown before.

    This is cut only if the observation begins with all earlier user messages, joined. If nothing
    new would be left, the complete observation is returned.
    """
    shown = ""
    for message in messages:
        shown += str(message["content"]) if message["role"] == "user" else ""
    return observation.removeprefix(shown) or observation


class _Noise:
    """State of the process-wide random numbers, one per game, so that games do not share them."""

    def __init__(self, seed: int) -> None:
        self._state = random.Random(seed).getstate()

    def __enter__(self) -> None:
        self._others = random.getstate()
        random.setstate(self._state)

    def __exit__(self, *_: object) -> None:
        self._state = random.getstate()
        random.setstate(self._others)
