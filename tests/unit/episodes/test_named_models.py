"""Models besides the policy at the endpoint: which one a name means, and servers outside."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import anthropic
import openai
import pytest

from spmdflow.config.episode_models import episode_models, server_key
from spmdflow.datasets.chat import ChatTemplate
from spmdflow.episodes.ask import Refusal
from spmdflow.episodes.endpoint import Endpoint
from spmdflow.episodes.generation import OtherModels
from spmdflow.episodes.named_model import NamedModels, OwnSampling, SavedSteps, take_sampling
from spmdflow.episodes.pending import GenerationRequest
from spmdflow.episodes.recorder import Limits, Recorder
from spmdflow.errors import ConfigError
from tests.unit.episodes.judge_server import Answer, JudgeServer, is_silent, says
from tests.unit.episodes.test_agent_requests import words
from tests.unit.episodes.test_conversation import text_tokenizer

TOKENIZER = text_tokenizer()
KEY = "sk-not-for-logs-1234"
LIMITS = Limits(
    4, max_prompt_tokens=900, max_new_tokens=500, may_fork=True, vocab_size=len(TOKENIZER)
)
FUNCTION = {"name": "add", "parameters": {"type": "object", "properties": {}}}


def new_recorder(*_: Any) -> Recorder:
    return Recorder(ChatTemplate(TOKENIZER), (TOKENIZER.eos_token_id,), LIMITS)


class Episode:
    """An episode with models, and clients of two dialects."""

    def __init__(self, settings: dict[str, Any], steps: SavedSteps | None = None) -> None:
        models = episode_models("models", settings)
        named = NamedModels(models, lambda: steps or SavedSteps())
        self.endpoint = Endpoint(models=named, server_keys={"judge": KEY})
        self.recorder = new_recorder()
        others = OtherModels(new_recorder, lambda model: LIMITS)
        self.name, told = self.endpoint.open(0, self.recorder, others)
        url = told["base_url"]
        self.openai = openai.OpenAI(base_url=url, api_key=told["api_key"], max_retries=0)
        base = url.removesuffix("/v1")
        self.anthropic = anthropic.Anthropic(base_url=base, api_key=told["api_key"], max_retries=0)

    def chat(self, model: str, text: str = "good?", **fields: Any) -> Any:
        messages = [{"role": "user", "content": text}]
        return self.openai.chat.completions.create(model=model, messages=messages, **fields)  # type: ignore[call-overload]

    def close(self) -> None:
        self.openai.close()
        self.anthropic.close()
        self.endpoint.close()


@contextmanager
def judged(
    answer: Callable[[dict[str, Any]], Answer], **options: Any
) -> Iterator[tuple[Episode, JudgeServer]]:
    """An episode whose model "judge" is a server that answers so."""
    with JudgeServer(answer) as server:
        episode = Episode({"judge": {"url": server.url, **options}})
        try:
            yield episode, server
        finally:
            episode.close()


def test_judge_answers_by_name_with_the_sampling_of_the_request_and_nothing_is_recorded() -> None:
    with judged(lambda body: says("A"), model="big-judge", key_variable="K") as (episode, server):
        answer = episode.chat("judge", temperature=0.2, top_p=0.9, seed=5, max_tokens=10, stop="z")

        (path, headers, body) = server.requests[0]
        assert answer.choices[0].message.content == "A" and answer.model == "judge"
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (7, 3)
        assert path == "/v1/chat/completions"
        assert headers["authorization"] == f"Bearer {KEY}"
        assert body == {
            "model": "big-judge",
            "messages": [{"role": "user", "content": "good?"}],
            "temperature": 0.2,
            "top_p": 0.9,
            "seed": 5,
            "max_tokens": 10,
            "stop": ["z"],
        }
        assert episode.recorder.segments == [] and episode.recorder.num_turns == 0
        assert episode.endpoint.inbox.empty()
        (use,) = episode.endpoint.forget(episode.name).values()
        assert (use.requests, use.failed, use.tokens) == (1, 0, 3)


def test_judge_is_reached_in_every_dialect() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    tools: Any = [{"type": "function", "function": FUNCTION}]

    def answer(body: dict[str, Any]) -> Answer:
        return says(None, tool_calls=[call]) if "tools" in body else says("B", reasoning="hm")

    with judged(answer) as (episode, server):
        said = episode.anthropic.messages.create(
            model="judge", max_tokens=9, messages=[{"role": "user", "content": "good?"}]
        )
        first = episode.openai.responses.create(model="judge", input="good?")
        second = episode.openai.responses.create(
            model="judge", input="sure?", previous_response_id=first.id
        )
        called = episode.chat("judge", "add", tools=tools, tool_choice="required")

    assert [block.type for block in said.content] == ["thinking", "text"]
    assert (first.output_text, second.output_text) == ("B", "B") and first.id != second.id
    assert said.model == first.model == "judge"
    assert [message["role"] for message in server.requests[2][2]["messages"]] == [
        "user",
        "assistant",
        "user",
    ]
    (found,) = called.choices[0].message.tool_calls
    assert (found.id, found.function.name) == ("c1", "add")
    assert called.choices[0].finish_reason == "tool_calls"
    assert server.requests[3][2]["tool_choice"] == "required"


def test_judge_is_streamed_as_one_piece() -> None:
    with judged(lambda body: says("one piece")) as (episode, _):
        chunks = list(episode.chat("judge", stream=True))

    text = "".join(x.choices[0].delta.content or "" for x in chunks if x.choices)
    assert text == "one piece" and chunks[0].model == "judge"


@pytest.mark.parametrize(
    ("answer", "status", "retries", "expected"),
    [
        ((500, {"error": "down"}), 502, "true", "got status 500"),
        ((401, {"error": f"wrong key {KEY}"}), 502, "false", "the environment variable JUDGE_KEY"),
        ((400, {"error": "too long"}), 400, "false", "too long"),
        ((200, b"<html>"), 502, "false", "another answer than chat completions"),
        ((200, {"choices": []}), 502, "false", "another answer than chat completions"),
    ],
)
def test_failure_of_a_judge_is_a_clear_error_and_the_episode_goes_on(
    answer: Answer,
    status: int,
    retries: str,
    expected: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    with judged(lambda body: answer, key_variable="JUDGE_KEY", attempts=2) as (episode, server):
        with pytest.raises(openai.APIStatusError) as caught:
            episode.chat("judge")
        asked_again = server.requests[1:]
        with pytest.raises(openai.APIStatusError):
            episode.chat("judge", logprobs=True)
        (use,) = episode.endpoint.forget(episode.name).values()

    error = caught.value
    assert error.status_code == status and error.response.headers["x-should-retry"] == retries
    text = error.response.json()["error"]["message"]
    assert text.startswith("model judge: got ") and expected in text
    assert len(asked_again) == (1 if retries == "true" else 0)
    assert KEY not in text and KEY not in caplog.text
    assert (use.requests, use.failed) == (2, 2)
    assert episode.endpoint.inbox.empty(), "no fault of the episode"


def test_judge_that_is_busy_once_is_asked_again() -> None:
    answers = [(429, {}), says("yes")]
    with judged(lambda body: answers.pop(0)) as (episode, server):
        assert episode.chat("judge").choices[0].message.content == "yes"
        assert len(server.requests) == 2


def test_judge_that_is_down_or_silent_is_an_error_within_its_time() -> None:
    episode = Episode({"judge": {"url": "http://127.0.0.1:9/v1", "attempts": 1}})
    with pytest.raises(openai.APIStatusError, match="no answer of http://127.0.0.1:9") as caught:
        episode.chat("judge")
    assert caught.value.status_code == 502
    episode.close()
    with judged(is_silent(0.5), seconds=0.1) as (other, _):
        with pytest.raises(openai.APIStatusError, match=r"within 0.1 s") as caught:
            other.chat("judge")
        assert caught.value.response.headers["x-should-retry"] == "true"


def test_judge_has_a_limit_of_turns_of_its_own() -> None:
    with judged(lambda body: says("A")) as (episode, server):
        for _ in range(LIMITS.max_turns):
            episode.chat("judge")
        with pytest.raises(openai.BadRequestError, match=r"models\.judge\.max_turns=4"):
            episode.chat("judge")
        assert len(server.requests) == LIMITS.max_turns


def test_names_that_are_not_set_up_are_the_policy_but_never_those_of_other_weights(
    caplog: pytest.LogCaptureFixture,
) -> None:
    none = NamedModels()
    some = NamedModels(episode_models("models", {"judge": {"url": "http://j/v1"}}))

    for name in ("policy", "gpt-4o", "judge", None, 5):
        assert none.find(name) is None
    assert caplog.text == ""
    assert some.find("gpt-4o") is None and some.find("gpt-4o") is None
    assert caplog.text.count("gpt-4o") == 1, "a name that may be a typing error is logged once"
    for name in ("reference", "policy@3", "policy@step"):
        for models in (none, some):
            with pytest.raises(Refusal, match=r"which is not set up, expected one of policy") as c:
                models.find(name)
            assert c.value.status == 404


def test_requests_to_frozen_models_carry_their_own_sampling_and_leave_the_policy_alone() -> None:
    steps = SavedSteps([0, 10])
    episode = Episode({"reference": {}, "policy@step": {}}, steps)
    draws: list[GenerationRequest] = []

    def reply_to_one() -> None:
        draw: Any = episode.endpoint.inbox.get(timeout=100)
        draws.append(draw)
        draw.done(words(TOKENIZER, "yes"))

    for model in ("reference", "policy@10", "policy"):
        thread = threading.Thread(target=reply_to_one)
        thread.start()
        answer = episode.chat(model, temperature=0, seed=3)
        thread.join()
        assert answer.model == model and answer.choices[0].message.content == "yes"
    listed = [model.id for model in episode.openai.models.list()]
    with pytest.raises(openai.NotFoundError, match=r"whose checkpoint exists: 0, 10"):
        episode.chat("policy@11")
    episode.close()

    assert [draw.model for draw in draws] == ["reference", "policy@10", "policy"]
    own = OwnSampling(temperature=0, seed=3)
    assert [draw.sampling for draw in draws] == [own, own, None]
    assert [draw.turn for draw in draws] == [0, 0, 0], "each model has turns of its own"
    assert episode.recorder.num_turns == 1 and len(episode.recorder.segments) == 1
    assert listed == ["policy", "reference", "policy@0", "policy@10"]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"temperature": -1}, "temperature: got -1, expected 0 to 100"),
        ({"temperature": "hot"}, "temperature: got 'hot', expected a number"),
        ({"top_p": 1.5}, "top_p: got 1.5, expected 0 to 1"),
        ({"seed": 1.5}, "seed: got 1.5, expected a number"),
        ({"top_k": True}, "top_k: got True, expected a number"),
    ],
)
def test_sampling_out_of_bounds_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(Refusal, match=said):
        take_sampling(fields)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"policy": {}}, "the name 'policy'"),
        ({"policy@7": {}}, "the name 'policy@7'"),
        ({"judge": "http://j/v1"}, "expected a map with url"),
        ({"judge": {}}, "neither path nor url"),
        ({"judge": {"url": "j:80"}}, "expected http://host:port/v1"),
        ({"judge": {"url": "http://me:pw@j/v1"}}, "without secrets"),
        ({"judge": {"url": "http://j/v1", "key": "x"}}, "the option 'key'"),
        ({"judge": {"url": "http://j/v1", "seconds": 0}}, "a number, at least 0.001"),
        ({"judge": {"url": "http://j/v1", "attempts": 1.5}}, "a whole number, at least 1"),
        ({"reference": {"url": "http://j/v1"}}, "a url for 'reference'"),
        ({"policy@step": {"path": "x"}}, "none: they are the checkpoints'"),
        ({"a/b": {"path": "x"}}, "the name 'a/b'"),
    ],
)
def test_setting_that_cannot_work_is_refused(setting: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        episode_models("models", setting)


def test_key_that_is_not_in_the_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"judge": {"url": "http://j/v1", "key_variable": "A_JUDGE_KEY"}, "none": None}
    models = episode_models("models", settings)
    judge: Any = models["judge"]
    monkeypatch.delenv("A_JUDGE_KEY", raising=False)

    assert list(models) == ["judge"]
    with pytest.raises(ConfigError, match="A_JUDGE_KEY, which is not set on this rank"):
        server_key("models.judge", judge)
    monkeypatch.setenv("A_JUDGE_KEY", KEY)
    assert server_key("models.judge", judge) == KEY
    assert KEY not in json.dumps(settings) and KEY not in repr(judge)
