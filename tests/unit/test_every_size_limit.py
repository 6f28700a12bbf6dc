"""Every size limit that the data of a user, an agent or a reward function can reach: a size just
below it works, a size just above it is the documented error, or gives the same result in pieces.

A limit that is tested elsewhere has the name of that test here. Limits of a plan's text and of log
lines, and sizes that only choose the faster of two ways to copy a model's weights between ranks,
are no part of the table. Neither are limits that are settings (max_prompt_tokens, max_turns, ...).

| limit | where | test |
|---|---|---|
| 64 MiB, one message | message.py | test_size_limits.py: message_of_the_largest |
| 80 MiB on a connection | runtime/inflow.py | test_wire.py: large_messages, message_without_end |
| 100,000 queued messages | runtime/wire.py | here |
| 10 warnings of another run | runtime/wire.py | here |
| 64 connections without a key | runtime/wire.py | test_hostile_network.py: whoever_reaches |
| 128 KiB, columns in one message | transfer/lane.py | here |
| 32 MiB, a piece of plain data | parallel/group.py | test_groups.py: groups_are_made_once |
| 16 MiB, memory with huge pages | data/column.py | here |
| 2**20 samples of a held-out row | data/row_id.py | below here; above test_row_id.py |
| 4 MiB, body of a request | episodes/http.py | here |
| 64 MiB, body that is read and refused | episodes/http.py | here |
| 64 KiB, head of a request | episodes/http.py | here |
| 20 digits of a content-length | h11 | here |
| 100 refused requests | episodes/endpoint.py | here |
| 128 connections of an episode, also its waiting requests | episodes/connections.py | here |
| 1024 strangers, 768 of an address | episodes/connections.py | test_endpoint.py: strangers |
| 4096 connections in all | episodes/connections.py | test_endpoint.py: idle_connections |
| 256 connections of ended episodes | episodes/connections.py | here |
| 50 warnings, 100 letters of a field | episodes/ask.py | here |
| 1000 letters of a refusal | episodes/ask.py | here |
| 256 MiB, a row of an environment | episodes/child.py | none: too large for a test |
| 64 KiB, a read of an answer | rewards/process.py | here |
| 64 calls of a chunk | rewards/pool.py | test_rewards.py: chunks_cover_every_sample |
| 200 letters of a text in an error | rewards/pool.py | test_reward_pool.py: long_texts |
| 4000 letters of an error, and of its traceback | rewards/child.py | here |
| 100 letters of a number | rewards/gsm8k.py | here |
| 200 letters, 9 digits, 20,000 letters | rewards/countdown.py | here |
| 1000 letters of an answer | rewards/math.py | below here; above test_math.py |
| 256 rows, 2**20 characters tokenised | datasets/scan.py | here |
| 1 MiB, a block of lines | datasets/line_file.py | test_long_rows.py: lines_longer_than_a_block |
| 1024 rows of Parquet | datasets/line_file.py | here |
| 4096 answers in a conversation | config/schema.py | here |
| 4 MiB, a file that a plan reads | plan/example.py | here |
| 16 MiB, a transcript | controller/transcript.py | here |
| 32 MiB, the batch that a guard keeps | controller/guarding.py | here |
| 32 MiB, rows fetched at once | controller/caller.py | here; test_size_limits.py: column_below |
| rows of a scan in a message | controller/prompts.py | test_size_limits.py: rows_are_scanned |
| 16 and at least 4 samples, 16,384 tokens | controller/sample.py | here |
| 512 values of a guarded metric | tracking/guard.py | here |
| bytes of trace.json | tracking/trace.py | here |
| 8 KiB, a request for metrics; 32 connections | tracking/scrape.py | test_scrape.py |
| 8 MiB, a status.json on that page | tracking/prometheus.py | test_prometheus.py |
| 16 and 32 MiB, 1024 servers, 500 letters in reports | tracking/servers.py | test_servers.py |
| 100 parameters, 1000 metrics | tracking/sink.py | test_sinks.py: mlflow |
| steps, spans, samples of a page | view/content.py | test_page.py |
| 64 MiB, a box | checkpoint/tensors.py | here |
| 64 MiB, a file that is hashed whole | checkpoint/tensors.py | below here; above test_frozen.py |
| 64 MiB to 4 GiB, a file of a model | checkpoint/export.py | here |
| 1 MiB, a read of a tensor | weights/file.py | here |
| 8 MiB, a direct write | weights/direct.py | here; with a small limit test_direct.py |
| 2**24 elements read at once | weights/move.py | here |
| 64 MiB, a bucket of weights | weights/ranks.py | test_reshard.py, test_whole_tensors.py |
| 2**16 elements hashed at once | blocks/hash.py | here |
| 8192 remembered row ids | blocks/rows.py | here |
| 2**24 logits at once | objectives/log_prob.py | test_log_prob.py |
"""

from __future__ import annotations

import json
import logging
import os
import select
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from tensordict import TensorDict
from torch import Tensor

from spmdflow.blocks import hash as tensor_hash
from spmdflow.blocks import rows as row_plans
from spmdflow.blocks.box import Box
from spmdflow.blocks.hash import box_hash, positional_hash
from spmdflow.blocks.rows import redistribute_rows
from spmdflow.checkpoint import tensors as state_tensors
from spmdflow.checkpoint.export import plan_files
from spmdflow.checkpoint.rows import read_rows
from spmdflow.checkpoint.tensors import model_hash, write_state
from spmdflow.config.offline import ExampleDataConfig
from spmdflow.config.schema import MAX_TEXTS_PER_LINE, DataConfig
from spmdflow.controller import guarding, transcript
from spmdflow.controller.observer import StepRecord
from spmdflow.controller.result import cut_rows
from spmdflow.controller.sample import samples_of
from spmdflow.controller.transcript import Transcript, read_transcript
from spmdflow.data import row_id
from spmdflow.data.column import Column, empty_values
from spmdflow.data.ragged import ragged_from_rows
from spmdflow.data.row_id import held_out_ids
from spmdflow.data.store import RowStore
from spmdflow.datasets import line_file
from spmdflow.datasets import scan as scanning
from spmdflow.datasets.encode import AnswerEncoder
from spmdflow.datasets.line_file import LineFile
from spmdflow.datasets.scan import scan
from spmdflow.datasets.tokenizer import load_tokenizer
from spmdflow.episodes import ask, http
from spmdflow.episodes import endpoint as endpoints
from spmdflow.episodes.ask import Refusal
from spmdflow.episodes.connections import ConnectionLimits, Connections
from spmdflow.episodes.endpoint import Endpoint, EpisodeFault, GenerationRequest
from spmdflow.episodes.fields import parse_request
from spmdflow.errors import DataError, MessageError
from spmdflow.plan.example import SMALL_FILE_BYTES, scan_or_assume
from spmdflow.rewards import child, countdown, gsm8k
from spmdflow.rewards.child import describe
from spmdflow.rewards.math import answer_of
from spmdflow.rewards.process import RewardProcess
from spmdflow.runtime import wire
from spmdflow.runtime.wire import RUN_ID_BYTES, Envelopes, Hub, Kind
from spmdflow.tracking import guard as guards
from spmdflow.tracking.guard import Guards
from spmdflow.tracking.trace import Span, TraceWriter
from spmdflow.transfer import lane
from spmdflow.transfer.lane import CountedTransport, run_release
from spmdflow.weights import direct, move
from spmdflow.weights import file as weight_file
from spmdflow.weights.file import TensorInfo, find_changed_tensor, write_file
from spmdflow.worker_api.register import register
from tests.unit.controller.test_guarding import Learner
from tests.unit.datasets.test_datasets import MODEL
from tests.unit.datasets.test_examples import TURNS, chat_tokenizer
from tests.unit.episodes.test_agent_requests import words
from tests.unit.episodes.test_endpoint import TOKENIZER, WAIT_SECONDS, Agent, answer_from
from tests.unit.runtime.test_wire import wait_for_message
from tests.unit.toy_flow import ROWS, Rank, Toy, ToyConfig, draw, rank_of_one

JUST_AROUND = pytest.mark.parametrize("more", [-1, 0, 1])


def seeded_bytes(count: int) -> Tensor:
    """(count,) uint8 at random."""
    generator = torch.Generator().manual_seed(count)
    return torch.randint(256, (count,), dtype=torch.uint8, generator=generator)


# Messages


def test_messages_wait_for_a_rank_that_takes_none_until_there_are_too_many() -> None:
    run_id = os.urandom(RUN_ID_BYTES)
    hub = Hub(run_id)
    envelopes = Envelopes(run_id)
    rank = wire.RankSocket(hub.bind("127.0.0.1"), 1, run_id=run_id)
    rank.send(envelopes.seal(Kind.HELLO))
    assert wait_for_message(hub)[0] == 1
    hub.admit(1)
    beat = envelopes.seal(Kind.BEAT)

    num_sent = 0
    with pytest.raises(
        MessageError, match="100000 are queued for rank 1.*let the script wait for res"
    ):
        while num_sent < 20 * wire._MAX_QUEUED:  # what the sockets of the kernel hold besides
            assert hub.send(1, beat)
            num_sent += 1

    assert num_sent >= wire._MAX_QUEUED
    rank.close()
    hub.close()
    hub.terminate()


def test_messages_of_another_run_are_logged_up_to_a_number(
    caplog: pytest.LogCaptureFixture,
) -> None:
    envelopes = Envelopes(b"a" * RUN_ID_BYTES)
    foreign = Envelopes(b"b" * RUN_ID_BYTES).seal(Kind.BEAT)

    opened = [envelopes.open(foreign, 1) for _ in range(wire._MAX_WARNINGS + 1)]

    assert opened == [None] * (wire._MAX_WARNINGS + 1)
    assert caplog.text.count("bytes of another run") == wire._MAX_WARNINGS


# Rows between ranks


def run_rank(rank: int, path: Path, columns: dict[str, Column], ids: np.ndarray) -> dict[str, Any]:
    """Send the columns from rank 0 to rank 1; what a rank counted, and on rank 1 what came."""
    torch.set_num_threads(1)  # of a forked process: OpenMP's threads are not in it
    store = dist.FileStore(str(path), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    rows = RowStore()
    transport = CountedTransport(None, seconds=60)
    command: dict[str, Any] = {"result": 7, "sends": [], "receives": []}
    if rank == 0:
        rows.put(7, ids, columns)
        command["sends"] = [(1, list(columns), ids)]
    else:
        kinds = {name: column.spec.to_plain() for name, column in columns.items()}
        lengths = {
            name: column.lengths.numpy()
            for name, column in columns.items()
            if column.lengths is not None
        }
        command["receives"] = [(0, list(columns), ids, kinds, lengths)]
    run_release(3, command, rows, transport)
    dist.barrier()
    came = rows.take(7, list(columns), ids) if rank == 1 else {}
    found = {"counts": transport.take_counts(), "columns": came}
    dist.destroy_process_group()
    return found


@JUST_AROUND
def test_columns_of_an_edge_arrive_in_one_message_or_in_one_each(tmp_path: Path, more: int) -> None:
    num_rows = 1000
    values = seeded_bytes(lane._PACKED_BYTES + more - num_rows)
    lengths = torch.ones(num_rows, dtype=torch.int64)
    lengths[-1] = len(values) - (num_rows - 1)
    columns = {
        "flags": Column("dense", seeded_bytes(num_rows)),
        "text": Column("text", values, lengths),
    }
    ids = np.arange(num_rows, dtype=np.int64)

    sender = os.fork()  # a group has one rank for each process
    if sender == 0:
        status = 1
        try:
            run_rank(0, tmp_path / "store", columns, ids)
            status = 0
        finally:
            os._exit(status)
    found = run_rank(1, tmp_path / "store", columns, ids)

    assert os.waitstatus_to_exitcode(os.waitpid(sender, 0)[1]) == 0
    assert found["counts"]["received"] == {0: lane._PACKED_BYTES + more}
    for name, column in columns.items():
        assert torch.equal(found["columns"][name].values, column.values)
    assert torch.equal(found["columns"]["text"].lengths, lengths)


@JUST_AROUND
def test_memory_of_a_column_has_its_shape_and_takes_values_with_and_without_huge_pages(
    more: int,
) -> None:
    values = seeded_bytes((16 << 20) + more)

    copy = empty_values(values.shape, values.dtype).copy_(values)

    assert torch.equal(copy, values)


def test_a_held_out_row_has_the_most_samples_without_reaching_into_the_next_row() -> None:
    ids, parents = held_out_ids(np.array([0, 1]), row_id._MOST_SAMPLES)

    assert len(np.unique(ids)) == 2 * row_id._MOST_SAMPLES
    assert np.unique(parents).tolist() == [ids[0], ids[row_id._MOST_SAMPLES]]


def test_rows_are_sent_alike_whether_the_plan_is_remembered_or_not() -> None:
    plans = []
    for num_rows in (row_plans._REMEMBERED_IDS // 2, row_plans._REMEMBERED_IDS // 2 + 1):
        ids = np.arange(num_rows, dtype=np.int64) + 5
        have = {0: ids[::2], 1: ids[1::2]}
        need = {2: ids[: num_rows // 2], 3: ids[num_rows // 2 :]}
        edges = redistribute_rows(have, need)
        for rank, wanted in need.items():
            came = np.concatenate([edge.ids for edge in edges if edge.destination == rank])
            assert sorted(came.tolist()) == wanted.tolist()
        plans.append([(edge.source, edge.destination) for edge in edges])

    assert plans == [[(0, 2), (0, 3), (1, 2), (1, 3)]] * 2


# Agents


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    opened = Endpoint()
    yield opened
    opened.close()


def next_draw(endpoint: Endpoint) -> GenerationRequest:
    """The next reply that has to be drawn."""
    item = endpoint.inbox.get(timeout=WAIT_SECONDS)
    assert isinstance(item, GenerationRequest)
    return item


def test_body_of_the_largest_size_is_answered_and_a_larger_one_is_refused(
    endpoint: Endpoint,
) -> None:
    agent = Agent(endpoint)
    largest = b'{"prompt": "a"}'.ljust(http.MOST_BODY_BYTES)
    with agent.connect() as connection:
        connection.sendall(agent.request(largest))
        next_draw(endpoint).done(words(TOKENIZER, "b"))
        status, _ = answer_from(connection)

    refused, said = agent.ask(largest + b" ")

    assert (status, refused) == (200, 413)
    assert "got a request of 4194305 bytes, expected at most 4194304" in said["error"]["message"]
    assert agent.is_answered()


@pytest.mark.parametrize("size", [64 << 20, (64 << 20) + 1, 10**20 - 1])
def test_body_that_is_far_too_large_is_read_up_to_a_limit_and_refused(
    endpoint: Endpoint, size: int
) -> None:
    agent = Agent(endpoint)
    head = agent.request(b"", size=str(size))
    block = bytes(1 << 20)

    with agent.connect() as connection:
        connection.sendall(head)
        for _ in range(http._MOST_DISCARDED_BYTES // len(block)):
            connection.sendall(block)
        status, said = answer_from(connection)

    assert status == 413 and f"got a request of {size} bytes" in said["error"]["message"]
    assert agent.is_answered()


@JUST_AROUND
def test_head_of_the_largest_size_is_answered_and_after_a_larger_one_the_connection_ends(
    endpoint: Endpoint, more: int
) -> None:
    agent = Agent(endpoint)
    body = b'{"prompt": "a"}'
    request = agent.request(body)
    head, _, _ = request.partition(b"\r\n\r\n")
    padding = http._MOST_HEAD_BYTES + more - len(head) - len(b"\r\nx-padding: ")
    head += b"\r\nx-padding: " + b"x" * padding
    assert len(head) == http._MOST_HEAD_BYTES + more

    with agent.connect() as connection:
        connection.sendall(head)
        if more <= 0:
            connection.sendall(b"\r\n\r\n" + body)
            next_draw(endpoint).done(words(TOKENIZER, "b"))
            assert answer_from(connection)[0] == 200
        else:
            assert answer_from(connection)[0] == 431
            assert connection.recv(1) == b""

    assert agent.is_answered()


@pytest.mark.parametrize(("digits", "expected"), [(20, 413), (21, 400)])
def test_content_length_has_at_most_20_digits(
    endpoint: Endpoint, digits: int, expected: int
) -> None:
    agent = Agent(endpoint)
    size = str(http.MOST_BODY_BYTES + 1).zfill(digits)

    body = bytes(http.MOST_BODY_BYTES + 1) if expected == 413 else b""  # a refused one is not read

    status, _ = agent.ask(body, size=size)

    assert status == expected
    assert agent.is_answered()


def test_as_many_requests_of_an_episode_wait_as_it_may_have_connections(
    endpoint: Endpoint,
) -> None:
    agent = Agent(endpoint)
    with ExitStack() as opened:
        waiting = []
        for _ in range(ConnectionLimits.of_episode + 1):
            connection = opened.enter_context(agent.connect())
            connection.sendall(agent.request({"prompt": "a"}))
            waiting.append(connection)
        # nothing is drawn yet: the only answer is the refusal, whichever request came last
        (refused,), _, _ = select.select(waiting, [], [], WAIT_SECONDS)
        waiting.remove(refused)

        status, said = answer_from(refused)
        for _ in waiting:
            next_draw(endpoint).done(words(TOKENIZER, "b"))
        statuses = [answer_from(connection)[0] for connection in waiting]

    assert status == 429 and "more than 128 open connections" in said["error"]["message"]
    assert statuses == [200] * ConnectionLimits.of_episode


def test_the_last_refused_request_that_is_too_many_ends_its_episode(endpoint: Endpoint) -> None:
    agent = Agent(endpoint, 7)
    with agent.connect() as connection:
        for _ in range(endpoints._MOST_REFUSED - 1):
            connection.sendall(agent.request(b"["))
            assert answer_from(connection)[0] == 400
    assert endpoint.inbox.empty() and agent.is_answered()

    agent.ask(b"[")

    fault = endpoint.inbox.get(timeout=WAIT_SECONDS)
    assert isinstance(fault, EpisodeFault) and fault.number == 7
    assert "flooded the endpoint: 100 requests were refused" in fault.cause


def test_connections_of_ended_episodes_stay_until_there_are_too_many() -> None:
    connections = Connections(ConnectionLimits())
    closed = list[int]()
    for number in range(ConnectionLimits.idle + 1):
        connection, _ = connections.admit(lambda number=number: closed.append(number), 0.0)
        assert connections.claim(connection, f"episode {number}")
    for number in range(ConnectionLimits.idle):
        connections.end_episode(f"episode {number}")
    assert closed == []

    connections.end_episode(f"episode {ConnectionLimits.idle}")

    assert closed == [0]


def test_ignored_fields_are_logged_up_to_a_number_and_their_names_up_to_a_length(
    caplog: pytest.LogCaptureFixture,
) -> None:
    names = ["a" * ask._NAME_LETTERS, "b" * (ask._NAME_LETTERS + 1)]
    names += [f"field {number}" for number in range(ask._MOST_WARNINGS)]
    told: set[str] = set()

    parse_request({"prompt": "a", **dict.fromkeys(names, 1)}, chat=False, warned_fields=told)
    parse_request({"prompt": "a", "one more": 1}, chat=False, warned_fields=told)

    said = [record.getMessage() for record in caplog.records]
    assert len(said) == ask._MOST_WARNINGS
    assert f"'{names[0]}'" in said[0]
    assert names[1] not in said[1] and "b ... b" in said[1]


def test_text_of_a_refusal_is_whole_up_to_a_length_and_then_loses_its_middle() -> None:
    whole = "x" * ask._REFUSAL_LETTERS

    assert str(Refusal(whole)) == whole
    assert str(Refusal(whole + "y")) == "x" * 500 + " ... " + "x" * 499 + "y"


# Rewards


def read_messages(process: RewardProcess, count: int) -> list[dict[str, Any]]:
    """The next messages of a process of a reward function."""
    found: list[dict[str, Any]] = []
    limit = time.monotonic() + WAIT_SECONDS
    while len(found) < count and time.monotonic() < limit:
        select.select([process], [process] if process.has_unsent else [], [], WAIT_SECONDS)
        messages, end = process.advance()
        found += messages
        assert end is None or len(found) >= count, end
    return found


def test_answers_and_prints_of_a_reward_function_of_any_size_come_whole(tmp_path: Path) -> None:
    path = tmp_path / "reward.py"
    path.write_text(
        "def score(prompt, response, row):\n"
        "    print('printed' * row['size'])\n"
        "    return {'score': len(response), 'answer': 'x' * row['size']}\n"
    )
    block = 1 << 16
    sizes = [block - 64, block - 1, block, block + 1, 3 * block, 16 << 20]
    function = (f"{path}:score", {})
    process = RewardProcess([function], start_seconds=WAIT_SECONDS, sample_seconds=WAIT_SECONDS)
    try:
        assert "ready" in read_messages(process, 1)[0]
        process.ready = True
        process.give(range(len(sizes)), [[[0], "", "r" * size, {"size": size}] for size in sizes])

        found = [message["scores"] for message in read_messages(process, len(sizes))]
    finally:
        process.kill()

    assert [scores["score"] for scores in found] == sizes
    assert [len(scores["answer"]) for scores in found] == sizes


@JUST_AROUND
def test_error_of_a_reward_function_is_described_by_its_end(more: int) -> None:
    error = ValueError("first line\n" + "x" * (child._TRACEBACK_LETTERS + more - len("\n")))
    whole = "ValueError: " + str(error) + "\n"

    line, _, trace = describe(error).partition("\n")

    assert line == "ValueError: first line"
    assert trace == whole[-child._TRACEBACK_LETTERS :]


def test_first_line_of_an_error_of_a_reward_function_is_whole_up_to_a_length() -> None:
    longest = "x" * child._TRACEBACK_LETTERS

    whole, cut = (
        describe(ValueError(text)).partition("\n")[0] for text in (longest, longest + "y")
    )

    assert whole == cut == f"ValueError: {longest}"


def test_number_of_an_answer_has_at_most_as_many_letters() -> None:
    longest = "1" * gsm8k._MAX_LETTERS

    assert gsm8k.final_number(f"#### {longest}") == int(longest)
    assert gsm8k.final_number(f"#### {longest}1") is None


def test_expression_of_countdown_has_at_most_as_many_letters_and_digits() -> None:
    longest = "1+1".ljust(countdown._MAX_LETTERS - 1) + "0"
    spaced = "1+" + " " * (countdown._MAX_LETTERS - 3) + "1"

    assert len(longest) == len(spaced) == countdown._MAX_LETTERS
    assert countdown.expression_of(f"<answer>{spaced}</answer>") == (2, [1, 1])
    assert countdown.expression_of(f"<answer> {spaced}</answer>") is None
    assert countdown.expression_of("<answer>999999999</answer>") == (999_999_999, [999_999_999])
    assert countdown.expression_of("<answer>1000000000</answer>") is None


def test_expression_of_countdown_is_looked_for_in_the_end_of_a_response() -> None:
    behind = "\n" + "x" * (20_000 - len("1+1\n"))

    assert countdown.expression_of(f"words\n1+1{behind}") == (2, [1, 1])
    assert countdown.expression_of(f"words\n1+1{behind}{'x' * 4}") is None


def test_answer_of_a_problem_has_at_most_as_many_letters() -> None:
    longest = "1" * 1000

    assert answer_of(rf"\boxed{{{longest}}}") == rf"$\boxed{{{longest}}}$"
    assert answer_of(rf"\boxed{{{longest}1}}") is None


# Data


def write_lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def data_of(path: Path, **settings: Any) -> DataConfig:
    return DataConfig(train_path=str(path), tokenizer_path=str(MODEL), **settings)


@JUST_AROUND
def test_rows_are_found_alike_in_one_or_two_blocks_of_rows(tmp_path: Path, more: int) -> None:
    num_rows = scanning._TOKENISED_AT_A_TIME + more
    path = write_lines(tmp_path / "p.jsonl", [{"prompt": f"{n}="} for n in range(num_rows)])

    report = scan(data_of(path), path, load_tokenizer(str(MODEL)))

    assert list(report.rows) == list(range(num_rows))


@pytest.mark.parametrize("more", [0, 1])
def test_rows_are_found_alike_in_one_or_two_blocks_of_characters(tmp_path: Path, more: int) -> None:
    most = scanning._CHARACTERS_AT_A_TIME
    texts = ["1" * (most - len("1+1=") + more), "1+1=", "2="]
    path = write_lines(tmp_path / "p.jsonl", [{"prompt": text} for text in texts])

    report = scan(data_of(path, max_prompt_tokens=2 * most), path, load_tokenizer(str(MODEL)))

    assert list(report.rows) == [0, 1, 2] and report.num_too_long == 0


@JUST_AROUND
def test_rows_of_parquet_are_read_alike_in_one_or_two_blocks(tmp_path: Path, more: int) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="extra parquet is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")
    prompts = [f"{n}=" for n in range(line_file._ROWS_AT_A_TIME + more)]
    parquet.write_table(pyarrow.table({"prompt": prompts}), tmp_path / "p.parquet")

    lines = [json.loads(line) for line in LineFile(tmp_path / "p.parquet").lines()]

    assert [line["prompt"] for line in lines] == prompts


def test_conversation_has_at_most_as_many_answers_as_a_line_has_texts(tmp_path: Path) -> None:
    turn = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "1"}]
    cfg = ExampleDataConfig(
        train_path="unread",
        tokenizer_path=chat_tokenizer(tmp_path / "tokenizer", TURNS),
        prompt_column="messages",
        response_column=None,
        chat_template=True,
        rows_per_conversation="answers",
    )
    encoder = AnswerEncoder(load_tokenizer(cfg.tokenizer_path), cfg)

    num_texts = encoder.num_texts({"messages": turn * MAX_TEXTS_PER_LINE})

    assert num_texts == MAX_TEXTS_PER_LINE
    with pytest.raises(DataError, match="has 4097 answers in 'messages', expected at most 4096"):
        encoder.num_texts({"messages": turn * (MAX_TEXTS_PER_LINE + 1)})


@pytest.mark.parametrize(("more", "said"), [(0, "1 rows, their own lengths"), (1, "than 4 MiB")])
def test_plan_reads_a_file_of_the_largest_size_and_assumes_the_rows_of_a_larger_one(
    tmp_path: Path, more: int, said: str
) -> None:
    short = json.dumps({"prompt": "1+1="}) + "\n"
    path = tmp_path / "p.jsonl"
    path.write_text(short + "\n" * (SMALL_FILE_BYTES + more - len(short)))

    _, how = scan_or_assume(data_of(path), str(path), read_data=True)

    assert said in how


# The controller


@pytest.mark.parametrize("more", [0, 1])
def test_transcript_of_the_largest_size_is_written_and_a_larger_step_is_left_out(
    tmp_path: Path, more: int
) -> None:
    def step_of(number: int, metric: str) -> StepRecord:
        return StepRecord(number, [], [], {metric: 1.0}, Counter(), Counter())

    def record(path: Path, letters: int) -> Transcript:
        recorder = Transcript(path, (0,), [0])
        recorder.end_step(step_of(1, "x"))
        recorder.end_step(step_of(2, "x" * letters))
        return recorder

    letters = 1 << 20
    record(tmp_path / "smaller", letters)
    other_bytes = (tmp_path / "smaller").stat().st_size - letters

    recorder = record(tmp_path / "largest", transcript.MOST_BYTES - other_bytes + more)
    recorder.end_step(step_of(3, "x"))

    steps = [step["step"] for step in read_transcript(tmp_path / "largest")["steps"]]
    assert steps == ([1] if more else [1, 2])


class Talker(Toy):
    """Answers with as many tokens as it is told."""

    num_tokens = 0

    @register(
        transfer_mode="3D_PROTO",
        reads=("prompts",),
        writes=("responses", "response_text", "scores"),
    )
    def talk(self, batch: TensorDict) -> TensorDict:
        """The same response for every row."""
        rows = [torch.ones(Talker.num_tokens, dtype=torch.int64)] * len(batch)
        made = TensorDict({"scores": torch.zeros(len(batch))}, batch_size=batch.batch_size)
        made["responses"] = ragged_from_rows(rows, dtype=torch.int64)
        made.set_non_tensor("response_text", ["said"] * len(batch))
        return made


@pytest.mark.parametrize(
    ("num_rows", "num_tokens", "num_samples"),
    [(15, 1, 15), (17, 1, 16), (17, 1024, 16), (17, 1025, 15), (17, 5000, 4)],
)
def test_samples_are_as_many_as_may_be_written_but_some_however_long(
    tmp_path: Path, num_rows: int, num_tokens: int, num_samples: int
) -> None:
    Talker.num_tokens = num_tokens
    with rank_of_one(tmp_path, prompts_per_step=num_rows) as rank:
        talker = rank.flow.spawn(Talker, ToyConfig())
        rows = next(rank.flow.prompts(rank.config.data))

        found = samples_of(rows | talker.talk(rows), "train", str(MODEL))

    assert len(found) == num_samples
    assert {len(sample.facts["lengths"]) for sample in found} == {num_tokens}


@JUST_AROUND
def test_a_long_response_is_written_without_its_middle(tmp_path: Path, more: int) -> None:
    """The gap counts as one token, and each token's characters are those of the text."""
    Talker.num_tokens = 8192 + more
    with rank_of_one(tmp_path, prompts_per_step=1) as rank:
        talker = rank.flow.spawn(Talker, ToyConfig())
        rows = next(rank.flow.prompts(rank.config.data))

        (found,) = samples_of(rows | talker.talk(rows), "train", str(MODEL))

    lengths = found.facts["lengths"]
    assert isinstance(lengths, list)
    assert sum(lengths) == len(found.response)
    if more <= 0:
        assert (len(lengths), found.response) == (8192 + more, "said")
        assert "tokens" not in found.facts
    else:
        assert (len(lengths), lengths[4096]) == (8193, len(" ... "))
        assert " ... " in found.response
        assert found.facts["tokens"] == 8193


@pytest.mark.parametrize(
    ("sizes", "cuts"),
    [
        ([], []),
        ([32], []),
        ([16, 16], []),
        ([16, 17], [1]),
        ([5, 60, 31], [1, 2]),
        ([60, 0, 31, 1, 0, 1], [1, 5]),
        ([12] * 6, [2, 4]),
    ],
)
def test_rows_are_fetched_in_pieces_of_which_none_is_too_large_but_a_large_row(
    sizes: list[int], cuts: list[int]
) -> None:
    assert cut_rows(np.array(sizes, dtype=np.int64), 32) == cuts


class Heavy(Learner):
    """Makes a column of large rows."""

    row_bytes = 0

    @register(transfer_mode="3D_PROTO", reads=("number",), writes=("heavy",))
    def fill(self, batch: TensorDict) -> TensorDict:
        """heavy = the number in as many bytes."""
        rows = batch["number"].to(torch.uint8)[:, None].expand(-1, Heavy.row_bytes)
        return TensorDict({"heavy": rows.contiguous()}, batch_size=batch.batch_size)


def keep_batch(rank: Rank, row_bytes: int) -> None:
    """One step with a guard that keeps its batch."""
    Heavy.row_bytes = row_bytes
    heavy = rank.flow.spawn(Heavy, ToyConfig())
    prompts = rank.flow.prompts(rank.config.data)
    for step in rank.flow.steps(1):
        batch = draw(prompts, heavy)
        batch |= heavy.fill(batch)
        step.log(heavy.learn(batch), x=1.0)


@pytest.mark.parametrize(
    ("row_bytes", "num_kept"),
    [
        ((32 << 20) // ROWS - 100, ROWS),
        ((32 << 20) // ROWS + 1, ROWS - 1),
        ((32 << 20) - 100, 1),
        ((32 << 20) + 1, 0),
    ],
)
def test_guard_keeps_as_many_rows_of_a_batch_as_fit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, row_bytes: int, num_kept: int
) -> None:
    assert guarding.MOST_BYTES == 32 << 20
    with rank_of_one(tmp_path, guards=["x > 0: warn"]) as rank, caplog.at_level(logging.WARNING):
        keep_batch(rank, row_bytes)

    assert f"{num_kept} of its {ROWS} rows are in" in caplog.text
    rows = read_rows(tmp_path / "guards" / "step-1.safetensors")
    assert rows["heavy"].shape == (num_kept, row_bytes)
    assert rows["heavy"][:, -1].tolist() == [int(number) for number in rows["number"]]


# Tracking


def test_median_of_a_guarded_metric_stays_right_when_every_second_value_is_dropped() -> None:
    watched = Guards(["x > 2 * median: warn"])
    medians = []
    for number in range(guards._MOST_VALUES + 1):
        watched.learn({"x": float(number)})
        if number >= guards._MOST_VALUES - 2:
            (trip,) = watched.trips({"x": 1e6}, skipping=False)
            medians.append(trip.base)

    kept = watched.state_dict()["seen"]["x"][3]
    assert len(kept) == guards._MOST_VALUES // 2 + 1
    assert medians == [255.0, 255.0, 256.0]


def test_trace_takes_spans_up_to_its_last_byte(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spans = [Span(0, "compute", "a", 0, 1)]
    TraceWriter(tmp_path / "once").write(spans * 2)
    num_bytes = (tmp_path / "once").stat().st_size
    sizes = []
    for most in range(num_bytes - 1, num_bytes + 8):
        path = tmp_path / f"trace-{most}.json"
        writer = TraceWriter(path, max_bytes=most)
        writer.write(spans * 2)
        writer.close()
        sizes.append(path.stat().st_size)
        assert path.stat().st_size <= most and isinstance(json.loads(path.read_text()), list)

    assert sizes[0] < num_bytes and sizes[-1] == num_bytes
    assert "later spans are dropped" in caplog.text


# Checkpoints and weights


@pytest.mark.parametrize(("more", "num_parts"), [(-1, 1), (0, 1), (1, 2)])
def test_box_of_the_largest_size_is_written_whole_and_a_larger_one_in_parts(
    tmp_path: Path, more: int, num_parts: int
) -> None:
    row_bytes = 1 << 16
    num_rows = state_tensors._MAX_BOX_BYTES // row_bytes + more
    values = torch.arange(num_rows, dtype=torch.uint8)[:, None].expand(-1, row_bytes)
    values = values.contiguous()

    write_state(tmp_path / "rank-0", [("w", values, Box.of_shape(values.shape))], {})

    with safe_open(tmp_path / "rank-0", "pt") as file:
        parts = [file.get_tensor(name) for name in file.keys()]  # noqa: SIM118
    parts.sort(key=len, reverse=True)
    assert len(parts) == num_parts
    assert torch.equal(torch.cat(parts), values)


@pytest.mark.parametrize("more", [0, 1])
def test_model_files_have_at_least_and_at_most_their_sizes(more: int) -> None:
    largest = 4 << 30
    smallest = 64 << 20
    quarter = TensorInfo("quarter", torch.uint8, (largest // 4,))
    last = TensorInfo("last", torch.uint8, (largest // 4 + more,))

    one = plan_files([quarter] * 3 + [last], 1)
    two = plan_files(
        [
            TensorInfo("a", torch.uint8, (smallest,)),
            TensorInfo("b", torch.uint8, (smallest - more,)),
        ],
        2,
    )

    assert len(one) == 1 + more
    assert len(two) == 2 - more


@JUST_AROUND
def test_changed_byte_at_the_end_of_a_block_that_is_read_is_found(
    tmp_path: Path, more: int
) -> None:
    values = seeded_bytes(weight_file._READ_BYTES + more)
    path = tmp_path / "w.safetensors"
    write_file(path, [TensorInfo("w", torch.uint8, values.shape)], [values], {})
    assert find_changed_tensor(path) is None

    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(bytes([int(values[-1]) ^ 1]))

    assert (find_changed_tensor(path) or "").startswith("w (bytes ")


@JUST_AROUND
def test_file_is_written_alike_past_the_page_cache_and_through_it(
    tmp_path: Path, more: int
) -> None:
    values = seeded_bytes(direct._BUFFER_BYTES + more)
    facts = [TensorInfo("w", torch.uint8, values.shape)]
    write_file(
        tmp_path / "empty", [TensorInfo("w", torch.uint8, (0, 10))], [values[:0].view(0, 10)], {}
    )
    head_bytes = (tmp_path / "empty").stat().st_size
    shorter = values[: len(values) - head_bytes]

    write_file(tmp_path / "larger", facts, [values], {})
    write_file(tmp_path / "smaller", [TensorInfo("w", torch.uint8, shorter.shape)], [shorter], {})

    for name, expected in (("larger", values), ("smaller", shorter)):
        with safe_open(tmp_path / name, "pt") as file:
            assert torch.equal(file.get_tensor("w"), expected)


@pytest.mark.parametrize("at", [0, (1 << 20) + 1, (33 << 20) + 5, (64 << 20) - 1])
def test_every_byte_of_the_largest_file_that_is_hashed_whole_counts(
    tmp_path: Path, at: int
) -> None:
    hashes = set()
    for place in (None, at):
        with (tmp_path / "model.safetensors").open("wb") as file:
            file.truncate(state_tensors._BLOCK_BYTES * state_tensors._NUM_BLOCKS)
            if place is not None:
                file.seek(place)
                file.write(b"x")
        hashes.add(model_hash(tmp_path))

    assert len(hashes) == 2


@pytest.mark.parametrize(("more", "num_reads"), [(-1, 1), (0, 1), (1, 2)])
def test_box_is_read_at_once_or_some_rows_at_a_time_with_the_same_values(
    more: int, num_reads: int
) -> None:
    row_size = 1 << 12
    num_rows = move._READ_ELEMENTS // row_size + more
    values = torch.arange(num_rows, dtype=torch.uint8)[:, None].expand(-1, row_size)
    target = torch.zeros(values.shape, dtype=torch.uint8)
    read = list[Box]()

    def read_box(name: str, box: Box) -> Tensor:
        read.append(box)
        return values[box.slices()]

    move.copy_box(target, "w", Box.of_shape(values.shape), read_box)

    assert len(read) == num_reads
    assert torch.equal(target, values)


@JUST_AROUND
def test_hash_of_a_tensor_is_the_same_in_one_or_two_blocks(more: int) -> None:
    values = seeded_bytes(2 * tensor_hash._CPU_CHUNK + 2 * more).view(-1, 2)
    cut = len(values) // 3

    upper = box_hash(values[:cut], Box(((0, cut), (0, 2))))
    lower = box_hash(values[cut:], Box(((cut, len(values)), (0, 2))))

    assert positional_hash(values) == (upper + lower) % tensor_hash.MODULUS
