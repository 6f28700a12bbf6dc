"""Ids of replies and tool calls: unique over all episodes of a run, and the same in a repeated run.

They are hashes of the episode's seed and of the turn. A client repeats them, and some chat
templates render them: so nothing random may be in them. Calls have 9 letters and digits, because
templates of Mistral accept nothing else.
"""

from __future__ import annotations

import hashlib
import string

_LETTERS = string.digits + string.ascii_letters
_CALL_LETTERS = 9


def reply_name(seed: int, turn: int) -> str:
    """24 hexadecimal digits for the reply of a turn. seed: of the episode."""
    return hashlib.blake2b(f"reply {seed} {turn}".encode(), digest_size=12).hexdigest()


def call_id(seed: int, turn: int, index: int) -> str:
    """9 letters and digits for a call of a reply. index: of the call in the reply."""
    text = f"call {seed} {turn} {index}"
    number = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
    letters = []
    for _ in range(_CALL_LETTERS):
        number, letter = divmod(number, len(_LETTERS))
        letters.append(_LETTERS[letter])
    return "".join(letters)
