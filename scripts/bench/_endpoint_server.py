"""A real endpoint and real recorders with a scripted generator, in a process of its own.

Started by scripts/bench/endpoint.py in the source tree that is measured, so it uses only what old
commits have too. Each line on stdin is a number of episodes to open; the answer is a line of JSON:
[[path, key], ...]. Every request is answered with the same tokens, at once.
"""

from __future__ import annotations

import gc
import json
import sys
import threading
from inspect import signature
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch

from spmdflow.datasets.chat import ChatTemplate
from spmdflow.datasets.tokenizer import load_tokenizer
from spmdflow.episodes.endpoint import Endpoint
from spmdflow.episodes.recorder import Limits, Recorder
from spmdflow.rollout.forward import end_tokens
from spmdflow.rollout.resumable import VersionedResponse


def main() -> None:
    """Serve until stdin ends."""
    folder = str(Path(sys.argv[1]) / "algos" / "guess" / "model")
    tokenizer = load_tokenizer(folder)
    chat = ChatTemplate(tokenizer)
    ends = end_tokens(folder)
    limits = Limits(
        9, max_prompt_tokens=100, max_new_tokens=100, may_fork=False, vocab_size=len(tokenizer)
    )
    ids = [*tokenizer("guess", add_special_tokens=False).input_ids, ends[0]]
    response = VersionedResponse(
        0,
        torch.tensor(ids),
        torch.full((len(ids),), -0.5),
        versions=torch.zeros(len(ids)).int(),
    )
    endpoint = Endpoint(*_endpoint_arguments(tokenizer))
    gc.freeze()  # as runs do: otherwise collections of 0.2 s disturb some of the rounds
    threading.Thread(target=draw, args=(endpoint, response), daemon=True).start()
    number = 0
    names: list[str] = []
    for line in sys.stdin:
        for name in names:
            endpoint.forget(name)
        names = []
        told = []
        for _ in range(int(line)):
            recorder = Recorder(chat, ends, limits)
            name, arguments = endpoint.open(number, recorder)
            number += 1
            names.append(name)
            url = urlsplit(arguments["base_url"])
            told.append([url.port, url.path, arguments["api_key"]])
        print(json.dumps(told), flush=True)
    endpoint.close()


def _endpoint_arguments(tokenizer: Any) -> list[Any]:
    """The arguments of Endpoint in this tree: old ones take the tokenizer."""
    if "tokenizer" in signature(Endpoint).parameters:
        return [tokenizer]
    return []


def draw(endpoint: Endpoint, response: VersionedResponse) -> None:
    """Answer every request with this response."""
    while True:
        item = endpoint.inbox.get()
        if hasattr(item, "done"):
            item.done(response)


if __name__ == "__main__":
    main()
