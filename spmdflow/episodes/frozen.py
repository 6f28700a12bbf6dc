"""Models with frozen weights that episodes call by name: the reference, or an earlier policy.

They belong to the first rank of a replica alone, because nothing of their replies is trained: the
other ranks need neither the weights nor the tokens. Each model is a generator of its own, stepped
in the same loop as the policy's. Requests with different sampling settings are not generated
together; those that came first determine the settings, and the others wait until they have ended.

Weights of checkpoints are loaded when a request names them, and replace those of another step that
have not been used for longest. Knows no files: `load` brings a generator with weights.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import NamedTuple

from spmdflow.config.episode_models import STEP_PREFIX
from spmdflow.episodes.ask import Refusal
from spmdflow.episodes.pending import AbandonedRequest, GenerationRequest
from spmdflow.errors import SpmdflowError
from spmdflow.rollout.builtin import BuiltinGenerator
from spmdflow.rollout.generator import Request
from spmdflow.rollout.resumable import ResumableRequests
from spmdflow.rollout.sampling import Sampling


class LoadedWeights(NamedTuple):
    """A generator that has its weights, and the tokens that end its replies."""

    generator: BuiltinGenerator
    end_tokens: tuple[int, ...]


class _Entry(NamedTuple):
    """A request of the endpoint, and what its model's generator gets."""

    draw: GenerationRequest
    request: Request


@dataclass
class _Model:
    """A loaded model and its requests."""

    generator: BuiltinGenerator
    requests: ResumableRequests
    waiting: list[_Entry] = field(default_factory=list)
    """Not yet in the generator, oldest first."""
    live: dict[int, GenerationRequest] = field(default_factory=dict)
    """By their numbers in `requests`."""
    settings: Sampling | None = None
    """Shared by all live requests (`Sampling.of_batch`)."""

    @property
    def is_idle(self) -> bool:
        """Whether it has no requests."""
        return not self.waiting and not self.live

    def admit(self) -> None:
        """Moves waiting requests to the generator: those with the settings of the oldest one.

        While others are generated, only if all that wait have the same settings as those.
        """
        if not self.waiting:
            return
        if not self.live:
            self.settings = self.waiting[0].request.sampling.of_batch
        others = []
        for entry in self.waiting:
            if entry.request.sampling.of_batch != self.settings:
                others.append(entry)
        if self.live and others:
            return
        for entry in self.waiting:
            if entry.request.sampling.of_batch == self.settings:
                self.live[self.requests.add(entry.request)] = entry.draw
        self.waiting = others

    def step(self) -> None:
        """Draws a few tokens for all requests, and hands those that have ended to their clients."""
        self.admit()
        if not self.live or self.settings is None:
            return
        for drawn in self.requests.step(greedy=self.settings.greedy):
            self.live.pop(drawn.id).done(drawn)
        self._show_progress()

    def _show_progress(self) -> None:
        """Hands the tokens so far of streamed replies to the endpoint."""
        streamed = [number for number, draw in self.live.items() if draw.progress is not None]
        if not streamed:
            return
        for number, tokens in zip(streamed, self.requests.tokens_so_far(streamed), strict=True):
            progress = self.live[number].progress
            if tokens and progress is not None:
                progress(tokens)

    def drop(self, is_dropped: Callable[[GenerationRequest], bool]) -> None:
        """Takes requests out, and tells their clients that there is no reply."""
        kept = []
        for entry in self.waiting:
            if is_dropped(entry.draw):
                entry.draw.done(None)
            else:
                kept.append(entry)
        self.waiting = kept
        for number, draw in list(self.live.items()):
            if is_dropped(draw):
                del self.live[number]
                self.requests.abort(number)
                draw.done(None)


class FrozenModels:
    """The frozen models of a replica. Used only on the compute lane of its first rank."""

    def __init__(
        self,
        load: Callable[[str], LoadedWeights],
        request_of: Callable[[GenerationRequest], Request],
        *,
        most_steps: int = 1,
    ) -> None:
        """load: the weights of a name; an error of the tree `SpmdflowError` is answered to the
        client. request_of: what the generator gets for a request. most_steps: how many checkpoints
        are loaded at once; all other models stay."""
        self._load = load
        self._request_of = request_of
        self._most_steps = most_steps
        self._models: dict[str, _Model] = {}
        """Loaded models by name, those used last at the end."""
        self._waiting: list[GenerationRequest] = []
        """Requests whose model is not loaded yet, or waits for its turn."""
        self.num_loads = 0
        """How often weights were loaded so far."""

    @property
    def is_idle(self) -> bool:
        """Whether there are no requests."""
        return not self._waiting and all(model.is_idle for model in self._models.values())

    def open(self, name: str) -> None:
        """Loads a model before a request names it. The errors of `load`."""
        weights = self._load(name)
        requests = ResumableRequests(weights.generator, weights.end_tokens)
        self._models[name] = _Model(weights.generator, requests)
        self.num_loads += 1

    def add(self, draw: GenerationRequest) -> None:
        """Queues a request. Its client gets the reply, or the reason why there is none."""
        self._waiting.append(draw)

    def abandon(self, item: AbandonedRequest) -> None:
        """Drops the request of a client that has left."""
        self._drop(lambda draw: draw.identity == item)

    def end_episodes(self, numbers: Collection[int]) -> None:
        """Drops the requests of episodes that have ended, and frees what was kept for them."""
        if not numbers:
            return
        self._drop(lambda draw: draw.number in numbers)
        for model in self._models.values():
            model.requests.forget(numbers)

    def step(self) -> None:
        """Loads models that requests wait for, and draws a few tokens for all requests."""
        self._distribute()
        for model in self._models.values():
            model.step()

    def sleep(self) -> None:
        """Frees the caches. Requests continue with the next `step`; the weights stay."""
        for model in self._models.values():
            model.requests.suspend_all()
            model.generator.sleep()

    def close(self) -> None:
        """Frees all memory."""
        for model in self._models.values():
            model.generator.close()
        self._models.clear()

    def _drop(self, is_dropped: Callable[[GenerationRequest], bool]) -> None:
        kept = []
        for draw in self._waiting:
            if is_dropped(draw):
                draw.done(None)
            else:
                kept.append(draw)
        self._waiting = kept
        for model in self._models.values():
            model.drop(is_dropped)

    def _distribute(self) -> None:
        """Hands waiting requests to their models, oldest first, and loads models for them.

        Once a request waits for a loaded step to become idle, later requests for steps wait too, so
        that a step which is always in use cannot keep others out.
        """
        waiting = []
        is_full = False
        for draw in self._waiting:
            is_step = draw.model.startswith(STEP_PREFIX)
            if is_step and (is_full or not self._has_room(draw.model)):
                is_full = True
                waiting.append(draw)
                continue
            try:
                if draw.model not in self._models:
                    self.open(draw.model)
                model = self._models.pop(draw.model)
                self._models[draw.model] = model  # used last
                request = self._request_of(draw)
                model.requests.check(request)
                model.waiting.append(_Entry(draw, request))
            except SpmdflowError as err:  # answered to this client; the run goes on
                draw.fail(Refusal(f"model {draw.model}: {err}", code="model_failed"))
        self._waiting = waiting

    def _has_room(self, name: str) -> bool:
        """Whether a step is loaded or can be; unloads the one that is idle for longest if needed.

        False if all loaded steps have requests.
        """
        loaded = [each for each in self._models if each.startswith(STEP_PREFIX)]
        if name in loaded or len(loaded) < self._most_steps:
            return True
        for each in loaded:
            if self._models[each].is_idle:
                self._models.pop(each).generator.close()
                return True
        return False
