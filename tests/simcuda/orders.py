"""Would what the ranks started on their groups end on NCCL? Reads the records of a simulated run.

On a GPU the operations of a rank queue up on its device: one that waits for another rank holds
back all that was started after it. gloo is kinder, so an order that hangs only there is looked for
in the record:

1. every member of a group makes the same collectives, with the same sizes and dtypes, in one order
   (those that divide rows unevenly, as among experts, may differ in the number of rows);
2. a message has a sender and a receiver, and both say the same size and dtype;
3. no cycle: an operation waits for those that its rank started before it. On NCCL all threads of a
   rank share a queue, and the messages of one batch_isend_irecv go together; on gloo a thread waits
   for a collective, but not for a message;
4. NCCL knows no tags, and a communicator belongs to one lane of a rank and its autograd thread;
5. the first operation of a rank on a communicator holds its thread up until all members have come
   to theirs, so all of them must, and these meetings have no cycle either. A message outside of
   batch_isend_irecv has a communicator of its two ranks.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import networkx

_MESSAGES = ("send", "recv")
_UNEQUAL_ROWS = frozenset({"alltoall_base", "allgather", "reduce_scatter"})
"""Collectives in which each member may have another number of rows."""
_UNEQUAL_SIZES = ("gather", "scatter", "barrier")
"""Members of gloo's gather and scatter may hold nothing."""


@dataclass(frozen=True)
class Operation:
    """One operation that a rank started on a group."""

    rank: int
    group: str
    """backend:name:[ranks]"""
    op: str
    shapes: tuple[tuple[tuple[int, ...], str], ...]
    """(sizes, dtype) of each tensor."""
    peer: int = -1
    """Of a message and of an operation with a root: the other's rank in the group."""
    tag: int = 0
    thread: str = "MainThread"
    line: str = ""
    batch: int | None = None
    """Messages that were started together."""

    @property
    def backend(self) -> str:
        return self.group.partition(":")[0]

    @property
    def members(self) -> list[int]:
        return list(json.loads(self.group.rpartition(":")[2]))

    @property
    def is_message(self) -> bool:
        return self.op in _MESSAGES

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.op} on {self.group} at {self.line}"


Ranks = Mapping[int, Sequence[Operation]]


def read(folder: Path) -> dict[str, dict[int, list[Operation]]]:
    """Run -> rank -> its operations, in the order in which they were started."""
    runs: dict[str, dict[int, list[Operation]]] = defaultdict(dict)
    for path in sorted(folder.glob("*.json")):
        record = json.loads(path.read_text())
        for entry in record["operations"]:
            name = entry.pop("run")
            shapes = tuple((tuple(size), dtype) for size, dtype in entry.pop("shapes"))
            operation = Operation(rank=record["rank"], shapes=shapes, **entry)
            runs[name].setdefault(record["rank"], []).append(operation)
    return dict(runs)


def read_waits(folder: Path, rank: int = 0) -> dict[str, Counter[tuple[str, str]]]:
    """Run -> (what, file:function) -> how often the host of a rank waited there for its device."""
    runs: dict[str, Counter[tuple[str, str]]] = defaultdict(Counter)
    for name, what, line, number, _ in _record(folder, rank)["waits"]:
        runs[name][what, line] = number
    return dict(runs)


def is_wait(what: str) -> bool:
    """Whether the host waited there for its device; a copy may go on behind."""
    return "wait" in what or not what.startswith("copy ")


def costs(folder: Path, rank: int = 0) -> dict[str, Counter[str]]:
    """Run -> waits of a rank's host, copies between host and device, those that wait, their bytes,
    and the operators that its device was given."""
    runs: dict[str, Counter[str]] = defaultdict(Counter)
    record = _record(folder, rank)
    for name, what, _, number, size in record["waits"]:
        found = runs[name]
        found["waits"] += number * is_wait(what)
        if what.startswith("copy "):
            found["copies"] += number
            found["copies that wait"] += number * is_wait(what)
            found["bytes"] += size
    for name, launches in record["launches"].items():
        runs[name]["operators"] = sum(launches.values())
    return dict(runs)


def read_memory(folder: Path, rank: int = 0) -> dict[str, dict[int, tuple[int, int]]]:
    """Run -> step -> (bytes, blocks) of tensors that were on a rank's device after it."""
    return {
        name: {int(step): (used, blocks) for step, (used, blocks) in steps.items()}
        for name, steps in _record(folder, rank)["memory"].items()
    }


def _record(folder: Path, rank: int) -> dict[str, Any]:
    (path,) = folder.glob(f"{rank}-*.json")
    return dict(json.loads(path.read_text()))


def problems(ranks: Ranks) -> list[str]:
    """What is wrong with the operations of one run; [] if nothing is."""
    return [*_mismatches(ranks), *_cycles(ranks), *_rules(ranks), *_first_uses(ranks)]


def _events(operations: Iterable[Operation]) -> Iterator[tuple[Hashable, Operation]]:
    """Each operation with the event that it takes part in: one of a group, or one of a pair."""
    seen: Counter[Hashable] = Counter()
    for each in operations:
        key: tuple[Hashable, ...] = (each.group,)
        if each.is_message:
            own = each.rank
            other = each.members[each.peer]
            key = (each.group, *((own, other) if each.op == "send" else (other, own)))
        yield (*key, seen[key]), each
        seen[key] += 1


def _mismatches(ranks: Ranks) -> Iterator[str]:
    parts: dict[Hashable, list[Operation]] = defaultdict(list)
    for operations in ranks.values():
        for event, each in _events(operations):
            parts[event].append(each)
    for found in parts.values():
        first = found[0]
        expected = {first.rank, first.members[first.peer]} if first.is_message else {*first.members}
        lacking = sorted(expected - {each.rank for each in found})
        if lacking:
            yield f"{first}: never started by ranks {lacking}"
        for other in found[1:]:
            if _content(other) != _content(first):
                yield f"{first} has {_content(first)}, but {other} has {_content(other)}"


def _content(each: Operation) -> tuple[Any, ...]:
    """What all members must agree on."""
    if each.is_message:
        return tuple((prod(size), dtype) for size, dtype in each.shapes)
    unequal = each.op == "barrier" or (each.backend == "gloo" and each.op in _UNEQUAL_SIZES)
    shapes: tuple[Any, ...] = () if unequal else each.shapes
    if each.op in _UNEQUAL_ROWS:
        shapes = tuple((size[1:], dtype) for size, dtype in each.shapes)
    return (each.op, each.peer, shapes)


_Queue = list[list[tuple[Hashable, Operation]]]


def _cycles(ranks: Ranks) -> Iterator[str]:
    for backends in ({"nccl"}, {"nccl", "gloo"}):
        queues = [q for operations in ranks.values() for q in _queues(operations, backends)]
        if found := _cycle(queues):
            size, why = found
            yield f"a cycle of {size} operations on {' and '.join(sorted(backends))}: {why}"
            return


def _cycle(queues: Iterable[_Queue]) -> tuple[int, str] | None:
    """(number of operations, the first of them) that wait for each other in a circle."""
    graph = networkx.DiGraph()
    for queue in queues:
        for before, after in pairwise(queue):
            graph.add_edges_from(
                (first, second, {"why": f"{one}, then {two}"})
                for first, one in before
                for second, two in after
            )
    try:
        cycle = networkx.find_cycle(graph)
    except networkx.NetworkXNoCycle:
        return None
    return len(cycle), "; ".join(graph.edges[edge[:2]]["why"] for edge in cycle[:4])


def _first_uses(ranks: Ranks) -> Iterator[str]:
    """Communicators that some members never use, and first uses that wait for each other."""
    joined: dict[Hashable, dict[int, Operation]] = defaultdict(dict)
    members: dict[Hashable, set[int]] = {}
    queues = []
    for rank, operations in ranks.items():
        by_thread: dict[str, _Queue] = defaultdict(list)
        for event, each in _events(operations):
            if each.backend == "gloo":
                if not each.is_message:
                    by_thread[each.thread].append([(event, each)])
                continue
            key, needed = _communicator(each)
            members[key] = needed
            if rank not in joined[key]:
                joined[key][rank] = each
                by_thread[each.thread].append([(("first use", key), each)])
        queues += by_thread.values()
    for key, found in joined.items():
        if lacking := sorted(members[key] - set(found)):
            first = next(iter(found.values()))
            yield f"{first} is its first use, which ranks {lacking} never reach"
    if cycle := _cycle(queues):
        yield f"a cycle of {cycle[0]} first uses and collectives of hosts: {cycle[1]}"


def _communicator(each: Operation) -> tuple[Hashable, set[int]]:
    """Key and members of the communicator that an operation on NCCL takes."""
    if each.is_message and each.batch is None:
        pair = {each.rank, each.members[each.peer]}
        return (each.group, *sorted(pair)), pair
    return (each.group,), set(each.members)


def _queues(operations: Iterable[Operation], backends: set[str]) -> Iterable[_Queue]:
    """By queue of a rank: what it starts one after another, batches together."""
    queues: dict[str, list[list[tuple[Hashable, Operation]]]] = defaultdict(list)
    batches: dict[str, int | None] = {}
    for event, each in _events(operations):
        if each.backend not in backends or (each.backend == "gloo" and each.is_message):
            continue
        names = [each.thread] if each.backend == "gloo" else ["the device", each.thread]
        for name in names:
            if each.batch is not None and batches.get(name) == each.batch:
                queues[name][-1].append((event, each))
            else:
                queues[name].append([(event, each)])
            batches[name] = each.batch
    return queues.values()


def _rules(ranks: Ranks) -> Iterator[str]:
    threads: dict[tuple[int, str], set[str]] = defaultdict(set)
    for operations in ranks.values():
        for each in operations:
            if each.backend == "nccl":
                threads[each.rank, each.group].add(each.thread)
                if each.tag:
                    yield f"{each}: tag {each.tag}, which NCCL ignores"
    for (rank, group), names in threads.items():
        lanes = {name for name in names if not name.startswith("Dummy")}
        if len(lanes) > 1:
            yield f"rank {rank}: {group} is used by several threads: {sorted(lanes)}"
