"""Conversations of several turns with a generator of requests, three at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from spmdflow.rollout.builtin import BuiltinGenerator
from spmdflow.rollout.generator import Request, RequestGenerator
from spmdflow.rollout.sampling import Sampling

TURNS = 3
AT_ONCE = 3


@dataclass
class Turns:
    """What was said, by (conversation, turn)."""

    tokens: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    log_probs: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    routes: dict[tuple[int, int], Tensor | None] = field(default_factory=dict)
    """Experts of the whole row: prompt and response."""


def hold_conversations(
    generator: RequestGenerator, starts: Sequence[Tensor], sampling: Sampling, *, named: bool
) -> Turns:
    """A conversation of three turns for each start, three of them at a time.

    Each turn's prompt is the one before, what was said, and some tokens more. Of conversation 2
    only half of what was said, as a stop string of an agent cuts it. named: whether the requests
    say which conversation they belong to, so that a generator may keep its rows.
    """
    prompts = [start.tolist() for start in starts]
    waiting = []
    for first in range(0, len(starts), AT_ONCE):
        for turn in range(TURNS):
            waiting += [(first + n, turn) for n in range(AT_ONCE)]
    turns = Turns()
    under_way: dict[int, tuple[int, int]] = {}
    while waiting or under_way:
        ready = [(n, t) for n, t in waiting if t == 0 or (n, t - 1) in turns.tokens]
        for number, turn in ready[: AT_ONCE - len(under_way)]:
            waiting.remove((number, turn))
            prompt = torch.tensor(prompts[number])
            conversation = number if named else None
            request = Request(prompt, 2**62 + TURNS * number + turn, sampling, conversation)
            under_way[generator.add(request)] = (number, turn)
        for row in generator.step():
            number, turn = under_way.pop(row.id)
            said = row.tokens.tolist()
            turns.tokens[number, turn] = said
            turns.log_probs[number, turn] = row.log_probs
            turns.routes[number, turn] = row.routes
            num_said = len(said) // (2 if number == 2 else 1)
            prompts[number] += said[:num_said] + [5 + number] * (1 + 4 * (number % 3))
    return turns


def record_continued_rows(
    generator: BuiltinGenerator, monkeypatch: pytest.MonkeyPatch
) -> list[int]:
    """A list to which the generator appends, for each parked row that it continues, its length."""
    lengths: list[int] = []
    extend = generator._forward.extend

    def record(rows: list[int], more: list[Tensor], starts: list[int]) -> Tensor:
        lengths.extend(starts)
        return extend(rows, more, starts)

    monkeypatch.setattr(generator._forward, "extend", record)
    return lengths
