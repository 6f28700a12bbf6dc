"""What the roles that generate share: seeds of rows, arguments of a call, what is reported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from spmdflow.config.model_folder import read_model_folder
from spmdflow.data.row_id import is_held_out
from spmdflow.data.rows import total_length
from spmdflow.data.seed import seed_of
from spmdflow.errors import ConfigError, ProtocolError
from spmdflow.rollout.sampling import Sampling
from spmdflow.transfer.worker import CallInfo, Mean, Metric, Sum, WorkerContext


def row_seeds(context: WorkerContext, call: CallInfo) -> list[int]:
    """A seed for each row of a call, from (seed, step, row id, generation), never from a rank.

    generation: which one of the step it is for the row; the first one adds no number. Held-out
    rows have the same seeds at every step: evaluations differ by their weights only.
    ProtocolError if the method is not marked as drawing.
    """
    if call.generation is None:
        raise ProtocolError(
            f"{context.name}: got a call that generates in a method without draws=True, expected "
            f"the mark, as a second call on the same rows must not repeat the noise of the first; "
            f"write @register(..., draws=True) above the method"
        )
    return [
        seed_of(
            context.seed,
            "generate",
            0 if is_held_out(row) else call.step,
            row,
            *([generation] if generation else []),
        )
        for row, generation in zip(call.row_ids.tolist(), call.generation.tolist(), strict=True)
    ]


def check_sampling(label: str, cfg: Any, arguments: Mapping[str, Any]) -> None:
    """Refuse what `generate_sequences` cannot do, by the bounds of the settings."""
    if not set(arguments) - {"greedy"}:
        return  # the settings have checks of their own, which tell all that is wrong
    try:
        sampling = Sampling.from_config(cfg.rollout).for_call(**arguments)
    except ConfigError as err:
        raise ConfigError(f"{label}: {err}") from err
    if arguments.get("max_new_tokens") is None:
        return
    positions = read_model_folder("actor.model.path", cfg.model.path, weights=False).max_positions
    if positions is not None and sampling.max_new_tokens >= positions:
        raise ConfigError(
            f"{label}: max_new_tokens: got {sampling.max_new_tokens}, expected less than the "
            f"model's {positions} positions, which prompt and response share; ask for fewer tokens"
        )


def tokenizer_path(context: WorkerContext) -> str:
    """Folder of the tokenizer that makes and reads the run's texts."""
    data = getattr(context.config, "data", None)
    return "" if data is None else str(data.tokenizer_path)


def rollout_metrics(prompts: Tensor, responses: Tensor) -> dict[str, Metric]:
    """Tokens in and out of ragged columns."""
    rows, tokens = prompts.shape[0], total_length(responses)
    return {
        "rollout/prompt_tokens": Sum(total_length(prompts)),
        "rollout/response_tokens": Sum(tokens),
        "rollout/response_length": Mean(tokens, rows),
    }
