"""Responses that a grammar limits: they parse, and their log-probabilities are the policy's."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from spmdflow.config.schema import RolloutConfig
from spmdflow.errors import ConfigError
from spmdflow.rollout.builtin import BuiltinGenerator
from spmdflow.rollout.generator import Finished, Request, take_folder_weights
from spmdflow.rollout.grammar import check_grammar
from spmdflow.rollout.resumable import ResumableRequests
from spmdflow.rollout.sampling import Grammar, Sampling
from tests.unit.episodes.test_conversation import text_tokenizer

pytest.importorskip("xgrammar")
jsonschema = pytest.importorskip("jsonschema")

PROMPT = torch.tensor([5, 6, 7])
NUM_TOKENS = 200


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with random weights and one token a byte."""
    path = tmp_path_factory.mktemp("guided")
    tokenizer = text_tokenizer()
    tokenizer.save_pretrained(path)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=512,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        initializer_range=0.1,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def generator(folder: Path) -> BuiltinGenerator:
    cfg = RolloutConfig(max_batch_size=16, dtype="float32")
    made = BuiltinGenerator(cfg, str(folder), torch.device("cpu"))
    take_folder_weights(made, str(folder), verify=True)
    return made


def request(folder: Path, seed: int, **settings: Any) -> Request:
    fields = {"max_new_tokens": NUM_TOKENS, "tokenizer_path": str(folder), **settings}
    return Request(PROMPT, seed, Sampling(**fields))


def finish(generator: BuiltinGenerator, requests: list[Request]) -> list[Finished]:
    """The responses to requests that are generated together, in order."""
    numbers = [generator.add(each) for each in requests]
    done: dict[int, Finished] = {}
    while len(done) < len(numbers):
        done |= {row.id: row for row in generator.step()}
    return [done[number] for number in numbers]


def random_schema(draw: random.Random, depth: int = 2) -> dict[str, Any]:
    """A schema whose values are short."""
    kind = draw.choice(["boolean", "enum", "pattern", *["object"] * depth, *["array"] * depth])
    if kind == "boolean":
        return {"type": "boolean"}
    if kind == "enum":
        return {"enum": [draw.choice(["x", "y z", 7, True, None, 'a"b']) for _ in range(3)]}
    if kind == "pattern":
        return {"type": "string", "pattern": f"^[a-c]{{1,{draw.randrange(1, 5)}}}$"}
    if kind == "array":
        items = random_schema(draw, depth - 1)
        return {"type": "array", "items": items, "minItems": 1, "maxItems": 2}
    names = [f"n{i}" for i in range(draw.randrange(1, 4))]
    return {
        "type": "object",
        "properties": {name: random_schema(draw, depth - 1) for name in names},
        "required": names,
        "additionalProperties": False,
    }


def test_responses_match_random_schemas_and_have_the_log_probs_of_an_independent_forward(
    folder: Path, generator: BuiltinGenerator
) -> None:
    tokenizer = text_tokenizer()
    draw = random.Random(0)
    schemas = [random_schema(draw) for _ in range(24)]
    requests = []
    for seed, schema in enumerate(schemas):
        grammar = Grammar("json_schema", json.dumps(schema))
        requests.append(request(folder, seed, grammar=grammar))
        requests.append(request(folder, seed))  # a row without a grammar next to it
    responses = finish(generator, requests)

    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    num_forced = 0
    for schema, response in zip(schemas, responses[::2], strict=True):
        tokens = response.tokens
        assert int(tokens[-1]) == tokenizer.eos_token_id
        jsonschema.validate(json.loads(tokenizer.decode(tokens[:-1])), schema)
        with torch.no_grad():
            logits = model(torch.cat([PROMPT, tokens])[None]).logits[0, len(PROMPT) - 1 : -1]
        expected = logits.float().log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
        torch.testing.assert_close(response.log_probs, expected, rtol=0, atol=1e-6)
        assert response.notes is not None and len(response.notes.forced) == len(tokens)
        num_forced += sum(response.notes.forced)
    assert num_forced > 0


def test_rows_without_a_grammar_are_the_same_next_to_rows_with_one(
    folder: Path, generator: BuiltinGenerator
) -> None:
    grammar = Grammar("json_schema", '{"type": "boolean"}')
    alone = finish(generator, [request(folder, seed, max_new_tokens=9) for seed in range(4)])
    mixed = []
    for seed in range(4):
        mixed.append(request(folder, seed, max_new_tokens=9))
        mixed.append(request(folder, seed, max_new_tokens=9, grammar=grammar))

    together = finish(generator, mixed)[::2]

    for one, other in zip(alone, together, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()


def test_grammar_goes_on_where_it_was_after_the_weights_have_changed(
    folder: Path, generator: BuiltinGenerator
) -> None:
    schema = {"type": "string", "pattern": "^[a-c]{30}$"}
    grammar = Grammar("json_schema", json.dumps(schema))
    (whole,) = finish(generator, [request(folder, 3, grammar=grammar)])
    requests = ResumableRequests(generator, (0,))
    requests.add(request(folder, 3, grammar=grammar))
    drawn = []
    while not drawn:
        drawn = requests.step()
        requests.suspend_all()

    assert drawn[0].tokens.tolist() == whole.tokens.tolist()
    assert drawn[0].notes == whole.notes


def test_likeliest_tokens_are_those_of_the_policy(
    folder: Path, generator: BuiltinGenerator
) -> None:
    (response,) = finish(generator, [request(folder, 1, max_new_tokens=5, top_log_probs=3)])

    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.cat([PROMPT, response.tokens])[None]).logits[0, len(PROMPT) - 1 : -1]
    values, tokens = logits.log_softmax(-1).topk(3)
    assert response.notes is not None
    assert [[token for token, _ in row] for row in response.notes.likeliest] == tokens.tolist()
    found = torch.tensor([[value for _, value in row] for row in response.notes.likeliest])
    torch.testing.assert_close(found, values, rtol=0, atol=1e-6)


def test_at_most_8_tokens_are_drawn_past_a_stop_string(
    folder: Path, generator: BuiltinGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = text_tokenizer()
    requests = []
    for seed in range(16):
        (free,) = finish(generator, [request(folder, seed, max_new_tokens=60)])
        text = tokenizer.decode(free.tokens[:20], skip_special_tokens=True)
        requests.append(request(folder, seed, max_new_tokens=300, stop=(text[-2:] or "a",)))
    drawn: dict[int, int] = {}
    to_finished = generator._to_finished

    def count(rows: Any, row: Any, index: int, size: int) -> Finished:
        drawn[row.id] = int(rows.counts[index])
        return to_finished(rows, row, index, size)

    monkeypatch.setattr(generator, "_to_finished", count)
    responses = finish(generator, requests)

    past = [drawn[response.id] - len(response.tokens) for response in responses]
    assert max(past) <= 8 and sum(past) > 0
    assert max(len(response.tokens) for response in responses) < 300


def test_stop_string_is_found_across_a_change_of_weights(
    folder: Path, generator: BuiltinGenerator
) -> None:
    (free,) = finish(generator, [request(folder, 5, max_new_tokens=40)])
    text = text_tokenizer().decode(free.tokens[:12], skip_special_tokens=True)
    stopped = request(folder, 5, max_new_tokens=100, stop=(text[-6:],))
    (whole,) = finish(generator, [stopped])
    requests = ResumableRequests(generator, (0,))
    requests.add(stopped)
    drawn = []
    while not drawn:
        drawn = requests.step()
        requests.suspend_all()

    assert drawn[0].tokens.tolist() == whole.tokens.tolist()


def test_schema_that_cannot_be_used_is_refused_in_words() -> None:
    with pytest.raises(ConfigError, match="Unsupported type"):
        check_grammar(Grammar("json_schema", '{"type": "number of things"}'))
