"""verifiers: vf-eval of the taskset `verifiers_sums`, through its interception server."""

import json
import sys
from pathlib import Path

from verifiers.v1.cli.eval.main import main

base_url, model, _ = sys.argv[1:]
main(
    [
        *("verifiers_sums", "-m", model, "--client.base-url", base_url),
        *("--client.api-key-var", "OPENAI_API_KEY", "--no-push", "--no-rich"),
        *("--env.agent.harness.id", "verifiers_sums", "--env.agent.runtime.type", "subprocess"),
        *("--run.name", "sums"),
    ]
)
(file,) = Path("outputs").rglob("traces.jsonl")
(episode,) = file.read_text().splitlines()
(trace,) = json.loads(episode)["traces"]
assert trace["is_completed"] and not trace["errors"], trace["errors"]
nodes = [node["message"] for node in trace["nodes"]]
print("\n" + json.dumps({"rewards": trace["rewards"], "roles": [node["role"] for node in nodes]}))
