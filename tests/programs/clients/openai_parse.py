"""openai: structured outputs by `parse`, with chat completions and with the Responses API."""

import json
import sys

from openai import OpenAI
from pydantic import BaseModel

MODEL = sys.argv[2]


class Step(BaseModel):
    """A step of a calculation."""

    explanation: str
    output: str


class Solution(BaseModel):
    """A calculation."""

    steps: list[Step]
    answer: int


client = OpenAI()
chat = client.chat.completions.parse(
    model=MODEL,
    messages=[{"role": "user", "content": "Solve 3x = 12"}],
    response_format=Solution,
)
response = client.responses.parse(model=MODEL, input="Solve 5x = 10", text_format=Solution)
first = chat.choices[0].message.parsed
second = response.output_parsed
assert first is not None and second is not None
print(json.dumps({"chat": first.model_dump(), "responses": second.model_dump()}))
