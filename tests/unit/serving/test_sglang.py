"""The client of SGLang's servers, against a stand-in in this process, and what it reads."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from spmdflow.config.schema import RolloutConfig, ServerConfig
from spmdflow.config.server import check_servers
from spmdflow.errors import ConfigError
from spmdflow.rollout.generator import NEVER, Request
from spmdflow.rollout.sampling import Sampling
from spmdflow.serving.client import (
    ResponsePart,
    ServerFacts,
    ServerFault,
    WrongAnswer,
    WrongVersion,
)
from spmdflow.serving.fleet import FleetSettings, Identity
from spmdflow.serving.identity import config_hash, tokenizer_hash
from spmdflow.serving.sglang import RowReader, SglangClient, read_version
from spmdflow.serving.sglang_link import allowed_checksums
from tests.algos.runs import ROOT
from tests.sglang_server import StandIn

MODEL = str(ROOT / "algos" / "arithmetic" / "model")
VOCABULARY = 16
END = 2
PROMPT = torch.tensor([1, 4, 5, 13, 6, 7, 14])  # 12+34=, whose answer has two digits


@pytest.fixture(scope="module")
def loaded() -> Iterator[StandIn]:
    server = StandIn(MODEL)
    server.model.load_state_dict(AutoModelForCausalLM.from_pretrained(MODEL).state_dict())
    yield server
    server.close()


@pytest.fixture
def server(loaded: StandIn) -> StandIn:
    """A server with the weights of the folder, as if it had just started."""
    loaded.fault = ""
    loaded.facts = {}
    loaded.key = ""
    loaded.version = "1234abcd:5"
    loaded.is_incremental = False
    loaded.bodies.clear()
    return loaded


def client_of(server: StandIn, key: str = "") -> SglangClient:
    return SglangClient(server.url, key=key, vocab_size=VOCABULARY)


def facts_of(server: StandIn, key: str = "") -> ServerFacts:
    async def ask() -> ServerFacts:
        client = client_of(server, key)
        try:
            return await client.facts(seconds=10)
        finally:
            await client.close()

    return asyncio.run(ask())


def parts_of(server: StandIn, sampling: Sampling, version: str = "1234abcd:5") -> list[Any]:
    """The parts of one row's response."""

    async def ask() -> list[ResponsePart]:
        client = client_of(server)
        request = Request(PROMPT, 1, sampling)
        try:
            await client.facts(seconds=10)
            stream = client.generate(request, ends=(END,), version=version, stall_seconds=10)
            return [part async for part in stream]
        finally:
            await client.close()

    return asyncio.run(ask())


def expected_log_probs(tokens: list[int], temperature: float) -> list[float]:
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    with torch.no_grad():
        ids = torch.cat([PROMPT, torch.tensor(tokens)])[None]
        logits = model(input_ids=ids).logits[0, len(PROMPT) - 1 : -1]
    log_probs = (logits / temperature).log_softmax(-1)
    return [float(row[token]) for row, token in zip(log_probs, tokens, strict=True)]


@pytest.mark.parametrize("is_incremental", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_row_has_the_models_log_probabilities_after_the_temperature(
    server: StandIn, is_incremental: bool, temperature: float
) -> None:
    server.is_incremental = is_incremental
    longest = 0
    for number in range(100):
        parts = parts_of(server, Sampling(40, temperature))

        tokens = [token for part in parts for token in part.tokens]
        log_probs = [value for part in parts for value in part.log_probs]
        assert log_probs == pytest.approx(expected_log_probs(tokens, temperature), abs=1e-5)
        assert parts[-1].finish == ("stop" if tokens[-1] == END else "length")
        assert END not in tokens[:-1]
        longest = max(longest, len(parts))
        if number >= 3 and (longest > 1 or not is_incremental):
            break
    assert longest > 1 or not is_incremental  # a short row is one part, a hundred are not
    body = server.bodies[-1]
    assert body["sampling_params"]["stop_token_ids"] == [END]
    assert "ignore_eos" not in body["sampling_params"]  # it would ignore stop_token_ids too
    assert ("stream_interval" in body["sampling_params"]) is not is_incremental


def test_greedy_row_is_the_likeliest_one(server: StandIn) -> None:
    first = parts_of(server, Sampling(12, greedy=True, temperature=2.0))
    second = parts_of(server, Sampling(12, greedy=True))

    assert first == second
    assert server.bodies[-1]["sampling_params"]["temperature"] == 0
    assert server.bodies[-1]["sampling_params"]["top_k"] == -1


def test_facts_are_hashes_of_the_folders_that_the_server_names(server: StandIn) -> None:
    facts = facts_of(server)

    assert facts.model == config_hash(MODEL)
    assert facts.tokenizer == tokenizer_hash(MODEL)
    assert (facts.dtype, facts.row_noise, facts.num_workers) == ("float32", False, 1)
    assert (facts.max_model_len, facts.max_num_seqs, facts.prefix_caching) == (58, 8, True)
    assert (facts.epoch, facts.weights_version) == ("1234abcd", 5)


def test_server_that_was_started_again_has_another_instance(server: StandIn) -> None:
    first = facts_of(server)
    server.facts = {"startup_time": {"total": 1.5}}

    assert facts_of(server).instance != first.instance


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        ({"dp_size": 2}, "dp_size: got 2, expected 1; start it with --dp-size 1"),
        ({"pp_size": 2}, "--pp-size 1"),
        ({"preferred_sampling_params": {"min_p": 0.1}}, "preferred sampling parameters"),
        ({"internal_states": []}, "internal_states"),
        ({"max_req_input_len": None}, "max_model_len is None"),
        ({"tp_size": "1"}, "num_workers is '1'"),
        ({"internal_states": [{}]}, "max_num_seqs is None"),
    ],
)
def test_facts_that_no_usable_server_has_are_faults(
    server: StandIn, facts: dict[str, Any], text: str
) -> None:
    server.facts = facts

    with pytest.raises(ServerFault, match=text):
        facts_of(server)


def test_folder_that_the_rank_cannot_read_is_a_fault(
    server: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "model_path", "/no/such/folder")

    with pytest.raises(ServerFault, match=r"got '/no/such/folder'.*serve actor\.model\.path"):
        facts_of(server)


def test_quantized_server_and_a_server_without_row_noise_are_told_apart(server: StandIn) -> None:
    own = Identity(config_hash(MODEL), tokenizer_hash(MODEL), "float32", 58)
    settings = {"health_seconds": 1.0, "stall_seconds": 1.0, "transfer_seconds": 1.0}
    others = {"wait_seconds": 1.0, "transport": "gloo", "is_exact": False}
    row = FleetSettings(**settings, **others, takes_any_sampler=False)  # type: ignore[arg-type]
    server_draws = FleetSettings(**settings, **others, takes_any_sampler=True)  # type: ignore[arg-type]
    plain = facts_of(server)
    server.facts = {"quantization": "fp8"}
    quantized = facts_of(server)

    assert own.difference(plain, server_draws) is None
    assert "sampler=server" in str(own.difference(plain, row))
    assert "got fp8, expected float32" in str(own.difference(quantized, server_draws))


def test_server_with_a_key_refuses_others(server: StandIn) -> None:
    server.key = "secret-of-sixteen-letters"

    with pytest.raises(ServerFault, match="401"):
        facts_of(server)
    assert facts_of(server, server.key).weights_version == 5


@pytest.mark.parametrize(
    ("fault", "error", "text"),
    [
        ("garbage", WrongAnswer, "no JSON"),
        ("long_line", WrongAnswer, "a line of more than"),
        ("no_log_probs", WrongAnswer, "log-probabilities None"),
        ("foreign_token", WrongAnswer, "token 99 of a vocabulary of 16"),
        ("version", WrongVersion, "weights 'other:1', not 1234abcd:5"),
        ("cut", ServerFault, "the stream ended before the response"),
    ],
)
def test_wrong_answer_to_a_row_is_a_fault_that_names_it(
    server: StandIn, fault: str, error: type[Exception], text: str
) -> None:
    server.fault = fault

    with pytest.raises(error, match=text):
        parts_of(server, Sampling(40))


def test_log_probabilities_before_the_temperature_are_refused_where_they_differ(
    server: StandIn,
) -> None:
    server.fault = "original"

    assert parts_of(server, Sampling(4))
    with pytest.raises(WrongAnswer, match="SGLANG_RETURN_ORIGINAL_LOGPROB"):
        parts_of(server, Sampling(4, 2.5))


def test_temperature_is_checked_once(server: StandIn) -> None:
    async def ask() -> None:
        client = client_of(server)
        await client.facts(seconds=10)
        for _ in range(2):
            request = Request(PROMPT, 1, Sampling(2, 2.5))
            stream = client.generate(request, ends=(), version="1234abcd:5", stall_seconds=10)
            assert [part async for part in stream]
        await client.close()

    asyncio.run(ask())

    assert len([body for body in server.bodies if "token_ids_logprob" in body]) == 1


def test_routes_that_let_vllm_sleep_do_nothing(server: StandIn) -> None:
    before = list(server.events)

    async def ask() -> list[dict[str, Any]]:
        client = client_of(server)
        routes = ("sleep?level=1&mode=wait", "wake_up")
        return [await client.call("POST", route, None, seconds=5) for route in routes]

    assert asyncio.run(ask()) == [{}, {}]
    assert server.events == before


# What a stream may contain


def line(tokens: list[int], finish: object = None, **facts: object) -> bytes:
    """A part of a stream."""
    known = {
        "finish_reason": finish,
        "weight_version": "a:1",
        "output_token_logprobs": [[-0.5, token, None] for token in tokens],
    }
    part = {"text": "", "output_ids": tokens, "meta_info": known | facts}
    return b"data: " + json.dumps(part).encode()


def reader(*, is_incremental: bool = False) -> RowReader:
    return RowReader(
        vocab_size=VOCABULARY,
        max_new_tokens=4,
        ends=(END,),
        version="a:1",
        is_incremental=is_incremental,
    )


def test_parts_are_what_is_new_whether_the_server_repeats_the_row_or_not() -> None:
    whole = reader()
    pieces = reader(is_incremental=True)

    first = [whole.read(line([4])), pieces.read(line([4]))]
    second = [whole.read(line([4, 5, END], {"type": "stop", "matched": END}))]
    second.append(pieces.read(line([5, END], {"type": "stop", "matched": END})))

    assert first == [ResponsePart((4,), (-0.5,), None)] * 2
    assert second == [ResponsePart((5, END), (-0.5, -0.5), "stop")] * 2


def test_part_without_a_new_token_and_lines_without_a_part_are_nothing() -> None:
    row = reader()
    row.read(line([4]))

    nothing = [b"", b": ping", b"data: [DONE]", line([4])]

    assert [row.read(each) for each in nothing] == [None] * 4


def test_aborted_row_gets_no_token_from_its_last_part() -> None:
    row = reader(is_incremental=True)
    row.read(line([4, 5]))

    part = row.read(line([5], {"type": "abort", "message": "Abort"}, weight_version="b:2"))

    assert part == ResponsePart((), (), "abort")


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (line([5, 5]), WrongAnswer),  # another first token than before
        (line([]), WrongAnswer),
        (line([4, 5, 5, 5, 5]), WrongAnswer),  # more than max_new_tokens
        (line([4, 16]), WrongAnswer),
        (line([4, True]), WrongAnswer),
        (line([4, 5], {"type": "length", "length": 2}), WrongAnswer),  # shorter than asked for
        (line([4, 5], {"type": "stop", "matched": 5}), WrongAnswer),  # ends no response
        (line([4, 5], {"type": "tired"}), WrongAnswer),
        (line([4, 5], output_token_logprobs=[[-0.5, 4, None]]), WrongAnswer),
        (line([4, 5], output_token_logprobs=[[-0.5, 4, None], [-1, 4, None]]), WrongAnswer),
        (line([4, 5], output_token_logprobs=[[-0.5, 4, None], [0.5, 5, None]]), WrongAnswer),
        (line([4, 5], output_token_logprobs=[[-0.5, 4, None], [-1, 5]]), WrongAnswer),
        (line([4, 5], weight_version="a:2"), WrongVersion),
        (line([4, 5], weight_version=None), WrongVersion),
        (line([4, 5], weight_versions=[{"version": "a:0", "start": 0, "end": 1}]), WrongVersion),
        (b'data: {"error": {"message": "too long", "code": 400}}', ServerFault),
        (b'data: {"output_ids": [4, 5]}', WrongAnswer),
        (b"data: [4]", WrongAnswer),
        (b"event: part", WrongAnswer),
    ],
)
def test_part_that_no_correct_server_sends_is_refused(
    answer: bytes, error: type[Exception]
) -> None:
    row = reader()
    row.read(line([4]))

    with pytest.raises(error):
        row.read(answer)


def test_logits_that_are_not_finite_are_nan() -> None:
    part = reader().read(line([4], output_token_logprobs=[[None, 4, None]]))

    assert part is not None
    assert part.log_probs[0] != part.log_probs[0]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("0011aabb:12", ("0011aabb", 12)),
        ("default", ("", NEVER)),
        ("spmdflow-none", ("", NEVER)),
        ("0011aabb:-1", ("", NEVER)),
        (None, ("", NEVER)),
    ],
)
def test_version_that_no_run_gave_is_none(name: object, expected: tuple[str, int]) -> None:
    assert read_version(name) == expected


def test_checksum_of_a_servers_tensor_is_that_of_the_tensors_it_joins() -> None:
    names = ("q_proj", "k_proj", "v_proj")
    tensors = {f"a.{name}.weight": torch.randn(4, 3) for name in names}
    tensors["embed.weight"] = torch.randn(10, 3)
    joined = torch.cat([tensors[f"a.{name}.weight"] for name in names])
    padded = torch.cat([tensors["embed.weight"], torch.zeros(54, 3)])

    for name, tensor in (("a.qkv_proj.weight", joined), ("embed.weight", padded)):
        expected = hashlib.sha256(tensor.numpy().tobytes()).hexdigest()[:16]
        assert expected in allowed_checksums(name, tensors)
    assert allowed_checksums("rotary.cache", tensors) == []


# Settings


@pytest.mark.parametrize(
    ("rollout", "server", "parts"),
    [
        ({}, {"exact": True}, ("server.exact", "true with", "spmdflow serve")),
        ({}, {"addresses": []}, ("server.addresses", "none with", "http://host:30000")),
        ({"sampler": "row"}, {}, ("rollout.sampler", "row with", "sampler=server")),
        ({}, {"transport": "nixl"}, ("server.transport", "nixl with", "transport=gloo")),
    ],
)
def test_settings_that_sglang_cannot_follow_are_refused_with_what_to_set(
    rollout: dict[str, Any], server: dict[str, Any], parts: tuple[str, ...]
) -> None:
    settings = {"dialect": "sglang", "addresses": ["http://127.0.0.1:30000"], **server}
    choice = {"engine": "served", "sampler": "server", "max_batch_size": 1, **rollout}
    cfg = RolloutConfig(**choice, server=ServerConfig(**settings))

    with pytest.raises(ConfigError) as info:
        check_servers("actor.rollout", cfg, here=True)

    message = str(info.value)
    assert all(part in message for part in (*parts, "got", "expected", "dialect=sglang"))


def test_settings_that_sglang_can_follow_pass() -> None:
    server = ServerConfig(dialect="sglang", addresses=["http://127.0.0.1:30000"])
    cfg = RolloutConfig(engine="served", sampler="server", temperature=0.7, server=server)

    check_servers("actor.rollout", cfg, here=True)
