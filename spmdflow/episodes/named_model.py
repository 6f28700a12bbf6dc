"""Which model a request names, and how its reply is sampled if that is not the policy."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any, NamedTuple

from spmdflow.config.episode_models import (
    AT_STEP,
    POLICY,
    REFERENCE,
    STEP_PREFIX,
    EpisodeModel,
)
from spmdflow.episodes.ask import Refusal

logger = logging.getLogger(__name__)

KEY = "actor.rollout.episode.models"
_MOST_WARNINGS = 20
_NAME_LETTERS = 100
_MOST_STEPS_SHOWN = 8
_MOST_DIGITS = 10
_WAIT_SECONDS = 60.0
_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class OwnSampling:
    """Sampling settings of a request. None: the request has none."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None


class SavedSteps(NamedTuple):
    """Steps of the run with a checkpoint. 0 is its start."""

    sealed: Sequence[int] = (0,)
    """Whose weights can be loaded, in ascending order."""
    unsealed: Collection[int] = ()
    """Whose checkpoints are being written."""


class NamedModels:
    """The models that requests may name. Used only in the endpoint's thread."""

    def __init__(
        self,
        models: Mapping[str, EpisodeModel] | None = None,
        steps: Callable[[], SavedSteps] | None = None,
    ) -> None:
        """models: by name, without the policy. steps: the checkpoints at this moment; None: there
        are none."""
        self._models = dict(models or {})
        self._steps = steps or SavedSteps
        self._warned: set[str] = set()

    def __bool__(self) -> bool:
        """Whether there is any model besides the policy."""
        return bool(self._models)

    def find(self, name: object) -> EpisodeModel | None:
        """Return the model with this name; None: the policy.

        Names that are not set up are the policy, because programs have fixed ones such as gpt-4o;
        each is logged once if other models are set up. Refusal (404) for `reference` and
        `policy@...` if they are not set up, and for a step without a checkpoint.
        """
        if not isinstance(name, str) or name == POLICY:
            return None
        if name in self._models and name != AT_STEP:
            return self._models[name]
        if name == REFERENCE:
            raise self._unknown(name, f"add {REFERENCE}: {{}} to {KEY}")
        if name.startswith(STEP_PREFIX):
            return self._at_step(name)
        if self._models:
            self._warn(name)
        return None

    def names(self) -> list[str]:
        """All names that are not the policy's alone: the policy, the models, and policy@STEP for
        each step whose weights can be loaded."""
        names = [POLICY]
        names += [name for name in self._models if name != AT_STEP]
        if AT_STEP in self._models:
            names += [f"{STEP_PREFIX}{step}" for step in self._steps().sealed]
        return names

    async def wait_until_sealed(self, model: EpisodeModel) -> None:
        """Waits until the checkpoint of a model named policy@STEP is complete, at most 60 s.

        So it makes no difference whether it is written faster than the next step begins. Refusal
        (404) if it is not complete then. Returns at once for any other model.
        """
        if not model.name.startswith(STEP_PREFIX):
            return
        loop = asyncio.get_running_loop()
        until = loop.time() + _WAIT_SECONDS
        step = int(model.name.removeprefix(STEP_PREFIX))
        while step not in (steps := self._steps()).sealed:
            if step not in steps.unsealed or loop.time() >= until:
                raise self._not_saved(model.name, steps)
            await asyncio.sleep(_POLL_SECONDS)

    def _at_step(self, name: str) -> EpisodeModel:
        if AT_STEP not in self._models:
            raise self._unknown(name, f"add {AT_STEP}: {{}} to {KEY}")
        step = name.removeprefix(STEP_PREFIX)
        if not (step.isascii() and step.isdecimal() and len(step) < _MOST_DIGITS):
            raise self._not_saved(name, self._steps())
        return replace(self._models[AT_STEP], name=f"{STEP_PREFIX}{int(step)}")

    def _not_saved(self, name: str, steps: SavedSteps) -> Refusal:
        newest = ", ".join(map(str, steps.sealed[-_MOST_STEPS_SHOWN:]))
        return Refusal(
            f"model: got {name[:_NAME_LETTERS]!r}, expected a step whose checkpoint exists: "
            f"{newest}; raise run.keep_checkpoints, or name another step",
            status=404,
            code="model_not_found",
        )

    def _unknown(self, name: str, do: str) -> Refusal:
        names = ", ".join(self.names())
        return Refusal(
            f"model: got {name!r}, which is not set up, expected one of {names}; {do}",
            status=404,
            code="model_not_found",
        )

    def _warn(self, name: str) -> None:
        shown = name[:_NAME_LETTERS]
        if shown in self._warned or len(self._warned) >= _MOST_WARNINGS:
            return
        self._warned.add(shown)
        logger.warning(
            "episodes: requests name the model %r, which is not in %s: the policy answers them",
            shown,
            KEY,
        )


def take_sampling(fields: Mapping[str, Any]) -> tuple[dict[str, Any], OwnSampling]:
    """Return the fields of a request without its sampling settings, and these.

    Refusal for a value that is no number or out of bounds: temperature from 0 to 100, top_p from 0
    to 1, top_k at least 0 (-1 is 0), seed a whole number.
    """
    others = dict(fields)
    values = {}
    for name, (least, most, is_whole) in _BOUNDS.items():
        values[name] = _number(name, others.pop(name, None), least, most, is_whole=is_whole)
    if values["top_k"] == -1:
        values["top_k"] = 0
    return others, OwnSampling(**values)


_BOUNDS: dict[str, tuple[float, float, bool]] = {
    "temperature": (0, 100, False),
    "top_p": (0, 1, False),
    "top_k": (-1, 1 << 30, True),
    "seed": (-(1 << 64), 1 << 64, True),
}
"""Field -> least value, largest value, whether it is a whole number."""


def _number(name: str, value: object, least: float, most: float, *, is_whole: bool) -> Any:
    if value is None:
        return None
    kinds = int if is_whole else (int, float)
    is_number = isinstance(value, kinds) and not isinstance(value, bool)
    if not is_number or not isinstance(value, int | float) or not isfinite(value):
        raise Refusal(f"{name}: got {value!r}, expected a number; send one or omit the field")
    if not least <= value <= most:
        raise Refusal(
            f"{name}: got {value!r}, expected {least:g} to {most:g}; send such a number or omit "
            f"the field"
        )
    return value
