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
from spmdflow.data.ragged import ragged_from_rows, rows_of
from spmdflow.errors import ConfigError
from spmdflow.rollout.builtin import BuiltinGenerator
from spmdflow.rollout.generator import Request, take_folder_weights
from spmdflow.rollout.sampling import Sampling
from tests.rollout_reference import (
    LLAMA,
    ended_at,
    make_prompts,
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
    prompts, whole = make_prompts(20), _generator(folder / name)
    expected = [
        r.tolist() for r in rows_of(whole.generate(prompts, SAMPLED, SEEDS[:20])["responses"])
    ]
    generator = _generator(folder / name, max_batch_size=4)

    ids, done = [], {}
    for number, (row, seed) in enumerate(zip(rows_of(prompts), SEEDS)):
        ids.append(generator.add(Request(row, seed, SAMPLED)))
        if number % 3 == 2:
            done |= {row.id: row.tokens.tolist() for row in generator.step()}
    done |= _finish(generator, [x for x in ids if x not in done])

    assert [done[x] for x in ids] == expected


def test_aborted_requests_are_never_given_and_the_others_are_as_before(folder: Path) -> None:
    prompts = make_prompts(9)
    generator, sampling = _generator(folder / "grouped", max_batch_size=5), Sampling(12)
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


def test_requests_may_differ_in_their_longest_response_only(folder: Path) -> None:
    generator = _generator(folder / "grouped")
    generator._end_tokens = torch.tensor([], dtype=torch.int64)
    ids = [generator.add(Request(torch.tensor([5]), 7, Sampling(n))) for n in (3, 9)]

    with pytest.raises(ConfigError, match="expected the same but for max_new_tokens; wait until"):
        generator.add(Request(torch.tensor([5]), 7, Sampling(3, top_k=2)))
    done = _finish(generator, ids)

    assert len(done[ids[0]]) == 3 and len(done[ids[1]]) == 9
    assert done[ids[1]][:3] == done[ids[0]]


def test_samples_of_a_prompt_are_prefilled_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator, passes = _generator(folder / "grouped"), []
    prefill = generator._forward.prefill

    def count(prompts: list[Tensor], source: list[int]) -> Tensor:
        passes.append((len(prompts), len(source)))
        return prefill(prompts, source)

    monkeypatch.setattr(generator._forward, "prefill", count)
    generator.generate(ragged_from_rows([torch.tensor([5, 6])] * 8), SAMPLED, SEEDS[:8])

    assert passes == [(1, 8)]


@pytest.mark.parametrize("look_every", [1, 8])
def test_stop_strings_end_a_response_at_the_token_that_completes_one(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, look_every: int
) -> None:
    monkeypatch.setattr("spmdflow.rollout.builtin._LOOK_EVERY", look_every)
    generator, prompts, stop = _generator(folder / "grouped"), make_prompts(20), ["7>", "<1"]
    tokenizer = write_numbers_tokenizer(tmp_path, 128)
    free = generator.generate(prompts, SAMPLED, SEEDS[:20])["responses"]
    expected = ended_at([row.tolist() for row in rows_of(free)], stop)

    asked = replace(SAMPLED, tokenizer_path=tokenizer).for_call(stop=stop)
    found = generator.generate(prompts, asked, SEEDS[:20])["responses"]

    assert [row.tolist() for row in rows_of(found)] == expected
    assert sum(len(row) for row in expected) < len(free.values())
