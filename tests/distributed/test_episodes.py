"""Episodes on one rank: what is recorded, in which order, and what environments cannot break."""

from __future__ import annotations

import importlib.util
import json
import random
import select
import shutil
import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from spmdflow.config.endpoint import EndpointConfig
from spmdflow.config.episode import EpisodeConfig
from spmdflow.config.schema import RolloutConfig
from spmdflow.data.ragged import ragged_from_rows
from spmdflow.data.row_id import seed_of
from spmdflow.datasets.chat import ChatTemplate
from spmdflow.datasets.tokenizer import load_tokenizer
from spmdflow.episodes.pool import EndedEpisode, EnvironmentPool
from spmdflow.episodes.recorder import Limits
from spmdflow.episodes.result import Episode
from spmdflow.episodes.run import EpisodeRunner
from spmdflow.plan.replay import Replay
from spmdflow.rollout.builtin import BuiltinGenerator
from spmdflow.rollout.forward import end_tokens, vocab_size
from spmdflow.rollout.generator import Replica, Request, take_folder_weights
from spmdflow.rollout.resumable import ResumableRequests
from spmdflow.rollout.sampling import Sampling
from tests.distributed.programs import episode_env, episode_ranks
from tests.unit.planned import trace_replayed

MODEL = Path(__file__).parents[2] / "algos" / "guess" / "model"
ENVIRONMENTS = Path(episode_env.__file__)
SAMPLING = Sampling(32, temperature=1.0, tokenizer_path=str(MODEL))
LIMITS = Limits(
    max_turns=8,
    max_prompt_tokens=8,
    max_new_tokens=32,
    may_fork=False,
    vocab_size=vocab_size(str(MODEL)),
)
NUM_ROWS = 24
"""Of the runs on several ranks."""
ROWS = [{"digit": number} for number in range(32)]


class ListeningGenerator(BuiltinGenerator):
    """Remembers the seeds of its requests in the order in which they came."""

    def add(self, request: Request) -> int:
        self.__dict__.setdefault("order", []).append(request.seed)
        return super().add(request)


def new_generator(*, max_batch_size: int = 128, model: Path = MODEL) -> ListeningGenerator:
    cfg = RolloutConfig(max_batch_size=max_batch_size, dtype="float32")
    generator = ListeningGenerator(cfg, str(model), torch.device("cpu"))
    take_folder_weights(generator, str(model), verify=True)
    return generator


def new_runner(
    name: str, generator: BuiltinGenerator, *, limits: Limits = LIMITS, **settings: Any
) -> EpisodeRunner:
    cfg = EpisodeConfig(**{"environment": f"{ENVIRONMENTS}:{name}", "seconds": 600.0, **settings})
    ends = end_tokens(str(MODEL))
    return EpisodeRunner(
        cfg,
        limits,
        ResumableRequests(generator, ends),
        chat=ChatTemplate(load_tokenizer(str(MODEL))),
        end_tokens=ends,
        replica=Replica.alone(),
    )


def seed_of_turn(place: int, turn: int) -> int:
    return seed_of(0, "episode", 1, place, 0, turn)


def facts(episodes: list[Episode]) -> list[Any]:
    """Everything that must not depend on the order of arrival."""
    return [tuple(episode) for episode in episodes]


@pytest.fixture(scope="module")
def alone() -> list[Episode]:
    """The scripted episodes, one request at a time: every shape is a row's own."""
    runner = new_runner("scripted", new_generator(max_batch_size=1))
    found = runner.run(ROWS, SAMPLING, seed_of_turn)
    runner.close()
    return found


def test_ids_and_masks_are_those_of_a_plain_loop(alone: list[Episode]) -> None:
    tokenizer = load_tokenizer(str(MODEL))
    generator = new_generator(max_batch_size=1)
    for row, episode in zip(ROWS, alone, strict=True):
        text = "<user>guess<policy>"
        ids = tokenizer(text, add_special_tokens=False).input_ids
        prompt = len(ids)
        mask = []
        log_probs = []
        for turn in range(3):
            made = generator.generate(
                ragged_from_rows([torch.tensor(ids)]),
                Sampling(2, tokenizer_path=str(MODEL)),
                [seed_of_turn(row["digit"], turn)],
            )
            said = made["responses"].values().tolist()
            log_probs += made["rollout_log_probs"].values().tolist()
            ids = ids + said
            mask = mask + [True] * len(said)
            if turn == 2:
                break
            told = f"<user>{episode_env.said(row['digit'], turn)}<policy>"
            more = tokenizer(told, add_special_tokens=False).input_ids
            ids = ids + more
            mask = mask + [False] * len(more)
            log_probs += [0.0] * len(more)
        assert (episode.prompt, episode.tokens) == (ids[:prompt], ids[prompt:])
        assert (episode.mask, episode.log_probs) == (mask, log_probs)
        assert episode.num_turns == 3 and episode.num_segments == 1


@pytest.mark.parametrize(
    "num_seeds",
    [2, pytest.param(6, marks=pytest.mark.drill), pytest.param(20, marks=pytest.mark.slow)],
)
def test_any_order_of_arrival_gives_the_same_bits(alone: list[Episode], num_seeds: int) -> None:
    orders = set()
    for sleeps in range(1, num_seeds + 1):
        generator = new_generator(max_batch_size=1)
        runner = new_runner(f"scripted(sleeps={sleeps})", generator)
        found = runner.run(ROWS, SAMPLING, seed_of_turn)
        runner.close()
        assert facts(found) == facts(alone), sleeps
        orders.add(tuple(generator.order))
    assert len(orders) == num_seeds


def test_rows_decoded_together_give_the_same_tokens(alone: list[Episode]) -> None:
    runner = new_runner("scripted(sleeps=1)", new_generator(), num_processes=2)
    found = runner.run(ROWS, SAMPLING, seed_of_turn)
    runner.close()

    for together, own in zip(found, alone, strict=True):
        assert (together.tokens, together.mask) == (own.tokens, own.mask)
        assert together.log_probs == pytest.approx(own.log_probs, abs=1e-5)


@pytest.mark.drill
@pytest.mark.skipif(shutil.which("openssl") is None, reason="no program openssl")
def test_environments_that_call_over_tls_get_the_same_bits(alone: list[Episode]) -> None:
    secure = EndpointConfig(address="0.0.0.0", public_url="https://localhost:{port}")
    secure.certificate = "self-signed"
    runner = new_runner("scripted", new_generator(max_batch_size=1), endpoint=secure)
    found = runner.run(ROWS, SAMPLING, seed_of_turn)
    runner.close()

    assert facts(found) == facts(alone)


@pytest.mark.drill
def test_processes_of_their_own_give_the_same_bits(alone: list[Episode]) -> None:
    runner = new_runner("scripted", new_generator(max_batch_size=1), isolation="process")
    found = runner.run(ROWS, SAMPLING, seed_of_turn)
    runner.close()

    assert facts(found) == facts(alone)


def test_episodes_begun_ahead_lose_nothing_to_new_weights_or_to_held_out_ones(
    alone: list[Episode], tmp_path: Path
) -> None:
    renewed = tmp_path / "renewed"
    generator = new_generator(max_batch_size=1)
    runner = new_runner("scripted(sleeps=3)", generator, concurrency=12)
    first = runner.begin(ROWS[:16], SAMPLING, seed_of_turn)
    rows = [row | {"last_turn_after": str(renewed)} for row in ROWS[16:32]]
    second = runner.begin(rows, SAMPLING, lambda place, turn: seed_of_turn(place + 16, turn))

    found = runner.finish(first)
    generator.renew(1)
    runner._requests.suspend_all()
    runner._requests.version = 1
    renewed.touch()
    greedy = runner.run(ROWS[:4], replace(SAMPLING, greedy=True), seed_of_turn)
    found += runner.finish(second)
    runner.close()

    assert [each.tokens for each in found] == [each.tokens for each in alone[:32]]
    for each in found:
        assert [version >= 0 for version in each.versions] == each.mask
    assert {version for each in found[16:] for version in each.versions} >= {-1, 1}
    assert {version for each in found[:16] for version in each.versions} == {-1, 0}
    assert all(each.scores for each in greedy)


LIMIT = 12.0
"""Seconds of an episode: far more than it takes on a busy machine, and no long wait."""
CAUSES = {
    "raises": "raised ValueError: no such game",
    "text": "returned 'good' (str)",
    "exits": "raised SystemExit: 3",
    "vanishes": "ended its worker process (exit status 7)",
    "waits": f"ran longer than actor.rollout.episode.seconds ({LIMIT:g} s)",
    "hangs": "kept its worker process busy for longer than",
    "floods": "flooded the endpoint: 100 requests were refused",
    "large": "expected at most 4194304",
    "other": "got no running episode of this client",
    "talks": "expected at most actor.rollout.episode.max_turns=8",
}


SLOW = ("waits", "hangs")
"""Those that are known after LIMIT only: drills."""
Found = tuple[list[dict[str, Any]], list[Episode]]


def episodes_of(causes: Sequence[str]) -> Found:
    """Rows, every other one of which does something wrong, and what became of them."""
    rows: list[dict[str, Any]] = [{"does": does} for does in ("none", *causes)]
    rows += [{"does": ""} for _ in rows]
    random.Random(0).shuffle(rows)
    runner = new_runner("faulty", new_generator(), seconds=LIMIT, num_processes=2)
    found = runner.run(rows, SAMPLING, seed_of_turn)
    again = runner.run(ROWS[:4], SAMPLING, seed_of_turn)
    runner.close()
    assert all(episode.scores for episode in again)
    return rows, found


@pytest.fixture(scope="module")
def among_quick_faults() -> Found:
    return episodes_of([does for does in CAUSES if does not in SLOW])


@pytest.fixture(scope="module")
def among_all_faults() -> Found:
    return episodes_of(list(CAUSES))


@pytest.mark.parametrize(
    "does",
    [pytest.param(does, marks=[pytest.mark.drill] * (does in SLOW)) for does in CAUSES],
)
def test_fault_of_an_environment_is_named(request: pytest.FixtureRequest, does: str) -> None:
    among = "among_all_faults" if does in SLOW else "among_quick_faults"
    rows, found = request.getfixturevalue(among)
    (episode,) = [e for row, e in zip(rows, found, strict=True) if row["does"] == does]

    assert episode.scores is None
    assert CAUSES[does] in episode.cause
    assert f'"does": "{does}"' in episode.cause


def test_an_episode_that_fails_as_it_is_cut_off_says_what_it_was_cut_off_for() -> None:
    pool = EnvironmentPool(EpisodeConfig(environment=f"{ENVIRONMENTS}:cut_off", num_processes=1))
    told = {"base_url": "", "model": "", "api_key": ""}
    _listener, wake = socket.socketpair()
    pool.begin({7: {"digit": 3}})
    ended: list[EndedEpisode] = []
    until = time.monotonic() + 60
    while not ended and time.monotonic() < until:
        pool.start_waiting(lambda number: told)
        (process,) = pool._processes
        select.select([process], [], [], 30)  # its failure can be read before the endpoint tells
        cause = {7: "flooded"} if process.running else {}
        ended = pool.advance(0, wake=wake.fileno(), faults=cause.copy)
    pool.close()

    assert [each.number for each in ended] == [7]
    assert "cut_off' flooded" in ended[0].cause
    assert 'row: {"digit": 3}' in ended[0].cause


def test_faults_harm_no_other_episode(
    among_quick_faults: Found,
) -> None:
    rows, found = among_quick_faults
    for row, episode in zip(rows, found, strict=True):
        if row["does"] == "none":
            assert (episode.scores, episode.cause) == (None, "")
        if row["does"] == "":
            assert episode.scores == {"score": 1.0, "torch": 0.0}
            assert (episode.num_turns, len(episode.tokens)) == (1, 1)


def test_strict_run_ends_at_the_first_failure() -> None:
    runner = new_runner("faulty", new_generator(), seconds=500.0)
    start = time.monotonic()
    found = runner.run(
        [{"does": "waits"}, {"does": "raises"}],
        SAMPLING,
        seed_of_turn,
        strict=True,
    )
    runner.close()

    assert time.monotonic() - start < 400
    assert [episode.number for episode in found if episode.cause] == [1]


@pytest.fixture(scope="module")
def runs_of_ranks(tmp_path_factory: pytest.TempPathFactory, spawn_ranks: Any) -> Path:
    out: Path = tmp_path_factory.mktemp("episodes")
    spawn_ranks(episode_ranks.run_all, 2, str(out))
    return out


@pytest.fixture(scope="module")
def run_of_four(runs_of_ranks: Path, spawn_ranks: Any) -> None:
    spawn_ranks(episode_ranks.run_all, 4, str(runs_of_ranks), episode_ranks.FOUR)


@pytest.fixture(params=["two", pytest.param("four", marks=pytest.mark.drill)])
def case(request: pytest.FixtureRequest) -> str:
    """A run on several ranks, which has ended."""
    request.getfixturevalue("runs_of_ranks" if request.param == "two" else "run_of_four")
    return request.param


def columns_of(runs_of_ranks: Path, case: str) -> dict[str, Any]:
    return json.loads((runs_of_ranks / f"{case}.json").read_text())


@pytest.fixture(scope="module")
def on_ranks(runs_of_ranks: Path) -> dict[str, Any]:
    """Number of ranks in words -> columns."""
    return {case: columns_of(runs_of_ranks, case) for case in episode_ranks.CASES}


def test_any_number_of_ranks_gives_the_same_bits(
    on_ranks: dict[str, Any], runs_of_ranks: Path, case: str
) -> None:
    found = columns_of(runs_of_ranks, case)
    expected = on_ranks["one"]

    ours = [name for name in expected if not name.endswith("old_log_probs")]
    assert {name: found[name] for name in ours} == {name: expected[name] for name in ours}


@pytest.mark.parametrize("prefix", ["", "turns "])
def test_trainer_and_recorder_agree_on_sampled_tokens(
    on_ranks: dict[str, Any], prefix: str
) -> None:
    columns = on_ranks["two"]
    names = ("response_mask", "rollout_log_probs", "old_log_probs")
    for mask, recorded, trained in zip(*(columns[prefix + name] for name in names), strict=True):
        own = [number for number, chosen in zip(trained, mask, strict=True) if chosen]
        assert [x for x, chosen in zip(recorded, mask) if chosen] == pytest.approx(own, abs=1e-5)
        assert not any(x for x, chosen in zip(recorded, mask) if not chosen)
    assert columns["num_turns"] == [3] * NUM_ROWS and all(columns["valid"])


def test_turns_of_the_script_are_joined_with_what_was_said_masked(
    on_ranks: dict[str, Any],
) -> None:
    one = on_ranks["one"]
    rows = zip(one["turns responses"], one["turns response_mask"], strict=True)
    said = [[token for token, chosen in zip(*row, strict=True) if not chosen] for row in rows]

    words = {load_tokenizer(str(MODEL)).convert_tokens_to_ids(word) for word in ("lower", "higher")}
    assert {len(tokens) for tokens in said} == {0, 1, 2}  # a row goes on until nothing is said
    assert set().union(*said) == words


def test_rows_of_turns_move_as_planned(runs_of_ranks: Path, case: str) -> None:
    replay = Replay.of_run(runs_of_ranks / case)
    planned = trace_replayed(episode_ranks, episode_ranks.config_of(case, runs_of_ranks), replay)

    assert planned.edges_by_step == {1: replay.edges(1)}
    assert sum(replay.edges(1).values()) > 0


def test_a_second_call_in_a_step_draws_anew(on_ranks: dict[str, Any]) -> None:
    one = on_ranks["one"]
    assert sum(map(list.__eq__, one["again"], one["responses"])) < 0.2 * NUM_ROWS


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed")
def test_replicas_of_vllm_on_one_and_two_ranks_give_the_same_tokens(
    on_ranks: dict[str, Any], tmp_path: Path, spawn_ranks: Any
) -> None:
    spawn_ranks(episode_ranks.run_with_vllm, 2, str(tmp_path))

    for case in episode_ranks.WITH_VLLM:
        found = json.loads((tmp_path / f"{case}.json").read_text())
        one = on_ranks["one"]
        for name in found:
            if not name.endswith("log_probs"):
                assert found[name] == one[name], (case, name)
                continue
            pairs = zip(found[name], one[name], strict=True)
            assert all(mine == pytest.approx(other, abs=1e-5) for mine, other in pairs)
