"""What losses get of a model, from a plain tensor of it."""

from __future__ import annotations

import torch
from tensordict import TensorDict
from torch import Tensor

from spmdflow.data.ragged import ragged_from_rows
from spmdflow.objectives.log_prob import CausalOutput, ScalarOutput
from spmdflow.workers.micro_batch import MicroBatch, micro_batches


def micro_of(ids: Tensor) -> MicroBatch:
    """One row (T,), all but its first token its response."""
    columns = {"prompts": ragged_from_rows([ids[:1]]), "responses": ragged_from_rows([ids[1:]])}
    batch = TensorDict(columns, batch_size=[1])
    (micro,) = micro_batches(
        batch, num_micro_batches=1, by_tokens=False, device=torch.device("cpu")
    )
    return micro


def causal_output(logits: Tensor, micro: MicroBatch) -> CausalOutput:
    """Of logits (b, T, V) at every position."""
    return CausalOutput(logits.flatten(0, 1)[micro.predicting], None, micro.targets)


def scalar_output(values: Tensor) -> ScalarOutput:
    """Of values (b, T) at every position."""
    return ScalarOutput(values.reshape(-1, 1), lambda hidden: hidden)


def of_logits(logits: Tensor, ids: Tensor) -> CausalOutput:
    """Every position of logits (..., V) predicts the token at its place in ids (...)."""
    return CausalOutput(logits.flatten(0, -2), None, ids.flatten())


def log_probs_of(logits: Tensor, ids: Tensor, temperature: float = 1.0) -> Tensor:
    return of_logits(logits, ids).log_probs(temperature).view(ids.shape)


def entropy_of(logits: Tensor, temperature: float = 1.0) -> Tensor:
    ids = torch.zeros(logits.shape[:-1], dtype=torch.int64)
    return of_logits(logits, ids).log_probs_and_entropy(temperature)[1].view(ids.shape)
