"""Episodes that end while their requests are under way: no request is left without an answer."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable
from typing import cast
from urllib.parse import urlsplit

import pytest

from spmdflow.datasets.chat import ChatTemplate
from spmdflow.episodes.endpoint import Endpoint
from spmdflow.episodes.leader import ReplicaLeader
from spmdflow.episodes.pool import EndedEpisode, EnvironmentPool
from spmdflow.episodes.recorder import Limits, Recorder
from tests.unit.episodes.test_conversation import text_tokenizer


class EndingPool:
    """Its one episode sends requests, and ends as the first one comes."""

    def __init__(self, endpoint: Endpoint, num_requests: int) -> None:
        self._endpoint = endpoint
        self._num_requests = num_requests
        self.clients: list[http.client.HTTPConnection] = []
        self._running = [0]

    def start_waiting(self, enter: Callable[[int], dict[str, str]]) -> None:
        told = {} if self.clients else enter(0)
        for _ in range(self._num_requests if told else 0):
            place = urlsplit(told["base_url"])
            key = f"Bearer {told['api_key']}"
            client = http.client.HTTPConnection(str(place.hostname), place.port, timeout=100.0)
            body = json.dumps({"prompt": "a"})
            client.request("POST", f"{place.path}/completions", body, {"authorization": key})
            self.clients.append(client)

    def advance(
        self, seconds: float, *, wake: int, faults: Callable[[], object]
    ) -> list[EndedEpisode]:
        while self._running and not self._all_are_there():
            time.sleep(0.001)
        faults()
        ended = self._running
        self._running = []
        return [EndedEpisode(number, None, "gone") for number in ended]

    def _all_are_there(self) -> bool:
        (episode,) = self._endpoint._episodes.values()
        return episode.under_way == self._endpoint.inbox.qsize() == self._num_requests


@pytest.mark.parametrize("num_requests", [1, 2])
def test_requests_of_an_episode_that_ends_as_they_come_are_cut_off(num_requests: int) -> None:
    tokenizer = text_tokenizer()
    limits = Limits(
        9, max_prompt_tokens=9, max_new_tokens=9, may_fork=True, vocab_size=len(tokenizer)
    )
    ends = (tokenizer.eos_token_id,)

    def new_recorder(number: int) -> Recorder:
        return Recorder(ChatTemplate(tokenizer), ends, limits)

    endpoint = Endpoint()
    pool = EndingPool(endpoint, num_requests)
    lead = ReplicaLeader(cast(EnvironmentPool, pool), endpoint, new_recorder, lambda draw: None)

    assert lead.collect_changes(lambda: True, idle=True).added == []
    for client in pool.clients:
        with pytest.raises(http.client.RemoteDisconnected):
            client.getresponse()
    endpoint.close()
