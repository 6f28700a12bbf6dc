"""Guess the digit: the environment says whether the hidden digit is higher or lower.

Each turn the policy says one token. Four guesses are enough for ten digits, if every guess halves
what is left. The score is 1 if a guess was right, else 0.
"""

from __future__ import annotations

from typing import Any

from spmdflow import ChatClient

NUM_GUESSES = 4


async def episode(row: dict[str, Any], *, base_url: str, model: str, api_key: str) -> float:
    """One game; row: {"digit": the hidden one}. Anything but a digit costs a guess."""
    messages = [{"role": "user", "content": "guess"}]
    async with ChatClient(base_url, model=model, api_key=api_key) as client:
        for _ in range(NUM_GUESSES):
            reply = await client.chat(messages, max_tokens=1)
            guess = str(reply["content"]).strip()
            if guess == str(row["digit"]):
                return 1.0
            messages += [reply, {"role": "user", "content": hint(guess, row["digit"])}]
    return 0.0


def hint(guess: str, digit: int) -> str:
    """What the environment answers to a wrong guess."""
    if not guess.isdigit():
        return "digit"
    return "higher" if digit > int(guess) else "lower"
