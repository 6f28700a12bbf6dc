"""Seeds as pure functions of (run seed, purpose, numbers).

Every random stream of a run (shuffles, mini-batch permutations, samples) takes its seed here,
never from a rank or from the process's generator: results do not depend on the layout, and a
resumed run continues the same streams.
"""

from __future__ import annotations

from hashlib import blake2b


def seed_of(seed: int, purpose: str, *numbers: int) -> int:
    """63-bit seed of one stream, e.g. seed_of(cfg.run.seed, "sample", step, row_id).

    The same arguments give the same seed on every machine and Python version (blake2b over
    the arguments' text); different ones give unrelated seeds.
    """
    text = repr((int(seed), purpose, *map(int, numbers)))
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
