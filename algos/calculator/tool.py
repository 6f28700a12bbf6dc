"""A calculator for a model whose chat template knows no tools: the system prompt describes it.

Two environments; both score 1 if the last number of the answer is right:

- `episode`: a turn that ends with CALC(23 * 45) is answered with the result; any other turn is the
  answer. 0.2 is added if the calculator was used.
- `episode_with_thoughts`: a turn has a thought and a call, both written into the text:

      <think>I need 347 * 589.</think><tool_call>347 * 589</tool_call>

  The next message has the result, and a turn without a call is the answer. A call that stands
  behind no thought, or cannot be computed, is answered with what is wrong.

`episode_with_random_score` is the same with a score that does not depend on the answer: a control.
"""

from __future__ import annotations

import ast
import operator
import random
import re
from typing import Any

from spmdflow import ChatClient, EndpointError

SYSTEM = (
    "You can use a calculator: write CALC(12 * 34) and nothing after it, and you are told the "
    "result. Then answer with the number only."
)
SYSTEM_WITH_THOUGHTS = (
    "Think, then call the calculator: <think>thought</think><tool_call>1 * 2</tool_call>\n"
    "You are told the result. Answer with the number only."
)
NUM_TURNS = 3
USE_BONUS = 0.2
_CALC = re.compile(r"CALC\(([^()]{1,40})\)")
_THOUGHT = re.compile(r"<think>(.*?)</think>", re.DOTALL)
_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)
_NUMBER = re.compile(r"-?\d[\d,]*")
_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}

Messages = list[dict[str, Any]]


async def episode(
    row: dict[str, Any], *, base_url: str, model: str, api_key: str, tokens_per_turn: int = 24
) -> dict[str, float]:
    """Ask one question, and return score, accuracy and whether the calculator was used.

    row: {"question": "What is 23 * 45?", "answer": "1035"}. tokens_per_turn: most new tokens of a
    turn.
    """
    messages = first_messages(SYSTEM, row)
    uses = 0
    answer = ""
    async with ChatClient(base_url, model=model, api_key=api_key) as client:
        for _ in range(NUM_TURNS):
            answer = await ask(client, messages, tokens_per_turn)
            called = _CALC.search(answer)
            if called is None:
                break
            uses += 1
            messages.append({"role": "user", "content": compute(called.group(1))})
            answer = ""
    right = is_right(answer, row)
    used = uses > 0
    return {"score": right + USE_BONUS * used, "accuracy": float(right), "used": float(used)}


async def episode_with_thoughts(
    row: dict[str, Any], *, base_url: str, model: str, api_key: str, tokens_per_turn: int = 56
) -> dict[str, float]:
    """Ask one question, with thoughts and calls in the text; return what `measured` says.

    row: {"question": "What is 347 * 589?", "answer": "204383"}. tokens_per_turn: most new tokens
    of a turn.
    """
    messages = await converse(row, base_url, model, api_key, tokens_per_turn)
    return measured(messages, row)


async def episode_with_random_score(
    row: dict[str, Any], *, base_url: str, model: str, api_key: str, tokens_per_turn: int = 56
) -> dict[str, float]:
    """`episode_with_thoughts`, whose score is a number drawn from [0, 1), seeded by what was said.

    Its other numbers are the true ones. The expected score is the same for every reply, so a run
    with it shows what chance does.
    """
    messages = await converse(row, base_url, model, api_key, tokens_per_turn)
    said = "\n".join(message["content"] for message in messages)
    return measured(messages, row) | {"score": random.Random(said).random()}


async def converse(
    row: dict[str, Any], base_url: str, model: str, api_key: str, tokens_per_turn: int
) -> Messages:
    """The messages of one conversation: system, question, then replies and results in turn."""
    messages = first_messages(SYSTEM_WITH_THOUGHTS, row)
    async with ChatClient(base_url, model=model, api_key=api_key) as client:
        for turn in range(NUM_TURNS):
            reply = await ask(client, messages, tokens_per_turn)
            if "<tool_call>" not in reply or turn == NUM_TURNS - 1:
                break
            messages.append({"role": "user", "content": answer_to_call(reply)})
    return messages


def first_messages(system: str, row: dict[str, Any]) -> Messages:
    """What the policy reads first."""
    return [
        {"role": "system", "content": system},
        {"role": "user", "content": row["question"]},
    ]


async def ask(client: ChatClient, messages: Messages, tokens_per_turn: int) -> str:
    """The policy's reply, which is added to the messages; "" if there is no room for one."""
    try:
        reply = await client.chat(messages, max_tokens=tokens_per_turn)
    except EndpointError as err:
        if err.code in ("context_length_exceeded", "max_turns"):
            return ""
        raise
    messages.append(reply)
    return str(reply["content"])


def answer_to_call(reply: str) -> str:
    """What the calculator says to a reply with a call: a number, or what is wrong with the call."""
    called = _CALL.search(reply)
    assert called is not None, reply
    if _THOUGHT.search(reply[: called.start()]) is None:
        return "error: write a thought in <think> and </think> before the call"
    return compute(called.group(1))


def measured(messages: Messages, row: dict[str, Any]) -> dict[str, float]:
    """Score and accuracy of a conversation, and parts of it, each 0 or 1.

    used: the calculator has computed something; thought: the first reply has a thought.
    """
    last = messages[-1]
    answer = last["content"] if last["role"] == "assistant" else ""
    if "<tool_call>" in answer:
        answer = ""
    replies = [message["content"] for message in messages[2::2]]
    results = [message["content"] for message in messages[3::2]]
    right = float(is_right(_THOUGHT.sub("", answer), row))
    return {
        "score": right,
        "accuracy": right,
        "used": float(any("error" not in result for result in results)),
        "thought": float(bool(replies) and _THOUGHT.search(replies[0]) is not None),
    }


def is_right(answer: str, row: dict[str, Any]) -> bool:
    """Whether the last number of the answer is the row's."""
    numbers = _NUMBER.findall(answer)
    return bool(numbers) and numbers[-1].replace(",", "") == str(row["answer"])


def compute(expression: str) -> str:
    """The value of +, - and * on whole numbers, as text; what is wrong if it is something else."""
    try:
        return str(_value(ast.parse(expression.strip(), mode="eval").body))
    except (SyntaxError, ValueError):
        return "error: write whole numbers with +, - or *"


def _value(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int and abs(node.value) < 10**9:
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        result: int = _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
        return result
    raise ValueError(ast.unparse(node))
