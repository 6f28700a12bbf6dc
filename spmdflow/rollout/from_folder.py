"""A generator with the weights of its own folder: for a policy that nothing trains.

Every generator reads the folder when it is built. Here that is compared with the files, tensor by
tensor, and taken for the weights of version 0.
"""

from __future__ import annotations

from spmdflow.blocks.hash import positional_hash
from spmdflow.errors import WeightSyncError
from spmdflow.kind.generator import generator_names
from spmdflow.rollout.generator import Generator
from spmdflow.weights.folder import folder_tensors


def take_folder_weights(generator: Generator, path: str, *, verify: bool) -> int:
    """Let it generate with the weights of the folder that it was built from.

    verify: compare the hash of each tensor that both know by name. Returns how many were
    compared. All ranks of a generation replica call it. WeightSyncError for one that differs.
    """
    compared = 0
    found = generator.hashes() if verify else {}
    for name, tensor in folder_tensors(path) if verify else ():
        if name not in found:
            continue
        expected = positional_hash(tensor.to(generator.dtype), 0)
        if found[name] != expected:
            raise WeightSyncError(
                f"weights of {path}: got rollout tensor {name} with hash {found[name]:#018x}, "
                f"expected the file's {expected:#018x}; set "
                f"actor.rollout.engine={generator_names()[0]} to see "
                f"whether it is the generator, and report this message"
            )
        compared += 1
    generator.renew(0)
    return compared
