"""Plans that are wrong in one place: every fault is found, and its message names the edge."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmdflow.plan.check import check_group_members
from spmdflow.plan.record import Trace, TracedEdge, row_edges
from tests.proofs.batches import check_batches
from tests.proofs.rows import check_rows
from tests.unit.planned import (
    ROOT,
    SMALL,
    Commands,
    changed,
    find,
    texts,
    traced,
)

SCRIPT = (ROOT / "algos" / "ppo.py").read_text().splitlines()
LINE = 1 + next(i for i, text in enumerate(SCRIPT) if "actor.update_actor(" in text)


@pytest.fixture(scope="module")
def right() -> Trace:
    return traced("ppo", 4, *SMALL, "placement=split")


def edges_of(trace: Trace) -> list[TracedEdge]:
    return list(row_edges(trace.calls))


def named(edge: TracedEdge) -> str:
    return f"edge {edge.source} -> {edge.destination}"


def lacking_sources(text: str, edge: TracedEdge) -> set[int]:
    """Ranks that messages name as those that could have sent an edge's rows."""
    pattern = rf"edge ([\d, or]+) -> {edge.destination}: got no rows"
    return {int(n) for found in re.findall(pattern, text) for n in re.findall(r"\d+", found)}


def send_of(commands: Commands, edge: TracedEdge) -> list[Any]:
    return next(
        send
        for send in commands[edge.source]["sends"]
        if send[0] == edge.destination and tuple(send[1]) == edge.columns
    )


def receive_of(commands: Commands, edge: TracedEdge) -> list[Any]:
    return next(
        receive
        for receive in commands[edge.destination]["receives"]
        if receive[0] == edge.source and tuple(receive[1]) == edge.columns
    )


def drop(commands: Commands, edge: TracedEdge) -> None:
    send = send_of(commands, edge)
    receive = receive_of(commands, edge)
    commands[edge.source]["sends"].remove(send)
    commands[edge.destination]["receives"] = [
        other for other in commands[edge.destination]["receives"] if other is not receive
    ]


def double(commands: Commands, edge: TracedEdge) -> None:
    commands[edge.source]["sends"].append(list(send_of(commands, edge)))
    commands[edge.destination]["receives"].append(list(receive_of(commands, edge)))


def move(commands: Commands, edge: TracedEdge, destination: int) -> None:
    """The edge's rows go to another rank."""
    receive = receive_of(commands, edge)
    drop(commands, edge)
    commands[edge.source]["sends"].append([destination, list(edge.columns), receive[2]])
    there = commands.setdefault(destination, {**commands[edge.source], "sends": [], "receives": []})
    there["receives"].append(receive)


@pytest.mark.parametrize("name", ["right", "layered", "grouped"])
def test_plan_of_a_script_is_proved(name: str, request: pytest.FixtureRequest) -> None:
    trace = request.getfixturevalue(name)

    assert edges_of(trace)
    for check in (check_rows, check_group_members, check_batches):
        assert check(trace) == []  # type: ignore[operator]


@given(data=st.data())
@settings(max_examples=30, deadline=None, derandomize=True)
@pytest.mark.parametrize("name", ["right", "layered"])
def test_dropped_edge_is_found(name: str, data: st.DataObject, request: Any) -> None:
    trace = request.getfixturevalue(name)
    edge = data.draw(st.sampled_from(edges_of(trace)))

    found = check_rows(changed(trace, trace.by_key[edge.release], lambda c: drop(c, edge)))

    sources = lacking_sources(texts(found), edge)
    assert edge.source in sources
    assert edge.destination not in sources


@given(data=st.data())
@settings(max_examples=30, deadline=None, derandomize=True)
@pytest.mark.parametrize("name", ["right", "layered"])
def test_doubled_edge_is_found(name: str, data: st.DataObject, request: Any) -> None:
    trace = request.getfixturevalue(name)
    edge = data.draw(st.sampled_from(edges_of(trace)))

    found = check_rows(changed(trace, trace.by_key[edge.release], lambda c: double(c, edge)))

    assert f"{named(edge)} of transfer" in texts(found)
    assert "twice, expected each row once" in texts(found)


@given(data=st.data())
@settings(max_examples=30, deadline=None, derandomize=True)
@pytest.mark.parametrize("name", ["right", "layered"])
def test_edge_that_goes_to_another_rank_is_found(
    name: str, data: st.DataObject, request: Any
) -> None:
    trace = request.getfixturevalue(name)
    edge = data.draw(st.sampled_from(edges_of(trace)))
    others = [r for r in trace.world if r not in (edge.source, edge.destination)]
    other = data.draw(st.sampled_from(others))

    found = check_rows(changed(trace, trace.by_key[edge.release], lambda c: move(c, edge, other)))

    assert edge.source in lacking_sources(texts(found), edge)
    assert f"edge {edge.source} -> {other} of transfer" in texts(found)


def test_two_edges_with_swapped_rows_are_both_found(right: Trace) -> None:
    release = find(right, "transfer 1 of actor.generate_sequences")
    one, other = [edge for edge in edges_of(right) if edge.release == release.key][:2]

    def swap(commands: Commands) -> None:
        sends = []
        receives = []
        for edge in (one, other):
            sends.append(send_of(commands, edge))
            receives.append(receive_of(commands, edge))
        sends[0][2], sends[1][2] = sends[1][2], sends[0][2]
        receives[0][2], receives[1][2] = receives[1][2], receives[0][2]

    found = texts(check_rows(changed(right, release, swap)))

    for edge in (one, other):
        assert f"{named(edge)} of transfer 1" in found
    assert "which the source does not have" in found
    assert f"-> {one.destination}: got no rows" in found


def test_edge_that_only_one_end_knows_is_found(right: Trace) -> None:
    edge = edges_of(right)[0]
    release = right.by_key[edge.release]

    def forget(commands: Commands) -> None:
        commands[edge.source]["sends"].remove(send_of(commands, edge))

    found = texts(check_rows(changed(right, release, forget)))

    assert f"{named(edge)} of transfer 1" in found
    assert "awaited that are not sent" in found


@pytest.mark.parametrize(("end", "said"), [("sends", "sent"), ("receives", "awaited")])
@pytest.mark.parametrize("name", ["right", "layered"])
def test_edge_that_is_doubled_on_one_end_only_is_found(
    name: str, end: str, said: str, request: Any
) -> None:
    trace = request.getfixturevalue(name)
    edge = edges_of(trace)[0]
    entry_of = {"sends": send_of, "receives": receive_of}[end]

    def double_one_end(commands: Commands) -> None:
        rank = edge.source if end == "sends" else edge.destination
        commands[rank][end].append(list(entry_of(commands, edge)))

    found = texts(check_rows(changed(trace, trace.by_key[edge.release], double_one_end)))

    assert f"{named(edge)} of transfer 1" in found
    assert f"{said} that are not" in found


def test_rows_that_were_freed_before_they_are_read_are_found(right: Trace) -> None:
    update = find(right, "actor.update_actor")
    result = update.commands[0]["inputs"][1]["result"]

    def free(commands: Commands) -> None:
        commands[0]["free"] = [result]

    found = texts(check_rows(changed(right, update, free)))

    assert f"actor.update_actor (call {update.number}, line {LINE}) on rank 0 reads rows" in found


def test_call_that_does_not_reach_a_member_of_its_group_is_found(layered: Trace) -> None:
    update = find(layered, "critic.update_critic")

    found = texts(check_group_members(changed(layered, update, lambda c: c.pop(5))))

    assert (
        f"critic.update_critic (call {update.number}, line {LINE}): got no command for rank 5"
        in found
    )


def test_group_that_a_rank_does_not_make_or_makes_otherwise_is_found(layered: Trace) -> None:
    groups = find(layered, "actor.groups")

    def reorder(commands: Commands) -> None:
        commands[3]["specs"] = commands[3]["specs"][::-1]

    assert "got no command for rank 3" in texts(
        check_group_members(changed(layered, groups, lambda c: c.pop(3)))
    )
    assert "got other groups on rank 3 than on rank 0" in texts(
        check_group_members(changed(layered, groups, reorder))
    )


def test_group_that_nobody_makes_is_found(layered: Trace) -> None:
    groups = find(layered, "actor.groups")

    def leave_out(commands: Commands) -> None:
        for plain in commands.values():
            plain["specs"] = [spec for spec in plain["specs"] if spec[0] != [4, 5]]

    found = texts(check_group_members(changed(layered, groups, leave_out)))

    assert "actor.spawn" in found
    assert "uses the group of ranks [4, 5], which does not exist yet" in found


def test_group_of_devices_without_one_for_host_memory_is_found(layered: Trace) -> None:
    groups = find(layered, "actor.groups")

    def leave_out(commands: Commands) -> None:
        for plain in commands.values():
            plain["specs"] = [[*spec[:2], "nccl"] for spec in plain["specs"]]

    found = texts(check_group_members(changed(layered, groups, leave_out)))

    assert (
        "uses the gloo group of ranks" in found
        and "add these ranks to what host_groups returns" in found
    )


def test_transfer_of_rows_that_a_later_call_makes_is_found(right: Trace) -> None:
    first = next(call for call in right.calls if call.lane == "transfer")
    later = find(right, "actor.update_actor")

    def produced_later(commands: Commands) -> None:
        for plain in commands.values():
            plain["result"] = later.number

    found = texts(check_rows(changed(right, first, produced_later)))

    assert "of transfer 1 of actor.generate_sequences (release" in found
    assert "which the source does not have" in found


def test_mutations_leave_the_plan_itself_as_it_was(right: Trace) -> None:
    before = copy.deepcopy([call.commands for call in right.calls[-3:]])
    edge = edges_of(right)[-1]

    changed(right, right.by_key[edge.release], lambda c: drop(c, edge))

    assert str(before) == str([call.commands for call in right.calls[-3:]])
