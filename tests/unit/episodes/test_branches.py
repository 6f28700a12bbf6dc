"""Second tries, branches, compacted histories and named conversations become segments."""

from __future__ import annotations

from typing import Any

import pytest

from spmdflow.episodes.fields import Ask, Refusal
from spmdflow.episodes.recorder import Recorder, Segment
from tests.unit.episodes.test_conversation import (
    CHATML,
    chat,
    completion,
    drawn_of,
    recorder_of,
    say,
    tokenizer_with,
)


def forking_recorder(**limits: Any) -> Recorder:
    return recorder_of(tokenizer_with(), may_fork=True, **limits)


def named(name: str, *said: str) -> Ask:
    return chat(*said)._replace(name=name)


def sampled(segment: Segment) -> str:
    """What the policy said in a segment, as text."""
    own = [i for i, chosen in zip(segment.tokens, segment.mask, strict=True) if chosen]
    return str(tokenizer_with().decode(own)).strip()


def test_of_three_tries_the_accepted_one_is_continued() -> None:
    recorder = forking_recorder()
    tries = [say(recorder, chat("guess"), word) for word in ("3", "4", "5")]
    say(recorder, chat("guess", tries[1], "higher"), "6")

    assert [sampled(segment) for segment in recorder.segments] == ["3", "4 6", "5"]


def test_a_branch_has_the_recorded_tokens_as_its_prompt_and_trains_them_once() -> None:
    recorder = forking_recorder()
    end = recorder._ends[0]
    ask = chat("guess")
    first = recorder.begin(ask)
    recorder.finish(ask, first, drawn_of([9, end]))  # ids that the text would not give again
    said = str(recorder.segments[0].messages[-1]["content"])
    one = say(recorder, chat("guess", said, "higher"), "5")
    say(recorder, chat("guess", said, "higher", one, "lower"), "4")
    say(recorder, chat("guess", said, "digit"), "7")

    trunk, branch = recorder.segments
    assert trunk.num_sampled == 4 and sampled(branch) == "7"
    kept = len(first.ids) + 2
    assert branch.prompt[:kept] == trunk.ids[:kept] == [*first.ids, 9, end]
    assert branch.prompt[kept:] != trunk.ids[kept : len(branch.prompt)]
    assert [reply.turn for reply in branch.replies] == [3]


def test_replies_of_turns_under_way_at_the_same_time_are_segments() -> None:
    recorder = forking_recorder()
    start = say(recorder, chat("guess"), "3")
    asks = [chat("guess", start, told) for told in ("higher", "lower")]
    turns = [recorder.begin(ask) for ask in asks]
    tokenizer = tokenizer_with()
    for ask, turn, word in zip(asks, turns, ("5", "1"), strict=True):
        recorder.finish(ask, turn, drawn_of(tokenizer(word, add_special_tokens=False).input_ids))

    assert [sampled(segment) for segment in recorder.segments] == ["3 5", "1"]
    assert recorder.segments[1].prompt == turns[1].ids


def test_a_compacted_history_is_a_segment_of_its_own() -> None:
    recorder = forking_recorder()
    say(recorder, chat("guess"), "3")
    say(recorder, chat("digit 3 higher"), "5")

    assert [sampled(segment) for segment in recorder.segments] == ["3", "5"]
    assert all(segment.mask == [True] for segment in recorder.segments)


def test_conversations_of_different_names_are_never_mixed() -> None:
    recorder = forking_recorder()
    replies = {name: say(recorder, named(name, "guess"), "3") for name in ("a", "b", "")}
    for name in ("b", "a", ""):
        turn = recorder.begin(named(name, "guess", replies[name], "higher"))
        assert turn.segment is not None and turn.segment.name == name
        assert turn.number_of_name == 1

    assert [segment.name for segment in recorder.segments] == ["a", "b", ""]


def test_prompts_of_later_segments_may_take_the_room_of_the_whole_row() -> None:
    recorder = forking_recorder(max_prompt_tokens=4, max_new_tokens=8)
    say(recorder, chat("guess"), "3")

    turn = recorder.begin(chat("higher higher higher"))
    assert len(turn.ids) == 5 and turn.max_new_tokens == 7
    with pytest.raises(Refusal, match="room for a reply"):
        recorder.begin(chat(" ".join(["higher"] * 10)))
    with pytest.raises(Refusal, match="room for a reply"):
        forking_recorder(max_prompt_tokens=4).begin(chat("higher higher higher"))


def test_a_branch_that_continues_keeps_within_the_room_of_a_row() -> None:
    recorder = forking_recorder(max_prompt_tokens=4, max_new_tokens=16)
    start = say(recorder, chat("guess"), "3")
    say(recorder, chat("guess", start, "higher lower"), "5")
    branch = say(recorder, chat("guess", start, "lower lower"), "4")
    again = recorder.begin(chat("guess", start, "lower lower", branch, "lower"))

    assert again.segment is recorder.segments[1]
    assert len(again.ids) + again.max_new_tokens == 4 + 16


def finish_choices(recorder: Recorder, ask: Ask, *said: str) -> list[str]:
    """What the client sees of each choice, if the model says this."""
    seen = []
    tokenizer = tokenizer_with()
    for turn, word in zip(recorder.begin_choices(ask), said, strict=True):
        drawn = drawn_of(tokenizer(word, add_special_tokens=False).input_ids)
        seen.append(str(recorder.finish(ask, turn, drawn)[0]["content"]))
    return seen


def test_choices_are_segments_and_the_first_extends_the_conversation() -> None:
    recorder = forking_recorder()
    start = say(recorder, chat("guess"), "3")
    ask = chat("guess", start, "higher", n=3)
    choices = finish_choices(recorder, ask, "5", "6", "7")
    more = chat("guess", start, "higher", choices[1], "lower", n=2)
    finish_choices(recorder, more, "4", "2")

    assert [sampled(each) for each in recorder.segments] == ["3 5", "6 4", "7", "2"]
    trunk, second, third, last = recorder.segments
    assert second.prompt == third.prompt == trunk.ids[:-1]
    assert last.prompt == second.ids[:-1]
    assert [each.replies[-1].turn for each in recorder.segments] == [1, 4, 3, 5]
    assert recorder.num_turns == 6


def test_choices_are_the_replies_to_requests_that_are_sent_one_after_another() -> None:
    at_once = forking_recorder()
    finish_choices(at_once, chat("guess", n=3), "5", "6", "7")
    one_by_one = forking_recorder()
    turns = []
    for word in ("5", "6", "7"):
        turns.append(one_by_one.begin(chat("guess")))
        one_by_one.num_turns -= 1
        say(one_by_one, chat("guess"), word)

    assert [turn.number for turn in turns] == [0, 1, 2]
    assert at_once.segments == one_by_one.segments


def test_choices_of_a_completion_continue_by_their_ids() -> None:
    recorder = forking_recorder()
    ask = completion([5, 6])._replace(num_choices=2)
    for turn, token in zip(recorder.begin_choices(ask), (7, 8), strict=True):
        recorder.finish(ask, turn, drawn_of([token]))
    turn = recorder.begin(completion([5, 6, 8, 9]))

    assert turn.segment is recorder.segments[1] and turn.fresh == [9]


def test_each_choice_counts_as_a_turn() -> None:
    recorder = forking_recorder(max_turns=3)
    say(recorder, chat("guess"), "3")

    with pytest.raises(Refusal, match=r"n=3, which counts as 3 requests, after 1.*max_turns=3"):
        recorder.begin_choices(chat("guess", n=3))
    assert len(recorder.begin_choices(chat("guess", n=2))) == 2
    with pytest.raises(Refusal, match=r"request 4 of an episode.*max_turns=3"):
        recorder.begin(chat("guess"))


def test_without_segments_several_choices_are_refused() -> None:
    with pytest.raises(Refusal, match=r"n: got 2, expected 1.*segments=all"):
        recorder_of(tokenizer_with()).begin_choices(chat("guess", n=2))


def test_without_segments_a_branch_is_refused() -> None:
    recorder = recorder_of(tokenizer_with(CHATML), may_fork=False)
    start = say(recorder, chat("guess"), "3")
    say(recorder, chat("guess", start, "higher"), "5")

    with pytest.raises(Refusal, match="segments=all"):
        recorder.begin(chat("guess", start, "lower"))
