"""Runs the episodes of one generation replica: the generator is stepped until all have ended.

The replica's first rank has the endpoint and the environments. Before each step it broadcasts which
requests are new and which are aborted, so that all ranks step the same requests. It checks each
request first: an invalid request fails its episode, never the run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import torch

from spmdflow.config.episode import EpisodeConfig
from spmdflow.config.episode_models import EpisodeModel
from spmdflow.data.row_id import seed_of
from spmdflow.datasets.chat import ChatTemplate
from spmdflow.episodes.address import open_address
from spmdflow.episodes.credit import CreditRule
from spmdflow.episodes.endpoint import Endpoint
from spmdflow.episodes.frozen import FrozenModels
from spmdflow.episodes.generation import OtherModels
from spmdflow.episodes.guided import GuidedReplies
from spmdflow.episodes.judgement import unpack_scores
from spmdflow.episodes.judging import EpisodeGroups, JudgedGroup, plan_groups
from spmdflow.episodes.leader import AddedRequest, ReplicaLeader, StepChanges, turn_of_seed
from spmdflow.episodes.model_set import ModelSet
from spmdflow.episodes.named_model import NamedModels, OwnSampling
from spmdflow.episodes.pending import GenerationRequest
from spmdflow.episodes.pool import EnvironmentPool
from spmdflow.episodes.recorder import Limits, Recorder
from spmdflow.episodes.result import Episode, from_plain, to_plain
from spmdflow.errors import ColumnError
from spmdflow.parallel.group import broadcast_plain
from spmdflow.rollout.generator import Replica, Request
from spmdflow.rollout.grammar import compile_grammar
from spmdflow.rollout.resumable import ResumableRequests
from spmdflow.rollout.sampling import Grammar, Sampling
from spmdflow.rollout.vllm_tools import vllm_call_reader


class EpisodeRunner:
    """Runs episodes. The replica's first rank has endpoint and environments; the others only
    step."""

    def __init__(
        self,
        cfg: EpisodeConfig,
        limits: Limits,
        requests: ResumableRequests,
        *,
        chat: ChatTemplate,
        end_tokens: tuple[int, ...],
        replica: Replica,
        models: ModelSet | None = None,
        rank_on_node: int = 0,
    ) -> None:
        """On the first rank, opens the endpoint, loads the models with frozen weights that are
        always there, and starts the worker processes in the background.

        models: those besides the policy; None: there are none. rank_on_node: number of this rank
        among those of its node, for the port of the endpoint.
        """
        tokenizer = chat.tokenizer
        self._chat = chat
        self._limits = limits
        self._requests = requests
        self._replica = replica
        self._end_tokens = end_tokens
        name = cfg.tool_parser
        self._read_calls = vllm_call_reader(name, tokenizer) if name else None
        self._numbers = count()
        self._seeds_of_episode: dict[int, tuple[Sampling, Callable[[int], int]]] = {}
        """Sampling and seed(turn) of each episode that has started and is not finished."""
        self._judge_calls: set[int] = set()
        """Numbers of calls of the judge that are under way."""
        self._leader: ReplicaLeader | None = None
        if replica.replica_rank == 0:
            address = open_address(cfg.endpoint, rank_on_node)
            pool = EnvironmentPool(cfg, certificate_path=address.certificate_path)
            own_form = getattr(tokenizer, "response_template", None) or getattr(
                tokenizer, "response_schema", None
            )
            guided = GuidedReplies(requests.is_guided, cfg.tool_parser, bool(own_form))
            named = NamedModels() if models is None else models.named_models()
            endpoint = Endpoint(
                address=address,
                guided=guided,
                models=named,
                server_keys=None if models is None else models.keys,
            )
            rule = CreditRule(cfg.credit, cfg.credit_discount) if cfg.segments == "all" else None
            self._leader = ReplicaLeader(
                pool,
                endpoint,
                self._new_recorder,
                self._check,
                rule,
                None if models is None else self._frozen_models(models),
                None if models is None else partial(self._others, models),
                has_judge=cfg.judge is not None,
            )

    def run(
        self,
        rows: Sequence[dict[str, Any]],
        sampling: Sampling,
        seed_of_turn: Callable[[int, int], int],
        *,
        strict: bool = False,
        groups: EpisodeGroups | None = None,
    ) -> list[Episode]:
        """One episode for each row, in order; the same on all ranks of the replica.

        seed_of_turn(row index, turn): seed of a reply. strict: stop at the first failure; the
        result may then lack later rows. groups: see `finish`.
        """
        numbers = self.begin(rows, sampling, seed_of_turn)
        return self.finish(numbers, greedy=sampling.greedy, strict=strict, groups=groups)

    def begin(
        self,
        rows: Sequence[dict[str, Any]],
        sampling: Sampling,
        seed_of_turn: Callable[[int, int], int],
    ) -> list[int]:
        """Queues one episode per row and returns their numbers, which are equal on all ranks.

        Greedy episodes go to the front of the queue, others to its end. Only the replica's first
        rank runs environments; all ranks must call this with the same arguments. seed_of_turn(row
        index, turn): seed of a reply.
        """
        numbers = [next(self._numbers) for _ in rows]
        for index, number in enumerate(numbers):
            self._seeds_of_episode[number] = sampling, partial(seed_of_turn, index)
        if self._leader:
            self._leader.begin(dict(zip(numbers, rows, strict=True)), first=sampling.greedy)
        return numbers

    def finish(
        self,
        numbers: Sequence[int],
        *,
        greedy: bool = False,
        strict: bool = False,
        groups: EpisodeGroups | None = None,
    ) -> list[Episode]:
        """Steps all episodes until these have ended, and returns their results in order.

        All ranks of the replica call it together and get the same results. Result i has number i.
        strict: stop at the first failure of any episode; results of episodes that have not ended
        are missing. The generator forgets the caches of these conversations. groups: the judge
        scores these groups of the episodes; all ranks of the pool then call this together. None:
        nobody judges.
        """
        leader = self._leader
        self.run_until(
            lambda: leader is None or leader.have_ended(numbers, strict=strict), greedy=greedy
        )
        if groups is not None and not (strict and self._has_failed()):
            self._judge(numbers, groups)
        for number in numbers:
            del self._seeds_of_episode[number]
        self._requests.forget(numbers)
        own_results = None
        if leader:
            own_results = [to_plain(episode) for episode in leader.take_results(numbers)]
        return [from_plain(fields) for fields in self._broadcast(own_results)]

    def _has_failed(self) -> bool:
        """Whether any episode has failed. All ranks of the replica call it together."""
        mine = None if self._leader is None else [self._leader.has_failed]
        return bool(self._broadcast(mine)[0])

    def _judge(self, numbers: Sequence[int], groups: EpisodeGroups) -> None:
        """Gives the ended episodes the scores of the judge. All ranks of the pool call it."""
        leader = self._leader
        mine = []
        descriptions = {}
        if leader:
            for number, row, parent in zip(numbers, groups.rows, groups.parents, strict=True):
                mine.append([row, parent, leader.id_seed_of(number)])
                descriptions[row] = leader.describe(number)
        planned = plan_groups(groups.exchange(mine))
        descriptions = _complete_descriptions(descriptions, planned, groups)
        own = [group for group in planned if group.owner == groups.leader]
        calls = [next(self._numbers) for _ in own]
        for call, group in zip(calls, own, strict=True):
            sampling, _ = self._seeds_of_episode[numbers[0]]
            self._seeds_of_episode[call] = sampling, partial(seed_of, group.seed, "judge")
            self._judge_calls.add(call)
        if leader:
            arguments = {}
            for call, group in zip(calls, own, strict=True):
                arguments[call] = [descriptions[row] for row in group.rows]
            leader.begin_judges(arguments)
        self.run_until(lambda: leader is None or leader.have_judged(calls))
        self._requests.forget(calls)
        results: list[list[Any]] = []
        for call, group in zip(calls, own, strict=True):
            del self._seeds_of_episode[call]
            self._judge_calls.remove(call)
            if leader:
                packed, cause = leader.take_judgement(call)
                scores = unpack_scores(packed or {}, len(group.rows))
                results += [[row, each, cause] for row, each in zip(group.rows, scores)]
        number_of_row = dict(zip(groups.rows, numbers, strict=True))
        for part in groups.exchange(results):
            for row, scores_of_row, cause in part:
                if leader and row in number_of_row:
                    leader.set_scores(number_of_row[row], scores_of_row, cause)

    def run_until(self, is_over: Callable[[], bool], *, greedy: bool = False) -> None:
        """Generates replies for the episodes until is_over() is true on the replica's first rank.

        All ranks of the replica call it together. Before each step the first rank broadcasts which
        requests are new or aborted and which episodes have ended; every rank then steps the
        generator. greedy: step greedy episodes, otherwise all others. While those have no requests,
        the other kind is stepped, whose episodes may occupy the worker processes.
        """
        leader = self._leader
        requests = self._requests
        while True:
            steps_greedy = greedy != requests.is_idle(greedy=greedy)
            idle = requests.is_idle(greedy=steps_greedy)
            changes = self._share_changes(
                leader.collect_changes(is_over, idle=idle) if leader else None
            )
            for request in changes.aborted:
                requests.abort(request)
            requests.forget(changes.ended)
            for fields in changes.added:
                request = requests.add(self._request_of_turn(AddedRequest(*fields)))
                if leader:
                    leader.confirm_added(request)
            if changes.done:
                return
            for drawn in (
                () if requests.is_idle(greedy=steps_greedy) else requests.step(greedy=steps_greedy)
            ):
                if leader:
                    leader.deliver(drawn)
            if leader:
                leader.show_progress(requests.tokens_so_far)
                leader.step_frozen()

    @property
    def first_rank(self) -> int:
        """The rank of the replica that has the endpoint and the environments."""
        return self._replica.ranks[0]

    @property
    def num_under_way(self) -> int:
        """Number of episodes that are waiting or running on the first rank; 0 on other ranks."""
        if self._leader:
            return self._leader.num_under_way
        return 0

    def wake(self) -> None:
        """Makes `run_until` check again. Safe in any thread."""
        if self._leader:
            self._leader.wake()

    def sleep(self) -> None:
        """Frees the caches of models with frozen weights; their requests continue later."""
        if self._leader:
            self._leader.sleep()

    def close(self) -> None:
        """Ends the worker processes and the endpoint."""
        if self._leader:
            self._leader.close()

    def _request_of_turn(self, added: AddedRequest) -> Request:
        """The generator's request for a turn of an episode."""
        sampling, seed_of = self._seeds_of_episode[added.number]
        return Request(
            prompt=torch.tensor(added.prompt, dtype=torch.int64),
            seed=seed_of(added.turn),
            sampling=replace(
                sampling,
                max_new_tokens=added.max_new_tokens,
                stop=tuple(added.stop),
                grammar=Grammar.of(added.grammar),
                top_log_probs=added.top_log_probs,
            ),
            conversation=added.number,
        )

    def _check(self, draw: GenerationRequest) -> None:
        """Raises the error that adding the request would raise, before any rank receives it.

        ColumnError for no tokens or a token id beyond the vocabulary, ConfigError if it is too
        long.
        """
        request = self._request_of_turn(AddedRequest.of(draw))
        known = range(self._limits.vocab_size)
        foreign = []
        for token in draw.ids:
            if token not in known:
                foreign.append(token)
        if foreign:
            got = f"the token ids {foreign[:3]}"
            expected = f"ids from 0 to {known[-1]}"
            raise ColumnError.of("run_episodes", got, expected, "send ids of the model's tokenizer")
        if request.sampling.grammar is not None:
            compile_grammar(
                request.sampling.grammar,
                tokenizer_path=request.sampling.tokenizer_path,
                vocab_size=self._limits.vocab_size,
                ends=self._end_tokens,
            )
        self._requests.check(request)

    def _new_recorder(self, number: int) -> Recorder:
        """The recorder of an episode. Ids derive from the seed of its first reply."""
        limits = self._limits
        if number in self._judge_calls:  # it compares whole episodes, and none of it is trained
            limits = replace(limits, may_fork=True, long_prompts=True)
        recorder = Recorder(self._chat, self._end_tokens, limits, self._read_calls)
        _, seed_of = self._seeds_of_episode[number]
        recorder.id_seed = seed_of(0)
        return recorder

    def _frozen_models(self, models: ModelSet) -> FrozenModels:
        """The models with frozen weights; loads those that are always there."""
        frozen = FrozenModels(
            models.load, partial(self._frozen_request, models), most_steps=models.most_steps
        )
        for name in models.always_loaded:
            frozen.open(name)
            models.form_of(name)  # read now, not in the endpoint's thread
        return frozen

    def _others(self, models: ModelSet, number: int) -> OtherModels:
        """What an episode needs for models that are not the policy."""
        _, seed_of_turn = self._seeds_of_episode[number]
        id_seed = seed_of_turn(0)

        def new_recorder(model: EpisodeModel) -> Recorder:
            form = models.form_of(model.name)
            limits = models.limits_of(model)
            recorder = Recorder(form.chat, form.end_tokens, limits, self._read_calls)
            recorder.id_seed = seed_of(id_seed, "model", name=model.name)
            return recorder

        return OtherModels(new_recorder, models.limits_of)

    def _frozen_request(self, models: ModelSet, draw: GenerationRequest) -> Request:
        """What the generator of a model with frozen weights gets for a request.

        Without a seed of the request, the seed is derived from the episode's, the model's name and
        the turn. With one it is derived from that alone.
        """
        _, seed_of_turn = self._seeds_of_episode[draw.number]
        own = draw.sampling or OwnSampling()
        seed = seed_of_turn(seed_of(turn_of_seed(draw), "model", name=draw.model))
        if own.seed is not None:
            seed = seed_of(own.seed, "request")
        return Request(
            prompt=torch.tensor(draw.ids, dtype=torch.int64),
            seed=seed,
            sampling=replace(
                models.sampling_of(draw.model, own),
                max_new_tokens=draw.max_new_tokens,
                stop=tuple(draw.stop),
                grammar=draw.grammar,
                top_log_probs=draw.top_log_probs,
            ),
            conversation=draw.number,
        )

    def _share_changes(self, mine: StepChanges | None) -> StepChanges:
        """The first rank's changes, on every rank of the replica (collective)."""
        return StepChanges(*self._broadcast(mine))

    def _broadcast(self, mine: Any) -> Any:
        """Returns the first rank's value on every rank of the replica (collective).

        mine: a sequence of plain data on the first rank, None on all others. The result is a list,
        except for a replica of one rank, which returns `mine` unchanged.
        """
        if self._replica.size == 1:
            return mine
        group = self._replica.group(self._replica.ranks, "gloo")
        return broadcast_plain(mine if mine is None else list(mine), group)


def _complete_descriptions(
    mine: dict[int, dict[str, Any]], planned: Sequence[JudgedGroup], groups: EpisodeGroups
) -> dict[int, dict[str, Any]]:
    """Returns these descriptions, by row, and those that this replica lacks of its groups.

    All ranks of the pool call it together. Nothing is sent if all groups are whole.
    """
    if not any(group.is_split for group in planned):
        return mine
    sent = []
    for group in planned:
        for row in group.rows:
            if row in mine and group.owner != groups.leader:
                sent.append([row, json.dumps(mine[row])])
    complete = dict(mine)
    for part in groups.exchange(sent):
        for row, text in part:
            complete[row] = json.loads(text)
    return complete
