"""The built-in generator with many families of transformers: refilled rows, their log-probs, and
rows that wait for the next turn of a conversation."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from scripts.families.tiny import FAMILIES, save_tiny_model
from spmdflow.config.schema import RolloutConfig
from spmdflow.data.ragged import ragged_from_rows, rows_of
from spmdflow.rollout.builtin import BuiltinGenerator
from spmdflow.rollout.generator import take_folder_weights
from spmdflow.rollout.sampling import Sampling
from spmdflow.weights.folder import attention_of
from tests.conversations import hold_conversations, record_continued_rows

CPU = torch.device("cpu")
BY_DEFAULT = ("gemma3_text", "qwen3_moe", "falcon_h1", "nemotron_h")
CASES = [
    pytest.param(name, marks=() if name in BY_DEFAULT else pytest.mark.slow) for name in FAMILIES
]
NUM_ROWS = 12
SEEDS = list(range(NUM_ROWS))
SAMPLED = Sampling(max_new_tokens=20)


def generator_of(folder: Path, max_batch_size: int) -> BuiltinGenerator:
    """A float32 generator with the folder's weights."""
    made = BuiltinGenerator(
        RolloutConfig(dtype="float32", max_batch_size=max_batch_size), str(folder), CPU
    )
    take_folder_weights(made, str(folder), verify=True)
    return made


@pytest.mark.parametrize("family", CASES)
def test_refilled_rows_have_their_own_tokens_and_the_log_probs_of_transformers(
    family: str, tmp_path: Path
) -> None:
    """Rows of 1 to 19 tokens, in a batch of 3 that is refilled and whose prompts are computed in
    parts of 5 tokens, and in one of 12.

    Log-probs within 2e-5: state space models add in another order in a cached forward, and
    nemotron_h comes to 1.2e-5; all others stay below 1e-5.
    """
    folder = save_tiny_model(family, tmp_path / family)
    draw = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, 20, (NUM_ROWS,), generator=draw).tolist()
    prompts = [torch.randint(3, 320, (length,), generator=draw) for length in lengths]
    refilled = generator_of(folder, 3)
    refilled._forward.prefill_chunk = 5

    found = refilled.generate(ragged_from_rows(prompts), SAMPLED, SEEDS)
    together = generator_of(folder, NUM_ROWS).generate(ragged_from_rows(prompts), SAMPLED, SEEDS)

    assert refilled._forward.refills
    assert torch.equal(found["responses"].values(), together["responses"].values())
    config = transformers.AutoConfig.from_pretrained(folder)
    plain = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, **attention_of(config)
    ).eval()
    drawn = zip(prompts, rows_of(found["responses"]), rows_of(found["rollout_log_probs"]))
    with torch.no_grad():
        for prompt, response, log_probs in drawn:
            row = torch.cat([prompt, response])[None]
            logits = plain(input_ids=row, use_cache=False).logits[0, len(prompt) - 1 : -1]
            expected = logits.log_softmax(-1).gather(-1, response[:, None])[:, 0]
            assert float((log_probs - expected).abs().max()) < 2e-5


@pytest.mark.parametrize("family", CASES)
def test_turns_of_a_conversation_continue_the_row_that_was_kept(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six conversations of three turns, as whole prompts and continued: the same tokens, log-probs
    within 5e-5, the same experts.

    Twelve turns can be continued. In one conversation half of each response is dropped, so its two
    need a row that can be truncated: not with sliding windows and states.
    """
    folder = save_tiny_model(family, tmp_path / family)
    draw = torch.Generator().manual_seed(2)
    starts = [torch.randint(3, 320, (length,), generator=draw) for length in (1, 7, 12, 3, 9, 19)]
    prefilling, continuing = (generator_of(folder, 3) for _ in range(2))
    prefilling._forward.prefill_chunk = 5
    continuing._forward.prefill_chunk = 3
    continued = record_continued_rows(continuing, monkeypatch)
    if prefilling._forward.routing is not None:
        prefilling.return_routes()
        continuing.return_routes()

    expected = hold_conversations(prefilling, starts, SAMPLED, named=False)
    found = hold_conversations(continuing, starts, SAMPLED, named=True)

    assert found.tokens == expected.tokens
    assert len(continued) == (12 if continuing._forward.truncates else 10)
    for turn, log_probs in expected.log_probs.items():
        torch.testing.assert_close(found.log_probs[turn], log_probs, rtol=0, atol=5e-5)
        if prefilling._forward.routing is not None:
            assert torch.equal(found.routes[turn], expected.routes[turn])


def test_long_waiting_prompts_are_computed_in_several_passes(tmp_path: Path) -> None:
    """More prompt tokens than one pass takes: no pass replaces the rows of the one before."""
    folder = save_tiny_model("phi3", tmp_path / "phi3")
    prompts = ragged_from_rows([torch.full((200,), 3 + row) for row in range(60)])

    together = generator_of(folder, 60).generate(prompts, Sampling(3), list(range(60)))
    alone = generator_of(folder, 1).generate(prompts, Sampling(3), list(range(60)))

    assert torch.equal(together["responses"].values(), alone["responses"].values())
