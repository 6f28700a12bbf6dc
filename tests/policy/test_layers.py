"""Imports go down the layers or sideways inside a room, never in a circle.

A room is a package, or a module next to the packages. The docstring of spmdflow says which rooms
are the library, the system and the tools. The library imports nothing that runs, and the system
imports no tools; the exceptions are listed here.
"""

from __future__ import annotations

import ast
import graphlib

from tests.policy.house import import_graph, room_of, tree_of

LAYERS = [
    [
        "errors",
        "log",
        "kind",
        "message",
        "derivative",
        "renamed",
        "requirement",
        "source_file",
        "deferred_name",
    ],
    ["parallel", "blocks", "weights", "cpu", "router"],
    ["config"],
    ["data", "worker_api"],
    ["transfer", "objectives", "rewards", "datasets", "checkpoint", "tracking", "failure"],
    ["runtime", "workers", "rollout", "mapping"],
    ["controller", "hybrid_engine"],
    ["serving", "episodes", "envs"],
    ["models"],
    [
        "run",
        "start",
        "torchrun",
        "sweep",
        "clean",
        "program",
        "preview",
        "plan",
        "report",
        "throughput",
        "view",
        "doctor",
        "show_weights",
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

LIBRARY = {"objectives", "rewards", "datasets", "envs", "episodes"}
TOOLS = {"plan", "mapping", "view", "report", "status", "live", "doctor", "export", "replay"}
TOOLS |= {"serving", "sweep", "clean", "preview", "show_weights", "throughput"}
SYSTEM = set(LAYER_OF) - LIBRARY - TOOLS

SYSTEM_USES_TOOLS = {
    ("program", "mapping"): "refuses an unknown run.hardware before anything starts",
    ("program", "plan"): "placement=auto asks the planner; a run is compared with its prediction",
    ("program", "view"): "run.view writes the page at the end of a run",
    ("run", "plan"): "says on the terminal that the planner is at work",
    ("models.policy", "serving"): "an actor publishes its weights to servers outside of the run",
}
"""(module of the system, tool that it imports) -> why."""
READ_RECORDS = {"controller.transcript", "controller.capsule", "plan", "view", "report", "status"}
READ_RECORDS |= {"replay", "live", "preview", "throughput", "controller.throughput_log"}
"""What looks at a run through the records of its calls."""
START_THEM = {"controller.script", "program", "run", "__main__"}
"""What puts a run together: it starts what looks at it."""
LIBRARY_USES_SYSTEM = {
    ("episodes", "rollout"): "episodes are played on the run's generator, turn by turn",
}
"""(package of the library, package of the system above the marks of methods) -> why."""


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


def _packages_of_part(part: str) -> set[str]:
    """The packages and modules that the docstring of spmdflow names for a part."""
    page = ast.get_docstring(tree_of("spmdflow/__init__.py")) or ""
    packages: set[str] = set()
    for line in page.splitlines():
        if line.startswith(f"| {part}"):
            packages |= set(line.split("|")[2].replace(",", " ").split())
    return packages


def test_docstring_of_the_package_tells_library_system_and_tools_apart() -> None:
    assert _packages_of_part("library") == LIBRARY
    assert _packages_of_part("tools") == TOOLS
    assert _packages_of_part("system") == SYSTEM - {"__init__", "__main__"}


def test_system_imports_tools_only_where_the_table_says_so() -> None:
    edges = {
        (module.removeprefix("spmdflow."), room_of(target))
        for module, targets in import_graph(with_types=True).items()
        for target in targets
        if room_of(module) in SYSTEM - {"__main__"} and room_of(target) in TOOLS
    }

    assert edges == SYSTEM_USES_TOOLS.keys()


def _reads_records(module: str) -> bool:
    name = module.removeprefix("spmdflow.")
    return name in READ_RECORDS or room_of(module) in READ_RECORDS


def test_nothing_that_trains_imports_what_reads_the_records_of_its_calls() -> None:
    importers = [
        where
        for module, targets in import_graph(with_types=True).items()
        for target, where in targets.items()
        if _reads_records(target)
        and not _reads_records(module)
        and module.removeprefix("spmdflow.") not in START_THEM
    ]

    assert importers == []


def test_library_imports_nothing_that_runs() -> None:
    """It may use settings, columns, the marks of methods and what is below them."""
    highest = LAYER_OF["worker_api"]
    edges = {
        (room, target)
        for room, target, _ in _edges()
        if room in LIBRARY and target not in LIBRARY and LAYER_OF[target] > highest
    }

    assert edges == LIBRARY_USES_SYSTEM.keys()


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
