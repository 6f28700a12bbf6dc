"""openai: a tool with the Responses API, continued by previous_response_id, and streamed."""

import json
import sys
from typing import Any

from openai import OpenAI

MODEL = sys.argv[2]

client = OpenAI()
tools: Any = [
    {
        "type": "function",
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
        "strict": True,
    }
]
items: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
first = client.responses.create(model=MODEL, input=items, tools=tools, reasoning={"effort": "low"})
items += first.output
cities = []
for item in first.output:
    if item.type == "function_call":
        city = json.loads(item.arguments)["city"]
        cities.append(city)
        output = {"type": "function_call_output", "call_id": item.call_id}
        items.append({**output, "output": f"{city}: 21 degrees"})
second = client.responses.create(model=MODEL, input=items, tools=tools)
with client.responses.stream(
    model=MODEL, input="And tomorrow?", tools=tools, previous_response_id=second.id
) as stream:
    deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
    last = stream.get_final_response()
result = {
    "cities": cities,
    "kinds": [item.type for item in first.output],
    "answer": second.output_text,
    "streamed": "".join(deltas),
    "last": last.output_text,
}
print(json.dumps(result))
