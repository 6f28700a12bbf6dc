"""A generator that replies as a file says; everything else is done by the built-in one.

The model is computed, so a log-probability is that of the scripted token under the weights, rows
are parked between turns, and grammars limit what may be said. A reply is chosen by the last message
that the model reads. Where none is scripted, the reply says so and quotes the message.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from spmdflow import GeneratorKind, RolloutConfig, register_generator
from spmdflow.config.episode import AgentActorConfig, AgentRolloutConfig, GRPOAgentConfig
from spmdflow.config.leaf import part, setting
from spmdflow.datasets.tokenizer import load_tokenizer
from spmdflow.rollout.builtin import BuiltinGenerator
from spmdflow.rollout.generator import Request
from spmdflow.rollout.sampling import log_probs_of

_MESSAGE_BEGIN = "<|im_start|>"
_CERTAIN = 1e4
"""Added to the logit of the scripted token: no other one is drawn, unless a grammar forbids it."""


@dataclass
class ScriptedRolloutConfig(AgentRolloutConfig):
    """Settings of rollouts, and what the model says."""

    replies_path: str = setting(
        "JSON file: a list of [part of the last message, reply]; the first that fits is said.", ""
    )


@dataclass
class ScriptedActorConfig(AgentActorConfig):
    """An actor whose replies are scripted."""

    rollout: ScriptedRolloutConfig = part(ScriptedRolloutConfig)


@dataclass
class ScriptedConfig(GRPOAgentConfig):
    """Everything `run_program.py` reads."""

    actor: ScriptedActorConfig = part(ScriptedActorConfig)


@register_generator(GeneratorKind("scripted", "replies from a file", shares_prompts=True, refill=8))
class ScriptedGenerator(BuiltinGenerator):
    """The built-in generator; which token is drawn, the file says."""

    def __init__(self, cfg: RolloutConfig, model_path: str, device: torch.device) -> None:
        super().__init__(cfg, model_path, device)
        assert isinstance(cfg, ScriptedRolloutConfig)
        self._tokenizer = load_tokenizer(model_path)
        self._replies = json.loads(Path(cfg.replies_path).read_text(encoding="utf-8"))
        self._scripts: dict[int, list[int]] = {}
        """Request -> the tokens that it gets."""

    def add(self, request: Request) -> int:
        """See RequestGenerator.add."""
        number = super().add(request)
        prompt = request.prompt[: len(request.prompt) - request.num_drawn]
        text = self._reply_to(self._tokenizer.decode(prompt.tolist()))
        ids = self._tokenizer(text, add_special_tokens=False).input_ids
        self._scripts[number] = [*ids, self._tokenizer.eos_token_id]
        return number

    def _reply_to(self, prompt: str) -> str:
        """The reply that is scripted for a prompt."""
        last = prompt.rsplit(_MESSAGE_BEGIN, 2)[-2]
        for part_of_message, reply in self._replies:
            if part_of_message in last:
                return str(reply)
        return f"nothing is scripted for {last}"

    def _draw_tokens(self) -> Tensor:
        """Draws the scripted tokens; their log-probabilities are those of the model's logits."""
        rows = self._rows
        logits = self._logits
        positions = rows.drawn + rows.counts
        slots = rows.counts[:, None].clone()
        certain = torch.zeros_like(logits)
        for index, position in enumerate(positions.tolist()):
            script = self._scripts[self._live[index].id]
            certain[index, script[min(position, len(script) - 1)]] = _CERTAIN
        self._logits = logits + certain
        chosen = super()._draw_tokens()
        self._logits = logits
        sampling = self._live[0].request.sampling
        rows.log_probs.scatter_(1, slots, log_probs_of(logits, chosen, sampling)[:, None])
        return chosen
