"""LangGraph: the ready agent with two tools, a memory, streamed tokens and a structured answer."""

import json
import sys
from typing import Any

from langchain.agents import create_agent
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from pydantic import BaseModel

MODEL = sys.argv[2]


class Weather(BaseModel):
    """The weather of a city."""

    city: str
    degrees: int


def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"{city}: 21 degrees"


def add(a: int, b: int) -> int:
    """The sum of two numbers."""
    return a + b


model = ChatOpenAI(model=MODEL)
agent: Any = create_agent(
    model, tools=[get_weather, add], system_prompt="Be brief.", checkpointer=InMemorySaver()
)
config = {"configurable": {"thread_id": "1"}}
question = {"role": "user", "content": "How warm is it in Paris, and what is 2 + 3?"}
first = agent.invoke({"messages": [question]}, config)
more = {"messages": [{"role": "user", "content": "Twice as warm is?"}]}
streamed = []
for token, _ in agent.stream(more, config, stream_mode="messages"):
    streamed.append(token.text)
structured = model.with_structured_output(Weather).invoke("How warm is it in Rome?")
assert isinstance(structured, Weather)
result = {
    "kinds": [message.type for message in first["messages"]],
    "answer": first["messages"][-1].text,
    "streamed": "".join(streamed),
    "structured": structured.model_dump(),
}
print(json.dumps(result))
