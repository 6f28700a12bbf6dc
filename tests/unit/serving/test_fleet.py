"""The fleet of a rank, with servers that fail in every way. The servers are stand-ins for vLLM."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("uvicorn", reason="uvicorn comes with vLLM")

from spmdflow.errors import SpmdflowError
from spmdflow.rollout.generator import NEVER, Finished, Request
from spmdflow.rollout.sampling import Sampling
from spmdflow.serving.client import ServerClient
from spmdflow.serving.fleet import Fleet, FleetSettings, Identity
from spmdflow.serving.identity import config_hash, tokenizer_hash
from spmdflow.serving.link import ServerLink
from spmdflow.serving.mirror import WeightMirror
from spmdflow.serving.roster import RosterEntry
from tests.unit.serving.standin import END, NAME, SHAPE, VOCABULARY, StandInServer, token_at

MODEL = str(Path(__file__).parents[3] / "algos" / "arithmetic" / "model")
LIMIT = 30.0
MOST_TOKENS = 12


def expected_tokens(seed: int) -> list[int]:
    """The response to a seed, wherever it is drawn."""
    tokens: list[int] = []
    while len(tokens) < MOST_TOKENS and (not tokens or tokens[-1] != END):
        tokens.append(token_at(seed, len(tokens)))
    return tokens


class Rank:
    """A fleet and what a generator does with it."""

    def __init__(
        self,
        servers: Sequence[StandInServer],
        others: Callable[[], list[RosterEntry]] = lambda: [],
        **limits: Any,
    ) -> None:
        settings = {
            "health_seconds": 1.0,
            "stall_seconds": 5.0,
            "transfer_seconds": 5.0,
            "wait_seconds": LIMIT,
            "transport": "gloo",
            "is_exact": False,
            "takes_any_sampler": False,
        }
        self.mirror = WeightMirror({NAME: SHAPE}, torch.float32)
        self.fleet = Fleet(
            [RosterEntry(server.url, "", "run", 0) for server in servers],
            Identity(config_hash(MODEL), tokenizer_hash(MODEL), "float32", 64),
            self.mirror,
            FleetSettings(**settings | limits),
            find_others=others,
            make_client=lambda entry: ServerClient(entry.url, key="", vocab_size=VOCABULARY),
            open_link=ServerLink.open,
            ends=[END],
        )
        self.version = NEVER

    def sync(self, changed: int = 3) -> None:
        """New weights, of which `changed` elements differ from the last ones."""
        before = self.mirror._front[NAME]
        ((_, tensor, _),) = self.mirror.next_blocks()
        tensor.copy_(before)
        tensor.view(-1)[:changed] += 1 + torch.rand(changed)
        self.version += 1
        self.fleet.commit(self.version)

    def generate(self, seeds: Sequence[int]) -> dict[int, list[int]]:
        """Seed -> tokens of its response."""
        seed_of = {self.add(seed): seed for seed in seeds}
        return {seed_of[row.id]: row.tokens.tolist() for row in self.collect(len(seeds))}

    def add(self, seed: int) -> int:
        """Add a row."""
        prompt = torch.tensor([1, 2, 3])
        return self.fleet.add(Request(prompt, seed, Sampling(max_new_tokens=MOST_TOKENS)), None)

    def collect(self, count: int) -> list[Finished]:
        """Wait for so many rows."""
        rows: list[Finished] = []
        end = time.monotonic() + LIMIT
        while len(rows) < count:
            assert time.monotonic() < end, (
                f"{len(rows)} of {count} rows; {self.fleet._care.describe()}"
            )
            rows += self.fleet.take_finished(0.2)
        return rows

    def wait(self, is_over: Callable[[], bool]) -> None:
        """Wait for a state."""
        end = time.monotonic() + LIMIT
        while not is_over():
            assert time.monotonic() < end, self.fleet._care.describe()
            time.sleep(0.02)

    @property
    def states(self) -> list[str]:
        """Of the servers."""
        return [server.state for server in self.fleet.servers]


@pytest.fixture
def start() -> Iterator[Callable[..., Any]]:
    """start(StandInServer or Rank, ...) -> one that ends with the test."""
    made: list[Any] = []

    def begin(kind: Any, *arguments: Any, **named: Any) -> Any:
        made.append(kind(*arguments, **named))
        return made[-1]

    yield begin
    for each in reversed(made):
        if isinstance(each, Rank):
            each.fleet.close()
        else:
            each.stop()


def servers_of(start: Callable[..., Any], number: int, **named: Any) -> list[StandInServer]:
    """Some servers."""
    return [start(StandInServer, MODEL, **named) for _ in range(number)]


SEEDS = range(100, 124)


def test_rows_over_three_servers_have_the_tokens_of_their_seeds_and_all_servers_work(
    start: Callable[..., Any],
) -> None:
    servers = servers_of(start, 3)
    rank = start(Rank, servers)
    rank.sync()
    rank.wait(lambda: rank.states == ["ready"] * 3)

    responses = rank.generate(SEEDS)

    assert responses == {seed: expected_tokens(seed) for seed in SEEDS}
    assert all(server.num_requests for server in servers)
    for server in servers:
        assert torch.equal(server.worker.weight, rank.mirror._front[NAME])


def test_rows_of_a_server_that_dies_go_to_another_one_with_the_same_tokens(
    start: Callable[..., Any],
) -> None:
    first, second = servers_of(start, 2, seconds_per_token=0.05)
    rank = start(Rank, [first, second])
    rank.sync()
    rank.wait(lambda: rank.states == ["ready"] * 2)
    seed_of = {rank.add(seed): seed for seed in SEEDS}
    rank.wait(lambda: first.num_requests > 0)

    first.stop()
    rows = rank.collect(len(SEEDS))

    assert {seed_of[row.id]: row.tokens.tolist() for row in rows} == {
        seed: expected_tokens(seed) for seed in SEEDS
    }
    assert rank.fleet.counters.moved_rows > 0
    assert rank.fleet.counters.recomputed_tokens > 0
    assert rank.states == ["dead", "ready"]
    first.start()
    rank.wait(lambda: rank.states == ["ready"] * 2)


def test_rows_wait_without_any_server_and_go_on_when_one_comes(start: Callable[..., Any]) -> None:
    (server,) = servers_of(start, 1)
    server.stop()
    rank = start(Rank, [server])
    rank.sync()
    seed_of = {rank.add(seed): seed for seed in SEEDS}
    rank.wait(lambda: rank.fleet.counters.waiting_seconds > 0)

    server.start()
    rows = rank.collect(len(SEEDS))

    assert {seed_of[row.id]: row.tokens.tolist() for row in rows} == {
        seed: expected_tokens(seed) for seed in SEEDS
    }


def test_no_server_for_longer_than_the_limit_is_an_error_with_the_states(
    start: Callable[..., Any],
) -> None:
    (server,) = servers_of(start, 1)
    server.stop()
    rank = start(Rank, [server], wait_seconds=1.0)
    rank.sync()
    rank.add(1)

    with pytest.raises(SpmdflowError, match=r"none was ready for .* dead .*wait_seconds"):
        rank.collect(1)


GARBAGE = [
    "",
    "data: {",
    "data: []\n\n",
    'data: {"choices": [{"token_ids": [99], "finish_reason": "stop"}]}\n\n',
    'data: {"choices": [{"token_ids": [3], "finish_reason": "stop", "logprobs": null}]}\n\n',
    'data: {"choices": [{"token_ids": [3], "logprobs": {"content": [{"logprob": 2.5}]}}]}\n\n',
    'data: {"choices": [{"token_ids": [], "finish_reason": "because"}]}\n\n',
    "data: " + "[" * 100_000 + "\n\n",
]


@pytest.mark.parametrize("garbage", GARBAGE, ids=range(len(GARBAGE)))
def test_garbage_of_one_server_costs_no_row(start: Callable[..., Any], garbage: str) -> None:
    liar, honest = servers_of(start, 2)
    rank = start(Rank, [liar, honest])
    rank.sync()
    rank.wait(lambda: rank.states == ["ready"] * 2)
    liar.misbehaves = lambda body: garbage

    responses = rank.generate(SEEDS)

    assert responses == {seed: expected_tokens(seed) for seed in SEEDS}
    assert liar.num_requests > 0


def test_a_row_whose_last_token_has_arrived_is_not_drawn_again_if_its_stream_breaks(
    start: Callable[..., Any],
) -> None:
    (server,) = servers_of(start, 1)
    rank = start(Rank, [server])
    rank.sync()
    rank.wait(lambda: rank.states == ["ready"])
    choice = {"token_ids": [7, END], "finish_reason": None}
    choice["logprobs"] = {"content": [{"logprob": -1.0}, {"logprob": -2.0}]}
    server.misbehaves = lambda body: f"data: {json.dumps({'choices': [choice]})}\n\n"

    responses = rank.generate([1])

    assert responses == {1: [7, END]}
    assert server.num_requests == 1


def test_a_server_without_tokens_for_the_limit_loses_its_rows(start: Callable[..., Any]) -> None:
    slow, fast = servers_of(start, 2)
    rank = start(Rank, [slow, fast], stall_seconds=0.5)
    rank.sync()
    rank.wait(lambda: rank.states == ["ready"] * 2)
    slow.misbehaves = lambda body: "hang"

    responses = rank.generate(SEEDS)

    assert responses == {seed: expected_tokens(seed) for seed in SEEDS}
    assert rank.fleet.counters.moved_rows > 0


def test_a_busy_server_that_sends_tokens_keeps_its_rows_though_it_does_not_say_who_it_is(
    start: Callable[..., Any],
) -> None:
    (server,) = servers_of(start, 1, seconds_per_token=0.1)
    rank = start(Rank, [server], health_seconds=0.5)
    rank.sync()
    rank.wait(lambda: rank.states == ["ready"])
    server.facts_seconds = 3600.0
    seed = next(each for each in range(300, 400) if len(expected_tokens(each)) == MOST_TOKENS)

    responses = rank.generate([seed])

    assert responses == {seed: expected_tokens(seed)}
    assert rank.fleet.counters.moved_rows == 0
    rank.wait(lambda: rank.states == ["dead"])  # no tokens, no answer


def test_a_lost_update_is_found_by_its_hash_and_the_server_gets_everything(
    start: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    (server,) = servers_of(start, 1)
    rank = start(Rank, [server])
    rank.sync()
    rank.wait(lambda: rank.states == ["ready"])
    server.worker.drops_update = True

    rank.sync()
    rank.wait(lambda: rank.fleet.counters.full_updates == 2)
    rank.wait(lambda: rank.states == ["ready"])

    assert rank.fleet.counters.lost_updates == 1
    assert f"got rollout tensor {NAME}" in caplog.text
    assert torch.equal(server.worker.weight, rank.mirror._front[NAME])


def test_updates_are_deltas_until_a_newcomer_that_gets_everything(
    start: Callable[..., Any],
) -> None:
    (first, second) = servers_of(start, 2)
    second.stop()
    rank = start(Rank, [first, second])
    rank.sync()
    rank.wait(lambda: rank.states[0] == "ready")
    full_bytes = rank.fleet.counters.update_bytes

    rank.sync(changed=3)
    rank.wait(lambda: rank.fleet.counters.updates == 2 and rank.states[0] == "ready")
    delta_bytes = rank.fleet.counters.update_bytes - full_bytes
    second.start()
    rank.wait(lambda: rank.states == ["ready"] * 2)

    assert full_bytes == torch.Size(SHAPE).numel() * 4
    assert delta_bytes == 3 * (4 + 4)
    assert rank.fleet.counters.full_updates == 2
    assert torch.equal(second.worker.weight, rank.mirror._front[NAME])


def test_another_model_is_refused_with_a_warning_that_names_server_and_reason(
    start: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    good = start(StandInServer, MODEL)
    other = start(StandInServer, str(Path(MODEL).parents[1] / "guess" / "model"))
    rank = start(Rank, [good, other])
    rank.sync()
    rank.wait(lambda: rank.states == ["ready", "refused"])

    assert f"{other.url} is not used: another model" in caplog.text


def test_exact_mode_waits_for_all_rows_and_begins_moved_rows_again(
    start: Callable[..., Any],
) -> None:
    servers = servers_of(start, 2, max_num_seqs=1, seconds_per_token=0.02)
    rank = start(Rank, servers, is_exact=True)
    rank.sync()
    rank.wait(lambda: rank.states == ["ready"] * 2)
    seeds = range(200, 208)
    seed_of = {rank.add(seed): seed for seed in seeds}
    rank.wait(lambda: servers[0].num_requests > 0)
    servers[0].stop()

    rows = rank.fleet.suspend()

    assert {seed_of[row.id]: row.tokens.tolist() for row in rows} == {
        seed: expected_tokens(seed) for seed in seeds
    }
    assert all(prompt == [1, 2, 3] for prompt in servers[1].prompts)


def test_suspended_rows_keep_their_tokens_and_go_on_after_them(start: Callable[..., Any]) -> None:
    (server,) = servers_of(start, 1, seconds_per_token=0.05, max_num_seqs=64)
    rank = start(Rank, [server])
    rank.sync()
    rank.wait(lambda: rank.states == ["ready"])
    seed = next(each for each in range(300, 400) if len(expected_tokens(each)) == MOST_TOKENS)
    number = rank.add(seed)
    rank.wait(lambda: any(row.tokens for row in rank.fleet._rows.values()))

    ended = rank.fleet.suspend()
    part = rank.fleet.abort(number)

    assert ended == []
    assert part is not None and 0 < len(part.tokens) < MOST_TOKENS
    assert part.tokens.tolist() == expected_tokens(seed)[: len(part.tokens)]


def test_a_rank_uses_servers_of_others_only_while_none_of_its_own_is_ready(
    start: Callable[..., Any],
) -> None:
    own, other = servers_of(start, 2)
    entry = RosterEntry(other.url, "", "run", 1)
    owner = start(Rank, [other])
    owner.sync()
    rank = start(Rank, [own], others=lambda: [entry])
    rank.sync()
    rank.wait(lambda: rank.states == ["ready"] * 2)
    first = rank.generate(SEEDS)
    asked_before = other.num_requests
    own.stop()
    second = rank.generate(SEEDS)

    assert first == second
    assert asked_before == 0
    assert other.num_requests == len(SEEDS)


def test_a_server_with_the_weights_of_another_run_gets_everything(
    start: Callable[..., Any],
) -> None:
    (server,) = servers_of(start, 1)
    rank = start(Rank, [server])
    rank.sync()
    rank.wait(lambda: rank.states == ["ready"])
    rank.fleet.close()

    resumed = start(Rank, [server])
    resumed.sync()
    resumed.wait(lambda: resumed.states == ["ready"])

    assert resumed.fleet.counters.full_updates == 1
    assert torch.equal(server.worker.weight, resumed.mirror._front[NAME])


def test_slot_of_an_aborted_row_is_free_for_the_next(start: Callable[..., Any]) -> None:
    (server,) = servers_of(start, 1)
    rank = start(Rank, [server])
    rank.sync()
    rank.wait(lambda: rank.states == ["ready"])

    for seed in range(2 * rank.fleet.servers[0].capacity):
        rank.fleet.abort(rank.add(seed))

    assert rank.fleet.servers[0].rows == {}
    assert rank.generate([100]) == {100: expected_tokens(100)}
