"""The models of a run that episodes may call besides the policy, and what each needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from spmdflow.config.episode_models import (
    AT_STEP,
    STEP_PREFIX,
    EpisodeModel,
    FrozenModel,
)
from spmdflow.datasets.chat import ChatTemplate
from spmdflow.episodes.frozen import LoadedWeights
from spmdflow.episodes.named_model import NamedModels, OwnSampling, SavedSteps
from spmdflow.episodes.recorder import Limits
from spmdflow.rollout.sampling import Sampling


@dataclass(frozen=True)
class ModelForm:
    """How the messages and tokens of a model with frozen weights look."""

    chat: ChatTemplate
    end_tokens: tuple[int, ...]
    vocab_size: int
    tokenizer_path: str


@dataclass(frozen=True)
class ModelSet:
    """Models by name, and where their weights come from."""

    models: Mapping[str, EpisodeModel]
    policy_limits: Limits
    """Of an episode with the policy."""
    run_sampling: Sampling
    """That of the run's settings."""
    load: Callable[[str], LoadedWeights]
    """Loads the weights of a name, which may be policy@STEP."""
    form_of_entry: Callable[[str], ModelForm]
    """For the name of an entry with weights."""
    steps: Callable[[], SavedSteps]
    """The checkpoints at this moment."""
    keys: Mapping[str, str] = field(default_factory=dict)
    """Model -> key of its server."""

    @property
    def always_loaded(self) -> list[str]:
        """Models with frozen weights that stay loaded."""
        names = []
        for name, model in self.models.items():
            if isinstance(model, FrozenModel) and name != AT_STEP:
                names.append(name)
        return names

    @property
    def most_steps(self) -> int:
        """How many checkpoints are loaded at once."""
        model = self.models.get(AT_STEP)
        return model.loaded if isinstance(model, FrozenModel) else 1

    def named_models(self) -> NamedModels:
        """What finds the model of a request."""
        return NamedModels(self.models, self.steps)

    def form_of(self, name: str) -> ModelForm:
        """How the messages and tokens of a model with weights look."""
        return self.form_of_entry(_entry_of(name))

    def limits_of(self, model: EpisodeModel) -> Limits:
        """The limits of one episode with a model. Its first prompt may be as long as a whole
        conversation of the policy, so that it can read one."""
        policy = self.policy_limits
        conversation_tokens = policy.max_prompt_tokens + policy.max_new_tokens
        vocab_size = policy.vocab_size
        if isinstance(model, FrozenModel):
            vocab_size = self.form_of(model.name).vocab_size
        return Limits(
            max_turns=model.max_turns or policy.max_turns,
            max_prompt_tokens=model.max_prompt_tokens or conversation_tokens,
            max_new_tokens=model.max_new_tokens or policy.max_new_tokens,
            may_fork=True,
            vocab_size=vocab_size,
        )

    def sampling_of(self, name: str, own: OwnSampling) -> Sampling:
        """How a reply is drawn: by the request, otherwise the model's settings, otherwise the
        run's. A temperature or top_p of 0 takes the likeliest tokens. Log-probabilities are those
        at temperature 1."""
        model = self.models[_entry_of(name)]
        run = self.run_sampling
        temperature = _first(own.temperature, model.temperature, run.temperature)
        top_p = _first(own.top_p, model.top_p, run.top_p)
        greedy = temperature == 0 or top_p == 0
        return replace(
            run,
            temperature=1.0 if greedy else temperature,
            top_p=1.0 if greedy else top_p,
            top_k=0 if greedy else int(_first(own.top_k, model.top_k, run.top_k)),
            greedy=greedy,
            policy_temperature=1.0,
            tokenizer_path=self.form_of(name).tokenizer_path,
        )


def _entry_of(name: str) -> str:
    """The name of the entry of `models` that a model's name means."""
    if name.startswith(STEP_PREFIX):
        return AT_STEP
    return name


def _first(*values: float | None) -> float:
    """The first value that is not None."""
    return next(value for value in values if value is not None)
