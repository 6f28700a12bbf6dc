"""`run_episodes`: rows as conversations with an environment, many turns each.

Shared by all roles that generate. The columns are those of a single response: all tokens after the
first prompt are the response, and the mask marks the tokens that the policy sampled.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import nan
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from spmdflow.config.episode import KEY, EpisodeConfig, environment_of
from spmdflow.config.episode_models import AT_STEP, STEP_PREFIX, episode_models
from spmdflow.data.ragged import ragged, ragged_from_rows, rows_of
from spmdflow.data.row_id import is_held_out, seed_of
from spmdflow.datasets.tokenizer import eos_token_id, load_tokenizer
from spmdflow.episodes.conversation import check_template
from spmdflow.episodes.judging import EpisodeGroups
from spmdflow.episodes.recorder import Limits
from spmdflow.episodes.result import Episode, SegmentRow
from spmdflow.episodes.run import EpisodeRunner
from spmdflow.errors import ConfigError, RewardError
from spmdflow.models.frozen import chat_template, model_set
from spmdflow.models.reward import average_terms, count_dropped, put_at_last_token
from spmdflow.models.turn import written_routes
from spmdflow.objectives import segments
from spmdflow.parallel.group import all_gather_plain
from spmdflow.rollout.forward import end_tokens, vocab_size
from spmdflow.rollout.generator import Generator, Replica, RequestGenerator
from spmdflow.rollout.resumable import ResumableRequests
from spmdflow.rollout.sampling import Sampling
from spmdflow.router import ROUTES
from spmdflow.worker_api.command import Command
from spmdflow.worker_api.metric import Max, Mean, Metric, Sum
from spmdflow.worker_api.register import register
from spmdflow.worker_api.worker import Worker

logger = logging.getLogger(__name__)

EPISODE_COLUMNS = segments.OF_A_SEGMENT
ENDED = ("token_versions", segments.VERSIONS)
"""Columns of `finish_episodes` that `run_episodes` does not have."""
_MOST_LOGGED = 3
"""Failures of one call that a rank logs in full."""


def check_environment(label: str, cfg: Any, arguments: Mapping[str, Any]) -> None:
    """Raise ConfigError unless cfg has rollout.episode and its environment can be found."""
    episode = getattr(cfg.rollout, "episode", None)
    if not isinstance(episode, EpisodeConfig):
        do = "declare actor: AgentActorConfig in the settings, as GRPOAgentConfig does"
        raise ConfigError.of(label, "settings without rollout.episode", f"{KEY}.environment", do)
    environment_of(episode.environment)


def requests_of(generator: Generator, model_path: str, what: str) -> ResumableRequests:
    """Return an empty queue of requests for a generator; responses end at the model's end tokens.

    ConfigError if the generator does not support requests. what: the method that needs them, for
    the error.
    """
    if not isinstance(generator, RequestGenerator):
        got = type(generator).__name__
        do = "choose another actor.rollout.engine"
        raise ConfigError.of(what, got, "a generator that takes requests", do)
    return ResumableRequests(generator, end_tokens(model_path))


def written_by_episodes(settings: Any) -> tuple[str, ...]:
    """Return the columns that episodes have with these settings next to `EPISODE_COLUMNS`."""
    episode = getattr(settings.rollout, "episode", None)
    routes = written_routes(settings)
    if not isinstance(episode, EpisodeConfig) or episode.segments != "all":
        return routes
    names = (segments.NAMES,) if episode.credit == "segment" else ()
    return (*routes, *segments.SEGMENTS, *names, *((segments.SEGMENT_ROUTES,) if routes else ()))


def written_by_ended_episodes(settings: Any) -> tuple[str, ...]:
    """Return the columns of `finish_episodes` in addition to `EPISODE_COLUMNS` and
    token_versions."""
    written = written_by_episodes(settings)
    return (*written, segments.VERSIONS) if segments.LENGTHS in written else written


def _whole_episode(episode: Episode) -> SegmentRow:
    """Return the only segment of an episode that failed or has no score."""
    return SegmentRow(
        "",
        episode.prompt,
        episode.tokens,
        episode.mask,
        episode.log_probs,
        episode.versions,
        episode.calls,
        episode.routes,
        nan,
        1.0,
        [0.0] * (len(episode.tokens) - 1) + [nan],
    )


class EpisodeWorker(Worker):
    """The call that runs episodes. A role adds the generator."""

    generator: Generator
    sampling: Sampling
    requests: ResumableRequests
    """Requests of the episodes, and of sequences that a generator generates ahead."""
    _runner: EpisodeRunner | None = None

    @register(
        transfer_mode="3D_ALL_MICRO_DP",
        reads=("prompts", "prompt_text", "row"),
        writes=EPISODE_COLUMNS,
        also_writes=written_by_episodes,
        draws=True,
        check=check_environment,
        parents=True,
    )
    def run_episodes(
        self, batch: TensorDict, *, greedy: bool = False, prefix: str = "reward"
    ) -> TensorDict:
        """Run one episode of the environment for each row, and return its tokens and its score.

        The environment gets the row's fields, and `prompt`: the text of its prompt. prompts: the
        first prompt of the policy. responses: all later tokens. response_mask: False for tokens
        that the policy did not sample; their rollout_log_probs are 0. valid (B,): False where the
        episode failed or the environment returned None; then the score is nan, and the mask False.
        num_turns (B,): number of replies. tool_calls: the calls of each reply, as JSON: [[[name,
        arguments]], ...]. With rollout.episode.segments=all also the columns of all segments, which
        `Batch.segments` makes rows of; the other columns are then those of the longest segment that
        is trained. RewardError if too many episodes failed (rollout.episode.on_error).
        greedy: take the likeliest tokens. prefix: of the score's metrics.
        """
        self.request_generator("run_episodes")
        episodes = self.runner.run(
            self.episode_rows(batch),
            self.sampling.for_call(greedy=greedy),
            partial(self._turn_seed, self.call),
            strict=self._is_strict(),
            groups=None if greedy else self.judged_groups(),
        )
        return self.episode_columns(batch, episodes, prefix).exclude(*ENDED)

    def judged_groups(self) -> EpisodeGroups | None:
        """Return the groups of this call's episodes, which the judge scores; None without one."""
        if self.cfg.rollout.episode.judge is None:
            return None
        assert self.call.parents is not None, "registered with parents=True"
        ranks = self.context.layout.ranks

        def exchange(mine: Any) -> list[Any]:
            if len(ranks) == 1:
                return [mine]
            return all_gather_plain(mine, self.context.groups.get(ranks, backend="gloo"))

        return EpisodeGroups(
            self.call.row_ids.tolist(),
            self.call.parents.tolist(),
            ranks.index(self.runner.first_rank),
            exchange,
        )

    @property
    def runner(self) -> EpisodeRunner:
        """Runs the episodes. It exists if the settings have an environment."""
        assert self._runner is not None, "its settings have an environment"
        return self._runner

    @staticmethod
    def episode_rows(batch: TensorDict) -> list[dict[str, Any]]:
        """Return the `row` argument of the environment for each row.

        It is the JSON object in the column row, plus "prompt", the text of the prompt.
        """
        result = []
        for row, text in zip(batch["row"], batch["prompt_text"], strict=True):
            result.append(json.loads(row) | {"prompt": text})
        return result

    def episode_columns(
        self, batch: TensorDict, episodes: list[Episode], prefix: str
    ) -> TensorDict:
        """Report the metrics of a call's episodes, and return their columns (see `run_episodes`).

        The first 3 failures are logged. RewardError for the first failure with on_error=raise,
        otherwise if a larger fraction than max_failed_fraction failed over all ranks. All ranks of
        the pool call it.
        """
        causes = []
        for episode in episodes:
            if episode.cause:
                causes.append(f"row {int(self.call.row_ids[episode.number])}: {episode.cause}")
        if causes and self._is_strict():
            raise RewardError(causes[0])
        for cause in causes[:_MOST_LOGGED]:
            logger.warning("an episode failed, dropped: %s", cause)
        self._report_episodes(episodes, prefix, next(iter(causes), ""))
        return self._columns(batch, episodes)

    def open_episodes(self) -> None:
        """Create the episode runner, which starts the environments. Needs the generator.

        Sets `requests` and `_runner`. Does nothing if the settings have no environment. ConfigError
        if the generator does not support requests, or if episode.segments is "one" and the
        tokenizer's chat template is not append-only.
        """
        cfg = self.cfg.rollout
        if not isinstance(getattr(cfg, "episode", None), EpisodeConfig):
            return
        may_fork = cfg.episode.segments != "one"
        chat = chat_template(cfg, cfg.tokenizer_path)
        if not may_fork:
            check_template(chat, end_tokens(self.cfg.model.path))
        self.requests = requests_of(self.generator, self.cfg.model.path, "run_episodes")
        limits = Limits(
            max_turns=cfg.episode.max_turns,
            max_prompt_tokens=cfg.max_prompt_tokens,
            max_new_tokens=cfg.max_new_tokens,
            may_fork=may_fork,
            vocab_size=vocab_size(self.cfg.model.path),
        )
        replica = Replica.of(self.context.layout, self.context.rank, self.context.groups)
        is_first = replica.replica_rank == 0
        self._runner = EpisodeRunner(
            cfg.episode,
            limits,
            self.requests,
            chat=chat,
            end_tokens=end_tokens(self.cfg.model.path),
            replica=replica,
            models=model_set(self.cfg, self.context, limits, chat, is_first=is_first),
            rank_on_node=self.context.rank_on_node,
        )

    def fresh_generator(self) -> Generator:
        """The generator, with the weights that the role generates with."""
        raise NotImplementedError

    def request_generator(self, method: str) -> RequestGenerator:
        """Return `fresh_generator()` if it supports requests, otherwise raise ConfigError.

        method: the calling method, for the error.
        """
        generator = self.fresh_generator()
        if not isinstance(generator, RequestGenerator):
            kind = type(generator).__name__
            do = "choose another actor.rollout.engine"
            raise ConfigError.of(method, kind, "a generator that takes requests", do)
        return generator

    def close(self) -> None:
        """Ends the environments and the endpoint."""
        super().close()
        if self._runner is not None:
            self._runner.close()

    def _turn_seed(self, call: Command, index: int, turn: int) -> int:
        """Return the seed of a reply: a hash of (run seed, step, row id, generation, turn).

        It does not depend on the rank. index: position of the row in the call that began it.
        Held-out rows use step 0, so their seeds are the same at every step.
        """
        assert call.generation is not None, "registered with draws=True"
        row = int(call.row_ids[index])
        step = 0 if is_held_out(row) else call.step
        numbers = (step, row, int(call.generation[index]), turn)
        return seed_of(self.context.seed, "episode", *numbers)

    def _is_strict(self) -> bool:
        """Whether the first failed episode ends the run."""
        return bool(self.cfg.rollout.episode.on_error == "raise")

    def _report_episodes(self, episodes: list[Episode], prefix: str, first_failure: str) -> None:
        """Report mean score, score terms, failures, token counts, turns and forks of the episodes.

        All ranks of the pool call it together, with any number of episodes. RewardError, on the
        first rank with a failed episode, if a larger fraction than episode.max_failed_fraction
        failed over all ranks. Episodes without a score because the environment returned None count
        as episodes/left_out, not as failures. first_failure: text for the error.
        """
        scored = []
        for episode in episodes:
            if episode.scores is not None:
                scored.append(episode.scores)
        scores = sum(episode["score"] for episode in scored)
        metrics: dict[str, Metric] = {"mean": Mean(scores, len(scored))} | average_terms(scored)
        has_run = torch.tensor([not episode.cause for episode in episodes]).bool()
        metrics |= count_dropped(
            self.context,
            self.context.layout.ranks,
            has_run,
            most=self.cfg.rollout.episode.max_failed_fraction,
            key=f"{KEY}.max_failed_fraction",
            first_failure=first_failure,
        )
        self.report({f"{prefix}/{name}": metric for name, metric in metrics.items()})
        sampled = sum(sum(episode.mask) for episode in episodes)
        self.report(
            {
                "rollout/prompt_tokens": Sum(sum(len(episode.prompt) for episode in episodes)),
                "rollout/response_tokens": Sum(sampled),
                "rollout/response_length": Mean(sampled, len(episodes)),
                "rollout/weights_version": Max(float(self.generator.weights_version)),
                "episodes/turns": Mean(
                    sum(episode.num_turns for episode in episodes), len(episodes)
                ),
                "episodes/left_out": Sum(sum(not x.cause and x.scores is None for x in episodes)),
                "episodes/forked": Sum(sum(episode.num_segments > 1 for episode in episodes)),
            }
        )
        self._report_models(episodes)

    def _report_models(self, episodes: list[Episode]) -> None:
        """Report requests, failed requests and tokens of each model that is not the policy.

        All checkpoints are reported together, as policy@step.
        """
        names = episode_models(f"{KEY}.models", self.cfg.rollout.episode.models)
        totals = {name: [0, 0, 0] for name in names}
        for episode in episodes:
            for name, use in episode.uses.items():
                total = totals[AT_STEP if name.startswith(STEP_PREFIX) else name]
                for index, count in enumerate(use):
                    total[index] += count
        for name, (requests, failed, tokens) in totals.items():
            self.report(
                {
                    f"episodes/requests_{name}": Sum(requests),
                    f"episodes/failed_requests_{name}": Sum(failed),
                    f"episodes/tokens_{name}": Sum(tokens),
                }
            )

    def _columns(self, batch: TensorDict, episodes: list[Episode]) -> TensorDict:
        """Return the columns of `run_episodes`, and token_versions (ragged int32).

        A row without a score gets the score nan, its original prompt, and a response of one
        end-of-sequence token with mask False and log-probability 0. token_versions is -1 at tokens
        that were not sampled.
        """
        tokenizer = load_tokenizer(self.cfg.rollout.tokenizer_path)
        device = self.context.device
        own = rows_of(batch["prompts"])
        end = eos_token_id(tokenizer)
        valid = [episode.scores is not None for episode in episodes]
        filled = []
        for episode in episodes:
            filled.append(
                episode
                if episode.scores is not None
                else episode._replace(
                    scores={"score": nan},
                    prompt=own[episode.number].tolist(),
                    tokens=[end],
                    mask=[False],
                    log_probs=[0.0],
                    versions=[-1],
                    calls=[],
                    routes=None,
                )
            )
        lengths = torch.tensor([len(episode.tokens) for episode in filled], dtype=torch.int64)

        def column(name: str, dtype: torch.dtype) -> Tensor:
            """Concatenate the field `name` of all episodes to a ragged column on the device."""
            values = []
            for episode in filled:
                for value in getattr(episode, name):
                    values.append(value)
            return ragged(torch.tensor(values, dtype=dtype), lengths).to(device)

        scores = torch.tensor([episode.scores["score"] for episode in filled if episode.scores])
        version = self.generator.weights_version
        columns = TensorDict(
            {
                "prompts": ragged_from_rows(
                    [torch.tensor(episode.prompt) for episode in filled], dtype=torch.int64
                ).to(device),
                "responses": column("tokens", torch.int64),
                "response_mask": column("mask", torch.bool),
                "rollout_log_probs": column("log_probs", torch.float32),
                "scores": scores,
                "token_level_rewards": put_at_last_token(scores, lengths),
                "valid": torch.tensor(valid).bool(),
                "num_turns": torch.tensor([episode.num_turns for episode in episodes]).long(),
                "weights_version": torch.full((len(episodes),), version),
                "token_versions": column("versions", torch.int32),
            },
            batch_size=batch.batch_size,
        )
        decode = tokenizer.batch_decode
        routes = self._routes_of(filled)
        if routes is not None:
            columns[ROUTES] = routes.to(device)
        columns.set_non_tensor("prompt_text", decode([episode.prompt for episode in filled]))
        columns.set_non_tensor("response_text", decode([episode.tokens for episode in filled]))
        columns.set_non_tensor("tool_calls", [json.dumps(episode.calls) for episode in filled])
        if self.cfg.rollout.episode.segments == "all":
            rows = [episode.segments or (_whole_episode(episode),) for episode in filled]
            columns.update(self._segment_columns(rows, with_routes=routes is not None))
        return columns

    def _segment_columns(
        self, episodes: Sequence[Sequence[SegmentRow]], *, with_routes: bool
    ) -> TensorDict:
        """Return the columns of all segments of each episode (`objectives.segments`)."""
        decode = load_tokenizer(self.cfg.rollout.tokenizer_path).batch_decode
        device = self.context.device
        counts = torch.tensor([len(rows) for rows in episodes], dtype=torch.int64)

        def of_segments(find: Callable[[SegmentRow], Any], dtype: torch.dtype) -> Tensor:
            """A ragged column with one item for each segment."""
            values = [find(row) for rows in episodes for row in rows]
            return ragged(torch.tensor(values, dtype=dtype), counts).to(device)

        def of_tokens(find: Callable[[SegmentRow], list[Any]], dtype: torch.dtype) -> Tensor:
            """A ragged column with the items of all segments of an episode."""
            parts = [torch.tensor([x for row in rows for x in find(row)]) for rows in episodes]
            return ragged_from_rows([part.to(dtype) for part in parts]).to(device)

        columns = TensorDict(
            {
                "segment_prompt_lengths": of_segments(lambda row: len(row.prompt), torch.int64),
                segments.LENGTHS: of_segments(lambda row: len(row.tokens), torch.int64),
                "segment_tokens": of_tokens(lambda row: row.prompt + row.tokens, torch.int64),
                "segment_mask": of_tokens(lambda row: row.mask, torch.bool),
                "segment_log_probs": of_tokens(lambda row: row.log_probs, torch.float32),
                "segment_rewards": of_tokens(lambda row: row.rewards, torch.float32),
                "segment_scores": of_segments(lambda row: row.score, torch.float32),
                "segment_weights": of_segments(lambda row: row.weight, torch.float32),
                "segment_turns": of_segments(lambda row: len(row.calls), torch.int64),
                segments.VERSIONS: of_tokens(lambda row: row.versions, torch.int32),
            },
            batch_size=[len(episodes)],
        )
        if self.cfg.rollout.episode.credit == "segment":
            columns[segments.NAMES] = of_segments(
                lambda row: seed_of(0, "segment", name=row.name), torch.int64
            )
        if with_routes:
            columns[segments.SEGMENT_ROUTES] = self._routes_of_segments(episodes).to(device)
        texts = []
        for rows in episodes:
            prompts = decode([row.prompt for row in rows])
            responses = decode([row.tokens for row in rows])
            calls = [json.dumps(row.calls) for row in rows]
            texts.append(json.dumps(list(zip(prompts, responses, calls, strict=True))))
        columns.set_non_tensor("segment_texts", texts)
        return columns

    def _routes_of_segments(self, episodes: Sequence[Sequence[SegmentRow]]) -> Tensor:
        """Return the ragged column of routed experts of all segments of each episode."""
        rows = []
        for segments_of_episode in episodes:
            rows.append(torch.cat([self._routes_of_row(row) for row in segments_of_episode]))
        return ragged_from_rows(rows)

    def _routes_of_row(self, row: SegmentRow | Episode) -> Tensor:
        """Return the routed experts of a row's tokens, (n, layers, k).

        A row without tokens of the generator gets routes that the trainer selects.
        """
        if row.routes is not None:
            return torch.from_numpy(row.routes)
        assert isinstance(self.generator, RequestGenerator)
        own = self.generator.own_routes(1)
        assert own is not None, "its generator returns routes"
        return own.repeat(len(row.prompt) + len(row.tokens), 1, 1)

    def _routes_of(self, episodes: Sequence[Episode]) -> Tensor | None:
        """Return the column of routed experts of these episodes; None: none are returned.

        An episode without tokens of the generator gets routes that the trainer selects.
        """
        generator = self.generator
        own = generator.own_routes(1) if isinstance(generator, RequestGenerator) else None
        if own is None:
            return None
        return ragged_from_rows([self._routes_of_row(episode) for episode in episodes])
