"""`Amount`: bytes of weights, told apart by why they are there. Integers only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from spmdflow.hybrid_engine.bucket import Bucket
from spmdflow.hybrid_engine.reshard import ReshardPlan
from spmdflow.weights.architecture import Architecture
from spmdflow.weights.ranks import RankTables
from spmdflow.weights.table import EMBEDDING, ShardTable

_WHOLE = ("norm.weight", "o_proj.bias", "down_proj.bias", "score.weight")
"""Ends of the names of tensors that every tensor-parallel rank of a stage holds."""
_FIRST_LAYER = "model.layers.0.input_layernorm.weight"


@dataclass(frozen=True)
class Amount:
    """Bytes, by why they are there."""

    sharded: int = 0
    """Weights divided over tensor-parallel ranks and stages: what the formulas count."""
    replicated: int = 0
    """Norms and biases held by every tensor-parallel rank of a stage."""
    tied_copy: int = 0
    """The embedding on a stage after the first. A difference may be negative: the copy saves."""
    padding: int = 0
    """Vocabulary rows beyond the model's, alignment, and rows as long as the largest stage."""

    @property
    def total(self) -> int:
        """All bytes."""
        return self.sharded + self.replicated + self.tied_copy + self.padding

    def __add__(self, other: Amount) -> Amount:
        return Amount(
            self.sharded + other.sharded,
            self.replicated + other.replicated,
            self.tied_copy + other.tied_copy,
            self.padding + other.padding,
        )

    def __sub__(self, other: Amount) -> Amount:
        return self + Amount(-other.sharded, -other.replicated, -other.tied_copy, -other.padding)


ByRank = Mapping[int, Amount]
"""By global rank."""


def summed(amounts: Iterable[Amount]) -> Amount:
    """Their sum."""
    return sum(amounts, Amount())


def together(some: ByRank, more: ByRank) -> ByRank:
    """Rank by rank; both have the same ranks."""
    return {rank: amount + more[rank] for rank, amount in some.items()}


def weights(arch: Architecture, tables: RankTables, *, element_bytes: int) -> ByRank:
    """What each rank holds in the tensors of its table, vocabulary padding included."""
    known: dict[int, Amount] = {}
    for table in tables.values():  # ranks that hold the same share a table
        if id(table) not in known:
            known[id(table)] = summed(_amounts(arch, table, element_bytes))
    return {rank: known[id(table)] for rank, table in tables.items()}


def received(arch: Architecture, plan: ReshardPlan, have: RankTables, need: RankTables) -> ByRank:
    """What reaches each rank over the wire: what it needs, less what it needs and has."""
    size = plan.element_bytes
    found = {}
    needs = weights(arch, need, element_bytes=size)
    for rank, needed in needs.items():
        copies = _copies(have.get(rank, {}))
        kept = summed(
            _amount(arch, part.name, part.box.size * size, is_copy=part.name in copies)
            for part in plan.local_parts(rank)
        )
        found[rank] = needed - Amount(padding=needed.padding) - kept
        assert found[rank].total == plan.received_bytes(rank), (rank, found[rank])
    return found


def _amounts(arch: Architecture, table: ShardTable, element_bytes: int) -> Iterator[Amount]:
    copies = _copies(table)
    for tensor in table.values():
        yield Amount(padding=tensor.padding * element_bytes)
        for piece in tensor.pieces:
            size = piece.box.size * element_bytes
            yield _amount(arch, piece.name, size, is_copy=piece.name in copies)


def _amount(arch: Architecture, name: str, size: int, *, is_copy: bool) -> Amount:
    if is_copy:
        return Amount(tied_copy=size)
    if name.endswith(_WHOLE):
        return Amount(replicated=size)
    return Amount(sharded=size)


def _copies(table: ShardTable) -> set[str]:
    """The embedding's name if the table is of a later stage, which has it as its output layer."""
    is_first = _FIRST_LAYER in table or "embedding.word_embeddings.weight" in table
    return set() if is_first else {EMBEDDING}


def sent_by(bucket: Bucket) -> Counter[int]:
    """Elements that each source packs, once for all destinations."""
    found = Counter[int]()
    for message in bucket.messages:
        found[message.source] += message.num_elements
    return found


def received_by(bucket: Bucket) -> Counter[int]:
    """Elements that reach each destination."""
    found = Counter[int]()
    for message in bucket.messages:
        found.update(dict.fromkeys(message.destinations, message.num_elements))
    return found


def staging_bytes(plan: ReshardPlan, rank: int) -> int:
    """The most bytes that a rank packs and receives in one bucket: its buffers."""
    sizes = (sent_by(bucket)[rank] + received_by(bucket)[rank] for bucket in plan.buckets)
    return plan.element_bytes * max(sizes, default=0)
