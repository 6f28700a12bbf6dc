"""Clients and bridges that users have: openai's, a class with tools, TextArena, reasoning-gym."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from spmdflow.envs.tools import episode as play_tools
from spmdflow.envs.tools import schemas_of
from spmdflow.episodes.recorder import Limits
from spmdflow.rollout.forward import vocab_size
from tests.distributed.programs import clients_env
from tests.distributed.test_episodes import (
    LIMITS,
    MODEL,
    SAMPLING,
    new_generator,
    new_runner,
    seed_of_turn,
)

HERE = Path(clients_env.__file__)


def needs(package: str) -> pytest.MarkDecorator:
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"{package} is not installed")


def run(
    environment: str, rows: list[dict[str, Any]], *, model: Path = MODEL, **settings: Any
) -> list[Any]:
    long = Limits(
        max_turns=64,
        max_prompt_tokens=1000,
        max_new_tokens=1000,
        may_fork=settings.get("segments", "one") != "one",
        vocab_size=vocab_size(str(model)),
    )
    limits = LIMITS if model == MODEL else long
    generator = new_generator(max_batch_size=1, model=model)
    runner = new_runner(
        "", generator, environment=environment, seconds=600.0, limits=limits, **settings
    )
    try:
        return runner.run(rows, SAMPLING, seed_of_turn)
    finally:
        runner.close()


@pytest.fixture(scope="module")
def patient(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model with room for long conversations; their words are unknown to it."""
    folder = tmp_path_factory.mktemp("long") / "model"
    shutil.copytree(MODEL, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2048}))
    return folder


@needs("openai")
def test_official_client_plays_the_same_episode_streaming_and_not() -> None:
    rows = [{"n": n} for n in range(4)]
    plain = run(f"{HERE}:official", rows)
    streamed = run(f"{HERE}:official(stream=True)", rows)

    assert [episode.cause for episode in plain + streamed] == [""] * 8
    assert [tuple(episode) for episode in plain] == [tuple(episode) for episode in streamed]
    for episode in plain:
        assert episode.scores["counted"] == sum(episode.mask) and episode.num_turns == 2


def test_tools_are_described_called_and_scored() -> None:
    """A server that answers as a model would that calls tools well; the bridge does the rest."""
    calls = [("nothing", {}), ("fail", {}), ("add", {"a": 2}), ("add", {"a": 2, "b": 3})]
    heard: list[dict[str, Any]] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for name, arguments in [*calls, (None, None)]:
            head = await reader.readuntil(b"\r\n\r\n")
            size = int(head.lower().partition(b"content-length: ")[2].split(b"\r")[0])
            heard.append(json.loads(await reader.readexactly(size)))
            function = {"name": name, "arguments": json.dumps(arguments)}
            told = [{"id": "call_0", "type": "function", "function": function}] if name else None
            message = {"role": "assistant", "content": "5", "tool_calls": told}
            body = json.dumps({"choices": [{"message": message}]}).encode()
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body)

    async def play() -> float:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        row = {"question": "2 + 3", "answer": 5}
        name = f"{HERE}:Calculator"
        return await play_tools(row, base_url=url, model="m", api_key="k", tools=name)

    score = asyncio.run(play())

    assert score == 1.0
    assert [
        message["content"] for message in heard[-1]["messages"] if message["role"] == "tool"
    ] == [
        "error: no tool 'nothing'",
        "error: ValueError: never works",
        "error: TypeError: Calculator.add() missing 1 required positional argument: 'b'",
        "5",
    ]
    (add, fail) = heard[0]["tools"]
    assert add["function"]["description"] == "The sum of two numbers."
    assert add["function"]["parameters"]["properties"] == {
        "a": {"type": "integer"},
        "b": {"type": "integer"},
    }
    assert schemas_of(clients_env.Calculator) == [add, fail]


@needs("textarena")
@pytest.mark.parametrize("game", ["TowerOfHanoi-v0", "Mastermind-v0"])
def test_games_of_textarena_run_unmodified_and_the_same_twice(patient: Path, game: str) -> None:
    environment = f"spmdflow.envs.textarena:episode(game='{game}', max_tokens=1)"
    rows = [{"seed": n} for n in range(3)]
    one, two = (run(environment, rows, model=patient) for _ in "12")

    assert [episode.cause for episode in one] == [""] * 3
    assert [tuple(episode) for episode in one] == [tuple(episode) for episode in two]
    assert all(episode.num_turns >= 1 for episode in one)


@needs("textarena")
def test_each_player_of_a_game_of_two_is_trained_with_its_own_reward(patient: Path) -> None:
    found = run(
        "spmdflow.envs.textarena:episode(game='TicTacToe-v0', num_players=2, max_tokens=1)",
        [{"seed": n} for n in range(3)],
        model=patient,
        segments="all",
        credit="segment",
    )

    assert [episode.cause for episode in found] == [""] * 3
    for episode in found:
        scores = {segment.name: segment.score for segment in episode.segments}
        assert scores["player-0"] == episode.scores["score"]
        assert scores["player-0"] == -scores.get("player-1", 1.0) != 0.0
        assert {segment.weight for segment in episode.segments} == {1.0}
        for segment in episode.segments:
            assert segment.rewards[-1] == segment.score and sum(segment.mask) > 0


@needs("reasoning_gym")
@pytest.mark.parametrize("task", ["chain_sum", "leg_counting", "spell_backward"])
def test_tasks_of_reasoning_gym_run_and_are_scored(patient: Path, task: str) -> None:
    environment = f"spmdflow.envs.reasoning:episode(task='{task}', max_tokens=4)"
    found = run(environment, [{"seed": n} for n in range(4)], model=patient)

    assert [episode.cause for episode in found] == [""] * 4
    assert all(0 <= episode.scores["score"] <= 1 for episode in found)
