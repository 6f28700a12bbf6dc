"""Tokens that a plan counts where rows share a prompt, next to what workers and generator make."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from bench._dataflows import NOMINAL
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from spmdflow.config.schema import RolloutConfig
from spmdflow.cpu.llama import LlamaForward
from spmdflow.data.micro import cut
from spmdflow.data.ragged import lengths_of, ragged_from_rows
from spmdflow.kind.generator import PREFILL_TOKENS
from spmdflow.mapping.dataflow import Engine, Model, Rollout, Strategy, Workload
from spmdflow.mapping.hardware import load_hardware
from spmdflow.mapping.memory import call_bytes, full_cache_bytes
from spmdflow.mapping.seconds import (
    cache_bytes,
    concurrency,
    generation_parts,
    micro_batches,
    pass_parts,
)
from spmdflow.mapping.shared_prompt import (
    cached_tokens,
    count_packed,
    packed_shares,
    prompts_admitted,
    rows_within,
)
from spmdflow.mapping.unequal import (
    Rows,
    SharedRows,
    admit_rows,
    busiest_tokens,
    estimate_generation,
    pass_parts_by_row,
)
from spmdflow.rollout.builtin import BuiltinGenerator
from spmdflow.rollout.generator import take_folder_weights
from spmdflow.rollout.sampling import Sampling
from spmdflow.weights.architecture import Architecture
from spmdflow.workers import micro_batch
from spmdflow.workers.micro_batch import MicroBatch
from tests.rollout_reference import write_llama

CPU = torch.device("cpu")
HARDWARE = load_hardware("cpu")
SHAPE = NOMINAL["7B"]
ONE = Strategy(1, 1, 1, 1, 1)
BUILTIN = Rollout("builtin")


def model_of(kind: str = "fsdp", rollout: Rollout | None = BUILTIN, **engine: object) -> Model:
    return Model("actor", SHAPE, trained=True, engine=Engine(kind, **engine), rollout=rollout)


GROUPS = st.lists(
    st.tuples(st.integers(1, 40), st.lists(st.integers(0, 30), min_size=1, max_size=6)),
    min_size=1,
    max_size=6,
)
"""(tokens of a prompt, those of the responses to it)."""


def rows_of(groups: list[tuple[int, list[int]]]) -> Rows:
    prompts = [prompt for prompt, responses in groups for _ in responses]
    responses = [response for _, responses in groups for response in responses]
    ids = [number for number, (_, responses) in enumerate(groups) for _ in responses]
    return Rows(np.array(prompts), np.array(responses), np.array(ids))


def made_micro_batches(rows: Rows, num_micro: int, *, by_tokens: bool) -> list[MicroBatch]:
    """What a worker makes of such rows; the first token of a prompt is its number."""
    prompts = []
    for number, length in zip(rows.keys.tolist(), rows.prompts.tolist(), strict=True):
        prompts.append(torch.tensor([100 + number, *range(1, length)]))
    responses = [torch.ones(length, dtype=torch.int64) for length in rows.responses.tolist()]
    columns = {
        "prompts": ragged_from_rows(prompts, dtype=torch.int64),
        "responses": ragged_from_rows(responses, dtype=torch.int64),
    }
    return micro_batch.micro_batches(
        TensorDict(columns, batch_size=[len(rows)]),
        num_micro_batches=num_micro,
        by_tokens=by_tokens,
        device=CPU,
        packed=True,
        shares_prompts=True,
    )


def squares_of(micro: MicroBatch) -> int:
    """Twice the pairs of tokens in the attention of a micro-batch."""
    assert micro.packed is not None
    seen = micro.packed.lengths if micro.packed.seen is None else micro.packed.seen.lengths
    squares = 0
    for own, keys in zip(micro.packed.lengths, seen, strict=True):
        squares += keys**2 - (keys - own) ** 2
    return squares


def gathered_of(micro: MicroBatch) -> int:
    assert micro.packed is not None
    seen = micro.packed.lengths if micro.packed.seen is None else micro.packed.seen.lengths
    return sum(seen)


@settings(deadline=None, max_examples=50)  # a loaded machine is no failure
@given(GROUPS, st.integers(1, 5), st.booleans())
def test_tokens_of_rows_are_those_of_the_workers_micro_batches(
    groups: list[tuple[int, list[int]]], num_micro: int, by_tokens: bool
) -> None:
    rows = rows_of(groups)
    num_micro = min(num_micro, len(rows))
    model = model_of("fsdp", micro_batch_tokens=9 if by_tokens else None)

    found = busiest_tokens(model, SharedRows((rows,), num_micro))

    made = made_micro_batches(rows, num_micro, by_tokens=by_tokens)
    computed = sum(micro.input_ids.numel() for micro in made)
    assert found.tokens * num_micro == computed
    assert found.answered * num_micro == sum(len(micro.targets) for micro in made)
    assert found.context * computed * 2 == pytest.approx(sum(map(squares_of, made)))
    parts = cut(rows.tokens.tolist(), num_micro, by_tokens=by_tokens, packed=True)
    for part, micro in zip(parts, made, strict=True):
        of_part = rows.take(np.array(part))
        columns = (of_part.keys, of_part.prompts, of_part.tokens)
        packed = count_packed(*(column.tolist() for column in columns))
        assert packed.computed == micro.input_ids.numel()
        assert packed.gathered == gathered_of(micro)


@settings(deadline=None, max_examples=50)
@given(
    st.integers(1, 5), st.integers(1, 6), st.integers(1, 40), st.integers(0, 40),
    st.integers(1, 6), st.booleans(),
)  # fmt: skip
def test_tokens_of_equal_rows_are_those_of_the_workers_micro_batches(
    num_prompts: int, samples: int, prompt: int, response: int, num_micro: int, by_tokens: bool
) -> None:
    num_rows = num_prompts * samples
    num_micro = min(num_micro, num_rows)
    work = Workload(num_rows, prompt, response, rows_per_prompt=samples)
    model = model_of(micro_batch_tokens=9 if by_tokens else None)

    found = packed_shares(model, work, num_rows, num_micro)

    rows = rows_of([(prompt, [response] * samples)] * num_prompts)
    made = made_micro_batches(rows, num_micro, by_tokens=by_tokens)
    sizes = [micro.input_ids.numel() for micro in made]
    largest = max(len(micro.index) for micro in made) * work.tokens
    assert float(found.tokens) * num_rows * work.tokens == pytest.approx(sum(sizes))
    squares = sum(map(squares_of, made))
    assert float(found.squares) * num_rows * work.tokens**2 == pytest.approx(squares)
    assert float(found.most_tokens) * largest == pytest.approx(max(sizes))
    assert float(found.most_gathered) * largest == pytest.approx(max(map(gathered_of, made)))


def test_shares_of_many_strategies_are_those_of_each() -> None:
    work = Workload(64, 40, 10, rows_per_prompt=8)
    model = model_of(micro_batch_rows=8)
    rows = np.array([64.0, 32.0, 16.0, 4.0])
    micro = np.array([8.0, 4.0, 3.0, 1.0])

    together = packed_shares(model, work, rows, micro)

    for index in range(len(rows)):
        one = packed_shares(model, work, rows[index], micro[index])
        assert together.tokens[index] == one.tokens and together.squares[index] == one.squares
        assert together.most_gathered[index] == one.most_gathered
    assert together.tokens[0] == (40 + 8 * 10) / (8 * 50)


@pytest.mark.parametrize(
    ("kind", "options", "shares"),
    [
        ("fsdp", (), True),
        ("zero1", (), True),
        ("zero2", (), True),
        ("zero3", (), True),
        ("fsdp", ("padded",), False),
        ("zero1", ("padded",), False),
        ("megatron", (), False),
    ],
)
def test_only_engines_that_pack_a_loaded_model_compute_a_shared_prompt_once(
    kind: str, options: tuple[str, ...], shares: bool
) -> None:
    model = model_of(kind, options=options, micro_batch_rows=8)
    other = replace(model, shape=replace(SHAPE, family="gpt2"))
    work = Workload(64, 40, 10, rows_per_prompt=8)

    alone = pass_parts(model, replace(work, rows_per_prompt=1), ONE, HARDWARE, trains=True)
    found = pass_parts(model, work, ONE, HARDWARE, trains=True)

    assert model.shares_prompts == shares and not other.shares_prompts
    assert (found["compute"] < 0.5 * alone["compute"]) == shares
    assert (found == alone) != shares


def test_rows_dealt_out_by_tokens_share_less_than_neighbours() -> None:
    work = Workload(64, 40, 10, rows_per_prompt=8)
    seconds = []
    for engine in ({"micro_batch_rows": 8}, {"micro_batch_tokens": 8 * 50}):
        parts = pass_parts(model_of(**engine), work, ONE, HARDWARE, trains=False)
        seconds.append(float(parts["compute"]))

    assert micro_batches(model_of(micro_batch_rows=8), work, ONE, trains=False)[1] == 8
    # eight rows of eight prompts in each of eight micro-batches
    assert seconds[1] > 2 * seconds[0]


def test_pass_of_equal_rows_with_shared_prompts_is_that_of_the_formula() -> None:
    model = model_of(micro_batch_rows=12)
    share = rows_of([(40, [10] * 8)] * 6)

    found = pass_parts_by_row(
        model, [SharedRows((share,), 4)], replace(ONE, dp=1), HARDWARE, trains=True
    )

    work = Workload(48, 40, 10, rows_per_prompt=8)
    expected = pass_parts(model, work, ONE, HARDWARE, trains=True)
    for name, seconds in expected.items():
        assert found[name] == pytest.approx(float(seconds)), name


def test_activations_follow_the_tokens_and_the_copied_keys_and_values() -> None:
    work = Workload(8, 4000, 100, rows_per_prompt=8)
    model = model_of(micro_batch_rows=8, dtype="bfloat16")

    whole = call_bytes(model, "train", replace(work, rows_per_prompt=1), ONE)["activations"]
    found = call_bytes(model, "train", work, ONE)["activations"]

    tokens = 4000 + 8 * 100
    copied = 4000 + 8 * 4100 - tokens
    layers = SHAPE.num_layers
    of_token = whole / (8 * 4100)
    more = 2 * SHAPE.kv_size * 2 * copied * layers
    assert float(found) == pytest.approx(float(of_token * tokens + more), rel=0.03)
    assert float(found) < 0.4 * float(whole)


# Generation


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_llama(folder, num_hidden_layers=1, hidden_size=32, intermediate_size=32, head_dim=16)
    return folder


class Watched:
    """A generator, with the prompts that it ran and the largest KV cache that it had."""

    def __init__(self, folder: Path, max_batch_size: int) -> None:
        self.prefills: list[tuple[int, int]] = []
        """(prompts, tokens of the longest) of each pass."""
        self.most_prompt_tokens = 0
        self.most_own_tokens = 0
        cfg = RolloutConfig(max_batch_size=max_batch_size)
        self._generator = BuiltinGenerator(cfg, str(folder), CPU)
        take_folder_weights(self._generator, str(folder), verify=False)
        forward = self._generator._forward
        assert isinstance(forward, LlamaForward)
        self._forward = forward

    def generate(self, rows: Rows, limit: int) -> list[int]:
        """The lengths of the responses to these prompts, at most `limit`."""
        prompts = []
        for number, length in zip(rows.keys.tolist(), rows.prompts.tolist(), strict=True):
            prompts.append(torch.tensor([3 + number, *[5] * (length - 1)]))
        prefill = self._forward.prefill
        step = self._forward.step

        def watched_prefill(distinct: list[torch.Tensor], source: list[int]) -> torch.Tensor:
            self.prefills.append((len(distinct), max(map(len, distinct))))
            return prefill(distinct, source)

        def watched_step(*arguments: object) -> torch.Tensor:
            logits = step(*arguments)
            shared = self._forward._shared[0]
            self.most_prompt_tokens = max(
                self.most_prompt_tokens, shared.shape[1] * shared.shape[3]
            )
            own = self._forward._cache[0]
            self.most_own_tokens = max(self.most_own_tokens, own.shape[1] * own.shape[3])
            return logits

        self._forward.prefill = watched_prefill
        self._forward.step = watched_step
        sampling = Sampling(limit, temperature=2.0)
        ragged = ragged_from_rows(prompts, dtype=torch.int64)
        found = self._generator.generate(ragged, sampling, list(range(len(rows))))
        return lengths_of(found["responses"]).tolist()


def shape_of(folder: Path) -> Architecture:
    return Architecture.from_folder(folder)


PROMPTS = st.lists(st.tuples(st.integers(1, 12), st.integers(1, 5)), min_size=1, max_size=5)
"""(tokens of a prompt, samples of it)."""


@settings(deadline=None, max_examples=25)
@given(PROMPTS, st.integers(2, 24), st.integers(1, 40))
def test_prefill_tokens_are_those_that_the_built_in_generator_runs(
    folder: Path, prompts: list[tuple[int, int]], max_batch_size: int, limit: int
) -> None:
    watched = Watched(folder, max_batch_size)
    groups = [(prompt, [1] * samples) for prompt, samples in prompts]
    lengths = watched.generate(rows_of(groups), limit)
    rows = replace(rows_of(groups), responses=np.array(lengths))
    model = Model(
        "actor", shape_of(folder), rollout=replace(BUILTIN, max_batch_size=max_batch_size)
    )

    found = admit_rows(model, rows, slots=max_batch_size)

    assert found.prefill_tokens()[0] == sum(count * width for count, width in watched.prefills)
    assert len(found.copies) == sum(count for count, _ in watched.prefills)


@settings(deadline=None, max_examples=25)
@given(
    st.integers(1, 5), st.integers(1, 6), st.integers(1, 12), st.integers(2, 40),
    st.integers(2, 24),
)  # fmt: skip
def test_cache_of_equal_rows_is_that_of_the_built_in_generator(
    folder: Path, num_prompts: int, samples: int, prompt: int, limit: int, max_batch_size: int
) -> None:
    watched = Watched(folder, max_batch_size)
    rows = rows_of([(prompt, [limit] * samples)] * num_prompts)
    assume(watched.generate(rows, limit) == [limit] * len(rows))
    model = Model(
        "actor", shape_of(folder), rollout=replace(BUILTIN, max_batch_size=max_batch_size)
    )
    together = min(len(rows), max_batch_size)
    work = Workload(len(rows), prompt, limit, rows_per_prompt=samples)

    planned = float(cached_tokens(model, work, together))

    found = watched.most_prompt_tokens + watched.most_own_tokens
    # the last token of a response is never read; a row may begin with any sample of its prompt
    straddling = prompt * (together % samples > 0)
    assert found <= planned <= found + together + straddling
    prompts = prompts_admitted(model, work, len(rows), together)
    assert prompts == sum(count for count, _ in watched.prefills)
    of_token = model.shape.kv_bytes_per_token(4)
    rollout = replace(BUILTIN, dtype="float32")
    in_bytes = cache_bytes(replace(model, rollout=rollout), work, ONE, together)
    assert float(in_bytes) == planned * of_token


@given(st.integers(1, 8), st.integers(1, 50), st.integers(0, 50), st.integers(0, 5000))
def test_rows_of_whole_prompts_fill_the_cache_and_no_more_fit(
    samples: int, prompt: int, response: int, tokens: int
) -> None:
    work = Workload(1, prompt, response, rows_per_prompt=samples)
    model = model_of()

    def needed(num_rows: int) -> int:
        return -(-num_rows // samples) * prompt + num_rows * response

    found = int(rows_within(model, work, tokens))

    assert needed(found) <= tokens
    assert needed(found + 1) > tokens or response == 0 or samples == 1


@pytest.mark.parametrize("slots", [64, 24, 20])
def test_generation_of_equal_rows_with_shared_prompts_is_that_of_the_formula(slots: int) -> None:
    model = model_of(rollout=replace(BUILTIN, max_batch_size=slots))
    rows = rows_of([(100, [40] * 8)] * 6)

    found = estimate_generation(model, SharedRows((rows,)), ONE, HARDWARE, slots=slots)

    work = Workload(48, 100, 40, rows_per_prompt=8)
    expected = generation_parts(model, work, ONE, HARDWARE, kv_bytes=1e15)
    assert found.parts["prefill"] == pytest.approx(float(expected["prefill"]))
    if 48 % slots == 0 or slots > 48:  # the formula has waves of equal size
        for name, seconds in expected.items():
            assert found.parts[name] == pytest.approx(float(seconds)), name


def test_built_in_generator_reads_a_shared_prompt_once_and_vllm_for_every_row() -> None:
    work = Workload(64, 1000, 10, rows_per_prompt=8)
    alone = replace(work, rows_per_prompt=1)
    seconds = {}
    for kind in ("builtin", "vllm"):
        model = model_of(rollout=Rollout(kind))
        for each in (work, alone):
            parts = generation_parts(model, each, ONE, HARDWARE, kv_bytes=1e15)
            seconds[kind, each.rows_per_prompt] = parts
        tokens = {"builtin": 1010, "vllm": 1024}[kind]  # vLLM keeps whole blocks
        assert full_cache_bytes(model, alone, ONE) == 64 * tokens * SHAPE.kv_bytes_per_token(2)

    assert seconds["vllm", 8] == seconds["vllm", 1]
    once = seconds["builtin", 8]
    each = seconds["builtin", 1]
    assert once["kv_read"] == pytest.approx(each["kv_read"] * (8 * 1000 + 64 * 5) / (64 * 1005))
    assert once["prefill"] == pytest.approx(each["prefill"] / 8, rel=0.2)
    assert once["compute"] == pytest.approx(each["compute"])
    cached = full_cache_bytes(model_of(), work, ONE)
    assert float(cached) == (8 * 1000 + 64 * 10) * SHAPE.kv_bytes_per_token(2)


def test_family_that_transformers_caches_is_prefilled_once_and_kept_for_every_row() -> None:
    work = Workload(64, 1000, 10, rows_per_prompt=8)
    model = model_of()
    other = replace(model, shape=replace(SHAPE, obstacle="no table of its weights"))

    table, none = (generation_parts(m, work, ONE, HARDWARE, kv_bytes=1e15) for m in (model, other))

    assert table["prefill"] == none["prefill"]
    assert table["kv_read"] < 0.2 * none["kv_read"]
    assert full_cache_bytes(other, work, ONE) == 64 * 1010 * SHAPE.kv_bytes_per_token(2)
    # it takes new rows only when all others have ended
    rows = rows_of([(10, [5, 9]), (10, [3, 3])])
    assert admit_rows(model, rows, slots=3).starts.tolist() == [0, 0, 0, 3]
    assert admit_rows(other, rows, slots=3).starts.tolist() == [0, 0, 0, 9]


def test_more_rows_of_shared_prompts_fit_into_a_cache() -> None:
    work = Workload(64, 1000, 10, rows_per_prompt=8)
    model = model_of()
    size = 2 * (1000 + 8 * 10) * SHAPE.kv_bytes_per_token(2)

    assert float(concurrency(model, work, ONE, size)) == 16
    assert float(concurrency(model, replace(work, rows_per_prompt=1), ONE, size)) == 2


def test_prefill_needs_the_activations_of_each_prompt_once() -> None:
    work = Workload(64, 20, 10, rows_per_prompt=8)
    once, whole = (
        call_bytes(model_of(), "generate", each, ONE)
        for each in (work, replace(work, rows_per_prompt=1))
    )

    assert once["activations"] == whole["activations"] / 8
    assert once["logits"] == whole["logits"], "every row is drawn from its own logits"
    assert 64 * 20 < PREFILL_TOKENS
