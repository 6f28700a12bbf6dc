"""The built-in generator against transformers run one row at a time, without cache or padding."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from spmdflow.blocks.hash import positional_hash
from spmdflow.config.schema import RolloutConfig
from spmdflow.cpu.llama import LlamaForward, covers
from spmdflow.data.ragged import lengths_of, ragged_from_rows, rows_of
from spmdflow.errors import ColumnError, ConfigError, SpmdflowError
from spmdflow.rollout.builtin import BuiltinGenerator
from spmdflow.rollout.forward import HuggingFaceForward, causal_lm, end_tokens
from spmdflow.rollout.generator import generator_of, take_folder_weights
from spmdflow.rollout.sampling import Sampling
from tests.rollout_reference import (
    END,
    FAMILIES,
    LLAMA,
    disagreements,
    load,
    make_prompts,
    put_weights,
    reference,
    write_family,
    write_llama,
)

CPU = torch.device("cpu")
SEEDS = [2**62 + row for row in range(40)]
SAMPLED = Sampling(12, temperature=0.8)

VARIANTS: dict[str, dict[str, Any]] = {
    "grouped": {},
    "tied": {"tie_word_embeddings": True, "num_key_value_heads": 2},
    "one layer": {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2},
    "scaled rope": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model folders: the Llama variants, every family, and one that transformers must run."""
    folder = tmp_path_factory.mktemp("models")
    for number, (name, changes) in enumerate(VARIANTS.items()):
        write_llama(folder / name, seed=number, **changes)
    for number, name in enumerate(FAMILIES):
        write_family(folder / name, name, seed=number, vocab_size=128)
    torch.manual_seed(9)
    config = transformers.StableLmConfig(**{k: v for k, v in LLAMA.items() if k != "head_dim"})
    transformers.StableLmForCausalLM(config).save_pretrained(folder / "stablelm")
    return folder


def _generator(path: Path, **settings: Any) -> BuiltinGenerator:
    generator = BuiltinGenerator(RolloutConfig(**settings), str(path), CPU)
    take_folder_weights(generator, str(path), verify=True)
    return generator


@pytest.mark.parametrize(
    "sampling", [SAMPLED, Sampling(12, greedy=True), Sampling(9, top_k=5, top_p=0.9)]
)
@pytest.mark.parametrize("name", [*VARIANTS, *FAMILIES, "stablelm"])
def test_responses_and_log_probs_equal_a_forward_over_each_whole_row(
    folder: Path, name: str, sampling: Sampling
) -> None:
    prompts = make_prompts(12)

    found = _generator(folder / name, max_batch_size=5).generate(prompts, sampling, SEEDS[:12])

    expected = reference(load(folder / name), prompts, sampling, SEEDS[:12], (END,))
    assert disagreements(found, expected, tolerance=1e-5) == []
    assert torch.equal(lengths_of(found["response_mask"]), lengths_of(found["responses"]))
    assert bool(found["response_mask"].values().all())
    assert found["response_mask"].dtype == torch.bool
    assert found["rollout_log_probs"].dtype == torch.float32


@pytest.mark.parametrize("sampling", [SAMPLED, Sampling(12, greedy=True)])
def test_row_whose_logits_are_nan_is_refused_by_name_after_its_first_token(
    folder: Path, sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = _generator(folder / "grouped")
    word = 5
    for name, tensor, _ in generator.blocks():
        if name == "model.embed_tokens.weight":
            tensor[word] = float("nan")
    prompts = ragged_from_rows([torch.tensor([1, 2]), torch.tensor([1, word]), torch.tensor([3])])
    draws = []
    step = generator._draw_tokens
    monkeypatch.setattr(generator, "_draw_tokens", lambda: draws.append(1) or step())
    unlimited = replace(sampling, max_new_tokens=10)

    with pytest.raises(SpmdflowError, match="row 1 of the 3 of the call: got .* nan for token 0 "):
        generator.generate(prompts, unlimited, SEEDS[:3])
    draws.clear()
    alone = ragged_from_rows([torch.tensor([1, word])])
    with pytest.raises(SpmdflowError, match="row 0 of the 1 of the call"):
        generator.generate(alone, unlimited, SEEDS[:1])
    assert len(draws) == 1


def test_families_use_the_forward_that_covers_them(folder: Path) -> None:
    modules = {
        name: causal_lm(str(folder / name), dtype=torch.float32, device=CPU)
        for name in [*VARIANTS, *FAMILIES, "stablelm"]
    }

    assert {name: covers(module) for name, module in modules.items()} == {
        **dict.fromkeys([*VARIANTS, *FAMILIES], True),
        "stablelm": False,
    }


@pytest.mark.parametrize("prefill_chunk", [8192, 3])
@pytest.mark.parametrize("name", [*VARIANTS, *FAMILIES])
def test_own_llama_forward_equals_transformers_within_1e_5_at_every_step(
    folder: Path, name: str, prefill_chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five rows of four prompts, computed whole or in parts of three tokens with masks of one
    query; after three tokens two of them go and a new one comes."""
    if prefill_chunk == 3:
        monkeypatch.setattr("spmdflow.cpu.llama._MASK_ELEMENTS", 1)
    module = causal_lm(str(folder / name), dtype=torch.float32, device=CPU)
    ours = LlamaForward(module, CPU, prefill_chunk=prefill_chunk)
    size = 100
    rows = [torch.randint(3, size, (length,)) for length in (7, 5, 5, 2, 1)]
    rows[2] = rows[1]
    late = torch.randint(3, size, (9,))
    ours.reserve(5, 12)

    def check(found: Tensor) -> None:
        for logits, row in zip(found, rows, strict=True):
            expected = module(input_ids=row[None]).logits[0, -1]
            gaps.append(float((logits - expected).abs().max()))

    def step() -> None:
        tokens = torch.randint(3, size, (len(rows),))
        places = torch.tensor([len(row) for row in rows])
        rows[:] = [torch.cat([row, token[None]]) for row, token in zip(rows, tokens)]
        check(ours.step(tokens, places, int(places.max()) + 1))

    gaps: list[float] = []
    with torch.no_grad():
        check(ours.prefill([rows[0], rows[1], rows[3], rows[4]], [0, 1, 1, 2, 3]))
        for _ in range(3):
            step()
        ours.keep([0, 4, 2])
        rows = [rows[0], rows[4], rows[2]]
        ours.reserve(4, 16)
        new = ours.prefill([late], [0])
        gaps.append(float((new[0] - module(input_ids=late[None]).logits[0, -1]).abs().max()))
        rows = [*rows, late]
        for _ in range(4):
            step()

    assert len(gaps) == 5 * 4 + 1 + 4 * 4
    assert max(gaps) < 1e-5, gaps
    assert float(new.std()) > 0.1


@pytest.mark.parametrize("prefill_chunk", [8192, 3])
def test_more_tokens_of_cached_rows_are_computed_in_chunks(
    folder: Path, prefill_chunk: int
) -> None:
    """Rows of 7, 2 and 4 tokens get 8, 1 and 3 more: logits within 1e-5 of transformers."""
    module = causal_lm(str(folder / "grouped"), dtype=torch.float32, device=CPU)
    ours = LlamaForward(module, CPU, prefill_chunk=prefill_chunk)
    starts = [7, 2, 4]
    rows = [torch.randint(3, 100, (length,)) for length in (15, 3, 7)]
    ours.reserve(3, 16)

    with torch.no_grad():
        ours.prefill([row[:start] for row, start in zip(rows, starts, strict=True)], [0, 1, 2])
        more = [row[start:] for row, start in zip(rows, starts, strict=True)]
        found = ours.extend([0, 1, 2], more, starts)

        for logits, row in zip(found, rows, strict=True):
            expected = module(input_ids=row[None]).logits[0, -1]
            assert float((logits - expected).abs().max()) < 1e-5


def test_bfloat16_stays_as_near_to_float32_as_transformers_bfloat16(folder: Path) -> None:
    prompts = make_prompts(24)
    greedy = Sampling(1, greedy=True)
    exact = _generator(folder / "grouped").generate(prompts, greedy, SEEDS[:24])
    ours = _generator(folder / "grouped", dtype="bfloat16")
    theirs = _generator(folder / "grouped", dtype="bfloat16")
    theirs._forward = HuggingFaceForward(
        causal_lm(str(folder / "grouped"), dtype=torch.bfloat16, device=CPU)
    )

    gaps = [
        (
            g.generate(prompts, greedy, SEEDS[:24])["rollout_log_probs"].values()
            - exact["rollout_log_probs"].values()
        )
        .abs()
        .mean()
        for g in (ours, theirs)
    ]

    assert ours.dtype == torch.bfloat16
    assert 0 < gaps[0] < max(2 * gaps[1], 0.01)


@pytest.mark.parametrize("name", ["grouped", "stablelm"])
def test_row_depends_on_its_prompt_and_seed_only(folder: Path, name: str) -> None:
    prompts = make_prompts(20)
    seeds = SEEDS[:20]
    order = torch.randperm(20).tolist()
    generator = _generator(folder / name, max_batch_size=128)
    whole = rows_of(generator.generate(prompts, SAMPLED, seeds)["responses"])

    rows = rows_of(prompts)
    shuffled = generator.generate(
        ragged_from_rows([rows[i] for i in order]), SAMPLED, [seeds[i] for i in order]
    )
    alone = [
        generator.generate(ragged_from_rows([row]), SAMPLED, [seed])
        for row, seed in zip(rows, seeds)
    ]
    in_threes = _generator(folder / name, max_batch_size=3).generate(prompts, SAMPLED, seeds)

    assert [row.tolist() for row in rows_of(shuffled["responses"])] == [
        whole[i].tolist() for i in order
    ]
    assert [answer["responses"].values().tolist() for answer in alone] == [
        row.tolist() for row in whole
    ]
    assert torch.equal(in_threes["responses"].values(), torch.cat(whole))


def test_samples_of_one_prompt_differ_by_their_seeds(folder: Path) -> None:
    prompts = ragged_from_rows([torch.tensor([5, 6, 7])] * 16)

    found = _generator(folder / "tied").generate(prompts, SAMPLED, SEEDS[:16])

    assert len({tuple(row.tolist()) for row in rows_of(found["responses"])}) == 16


def test_response_ends_with_its_first_end_token_and_the_others_go_on(folder: Path) -> None:
    generator = _generator(folder / "grouped")
    prompts = make_prompts(40)
    generator._end_tokens = torch.tensor([END, 40, 41, 42, 43, 44, 45, 46, 47])
    long = Sampling(30, temperature=1.5)

    found = [row.tolist() for row in rows_of(generator.generate(prompts, long, SEEDS)["responses"])]

    ends = set(generator._end_tokens.tolist())
    assert all(not ends & set(row[:-1]) for row in found)
    ended = [row for row in found if row[-1] in ends]
    assert all(len(row) == 30 for row in found if row[-1] not in ends)
    assert len(ended) > 20 and len({len(row) for row in ended}) > 5
    free = _generator(folder / "grouped")
    free._end_tokens = torch.tensor([], dtype=torch.int64)
    whole = [row.tolist() for row in rows_of(free.generate(prompts, long, SEEDS)["responses"])]
    assert [row[: len(short)] for row, short in zip(whole, found)] == found


def test_end_tokens_come_from_generation_config_first(folder: Path, tmp_path: Path) -> None:
    path = write_llama(tmp_path / "model")
    assert end_tokens(path) == (END,)

    transformers.GenerationConfig(eos_token_id=[7, 9]).save_pretrained(path)
    assert end_tokens(path) == (7, 9)

    (tmp_path / "model" / "generation_config.json").unlink()
    transformers.LlamaConfig(**(LLAMA | {"eos_token_id": None})).save_pretrained(path)
    assert end_tokens(path) == ()


def test_batch_of_no_rows_gives_columns_of_no_rows(folder: Path) -> None:
    nothing = ragged_from_rows([], dtype=torch.int64)

    found = _generator(folder / "grouped").generate(nothing, SAMPLED, [])

    assert found.batch_size == torch.Size([0])
    assert {name: (len(lengths_of(found[name])), found[name].dtype) for name in found.keys()} == {
        "responses": (0, torch.int64),
        "response_mask": (0, torch.bool),
        "rollout_log_probs": (0, torch.float32),
    }


@pytest.mark.parametrize(
    ("prompts", "num_seeds", "error", "message"),
    [
        (
            [[3] * 120],
            1,
            ConfigError,
            r"prompt of 120 tokens and rollout.max_new_tokens=12, together 132; expected at most "
            r"the model's 128 positions; lower rollout.max_new_tokens or data.max_prompt_tokens",
        ),
        ([[3], []], 2, ColumnError, r"prompt 1 has 0 tokens, expected at least 1; begin prompts"),
        ([[3], [4]], 1, ColumnError, r"got 1 seeds for 2 prompts; pass one seed per prompt"),
    ],
)
def test_prompts_that_cannot_be_answered_are_refused(
    folder: Path, prompts: list, num_seeds: int, error: type, message: str
) -> None:
    rows = ragged_from_rows([torch.tensor(row, dtype=torch.int64) for row in prompts])

    with pytest.raises(error, match=message):
        _generator(folder / "grouped").generate(rows, SAMPLED, SEEDS[:num_seeds])


def test_context_can_be_used_to_its_last_position(folder: Path) -> None:
    prompts = ragged_from_rows([torch.full((116,), 5), torch.tensor([9])])

    found = _generator(folder / "grouped").generate(prompts, SAMPLED, SEEDS[:2])

    expected = reference(load(folder / "grouped"), prompts, SAMPLED, SEEDS[:2], (END,))
    assert disagreements(found, expected, tolerance=1e-5) == []


@pytest.mark.parametrize("name", ["grouped", "qwen3", "stablelm"])
def test_loaded_weights_are_the_ones_that_generate(folder: Path, tmp_path: Path, name: str) -> None:
    generator = _generator(folder / name)
    prompts = make_prompts(12)
    before = generator.generate(prompts, SAMPLED, SEEDS[:12])
    model = load(folder / name)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)

    put_weights(generator, model.named_parameters(), version=5)

    assert generator.weights_version == 5
    found = generator.generate(prompts, SAMPLED, SEEDS[:12])
    expected = reference(model, prompts, SAMPLED, SEEDS[:12], (END,))
    assert disagreements(found, expected, tolerance=1e-5) == []
    assert found["responses"].values().tolist() != before["responses"].values().tolist()


@pytest.mark.parametrize("name", ["grouped", "qwen3", "stablelm"])
def test_hash_shows_a_flipped_bit_under_the_tensor_it_is_in(folder: Path, name: str) -> None:
    generator = _generator(folder / name)
    model = load(folder / name)
    before = generator.hashes()
    assert before == {n: positional_hash(p) for n, p in model.named_parameters()}

    for victim in before:
        bits = generator._forward.weights[victim].view(torch.int32).view(-1)
        bits[len(bits) // 2] ^= 1
        after = generator.hashes()
        assert [n for n in before if after[n] != before[n]] == [victim]
        bits[len(bits) // 2] ^= 1


def test_generator_that_slept_gives_the_same_responses(folder: Path) -> None:
    generator = _generator(folder / "grouped")
    prompts = make_prompts(8)
    before = generator.generate(prompts, SAMPLED, SEEDS[:8])["responses"].values()

    generator.sleep()

    assert not any(cache.numel() for cache in generator._forward._cache)
    generator.wake()
    assert torch.equal(
        generator.generate(prompts, SAMPLED, SEEDS[:8])["responses"].values(), before
    )


def test_responses_can_take_part_in_a_backward_pass(folder: Path) -> None:
    found = _generator(folder / "grouped").generate(make_prompts(4), SAMPLED, SEEDS[:4])

    weight = torch.ones(1, requires_grad=True)
    (weight * found["rollout_log_probs"].values()).sum().backward()

    assert weight.grad is not None and not found["rollout_log_probs"].is_inference()


def test_unknown_engine_is_refused_with_the_choices() -> None:
    message = r"rollout.engine: got 'sglang', expected one of builtin, served, vllm"
    with pytest.raises(ConfigError, match=message):
        generator_of(RolloutConfig(engine="sglang"), "nowhere", CPU)


@pytest.mark.skipif("SPMDFLOW_DATA" not in os.environ, reason="SPMDFLOW_DATA names no data folder")
def test_real_model_equals_transformers_over_64_tokens() -> None:
    path = Path(os.environ["SPMDFLOW_DATA"]) / "models" / "stories260K-hd64"
    prompts = make_prompts(4, vocab_size=512)
    sampling = Sampling(64)

    found = _generator(path).generate(prompts, sampling, SEEDS[:4])

    expected = reference(load(path), prompts, sampling, SEEDS[:4], end_tokens(str(path)))
    assert disagreements(found, expected, tolerance=5e-5) == []
