"""What the controller knows of the processes of a session."""

from __future__ import annotations

from spmdflow.failure.peers import Peers
from spmdflow.failure.process import Process


def test_ranks_of_one_machine_share_the_number_of_its_first_rank() -> None:
    machines = {4: "b", 0: "a", 1: "b", 2: "a", 3: "c"}
    peers = Peers({rank: Process(rank, 0, node) for rank, node in machines.items()}, own_rank=0)

    assert peers.nodes() == {0: 0, 1: 1, 2: 0, 3: 3, 4: 1}
