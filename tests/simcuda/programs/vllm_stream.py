"""Which stream a thread computes on after vLLM has asked for one, as a start of its engine does.

python tests/simcuda/programs/vllm_stream.py      prints one line of JSON
"""

from __future__ import annotations

import json
from importlib import import_module

import torch

from spmdflow.rollout.vllm_process import preserve_process_state


def main() -> None:
    """Ask as pynccl and the capture of graphs do, and compare with before."""
    before = torch.cuda.current_stream()
    with preserve_process_state(own_variables="VLLM_"):
        stream_of_vllm = import_module("vllm.utils.torch_utils").current_stream
        inside = stream_of_vllm()
        moved = torch.cuda.current_stream() != before and inside != before
    again = stream_of_vllm()
    facts = {
        "moved inside": moved,
        "torch is back": torch.cuda.current_stream() == before,
        "vllm is back": again == before,
        "torch stays after vllm asks": torch.cuda.current_stream() == before,
    }
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
