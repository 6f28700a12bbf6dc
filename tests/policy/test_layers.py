"""Imports go down the layers or sideways inside a room, never in a circle (DESIGN section 9)."""

from __future__ import annotations

import graphlib

from tests.policy.house import import_graph, room_of

LAYERS = [
    ["errors", "log", "kind", "message", "derivative"],
    ["parallel", "blocks", "weights", "cpu"],
    ["config"],
    ["data", "worker_api"],
    ["transfer", "objectives", "rewards", "datasets", "checkpoint", "tracking", "failure"],
    ["runtime", "workers", "rollout", "mapping"],
    ["controller", "hybrid_engine"],
    ["serving", "episodes", "envs"],
    ["models"],
    [
        "run",
        "program",
        "plan",
        "report",
        "view",
        "doctor",
        "live",
        "status",
        "export",
        "replay",
        "__init__",
    ],
    ["__main__"],
]
LAYER_OF = {room: number for number, rooms in enumerate(LAYERS) for room in rooms}
STRANGERS = (LAYER_OF["workers"], LAYER_OF["controller"])
"""Layers whose packages never import one another."""


def _edges() -> list[tuple[str, str, str]]:
    """(importing room, imported room, where), over different rooms."""
    return [
        (room_of(module), room_of(target), where)
        for module, targets in import_graph(with_types=True).items()
        for target, where in targets.items()
        if room_of(module) != room_of(target)
    ]


def test_every_room_has_a_layer() -> None:
    rooms = {room_of(module) for module in import_graph(with_types=True)}

    assert sorted(rooms - set(LAYER_OF)) == [], "give the room a layer in this table"
    assert {"config", "controller", "run"} <= rooms


def test_imports_never_go_up() -> None:
    up = [
        f"{where}: {room} (layer {LAYER_OF[room]}) imports {target} (layer {LAYER_OF[target]})"
        for room, target, where in _edges()
        if LAYER_OF[target] > LAYER_OF[room]
    ]

    assert up == []


def test_packages_that_run_beside_each_other_never_import_one_another() -> None:
    sideways = [
        f"{where}: {room} imports {target}"
        for room, target, where in _edges()
        if LAYER_OF[room] == LAYER_OF[target] and LAYER_OF[room] in STRANGERS
    ]

    assert sideways == []


def test_nothing_but_the_command_imports_the_package_itself() -> None:
    importers = [(room, where) for room, target, where in _edges() if target == "__init__"]

    assert [where for room, where in importers if room != "__main__"] == []


def test_rooms_have_no_cycle() -> None:
    graph: dict[str, set[str]] = {}
    for room, target, _ in _edges():
        graph.setdefault(room, set()).add(target)

    assert list(graphlib.TopologicalSorter(graph).static_order())


def test_modules_have_no_cycle() -> None:
    """Imports for types alone count: who names a class must know its file."""
    imports = import_graph(with_types=True)
    graph = {module: set(targets) - {module} for module, targets in imports.items()}

    assert list(graphlib.TopologicalSorter(graph).static_order())
