"""A response that goes on: what stays, what is left out, what is refused, and texts of a map."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from spmdflow import Batch, WorkerGroup, decode_responses, load_tokenizer, map_function, rows_of
from spmdflow.config.objective import PolicyUpdateConfig
from spmdflow.config.schema import ActorConfig, EngineConfig, ModelConfig, RolloutConfig
from spmdflow.cpu.llama import LlamaForward
from spmdflow.errors import ColumnError, RowError, SpmdflowError
from spmdflow.models.policy import ActorWorker
from tests.unit.toy_flow import TASK, Rank, numbers

MOST = 7
COLUMNS = ("responses", "response_mask", "rollout_log_probs")


@map_function(reads=("prompts", "responses"), writes=("tool_text", "num_tokens"))
def say(batch: TensorDict, *, skips: bool = False) -> dict[str, Any]:
    """tool_text: "+" and the response again; with skips nothing to every other row of the rank."""
    texts = decode_responses(batch, load_tokenizer(str(TASK / "model")))
    said = ["" if skips and place % 2 else f"+{text}" for place, text in enumerate(texts)]
    return {"tool_text": said, "num_tokens": torch.tensor([len(text) for text in texts])}


@map_function(reads=("prompts",), writes=("note",))
def note(batch: TensorDict) -> dict[str, list[str]]:
    """note: a text of the prompt alone."""
    return {"note": [f"{len(row)} tokens" for row in rows_of(batch["prompts"])]}


@pytest.fixture
def actor(rank: Rank) -> WorkerGroup:
    """An actor whose responses have at most seven tokens; step 1 has begun."""
    tokenizer = str(TASK / "model")
    rollout = RolloutConfig(max_new_tokens=MOST, temperature=3.0, tokenizer_path=tokenizer)
    model = ModelConfig(path=str(TASK / "model"))
    update = PolicyUpdateConfig(old_log_probs="recompute")
    cfg = ActorConfig(model=model, engine=EngineConfig(), rollout=rollout, update=update)
    group = rank.flow.spawn(ActorWorker, cfg, pool=rank.flow.pool("all"))
    next(rank.flow.steps(1))
    return group


@pytest.fixture
def first(actor: WorkerGroup, prompts: Any) -> Batch:
    """A first turn of at most two tokens, with a note of each prompt."""
    drawn = actor.generate_sequences(next(prompts), max_new_tokens=2)
    return drawn | drawn.map(note)


def rows(batch: Batch, name: str) -> list[list[Any]]:
    values = batch.fetch(name)[name]
    assert isinstance(values, torch.Tensor)
    return [row.tolist() for row in rows_of(values)]


def test_response_that_goes_on_has_the_first_turn_what_was_said_and_what_is_sampled(
    actor: WorkerGroup, first: Batch
) -> None:
    heard = first | first.map(say)
    whole = actor.generate_sequences(heard, max_new_tokens=2)

    turns = zip(*(rows(first, name) for name in COLUMNS), numbers(heard, "tool_text"), strict=True)
    joined = zip(*(rows(whole, name) for name in COLUMNS), strict=True)
    plus = load_tokenizer(str(TASK / "model")).convert_tokens_to_ids("+")
    for (tokens, mask, log_probs, text), (more, more_mask, more_log_probs) in zip(turns, joined):
        start = len(tokens)
        end = len(tokens) + len(text)
        assert more[:start] == tokens and more_log_probs[:start] == log_probs
        assert more[start] == plus and len(more) - end in (1, 2)
        assert more_mask == [*mask, *[False] * len(text), *[True] * (len(more) - end)]
        assert more_log_probs[start:end] == [0.0] * len(text) and max(more_log_probs[end:]) < 0


def test_trainer_agrees_with_what_was_recorded_over_three_turns(
    actor: WorkerGroup, first: Batch
) -> None:
    again = actor.generate_sequences(first, max_new_tokens=1)
    whole = actor.generate_sequences(again | again.map(say), max_new_tokens=2)
    whole |= actor.compute_log_prob(whole)

    assert whole.metrics["rollout/drift_max"] < 1e-5
    assert sum(map(sum, rows(whole, "response_mask"))) > sum(map(len, rows(first, "responses")))


def test_third_turn_computes_what_the_second_has_not(
    actor: WorkerGroup, first: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = actor.generate_sequences(first, max_new_tokens=1)
    heard = second | second.map(say)
    before = rows(second, "responses")
    said = numbers(heard, "tool_text")
    computed: list[int] = []
    extend = LlamaForward.extend

    def count(forward: LlamaForward, places: list[int], more: list[Any], starts: list[int]) -> Any:
        computed.extend(len(part) for part in more)
        return extend(forward, places, more, starts)

    monkeypatch.setattr(LlamaForward, "extend", count)
    rows(actor.generate_sequences(heard, max_new_tokens=1), "responses")

    going = [text for row, text in zip(before, said, strict=True) if len(row) + len(text) < MOST]
    assert going and sorted(computed) == sorted(1 + len(text) for text in going)


def test_columns_of_the_shorter_response_are_left_out_and_older_ones_stay(
    actor: WorkerGroup, first: Batch
) -> None:
    scored = first | actor.compute_log_prob(first) | first.map(say)
    whole = actor.generate_sequences(scored)

    assert sorted(whole.columns) == sorted(first.columns)
    assert numbers(whole, "note") == numbers(first, "note")
    assert len(rows((whole | actor.compute_log_prob(whole)), "old_log_probs")) == len(first)


def test_rows_that_were_told_something_go_on_and_come_back_in_their_place(
    actor: WorkerGroup, first: Batch
) -> None:
    going = (first | first.map(say, skips=True)).where("tool_text")
    whole = first.replace(actor.generate_sequences(going))

    assert going.ids.tolist() == first.ids[::2].tolist()
    assert whole.ids.tolist() == first.ids.tolist() and whole.columns == first.columns
    before = rows(first, "responses")
    after = rows(whole, "responses")
    assert [one == other for one, other in zip(before, after)] == [False, True] * 3


def test_row_without_room_stays_as_it_is_and_is_counted(actor: WorkerGroup, first: Batch) -> None:
    longer = actor.generate_sequences(first | first.map(say), max_new_tokens=1)
    whole = actor.generate_sequences(longer | longer.map(say))

    pairs = list(zip(rows(longer, "responses"), rows(whole, "responses"), strict=True))
    same = [before == after for before, after in pairs]
    assert 0 < sum(same) and all(len(after) <= MOST for _, after in pairs)
    assert whole.metrics["rollout/no_room"] == sum(same)


WRONG: dict[str, tuple[Callable[[Any, Batch], Any], type[SpmdflowError], str]] = {
    "part of a response": (
        lambda actor, b: actor.generate_sequences(b.drop("rollout_log_probs")),
        ColumnError,
        r"expected \['rollout_log_probs'\] too, to continue from; keep these columns together",
    ),
    "nothing to go on from": (
        lambda actor, b: actor.generate_sequences((b | b.map(say)).drop(*COLUMNS)),
        ColumnError,
        r"the batch has \['tool_text'\], expected \['responses', 'response_mask'",
    ),
    "other rows": (lambda actor, b: b[:2].replace(b[1:3]), RowError, "rows that are not in this"),
    "other columns": (
        lambda actor, b: b.replace(b[:2].drop("note")),
        ColumnError,
        r"got \['note'\] in only one of",
    ),
}


def test_turn_that_cannot_be_joined_is_refused(actor: WorkerGroup, first: Batch) -> None:
    for use, error, told in WRONG.values():
        with pytest.raises(error, match=told):
            use(actor, first)
