"""`spmdflow weights`: which elements of a model's tensors each rank has, for any layout.

    spmdflow weights MODEL --ranks 4                                # FSDP, built-in generator
    spmdflow weights MODEL --ranks 4 --engine megatron --layout t2 --generator vllm --generation t1
    spmdflow weights MODEL --ranks 2 --rank 0 --match layers.0      # the tensors of one layer

MODEL: a Hugging Face folder; only config.json is read. Of a family without a table, the tensors are
those of transformers' module. If vLLM's table of a family is not recorded, its own loader derives
it, which needs vLLM, the weights, and --generation t1 (a run derives t2 and more on as many ranks).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path

from spmdflow.blocks.box import Box, subtract_all
from spmdflow.config.parallel import check_ranks, sizes_of
from spmdflow.errors import ConfigError
from spmdflow.kind.engine import engine_kind, engine_names
from spmdflow.kind.generator import generator_kind, generator_names
from spmdflow.kind.registry import resolve
from spmdflow.parallel.layout import Layout
from spmdflow.weights.architecture import Architecture
from spmdflow.weights.folder import with_tensors
from spmdflow.weights.ranks import RankTables, is_derived, tables_of
from spmdflow.weights.table import LocalTensor, shapes_by_name

FINISHED = 0
REFUSED = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables of a model; return 0, or 2 if it or a layout is refused.

    arguments: default: sys.argv.
    """
    options = _parse(arguments)
    try:
        for line in lines(options):
            sys.stdout.write(line + "\n")
    except ConfigError as err:
        sys.stderr.write(f"spmdflow: {err}\n")
        return REFUSED
    return FINISHED


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="spmdflow weights",
        description="Show which elements of a model's tensors each rank trains and generates with.",
    )
    parser.add_argument("model", type=Path, metavar="MODEL", help="a Hugging Face folder")
    parser.add_argument("--ranks", type=int, default=1, help="of the pool (default: 1)")
    parser.add_argument("--engine", default=engine_names()[0], help=", ".join(engine_names()))
    parser.add_argument("--layout", default="t1", help="of training, such as t2p2 (default: t1)")
    parser.add_argument(
        "--generator", default=generator_names()[0], help=", ".join(generator_names())
    )
    parser.add_argument("--generation", default="t1", help="layout of generation (default: t1)")
    parser.add_argument("--rank", type=int, help="show the tensors of this rank")
    parser.add_argument("--match", default="", help="show tensors whose name contains this")
    return parser.parse_args(arguments)


def lines(options: argparse.Namespace) -> Iterator[str]:
    """Yield the lines of the report. ConfigError if the model or a layout cannot be used."""
    architecture = Architecture.sizes_from_folder(options.model)
    if architecture.obstacle:
        architecture = with_tensors(architecture, options.model)
    layout = _layout(options)
    shapes = shapes_by_name(architecture)
    total = sum(map(prod, shapes.values()))
    yield f"{options.model}: {len(shapes)} tensors, {total:,} weights"
    kinds = (
        ("trains", options.engine, engine_kind(options.engine, key="--engine").weight_table),
        (
            "generates",
            options.generator,
            generator_kind(options.generator, key="--generator").weight_table,
        ),
    )
    for verb, name, reference in kinds:
        generator = generator_kind(options.generator)
        if verb == "generates" and is_derived(generator, architecture):
            tables = _derive_tables(options, layout)
        else:
            tables = tables_of(reference, architecture, layout)
        yield ""
        yield f"{verb} with {name}"
        yield from _table_lines(tables, shapes, options)


def _layout(options: argparse.Namespace) -> Layout:
    """The layout of the pool. ConfigError if the sizes do not fit its number of ranks."""
    training = sizes_of("--layout", options.layout)
    generation = sizes_of("--generation", options.generation)
    check_ranks("--layout", training, options.ranks)
    check_ranks("--generation", generation, options.ranks)
    return Layout(
        tuple(range(options.ranks)),
        pp_size=training.pp,
        dp_size=options.ranks // training.replica,
        tp_size=training.tp,
        cp_size=training.cp,
        shard_size=training.shard,
        expert_size=training.ep,
        virtual_size=training.virtual,
        gen_tp_size=generation.tp,
        gen_pp_size=generation.pp,
        gen_expert_size=generation.ep,
    )


def _derive_tables(options: argparse.Namespace, layout: Layout) -> RankTables:
    """What a rank of the generator has, as its loader says. ConfigError for several ranks."""
    if layout.gen_tp_size * layout.gen_pp_size > 1:
        raise ConfigError.of(
            "--generation",
            f"{options.generation} for a model whose table only the generator's loader knows",
            "t1, as the ranks of a replica load together",
            "start a run: it derives the table on all its ranks",
        )
    table = resolve(generator_kind(options.generator).derived_table)(str(options.model))
    return dict.fromkeys(layout.ranks, table)


def _table_lines(
    tables: RankTables, shapes: Mapping[str, Sequence[int]], options: argparse.Namespace
) -> Iterator[str]:
    """Yield a summary of each rank, whether all ranks together have everything, and the tensors
    that --rank and --match choose."""
    for rank, table in tables.items():
        size = sum(piece.box.size for local in table.values() for piece in local.pieces)
        padding = sum(local.padding for local in table.values())
        more = f", {padding:,} of padding" if padding else ""
        yield f"  rank {rank}: {len(table)} tensors, {size:,} weights{more}"
    missing = _missing(tables, shapes)
    if missing:
        yield f"  no rank has {missing}"
    else:
        yield "  the ranks together have every element"
    if options.rank is None and not options.match:
        return
    for rank, table in tables.items():
        if options.rank not in (None, rank):
            continue
        for name, local in table.items():
            if options.match in name:
                yield f"  rank {rank}  {name} {_shape(local.shape)} = {_pieces(name, local)}"


def _missing(tables: RankTables, shapes: Mapping[str, Sequence[int]]) -> str:
    """The first elements that no rank has; empty if there are none."""
    boxes: dict[str, list[Box]] = {name: [] for name in shapes}
    for table in tables.values():
        for local in table.values():
            for piece in local.pieces:
                boxes[piece.name].append(piece.box)
    for name, shape in shapes.items():
        left = subtract_all([Box.of_shape(shape)], boxes[name])
        if left:
            return f"{name}{_range(left[0])}"
    return ""


def _pieces(name: str, local: LocalTensor) -> str:
    """The pieces of a local tensor; those of the tensor of its own name without the name."""
    parts = []
    for piece in local.pieces:
        turned = f" along axes {piece.axes}" if piece.axes else ""
        own = "" if piece.name == name else piece.name
        parts.append(f"{own}{_range(piece.box)}{turned}")
    return " + ".join(parts) or "padding"


def _range(box: Box) -> str:
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in box.bounds) + "]"


def _shape(shape: Sequence[int]) -> str:
    return "(" + ", ".join(map(str, shape)) + ")"


if __name__ == "__main__":
    sys.exit(main())
