"""vLLM's parameters under their Hugging Face names, as views.

vLLM stores q, k and v in one tensor, gate and up in another, and pads vocabularies to a multiple
of 64 rows. On one rank every Hugging Face tensor is a block of rows of one of its parameters, so
a view shows exactly what the forward reads. Knows modules, not vLLM.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor


def hugging_face_views(model: Any) -> dict[str, Tensor]:
    """Hugging Face name -> view of the live parameter, tied tensors once.

    model: a vLLM module of one rank; its `packed_modules_mapping` says what is fused, a fused
    layer's `output_sizes` where to cut, a vocabulary layer's `org_vocab_size` where padding begins.
    """
    fused = getattr(model, "packed_modules_mapping", {})
    views: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        path, _, kind = name.rpartition(".")
        parent, _, layer_name = path.rpartition(".")
        layer, tensor = model.get_submodule(path), parameter.detach()
        if layer_name in fused:
            parts = tensor.split(list(layer.output_sizes))
            names = [f"{parent}.{part}.{kind}" for part in fused[layer_name]]
            views.update(zip(names, parts, strict=True))
        else:
            views[name] = tensor[: getattr(layer, "org_vocab_size", len(tensor))]
    return views
