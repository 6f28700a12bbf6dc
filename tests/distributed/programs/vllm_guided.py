"""Guided responses and stop strings of vLLM, in a process of its own; prints what it found."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from spmdflow.config.schema import RolloutConfig
from spmdflow.rollout.generator import Finished, Replica, Request, take_folder_weights
from spmdflow.rollout.sampling import Grammar, Sampling
from spmdflow.rollout.vllm import VllmGenerator
from tests.unit.episodes.test_conversation import text_tokenizer

PROMPT = torch.tensor([5, 6, 7])
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string", "pattern": "^[a-c]{1,4}$"}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


def main() -> None:
    """Measure in the folder of the command line."""
    folder = sys.argv[1]
    write_model(folder)
    store = Path(folder, "store").absolute()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    cfg = RolloutConfig(engine="vllm", max_batch_size=8, dtype="float32", kv_cache_gib=0.1)
    generator = VllmGenerator(cfg, folder, torch.device("cpu"), Replica.alone())
    take_folder_weights(generator, folder, verify=True)
    found = {"guided": guided(generator, folder), "stopped": stopped(generator, folder)}
    generator.close()
    print(json.dumps(found))


def write_model(folder: str) -> None:
    """A model with random weights and one token a byte."""
    tokenizer = text_tokenizer()
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=512,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        initializer_range=0.1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def finish(generator: VllmGenerator, samplings: list[Sampling]) -> list[Finished]:
    """The responses to requests that are generated together, in order."""
    numbers = []
    for seed, sampling in enumerate(samplings):
        numbers.append(generator.add(Request(PROMPT, seed, sampling)))
    done: dict[int, Finished] = {}
    while len(done) < len(numbers):
        done |= {row.id: row for row in generator.step()}
    return [done[number] for number in numbers]


def guided(generator: VllmGenerator, folder: str) -> list[tuple[str, float, int]]:
    """(text, largest error of a log-probability, forced tokens) of responses with a schema."""
    grammar = Grammar("json_schema", json.dumps(SCHEMA))
    sampling = Sampling(150, tokenizer_path=folder, grammar=grammar)
    rows = finish(generator, [sampling, Sampling(150, tokenizer_path=folder), sampling])[::2]
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    result = []
    for row in rows:
        with torch.no_grad():
            logits = model(torch.cat([PROMPT, row.tokens])[None]).logits[0, len(PROMPT) - 1 : -1]
        expected = logits.log_softmax(-1).gather(-1, row.tokens[:, None])[:, 0]
        assert row.notes is not None
        error = float((expected - row.log_probs).abs().max())
        text = text_tokenizer().decode(row.tokens[:-1])
        result.append((text, error, sum(row.notes.forced)))
    return result


def stopped(generator: VllmGenerator, folder: str) -> list[tuple[int, int]]:
    """(kept tokens, drawn tokens) of responses with a stop string."""
    free = finish(generator, [Sampling(60, tokenizer_path=folder)] * 4)
    samplings = []
    for row in free:
        text = text_tokenizer().decode(row.tokens[:20], skip_special_tokens=True)
        samplings.append(Sampling(300, tokenizer_path=folder, stop=(text[-2:],)))
    drawn = []
    take = generator._sampler.take

    def count(number: int, size: int) -> Finished:
        (tokens,) = generator._sampler.tokens_so_far([number])
        drawn.append((size, len(tokens)))
        return take(number, size)

    generator._sampler.take = count
    finish(generator, samplings)
    return drawn


if __name__ == "__main__":
    main()
