"""Limits and slow ranks from how long calls took."""

from __future__ import annotations

from spmdflow.failure.duration import CallDuration, DurationHistory

KEY = ("actor.update", "train")


def _history(*calls: dict[int, CallDuration]) -> DurationHistory:
    history = DurationHistory()
    for durations in calls:
        history.add_call(KEY, durations)
    return history


def _even(seconds: float, *ranks: int) -> dict[int, CallDuration]:
    return {rank: CallDuration(seconds) for rank in ranks}


def test_call_is_looked_at_after_a_minute_or_five_medians() -> None:
    assert _history().report_after(KEY) == 60.0
    assert _history(_even(2.0, 0, 1)).report_after(KEY) == 60.0
    assert _history(_even(20.0, 0), _even(30.0, 0), _even(900.0, 0)).report_after(KEY) == 150.0


def test_call_has_no_limit_before_three_others_then_20_medians_of_the_slowest_rank() -> None:
    assert _history(_even(20.0, 0), _even(20.0, 0)).limit_or_none(KEY) is None
    assert _history(*[_even(0.1, 0, 1)] * 3).limit_or_none(KEY) == 600.0
    assert (
        _history(*[{0: CallDuration(1.0), 1: CallDuration(40.0)}] * 3).limit_or_none(KEY) == 800.0
    )
    assert _history(*[_even(0.1, 0, 1)] * 3).limit_or_none(("actor.update", "eval")) is None


def test_rank_whose_own_seconds_stand_out_is_slow_though_all_end_together() -> None:
    waiting = {0: CallDuration(8.0, 7.9), 1: CallDuration(8.0, 0.1), 2: CallDuration(8.0, 7.8)}
    slow = _history(*[waiting] * 3).slow_rank_or_none(KEY)

    assert slow is not None and slow[0] == 1
    assert abs(slow[1] - 23.7) < 1e-9 and abs(slow[2] - 0.45) < 1e-9


def test_no_rank_is_slow_for_one_call_a_few_seconds_or_half_as_much_again() -> None:
    late = {0: CallDuration(0.1), 1: CallDuration(30.0)}

    assert _history(late, late).slow_rank_or_none(KEY) is None
    assert (
        _history(*[{0: CallDuration(0.1), 1: CallDuration(2.0)}] * 3).slow_rank_or_none(KEY) is None
    )
    assert (
        _history(*[{0: CallDuration(100.0), 1: CallDuration(140.0)}] * 3).slow_rank_or_none(KEY)
        is None
    )
    assert _history(*[_even(30.0, 0)] * 3).slow_rank_or_none(KEY) is None
    assert _history(late, late, late, _even(0.1, 0, 2)).slow_rank_or_none(KEY) is None
