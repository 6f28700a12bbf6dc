"""Device memory that is given back and taken again, seen through views; longer micro-batches."""

from __future__ import annotations

import torch
from tensordict import TensorDict

from spmdflow.data.ragged import ragged
from spmdflow.weights.move import Storages
from spmdflow.workers.micro_batch import micro_batches, pad_length


def test_views_have_their_values_again_after_a_stay_on_the_host() -> None:
    whole = torch.arange(12.0)
    rows = whole.view(3, 4)
    apart = torch.ones(5, dtype=torch.bfloat16)
    storages = Storages([rows[1], whole[8:], apart])

    storages.to_host()
    sizes = [x.untyped_storage().nbytes() for x in (whole, apart)]
    storages.restore()

    assert sizes == [0, 0]
    assert torch.equal(rows, torch.arange(12.0).view(3, 4)) and bool((apart == 1).all())


def test_values_of_a_version_that_the_host_has_are_not_copied_again() -> None:
    for versions, expected in (((0, 1), 7.0), ((0, 0), 1.0), ((None, None), 7.0)):
        tensor = torch.ones(4)
        storages = Storages([tensor])

        storages.to_host(versions[0])
        storages.restore()
        tensor.fill_(7.0)
        storages.to_host(versions[1])
        storages.restore()

        assert bool((tensor == expected).all()), versions


def test_a_part_without_tensors_moves_too() -> None:
    storages = Storages([])

    storages.to_host()
    storages.restore()

    assert storages.num_bytes == 0


def test_dropped_memory_comes_back_as_zeros_and_moves_may_be_repeated() -> None:
    gradients = torch.ones(6)
    storages = Storages([gradients])

    storages.free()
    storages.free()
    storages.restore()
    storages.restore()

    assert torch.equal(gradients, torch.zeros(6))


def test_lengthened_packed_rows_have_a_row_of_padding_at_their_end() -> None:
    columns = {
        "prompts": ragged(torch.arange(3), torch.tensor([2, 1])),
        "responses": ragged(torch.arange(4) + 10, torch.tensor([3, 1])),
    }
    (micro,) = micro_batches(
        TensorDict(columns, batch_size=[2]),
        num_micro_batches=1,
        by_tokens=False,
        device=torch.device("cpu"),
        packed=True,
    )

    longer = pad_length(micro, 4)

    assert longer.input_ids.tolist() == [[*micro.input_ids[0].tolist(), 0]]
    assert longer.position_ids.tolist() == [[0, 1, 0, 1, 2, 3, 4, 0]]
    assert longer.packed is not None and longer.packed.lengths == (2, 5, 1)
    assert torch.equal(longer.predicting, micro.predicting) and pad_length(longer, 4) is longer


def test_lengthened_rows_keep_their_tokens_and_what_predicts_them() -> None:
    prompts = torch.tensor([2, 1])
    responses = torch.tensor([3, 1])
    columns = {
        "prompts": ragged(torch.arange(3), prompts),
        "responses": ragged(torch.arange(4) + 10, responses),
    }
    (micro,) = micro_batches(
        TensorDict(columns, batch_size=[2]),
        num_micro_batches=1,
        by_tokens=False,
        device=torch.device("cpu"),
    )

    longer = pad_length(micro, 4)

    assert longer.input_ids.shape == (2, 8) and pad_length(longer, 4) is longer
    assert torch.equal(longer.input_ids[:, :5], micro.input_ids)
    assert not bool(longer.input_ids[:, 5:].any())
    assert torch.equal(longer.position_ids[0], torch.arange(8))
    scores = torch.randn(2, 8)
    for places in ("predicting", "ends"):
        after = getattr(longer, places)
        before = getattr(micro, places)
        assert torch.equal(scores.flatten()[after], scores[:, :5].flatten()[before])
