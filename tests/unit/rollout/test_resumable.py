"""Requests that outlive the weights that began them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from spmdflow.config.schema import RolloutConfig
from spmdflow.data.ragged import rows_of
from spmdflow.errors import SpmdflowError
from spmdflow.rollout.builtin import BuiltinGenerator
from spmdflow.rollout.generator import Request, take_folder_weights
from spmdflow.rollout.resumable import ResumableRequests, VersionedResponse
from spmdflow.rollout.sampling import Sampling
from tests.rollout_reference import make_prompts, write_llama

SAMPLING = Sampling(12, temperature=0.8)
SEEDS = [2**62 + row for row in range(8)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two models of the same shape."""
    made = [tmp_path_factory.mktemp("models") / str(seed) for seed in (0, 1)]
    for seed, folder in enumerate(made):
        write_llama(folder, seed=seed)
    return made


def _generator(folder: Path, *, ends: bool = True) -> BuiltinGenerator:
    generator = BuiltinGenerator(RolloutConfig(max_batch_size=4), str(folder), torch.device("cpu"))
    take_folder_weights(generator, str(folder), verify=True)
    if not ends:
        generator._end_tokens = torch.tensor([], dtype=torch.int64)
    return generator


def _begun(generator: BuiltinGenerator) -> ResumableRequests:
    requests = ResumableRequests(generator, tuple(generator._end_tokens.tolist()))
    for row, seed in zip(rows_of(make_prompts(8)), SEEDS, strict=True):
        requests.add(Request(row, seed, SAMPLING))
    return requests


def test_request_whose_logits_are_nan_is_refused(folders: list[Path]) -> None:
    generator = _generator(folders[0])
    requests = _begun(generator)
    for _, tensor, _ in generator.blocks():
        tensor.fill_(float("nan"))

    with pytest.raises(SpmdflowError, match=r"generate, a prompt of \d+ tokens: got a log-prob"):
        _finish(requests)


def _finish(requests: ResumableRequests) -> dict[int, VersionedResponse]:
    done: dict[int, VersionedResponse] = {}
    while len(requests):
        done |= {row.id: row for row in requests.step()}
    return done


@pytest.mark.parametrize("pause", [1, 3, 12])
def test_suspended_requests_continue_to_the_tokens_that_they_would_have_had(
    folders: list[Path], pause: int
) -> None:
    whole = _generator(folders[0]).generate(make_prompts(8), SAMPLING, SEEDS)
    requests = _begun(_generator(folders[0]))
    done = {}

    for _ in range(100):
        for _ in range(pause):
            done |= {row.id: row for row in requests.step()}
        requests.suspend_all()
    assert not len(requests)

    assert [done[number].tokens.tolist() for number in range(8)] == [
        row.tolist() for row in rows_of(whole["responses"])
    ]
    found = torch.cat([done[number].log_probs for number in range(8)])
    torch.testing.assert_close(found, whole["rollout_log_probs"].values(), atol=1e-5, rtol=0)


def test_rows_under_way_go_on_with_new_weights_and_each_token_has_its_version(
    folders: list[Path],
) -> None:
    old, new = (_generator(folder, ends=False) for folder in folders)
    requests = _begun(old)
    for _ in range(5):  # four rows are drawn at a time, the others wait
        assert requests.step() == []

    requests.suspend_all()
    requests.version = 3
    for (_, mine, _), (_, its, _) in zip(old.blocks(), new.blocks(), strict=True):
        mine.copy_(its)
    old.renew(3)
    done = _finish(requests)

    expected = [0] * 5 + [3] * 7
    assert [done[number].versions.tolist() for number in range(4)] == [expected] * 4
    assert [done[number].versions.tolist() for number in range(4, 8)] == [[3] * 12] * 4
    for number, prompt in enumerate(rows_of(make_prompts(8))[:4]):
        ids = torch.cat([prompt, done[number].tokens[:5]])
        again = ResumableRequests(new, ())
        again.add(
            Request(prompt, SEEDS[number], SAMPLING),
            {
                "tokens": ids[len(prompt) :],
                "log_probs": done[number].log_probs[:5],
                "versions": done[number].versions[:5],
            },
        )
        (row,) = _finish(again).values()
        assert row.tokens.tolist() == done[number].tokens.tolist()


def test_greedy_requests_and_others_take_turns(folders: list[Path]) -> None:
    generator = _generator(folders[0])
    requests = _begun(generator)
    prompts = rows_of(make_prompts(2))
    requests.step()
    requests.suspend_all()
    greedy = Sampling(6, temperature=0.8, greedy=True)
    numbers = {requests.add(Request(row, 1, greedy)) for row in prompts}

    done: dict[int, VersionedResponse] = {}
    while not requests.is_idle(greedy=True):
        done |= {row.id: row for row in requests.step(greedy=True)}

    assert set(done) == numbers and not requests.is_idle(greedy=False)
    assert len(_finish(requests)) > 0


def test_an_aborted_request_is_gone_wherever_it_is(folders: list[Path]) -> None:
    requests = _begun(_generator(folders[0], ends=False))
    requests.step()

    for number in (0, 7):  # one that runs, one that waits
        requests.abort(number)
    requests.suspend_all()
    requests.abort(1)

    assert sorted(_finish(requests)) == [2, 3, 4, 5, 6]
