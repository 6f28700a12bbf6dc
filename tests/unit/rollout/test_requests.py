"""Requests that come and go one by one: the surface that `generate` is built on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from spmdflow.config.schema import RolloutConfig
from spmdflow.cpu.parked import order_rows
from spmdflow.data.ragged import ragged_from_rows, rows_of
from spmdflow.errors import ConfigError
from spmdflow.rollout.builtin import BuiltinGenerator
from spmdflow.rollout.generator import Request, take_folder_weights
from spmdflow.rollout.sampling import Sampling
from tests.conversations import hold_conversations, record_continued_rows
from tests.rollout_reference import (
    LLAMA,
    ended_at,
    make_prompts,
    write_family,
    write_llama,
    write_numbers_tokenizer,
)

SEEDS = [2**62 + row for row in range(40)]
SAMPLED = Sampling(12, temperature=0.8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of each of the two forwards."""
    folder = tmp_path_factory.mktemp("models")
    write_llama(folder / "grouped", seed=0)
    write_family(folder / "mistral", "mistral", seed=1, vocab_size=128)
    torch.manual_seed(9)
    config = transformers.StableLmConfig(**{k: v for k, v in LLAMA.items() if k != "head_dim"})
    transformers.StableLmForCausalLM(config).save_pretrained(folder / "stablelm")
    return folder


def _generator(path: Path, **settings: Any) -> BuiltinGenerator:
    generator = BuiltinGenerator(RolloutConfig(**settings), str(path), torch.device("cpu"))
    take_folder_weights(generator, str(path), verify=True)
    return generator


def _finish(generator: BuiltinGenerator, ids: list[int]) -> dict[int, list[int]]:
    """Steps until these requests have ended; their tokens."""
    done: dict[int, list[int]] = {}
    while not set(ids) <= set(done):
        done |= {row.id: row.tokens.tolist() for row in generator.step()}
    return done


@pytest.mark.parametrize("name", ["grouped", "stablelm"])
def test_requests_that_come_while_others_run_give_the_responses_of_a_batch(
    folder: Path, name: str
) -> None:
    prompts = make_prompts(20)
    whole = _generator(folder / name)
    expected = [
        r.tolist() for r in rows_of(whole.generate(prompts, SAMPLED, SEEDS[:20])["responses"])
    ]
    generator = _generator(folder / name, max_batch_size=4)

    ids = []
    done = {}
    for number, (row, seed) in enumerate(zip(rows_of(prompts), SEEDS)):
        ids.append(generator.add(Request(row, seed, SAMPLED)))
        if number % 3 == 2:
            done |= {row.id: row.tokens.tolist() for row in generator.step()}
    done |= _finish(generator, [x for x in ids if x not in done])

    assert [done[x] for x in ids] == expected


def test_aborted_requests_are_never_given_and_the_others_are_as_before(folder: Path) -> None:
    prompts = make_prompts(9)
    generator = _generator(folder / "grouped", max_batch_size=5)
    sampling = Sampling(12)
    generator._end_tokens = torch.tensor([], dtype=torch.int64)
    whole = rows_of(generator.generate(prompts, sampling, SEEDS[:9])["responses"])
    ids = [
        generator.add(Request(row, seed, sampling)) for row, seed in zip(rows_of(prompts), SEEDS)
    ]
    assert generator.step() == []

    for place in (1, 7):  # one that runs, one that waits
        generator.abort(ids[place])

    done = _finish(generator, [x for place, x in enumerate(ids) if place not in (1, 7)])
    assert {ids.index(x): tokens for x, tokens in done.items()} == {
        place: row.tolist() for place, row in enumerate(whole) if place not in (1, 7)
    }
    assert generator.step() == []


def test_requests_may_differ_in_their_longest_response_and_stop_strings_only(folder: Path) -> None:
    generator = _generator(folder / "grouped")
    generator._end_tokens = torch.tensor([], dtype=torch.int64)
    ids = [generator.add(Request(torch.tensor([5]), 7, Sampling(n))) for n in (3, 9)]

    with pytest.raises(
        ConfigError, match="expected the same apart from max_new_tokens and stop; wait"
    ):
        generator.add(Request(torch.tensor([5]), 7, Sampling(3, top_k=2)))
    done = _finish(generator, ids)

    assert len(done[ids[0]]) == 3 and len(done[ids[1]]) == 9
    assert done[ids[1]][:3] == done[ids[0]]


def test_samples_of_a_prompt_are_prefilled_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = _generator(folder / "grouped")
    passes = []
    prefill = generator._forward.prefill

    def count(prompts: list[Tensor], source: list[int]) -> Tensor:
        passes.append((len(prompts), len(source)))
        return prefill(prompts, source)

    monkeypatch.setattr(generator._forward, "prefill", count)
    generator.generate(ragged_from_rows([torch.tensor([5, 6])] * 8), SAMPLED, SEEDS[:8])

    assert passes == [(1, 8)]


@pytest.mark.parametrize(
    ("name", "max_batch_size"),
    [("grouped", 1), ("grouped", 2), ("grouped", 3), ("mistral", 128), ("stablelm", 3)],
)
def test_turns_of_a_conversation_are_those_of_whole_prompts(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, max_batch_size: int
) -> None:
    plain, kept = (_generator(folder / name, max_batch_size=max_batch_size) for _ in range(2))
    continued = record_continued_rows(kept, monkeypatch)
    prompts = rows_of(make_prompts(6))
    expected = hold_conversations(plain, prompts, SAMPLED, named=False)
    found = hold_conversations(kept, prompts, SAMPLED, named=True)

    assert found.tokens == expected.tokens
    for turn, log_probs in expected.log_probs.items():
        torch.testing.assert_close(found.log_probs[turn], log_probs, rtol=0, atol=1e-5)
    if max_batch_size == 1:  # every bit is then the row's own
        assert not continued
        assert all(map(torch.equal, found.log_probs.values(), expected.log_probs.values()))
    else:  # two rows make room for a third conversation, three for those that have not ended
        assert len(continued) == 12 if max_batch_size > 2 else len(continued) < 12
    if name != "stablelm":
        assert all(layer.shape[1] <= max_batch_size for layer in kept._forward._cache)


def test_what_is_parked_is_forgotten_with_its_conversation_and_at_a_sync(folder: Path) -> None:
    generator = _generator(folder / "grouped")
    for number in range(3):
        generator.add(Request(torch.tensor([5, 6, 7]), SEEDS[number], SAMPLED, number))
    while len(generator._parked) < 3:
        generator.step()

    generator.add(Request(torch.tensor([7, 6, 5]), 1, SAMPLED, 2))  # begins another way
    assert generator.step() == [] and len(generator._parked) == 2
    generator.abort(3)
    generator.forget([1])
    assert [row.conversation for row in generator._parked] == [0]
    generator.renew(7)
    assert not generator._parked and not generator._forward._shared[0].shape[1]


def test_rows_that_can_stay_are_not_moved() -> None:
    assert order_rows([0, 1], [2, 3, 4]) == [0, 1, 2, 3, 4]
    assert order_rows([0, 1, 4], [2, 3]) == [0, 1, 4, 3, 2]
    assert order_rows([1], [0, 2, 3]) == [1, 0, 2, 3]
    assert order_rows([], [1, 2]) == [2, 1]


@pytest.mark.parametrize("look_every", [1, 8])
def test_stop_strings_end_a_response_at_the_token_that_completes_one(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, look_every: int
) -> None:
    monkeypatch.setattr("spmdflow.rollout.builtin._CHECK_EVERY", look_every)
    generator = _generator(folder / "grouped")
    prompts = make_prompts(20)
    stop = ["7>", "<1"]
    tokenizer = write_numbers_tokenizer(tmp_path, 128)
    free = generator.generate(prompts, SAMPLED, SEEDS[:20])["responses"]
    expected = ended_at([row.tolist() for row in rows_of(free)], stop)

    asked = replace(SAMPLED, tokenizer_path=tokenizer).for_call(stop=stop)
    found = generator.generate(prompts, asked, SEEDS[:20])["responses"]

    assert [row.tolist() for row in rows_of(found)] == expected
    assert sum(len(row) for row in expected) < len(free.values())
