"""Race to nine: two players take turns and add one, two or three; who says nine wins.

    total 0 -> "first" says 2 -> total 2 -> "second" says 3 -> total 5 -> ...

A player hears the total and answers with a digit. Anything else loses at once. In training the
policy plays both sides, each with a conversation and a score of its own: 1 for the winner, -1 for
the loser. A row with "side" is a game against an opponent that never changes: it plays a random
legal move on the other side, and the score is 1 if the policy wins, else 0, also as the number of
its side: first_side or second_side.
"""

from __future__ import annotations

import random
from contextlib import AsyncExitStack
from typing import Any

from spmdflow import ChatClient

TARGET = 9
LARGEST_MOVE = 3
SIDES = ("first", "second")


async def episode(
    row: dict[str, Any], *, base_url: str, model: str, api_key: str
) -> dict[str, Any]:
    """One game. row: "start", the total at the beginning; "side" (0 or 1) and "seed" for a game
    against the random opponent."""
    opponent = 1 - row["side"] if "side" in row else None
    draw = random.Random(row.get("seed", 0))
    talks: list[list[dict[str, Any]]] = [[], []]
    total = int(row.get("start", 0))
    turn = 0
    async with AsyncExitStack() as stack:
        clients = []
        for side in SIDES:
            client = ChatClient(base_url, model=model, api_key=api_key, name=side)
            clients.append(await stack.enter_async_context(client))
        while total < TARGET:
            side = turn % 2
            if side == opponent:
                move = draw.randint(1, min(LARGEST_MOVE, TARGET - total))
            else:
                talks[side].append({"role": "user", "content": str(total)})
                reply = await clients[side].chat(talks[side], max_tokens=1)
                talks[side].append(reply)
                move = read_move(str(reply["content"]), total)
            if not move:
                return result(1 - side, opponent, turn)
            total += move
            turn += 1
    return result((turn - 1) % 2, opponent, turn)


def read_move(said: str, total: int) -> int:
    """The number that a player adds; 0 if what it said is no legal move."""
    word = said.strip()
    if word not in map(str, range(1, LARGEST_MOVE + 1)) or total + int(word) > TARGET:
        return 0
    return int(word)


def result(winner: int, opponent: int | None, turn: int) -> dict[str, Any]:
    """The scores of the players, or whether the policy has won against the opponent."""
    if opponent is not None:
        has_won = float(winner != opponent)
        return {"score": has_won, f"{SIDES[1 - opponent]}_side": has_won}
    scores = {}
    for side in range(min(turn + 1, 2)):  # the second has said nothing if the first lost at once
        scores[SIDES[side]] = 1.0 if side == winner else -1.0
    return {"score": scores["first"], "segment_scores": scores, "first_wins": float(winner == 0)}
