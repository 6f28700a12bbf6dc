"""Frozen models on the compute lane: which requests are generated together, which steps stay."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

from spmdflow.config.schema import RolloutConfig
from spmdflow.data.ragged import ragged_from_rows
from spmdflow.episodes.ask import Refusal
from spmdflow.episodes.frozen import FrozenModels, LoadedWeights
from spmdflow.episodes.named_model import OwnSampling
from spmdflow.episodes.pending import GenerationRequest
from spmdflow.errors import CheckpointError
from spmdflow.rollout.builtin import BuiltinGenerator
from spmdflow.rollout.forward import end_tokens
from spmdflow.rollout.generator import Request, take_folder_weights
from spmdflow.rollout.resumable import VersionedResponse
from spmdflow.rollout.sampling import Sampling

MODEL = Path(__file__).parents[3] / "algos" / "guess" / "model"
PROMPT = [3, 5, 4]


def new_generator(max_batch_size: int = 16) -> BuiltinGenerator:
    cfg = RolloutConfig(max_batch_size=max_batch_size, dtype="float32")
    generator = BuiltinGenerator(cfg, str(MODEL), torch.device("cpu"))
    take_folder_weights(generator, str(MODEL), verify=False)
    return generator


def request_of(draw: GenerationRequest) -> Request:
    own = draw.sampling or OwnSampling()
    greedy = own.temperature == 0
    sampling = Sampling(
        draw.max_new_tokens,
        temperature=1.0 if greedy else own.temperature or 1.0,
        greedy=greedy,
        policy_temperature=1.0,
        tokenizer_path=str(MODEL),
    )
    return Request(torch.tensor(draw.ids), draw.turn, sampling, draw.number)


@lru_cache(maxsize=1)
def one_generator() -> BuiltinGenerator:
    return new_generator()


class Asked:
    """Frozen models, and what became of requests."""

    def __init__(self, *, most_steps: int = 1) -> None:
        self.loaded: list[str] = []
        self.models = FrozenModels(self._load, request_of, most_steps=most_steps)
        self.ended: list[int] = []
        """Turns in the order in which they ended."""
        self.replies: dict[int, VersionedResponse | None] = {}
        self.errors: dict[int, Exception] = {}
        self.draws: dict[int, GenerationRequest] = {}

    def _load(self, name: str) -> LoadedWeights:
        if name == "policy@9":
            raise CheckpointError("policy@9 is gone")
        self.loaded.append(name)
        return LoadedWeights(new_generator(), end_tokens(str(MODEL)))

    def add(self, turn: int, model: str, *, temperature: float = 1.0, tokens: int = 3) -> None:
        def done(drawn: VersionedResponse | None) -> None:
            self.ended.append(turn)
            self.replies[turn] = drawn

        def fail(err: Exception) -> None:
            self.errors[turn] = err

        draw: dict[str, Any] = {"number": turn, "name": "e", "ids": PROMPT, "turn": turn}
        draw |= {"speaker": "", "turn_of_speaker": 0, "max_new_tokens": tokens}
        self.draws[turn] = GenerationRequest(
            **draw,
            done=done,
            fail=fail,
            model=model,
            sampling=OwnSampling(temperature=temperature),
        )
        self.models.add(self.draws[turn])

    def run(self, is_over: Callable[[], bool] = lambda: False) -> None:
        for _ in range(500):
            if self.models.is_idle or is_over():
                return
            self.models.step()
        raise AssertionError("the requests never end")


@cache
def alone(turn: int, temperature: float, tokens: int) -> list[int]:
    """The reply of a generator that has no other request."""
    sampling = Sampling(tokens, tokenizer_path=str(MODEL))
    if temperature == 0:
        sampling = Sampling(tokens, greedy=True, tokenizer_path=str(MODEL))
    elif temperature != 1:
        sampling = Sampling(tokens, temperature=temperature, tokenizer_path=str(MODEL))
    rows = ragged_from_rows([torch.tensor(PROMPT)])
    found: list[int] = (
        new_generator().generate(rows, sampling, [turn])["responses"].values().tolist()
    )
    return found


def test_requests_with_any_sampling_get_what_they_would_get_alone_and_none_waits_for_ever() -> None:
    asked = Asked()
    temperatures = [1.0, 0, 0.5, 1.0, 0.5]
    for turn, temperature in enumerate(temperatures):
        asked.add(turn, "reference", temperature=temperature, tokens=4)
        asked.models.step()

    asked.run()

    assert sorted(asked.ended) == list(range(len(temperatures)))
    for turn, temperature in enumerate(temperatures):
        reply = asked.replies[turn]
        assert reply is not None
        assert reply.tokens.tolist() == alone(turn, temperature, 4), (turn, temperature)


def test_requests_continue_after_the_caches_were_freed() -> None:
    asked = Asked()
    for turn in range(3):
        asked.add(turn, "reference", tokens=12)
    asked.models.step()
    asked.models.step()

    asked.models.sleep()

    asked.run()
    for turn in range(3):
        reply = asked.replies[turn]
        assert reply is not None and reply.tokens.tolist() == alone(turn, 1.0, 12)


def test_step_that_is_in_use_stays_until_it_is_idle_and_cannot_keep_others_out() -> None:
    asked = Asked(most_steps=1)
    asked.add(0, "policy@1", tokens=8)
    asked.models.step()
    asked.add(1, "policy@2")
    asked.add(2, "policy@1")
    asked.add(3, "reference")

    asked.run()

    assert asked.loaded == ["policy@1", "reference", "policy@2", "policy@1"]
    assert asked.ended.index(1) < asked.ended.index(2)
    assert sorted(asked.ended) == [0, 1, 2, 3]


def test_steps_used_last_stay_loaded() -> None:
    asked = Asked(most_steps=2)
    for turn, step in enumerate([1, 2, 1, 3, 1, 2]):
        asked.add(turn, f"policy@{step}")
        asked.run()

    assert asked.loaded == ["policy@1", "policy@2", "policy@3", "policy@2"]


def test_weights_that_cannot_be_loaded_and_prompts_that_are_too_long_are_refused() -> None:
    asked = Asked()
    asked.add(0, "policy@9")
    asked.add(1, "reference", tokens=100_000)
    asked.add(2, "reference")

    asked.run()

    assert asked.ended == [2]
    assert isinstance(asked.errors[0], Refusal) and "policy@9 is gone" in str(asked.errors[0])
    assert isinstance(asked.errors[1], Refusal) and "positions" in str(asked.errors[1])


@pytest.mark.parametrize("steps", [0, 2])
def test_requests_of_episodes_that_end_or_clients_that_leave_are_dropped(steps: int) -> None:
    long = [turn for turn in range(20) if len(alone(turn, 1.0, 20)) > 5]
    first, other, left, kept = long[:4]
    asked = Asked()
    asked.add(first, "reference", tokens=20)
    asked.add(other, "reference", tokens=20, temperature=0.5)
    asked.add(left, "policy@1", tokens=20)
    asked.add(kept, "reference", tokens=20)
    for _ in range(steps):
        asked.models.step()

    asked.models.end_episodes([first, other])
    asked.models.abandon(asked.draws[left].identity)

    assert asked.replies == {first: None, other: None, left: None}
    asked.run()
    reply = asked.replies[kept]
    assert reply is not None and reply.tokens.tolist() == alone(kept, 1.0, 20)
