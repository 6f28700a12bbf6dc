"""What a server's answers may do to a rank: 1,000 answers that no correct server gives."""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from spmdflow.errors import ConfigError
from spmdflow.serving.client import (
    ResponsePart,
    ServerClient,
    ServerFacts,
    WrongAnswer,
    parse_part,
)
from spmdflow.serving.link import _difference, _read_boxes

NUM_ANSWERS = 1000
VOCABULARY = 50
DANGEROUS = ("open", "exec", "compile", "import", "os.", "subprocess", "socket", "ctypes", "pickle")
"""Audit events of Python that no answer may cause."""
FACTS: dict[str, Any] = {
    "instance": "ab12",
    "model": "0f" * 16,
    "tokenizer": "",
    "dtype": "bfloat16",
    "row_noise": True,
    "num_workers": 1,
    "max_model_len": 64,
    "max_num_seqs": 4,
    "prefix_caching": False,
    "epoch": "cd34",
    "weights_version": 3,
    "running": 0,
}
_EVENTS: list[str] = []
_IS_WATCHING = [False]


def _note(event: str, arguments: tuple[object, ...]) -> None:
    if _IS_WATCHING[0] and event.startswith(DANGEROUS):
        _EVENTS.append(event)


sys.addaudithook(_note)


@pytest.fixture
def watched() -> Iterator[list[str]]:
    """The dangerous things that Python does during the test."""
    _EVENTS.clear()
    yield _EVENTS


def part_line(tokens: list[int], finish: str | None = None) -> bytes:
    """A line as a correct server writes it."""
    table = [{"token_id": token, "logprob": -1.25} for token in tokens]
    choice = {"token_ids": tokens, "finish_reason": finish, "logprobs": {"content": table}}
    return b"data: " + json.dumps({"choices": [choice]}).encode()


STRANGE: list[Any] = [
    None,
    True,
    -1,
    2**70,
    math.inf,
    "x" * 300,
    "../../etc/passwd",
    "__import__('os').system('id')",
    [],
    {},
    [[[]]],
    {"__reduce__": ["os.system", "id"]},
    "!!python/object/apply:os.system [id]",
]


def mutate(chooser: random.Random, value: Any) -> Any:
    """A value with something strange somewhere in it."""
    if isinstance(value, dict) and value and chooser.random() < 0.8:
        name = chooser.choice(list(value))
        return value | {name: mutate(chooser, value[name])}
    if isinstance(value, list) and value and chooser.random() < 0.8:
        index = chooser.randrange(len(value))
        return [*value[:index], mutate(chooser, value[index]), *value[index + 1 :]]
    return chooser.choice(STRANGE)


def test_a_thousand_strange_answers_are_refused_or_read_and_do_nothing_else(
    watched: list[str],
) -> None:
    chooser = random.Random(0)
    num_refused = 0
    valid = json.loads(part_line([3, 4], "stop").removeprefix(b"data: "))
    for number in range(NUM_ANSWERS):
        line = b"data: " + json.dumps(mutate(chooser, valid)).encode()
        if number % 3 == 0:
            place = chooser.randrange(len(line))
            line = line[:place] + chooser.randbytes(4) + line[place + 4 :]
        facts = mutate(chooser, FACTS)
        boxes = mutate(chooser, [["a", [[0, 4], [0, 2]]], ["b", [[1, 3]]]])
        hashes = mutate(chooser, {"a": 5, "b": 2**63})
        _IS_WATCHING[0] = True
        try:
            for read in (
                lambda line=line: parse_part(line, vocab_size=VOCABULARY, left=8),
                lambda facts=facts: ServerFacts.of(facts if isinstance(facts, dict) else {}),
                lambda boxes=boxes: _read_boxes(boxes),
                lambda hashes=hashes: _difference({"a": 5}, hashes, 1),
            ):
                try:
                    read()
                except WrongAnswer:
                    num_refused += 1
        finally:
            _IS_WATCHING[0] = False

    assert watched == []
    assert num_refused > NUM_ANSWERS


def test_a_correct_part_is_read_with_float32_log_probs_bit_for_bit() -> None:
    part = parse_part(part_line([3, 4], "length"), vocab_size=VOCABULARY, left=2)

    assert part == ResponsePart((3, 4), (-1.25, -1.25), "length")


@pytest.mark.parametrize(("value", "is_read"), [(1e-6, True), (6.9e-5, False), (0.5, False)])
def test_a_log_prob_above_zero_is_read_only_if_rounding_explains_it(
    value: float, is_read: bool
) -> None:
    line = part_line([3]).replace(b"-1.25", str(value).encode())

    if is_read:
        part = parse_part(line, vocab_size=VOCABULARY, left=1)
        assert part is not None and part.log_probs == (value,)
    else:
        with pytest.raises(WrongAnswer, match="log-probability"):
            parse_part(line, vocab_size=VOCABULARY, left=1)


def test_more_tokens_than_were_asked_for_are_a_wrong_answer() -> None:
    with pytest.raises(WrongAnswer, match="at most 1 are left"):
        parse_part(part_line([3, 4]), vocab_size=VOCABULARY, left=1)


@pytest.mark.parametrize(
    "url", ["file:///etc/passwd", "ftp://a", "http://a/b", "http://user:pw@a", "a:80", "http://"]
)
def test_an_address_that_is_no_server_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="expected http://host:port"):
        ServerClient(url, key="", vocab_size=VOCABULARY)
