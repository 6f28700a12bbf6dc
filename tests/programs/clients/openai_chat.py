"""openai: a loop of tools with chat completions, the last reply streamed."""

import json
import sys
from typing import Any

from openai import OpenAI

MODEL = sys.argv[2]

client = OpenAI()
tools: Any = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
                "additionalProperties": False,
            },
            "strict": True,
        },
    }
]
messages: Any = [
    {"role": "developer", "content": "Answer in one sentence."},
    {"role": "user", "content": "What is the weather in Paris and in Rome?"},
]
first = client.chat.completions.create(model=MODEL, messages=messages, tools=tools)
message = first.choices[0].message
messages.append(message)
cities = []
for call in message.tool_calls or []:
    city = json.loads(call.function.arguments)["city"]
    cities.append(city)
    messages.append({"role": "tool", "tool_call_id": call.id, "content": f"{city}: 21 degrees"})
second = client.chat.completions.create(model=MODEL, messages=messages, tools=tools)
messages.append(second.choices[0].message)
messages.append({"role": "user", "content": "And tomorrow?"})
parts = []
stream = client.chat.completions.create(model=MODEL, messages=messages, tools=tools, stream=True)
for chunk in stream:
    if chunk.choices and chunk.choices[0].delta.content:
        parts.append(chunk.choices[0].delta.content)
result = {
    "cities": cities,
    "finish": first.choices[0].finish_reason,
    "answer": second.choices[0].message.content,
    "streamed": "".join(parts),
}
print(json.dumps(result))
