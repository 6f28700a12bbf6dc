"""What the simulated device says of streams, events and copies behind the host's back, as CUDA does
it; part of `behaviours.py`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def refused(*words: str) -> Iterator[None]:
    """The block must raise an error that has all words."""
    try:
        yield
    except Exception as err:
        missing = [word for word in words if word not in str(err)]
        assert not missing, f"{err} lacks {missing}"
    else:
        raise AssertionError("was not refused")


def work_of_two_streams_is_ordered_by_events_and_waits() -> None:
    other = torch.cuda.Stream()
    written = torch.ones(8, device="cuda")
    with torch.cuda.stream(other), refused("aten::add", "stream 0", "aten::fill_", "writes"):
        written + 1
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        read = written + 1
    with refused("aten::zero_ on stream 0 writes", "aten::add", "reads"):
        written.zero_()
    event = other.record_event()
    torch.cuda.current_stream().wait_event(event)
    written.zero_()
    with torch.cuda.stream(other):
        read += 1
    with refused("aten::mul"):
        read * 2
    torch.cuda.synchronize()
    assert (read * 2).tolist() == [6] * 8


def streams_that_only_read_need_no_order() -> None:
    values = torch.ones(8, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        values + 1
    values + 2
    torch.cuda.synchronize()


def parts_of_a_storage_are_used_by_two_streams() -> None:
    whole = torch.zeros(8, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        whole[:4] += 1
    whole[4:] += 1
    with refused("stream race on cuda:0"):
        whole[3:] += 1
    torch.cuda.synchronize()


def the_wait_of_one_event_is_none_for_later_work() -> None:
    other = torch.cuda.Stream()
    with torch.cuda.stream(other):
        values = torch.ones(8, device="cuda")
        event = torch.cuda.Event()
        event.record()
        values += 1
    event.synchronize()
    with refused("stream race"):
        values * 2
    torch.cuda.synchronize()


def memory_is_not_freed_while_another_stream_uses_it() -> None:
    def used_by_another() -> tuple[torch.Tensor, torch.cuda.Stream]:
        made = torch.ones(1 << 18, device="cuda")
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            made + 1
        return made, stream

    made, _ = used_by_another()
    del made
    with refused("freed too early", "aten::add", "record_stream"):
        torch.empty(1 << 18, device="cuda")
    torch.cuda.synchronize()
    made, stream = used_by_another()
    made.record_stream(stream)
    del made
    torch.empty(1 << 18, device="cuda")
    made, stream = used_by_another()
    torch.cuda.current_stream().wait_stream(stream)
    del made
    torch.empty(1 << 18, device="cuda")


def backward_runs_on_the_stream_of_its_forward() -> None:
    layer = nn.Linear(8, 8, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        loss = layer(torch.ones(2, 8, device="cuda")).sum()
    loss.backward()  # which waits for the gradients' streams at its end
    assert layer.weight.grad.isfinite().all()


def copies_to_pinned_memory_have_come_when_the_host_has_waited() -> None:
    values = torch.arange(8.0, device="cuda")
    target = torch.empty(8, pin_memory=True)
    target.copy_(values, non_blocking=True)
    assert target.isnan().all()
    torch.cuda.synchronize()
    assert target.tolist() == list(range(8))
    target.copy_(values + 1, non_blocking=True)
    again = target.to("cuda", non_blocking=True)  # the same stream, so after the first copy
    assert again.tolist() == list(range(1, 9)) == target.tolist()
    event = torch.cuda.Event()
    target.copy_(values, non_blocking=True)
    event.record()
    event.synchronize()
    assert target.tolist() == list(range(8))


def copies_of_pinned_memory_on_two_streams_are_ordered() -> None:
    target = torch.empty(8, pin_memory=True)
    side = torch.cuda.Stream()
    values = torch.ones(8, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        target.copy_(values, non_blocking=True)
    with refused("stream race", "pinned memory", "stream 0", "writes"):
        target.to("cuda", non_blocking=True)
    torch.cuda.current_stream().wait_stream(side)
    assert target.to("cuda", non_blocking=True).tolist() == [1] * 8


def pinned_memory_is_not_written_before_it_is_copied() -> None:
    source = torch.ones(8, pin_memory=True)
    source.to("cuda", non_blocking=True)
    source[0] = 2
    with refused("pinned memory", "before", "copied"):
        torch.cuda.synchronize()
    source.to("cuda", non_blocking=True)
    torch.cuda.synchronize()
    source[0] = 3
