"""The built-in generator with the weights of SmolLM2-135M-Instruct, against plain transformers.

Each response is read by one forward of transformers over the whole row. Log-probabilities in
float32 may differ by TOLERANCE: sums in another order through 30 layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from spmdflow.config.schema import RolloutConfig
from spmdflow.data.ragged import ragged_from_rows, rows_of
from spmdflow.datasets.chat import ChatTemplate
from spmdflow.datasets.tokenizer import load_tokenizer
from spmdflow.rollout.builtin import BuiltinGenerator
from spmdflow.rollout.generator import take_folder_weights
from spmdflow.rollout.sampling import Sampling
from tests.smollm2 import (
    END,
    SMOLLM2,
    model_of_transformers,
    needs_smollm2,
    plain_logits,
    words_of,
)

pytestmark = needs_smollm2

TOLERANCE = 1e-4
CAPITAL = [{"role": "user", "content": "What is the capital of France?"}]
COUNT = [{"role": "user", "content": "Count from 1 to 1000."}]
PARIS = "The capital of France is Paris."


@pytest.fixture(scope="module")
def generator() -> BuiltinGenerator:
    made = BuiltinGenerator(RolloutConfig(dtype="float32"), str(SMOLLM2), torch.device("cpu"))
    take_folder_weights(made, str(SMOLLM2), verify=False)
    return made


@pytest.fixture(scope="module")
def plain() -> Any:
    return model_of_transformers()


def prompt_of(messages: list[dict[str, str]], begun: str = "") -> Tensor:
    """The rendered messages, and what the assistant has said already."""
    tokenizer = load_tokenizer(str(SMOLLM2))
    template = ChatTemplate(tokenizer)
    (ids,) = template.ids([template.render(messages)])
    return torch.tensor(ids + (tokenizer(begun).input_ids if begun else []))


def respond(generator: BuiltinGenerator, prompts: Sequence[Tensor], count: int) -> TensorDict:
    """The likeliest responses of at most `count` tokens."""
    sampling = Sampling(count, greedy=True)
    return generator.generate(ragged_from_rows(list(prompts)), sampling, [0] * len(prompts))


def check_rows(found: TensorDict, prompts: Sequence[Tensor], plain: Any) -> None:
    """Every token is transformers' likeliest one, with the same log-probability."""
    columns = (rows_of(found["responses"]), rows_of(found["rollout_log_probs"]))
    for prompt, response, log_probs in zip(prompts, *columns, strict=True):
        logits = plain_logits(plain, prompt.tolist(), response.tolist())
        assert logits.argmax(-1).tolist() == response.tolist()
        expected = logits.log_softmax(-1).gather(1, response[:, None])[:, 0]
        assert float((log_probs - expected).abs().max()) < TOLERANCE


def test_response_stops_at_the_end_of_its_turn_and_has_that_token(
    generator: BuiltinGenerator,
) -> None:
    tokenizer = load_tokenizer(str(SMOLLM2))

    found = respond(generator, [prompt_of(CAPITAL), prompt_of(CAPITAL, PARIS)], 20)

    whole, rest = (row.tolist() for row in rows_of(found["responses"]))
    assert tokenizer.decode(whole) == f"{PARIS}<|im_end|>"
    assert rest == [END]  # a response may be its end alone
    assert whole.count(END) == 1
    assert bool(found["response_mask"].values().all())


def test_response_that_does_not_end_has_all_tokens_that_it_may_have(
    generator: BuiltinGenerator,
) -> None:
    found = respond(generator, [prompt_of(COUNT)], 6)

    (response,) = rows_of(found["responses"])
    assert len(response) == 6 and END not in response.tolist()


def test_rows_of_different_lengths_are_those_of_transformers(
    generator: BuiltinGenerator, plain: Any
) -> None:
    """Their prompts have the end of a turn inside, and the shorter ones end first."""
    prompts = [prompt_of(CAPITAL), prompt_of(COUNT), prompt_of(CAPITAL, PARIS), torch.tensor([504])]

    found = respond(generator, prompts, 12)

    check_rows(found, prompts, plain)


@pytest.mark.drill
def test_prompts_of_1_and_4000_tokens_are_continued_as_by_transformers(
    generator: BuiltinGenerator, plain: Any
) -> None:
    tokenizer = load_tokenizer(str(SMOLLM2))
    prompts = [torch.tensor(tokenizer(words_of(tokenizer, size)).input_ids) for size in (1, 4000)]

    found = respond(generator, prompts, 3)

    assert [len(prompt) for prompt in prompts] == [1, 4000]
    check_rows(found, prompts, plain)
