"""A calculator for a model whose chat template knows no tools: the system prompt describes it.

A turn that ends with CALC(23 * 45) is answered with the result; any other turn is the answer. The
score is 1 if the last number of the answer is right, in addition 0.2 if the calculator was used.
"""

from __future__ import annotations

import ast
import operator
import re
from typing import Any

from spmdflow import ChatClient, EndpointError

SYSTEM = (
    "You can use a calculator: write CALC(12 * 34) and nothing after it, and you are told the "
    "result. Then answer with the number only."
)
NUM_TURNS = 3
USE_BONUS = 0.2
_CALL = re.compile(r"CALC\(([^()]{1,40})\)")
_NUMBER = re.compile(r"-?\d[\d,]*")
_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


async def episode(
    row: dict[str, Any], *, base_url: str, model: str, api_key: str, tokens_per_turn: int = 24
) -> dict[str, float]:
    """Ask one question, and return score, accuracy and whether the calculator was used.

    row: {"question": "What is 23 * 45?", "answer": "1035"}. tokens_per_turn: most new tokens of a
    turn.
    """
    messages = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": row["question"]},
    ]
    uses = 0
    answer = ""
    async with ChatClient(base_url, model=model, api_key=api_key) as client:
        for _ in range(NUM_TURNS):
            try:
                reply = await client.chat(messages, max_tokens=tokens_per_turn)
            except EndpointError as err:
                if err.code in ("context_length_exceeded", "max_turns"):
                    break
                raise
            answer = str(reply["content"])
            called = _CALL.search(answer)
            if called is None:
                break
            uses += 1
            messages += [reply, {"role": "user", "content": compute(called.group(1))}]
            answer = ""
    numbers = _NUMBER.findall(answer)
    right = bool(numbers) and numbers[-1].replace(",", "") == str(row["answer"])
    used = uses > 0
    return {"score": right + USE_BONUS * used, "accuracy": float(right), "used": float(used)}


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
