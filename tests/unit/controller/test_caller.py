"""Calls from a script: what is refused before anything is sent, what comes back, what is freed."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from spmdflow.controller.batch import Batch
from spmdflow.controller.group import WorkerGroup
from spmdflow.controller.prompts import PromptStream
from spmdflow.errors import (
    ColumnError,
    ConfigError,
    MessageError,
    ProtocolError,
    SpmdflowError,
)
from spmdflow.parallel.layout import Layout
from spmdflow.runtime.call import InprocTransport
from spmdflow.transfer.protocol import Answer, Protocol, register_protocol
from tests.unit.toy_flow import (
    ROWS,
    TASK,
    FrozenToyConfig,
    Other,
    Rank,
    Toy,
    ToyConfig,
    draw,
    rank_of_one,
    share,
)

# Refusals before anything is sent

REFUSED: dict[str, tuple[Callable[[WorkerGroup, Batch], Any], type[SpmdflowError], str]] = {
    "column": (lambda toy, batch: toy.add(batch.drop("number")), ColumnError, "expected .'number'"),
    "name": (lambda toy, batch: toy.ad(batch), ProtocolError, "registered methods are add, desc"),
    "mark": (lambda toy, batch: toy.unmarked(), ProtocolError, "Toy.unmarked: is not registered"),
    "argument": (lambda toy, batch: toy.add(batch, waht=2), ProtocolError, "argument 'waht'"),
    "no batch": (lambda toy, batch: toy.add(), ProtocolError, "required argument: 'batch'"),
    "batch": (lambda toy, batch: toy.describe(batch), ProtocolError, "too many positional"),
    "no Batch": (lambda toy, batch: toy.add(3.0), ProtocolError, "got float first"),
    "list": (
        lambda toy, batch: toy.add([1, 2]),
        ProtocolError,
        "got a list of 2, expected a Batch",
    ),
    "tensor": (
        lambda toy, batch: toy.add(batch, what=torch.ones(1)),
        MessageError,
        "^toy.add: message: got torch.Tensor; expected plain data",
    ),
    "column twice": (
        lambda toy, batch: toy.extend(batch | toy.extend(batch)),
        ColumnError,
        "^toy.extend: the batch already has 'twin', expected a batch without it",
    ),
}
"""A call, its error and a part of the message; docs/REFUSALS.md has whole messages."""


@pytest.mark.parametrize("mistake", REFUSED)
def test_call_that_cannot_work_is_refused_and_the_script_may_go_on(
    toy: WorkerGroup, batch: Batch, mistake: str
) -> None:
    call, error, message = REFUSED[mistake]

    with pytest.raises(error, match=message):
        call(toy, batch)

    assert toy.add(batch).fetch("next")["next"].tolist() == [i + 1 for i in batch.ids]


def test_missing_column_is_named_before_anything_is_sent(
    toy: WorkerGroup, batch: Batch, rank: Rank
) -> None:
    caller = rank.flow.caller
    before = (caller.next_number(), len(caller.records), rank.num_results)

    with pytest.raises(ColumnError):
        toy.add(batch.drop("number"))

    assert (caller.next_number() - 1, len(caller.records), rank.num_results) == before


def test_method_with_mini_batches_needs_an_update_config(rank: Rank, batch: Batch) -> None:
    frozen = rank.flow.spawn(Toy, FrozenToyConfig(), name="frozen")

    with pytest.raises(ProtocolError) as caught:
        frozen.update(batch)

    assert str(caught.value) == (
        "frozen: its method takes mini-batches, but its config has no `update`; add an UpdateConfig"
    )


# Answers

WRONG = {
    "return_one_of_two": "toy.return_one_of_two: returned columns ['first'], expected columns "
    "['first', 'second']; return exactly what `writes` declares",
    "return_a_tensor": "toy.return_a_tensor: returned Tensor, expected columns ['value']; "
    "return exactly what `writes` declares",
    "return_less": "toy.return_less: column 'number_or_less': got 4 rows, expected 6; "
    "return one row for each row received, in the same order",
}


@pytest.mark.parametrize("method", WRONG)
def test_answer_that_is_not_what_writes_declares_is_an_error(
    toy: WorkerGroup, batch: Batch, method: str
) -> None:
    with pytest.raises(ColumnError) as caught:
        getattr(toy, method)(batch)

    assert str(caught.value) == WRONG[method]


def test_metrics_are_merged_by_kind_and_read_as_numbers(toy: WorkerGroup, batch: Batch) -> None:
    result = toy.measure(batch)

    ids = batch.ids.tolist()
    assert dict(result) == {
        "toy/mean": sum(ids) / ROWS,
        "toy/items": sum(i % 3 for i in ids),
        "toy/largest": max(ids),
        "toy/plain": 2.5,
    }
    assert result["toy/plain"] < 3 and len(result) == 4
    assert repr(result) == "Result(toy.measure, done)"


def test_plain_values_come_by_rank_and_are_no_metrics(toy: WorkerGroup) -> None:
    result = toy.describe(factor=3)

    assert result.values_by_rank() == [3]
    with pytest.raises(ProtocolError) as caught:
        result["x"]
    assert str(caught.value) == (
        "toy.describe: returned int, expected a dict of metrics; "
        "use values_by_rank() for plain values"
    )


def test_mini_batches_use_every_row_once_and_keep_samples_of_a_prompt_together(
    toy: WorkerGroup, batch: Batch
) -> None:
    twice = batch.repeat(2)

    (minis,) = toy.update(twice).values_by_rank()

    assert [len(mini) for mini in minis] == [4, 4, 4]
    assert sorted(sum(minis, [])) == sorted(twice.parents.tolist())
    assert all(len(set(mini)) == 2 for mini in minis)


def test_user_defined_protocol_decides_who_gets_which_rows(toy: WorkerGroup, batch: Batch) -> None:
    placed = batch | toy.where(batch)

    assert placed.fetch("received_at")["received_at"].tolist() == [5, 4, 3, 2, 1, 0]
    assert placed[1:3].fetch("received_at")["received_at"].tolist() == [4, 3]


def test_protocol_name_of_another_module_is_refused() -> None:
    def nothing(layout: Layout, num_rows: int, shares: Any) -> dict[int, list[int]]:
        return {}

    mine = Protocol(
        "3D_PROTO",
        distribute=nothing,
        collect=lambda layout: Answer(layout.ranks, joined=False),
        num_shares=lambda layout: 1,
    )

    with pytest.raises(ProtocolError, match=r"^protocol 3D_PROTO: got a definition in .* choose"):
        register_protocol(mine)


# Rows are freed


def test_rows_of_50_steps_are_freed_as_the_script_goes_on(
    rank: Rank, toy: WorkerGroup, prompts: PromptStream
) -> None:
    held = []
    for step in rank.flow.steps(50):
        batch = next(prompts)
        batch |= toy.make(batch)
        batch |= toy.add(batch)
        batch |= batch.map(share)
        step.log(toy.measure(batch))
        held.append(rank.num_results)

    assert set(held[2:]) == {held[2]}
    assert held[2] <= 8  # four results of this step, and those of the last until the next command


def test_frame_is_freed_with_the_next_command_after_its_last_batch_is_dropped(
    rank: Rank, toy: WorkerGroup, batch: Batch
) -> None:
    before = rank.num_results
    kept = toy.add(batch)
    dropped = toy.add(batch)
    part = kept[2:3]
    assert rank.num_results == before + 2

    del dropped, kept
    assert rank.num_results == before + 2
    toy.describe()
    assert rank.num_results == before + 1
    assert part.fetch("next")["next"].tolist() == [batch.ids[2] + 1]
    del part
    toy.describe()

    assert rank.num_results == before


def test_input_of_a_running_call_lives_until_it_is_done(
    rank: Rank, toy: WorkerGroup, batch: Batch
) -> None:
    """The script's only reference goes before the rank has begun, as it does with sockets."""
    caller = rank.flow.caller
    transport = caller.transport
    assert isinstance(transport, InprocTransport)
    joined = batch | toy.add(batch)
    transport._is_running = True  # orders queue up, as behind a call that takes long

    result = toy.measure(joined)
    del joined
    gc.collect()
    assert repr(result) == "Result(toy.measure, pending)"
    assert not caller.freed

    transport._is_running = False
    transport.post(lambda: None)  # and now they run
    assert result["toy/plain"] == 2.5
    gc.collect()
    assert len(caller.freed) == 1


def test_frees_of_a_command_that_is_refused_ride_on_the_next(
    rank: Rank, toy: WorkerGroup, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = rank.num_results
    toy.add(batch)  # dropped at once
    assert rank.num_results == before + 1

    def refuse(call: Any, on_done: Any = None) -> None:
        raise MessageError("too large")

    with monkeypatch.context() as patch, pytest.raises(MessageError):
        patch.setattr(rank.flow.caller.transport, "submit", refuse)
        toy.describe()
    toy.describe()

    assert rank.num_results == before


# The flow


def test_second_stream_of_prompts_needs_a_name(rank: Rank, prompts: PromptStream) -> None:
    with pytest.raises(ProtocolError) as caught:
        rank.flow.prompts(rank.config.data)

    assert str(caught.value) == (
        "flow.prompts: got the name 'prompts' besides ['prompts'], expected a name of its own; "
        "give name=... for a second stream"
    )
    twin = rank.flow.prompts(rank.config.data, name="twin")
    assert next(twin).fetch("prompt_text") != next(prompts).fetch("prompt_text")


def test_prompts_repeat_each_row_and_say_which_rows_belong_together(
    tmp_path: Path,
) -> None:
    with rank_of_one(tmp_path, samples_per_prompt=3) as rank:
        batch = next(rank.flow.prompts(rank.config.data))

        texts = batch.fetch("prompt_text")["prompt_text"]
        assert len(batch) == 3 * ROWS and len(set(batch.ids.tolist())) == 3 * ROWS
        assert all(texts[i] == texts[i - i % 3] for i in range(3 * ROWS))
        assert all(batch.parents[i] == batch.parents[i - i % 3] for i in range(3 * ROWS))


def test_spawn_inside_a_step_is_refused(rank: Rank, toy: WorkerGroup) -> None:
    for _ in rank.flow.steps(1):
        with pytest.raises(ProtocolError) as caught:
            rank.flow.spawn(Toy, ToyConfig(), name="late")

    assert str(caught.value) == (
        "spawn Toy: called during step 1, expected before the first step; "
        "spawn every model at the top of main"
    )


def test_second_model_of_a_role_needs_a_name(rank: Rank, toy: WorkerGroup) -> None:
    with pytest.raises(ProtocolError) as caught:
        rank.flow.spawn(Toy, ToyConfig())

    assert str(caught.value) == (
        "spawn Toy: got the name 'toy', expected one that is not taken by WorkerGroup(toy on "
        "ranks (0,)); give name=... for a second one"
    )
    assert rank.flow.spawn(Toy, ToyConfig(), name="twin").describe().values_by_rank() == [1]


def test_role_and_pool_that_the_placement_lacks_are_refused(rank: Rank) -> None:
    with pytest.raises(
        ConfigError, match=r"^model 'other': got no pool for this name or its role 'other', e"
    ):
        rank.flow.spawn(Other, ToyConfig())
    with pytest.raises(ConfigError, match=r"^pool 'al': the placement has \['all'\], expected one"):
        rank.flow.pool("al")
    assert rank.flow.pool("all").spawn(Other, ToyConfig()).describe().values_by_rank() == [1]


def test_class_of_a_function_is_refused_as_ranks_cannot_import_it(rank: Rank) -> None:
    class Local(Toy):
        pass

    with pytest.raises(ProtocolError, match=re.escape("<locals>.Local: defined inside a function")):
        rank.flow.spawn(Local, ToyConfig())


def test_keep_takes_one_new_name_at_a_time(rank: Rank, prompts: PromptStream) -> None:
    for things in ({}, {"a": 1, "b": 2}, {"prompts": 3}):
        with pytest.raises(ProtocolError) as caught:
            rank.flow.keep(**things)
        assert str(caught.value) == (
            f"keep: got {sorted(things)} besides ['prompts'], expected one thing with a name of "
            f"its own; call it once for each"
        )


def test_evaluation_without_held_out_prompts_is_an_error_before_the_first_step(
    rank: Rank, toy: WorkerGroup, prompts: PromptStream
) -> None:
    with pytest.raises(ConfigError, match="^evaluate: got no held-out prompts, expected data.eval"):
        rank.flow.evaluate(toy)


def test_evaluation_that_is_refused_and_caught_leaves_later_metrics_those_of_training(
    tmp_path: Path,
) -> None:
    with rank_of_one(tmp_path, eval_path=str(TASK / "eval.jsonl")) as rank:
        flow = rank.flow
        toy = flow.spawn(Toy, ToyConfig())
        prompts = flow.prompts(rank.config.data)
        for step in flow.steps(1):
            with pytest.raises(ProtocolError, match="^flow.evaluate: got WorkerGroup"):
                flow.evaluate(toy)
            batch = draw(prompts, toy)
            toy.measure(batch).metrics()
            metrics = step.metrics(flow.caller.records)

    assert metrics["toy/reported"] == ROWS
    assert not [name for name in metrics if name.startswith("eval/")]


def test_step_logs_metrics_of_calls_and_numbers_of_the_script(
    rank: Rank, toy: WorkerGroup, prompts: PromptStream
) -> None:
    for step in rank.flow.steps(1):
        batch = next(prompts)
        batch |= toy.make(batch)
        step.log(toy.measure(batch), {"mine/a": 1.0}, temperature=0.5)

    logged = step.merge_logged()
    assert logged["mine/a"] == 1 and logged["temperature"] == 0.5
    assert logged["toy/largest"] == max(batch.ids)
