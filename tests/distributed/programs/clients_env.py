"""Episodes by the official client, streaming and not, and a class with tools; no torch."""

from __future__ import annotations

from typing import Any

ANSWERS: list[Any] = []


async def official(
    row: dict[str, Any], *, base_url: str, model: str, api_key: str, stream: bool = False
) -> dict[str, float]:
    """Two turns by openai's client; facts that the test compares."""
    import openai

    messages: list[Any] = [{"role": "user", "content": "guess"}]
    counted = 0
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        assert [entry.id async for entry in client.models.list()] == [model]
        for told in ("higher", "lower"):
            asked = {"model": model, "messages": messages, "max_tokens": 2, "temperature": 0.1}
            if stream:
                options = {"include_usage": True}
                chunks = await client.chat.completions.create(
                    **asked, stream=True, stream_options=options
                )
                said = ""
                reason = None
                async for chunk in chunks:
                    counted += chunk.usage.completion_tokens if chunk.usage else 0
                    for choice in chunk.choices:
                        said += choice.delta.content or ""
                        reason = choice.finish_reason or reason
            else:
                made = await client.chat.completions.create(**asked, logprobs=True)
                said = made.choices[0].message.content
                reason = made.choices[0].finish_reason
                counted += made.usage.completion_tokens
                assert len(made.choices[0].logprobs.content) == made.usage.completion_tokens
            assert reason in ("stop", "length")
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": told}]
        try:
            await client.chat.completions.create(model=model, messages=messages, n=2)
        except openai.BadRequestError as err:
            assert "n: got 2" in str(err)
    return {"score": 1.0, "counted": float(counted)}


class Calculator:
    """Tools that add and multiply; the reward is the right answer."""

    def reset(self, **row: Any) -> str:
        """The question."""
        self.wanted = row["answer"]
        self.said = None
        return f"What is {row['question']}?"

    def add(self, a: int, b: int) -> int:
        """The sum of two numbers."""
        self.said = a + b
        return self.said

    async def fail(self) -> None:
        """Always raises."""
        raise ValueError("never works")

    def get_reward(self) -> float:
        """1 for the right answer."""
        return float(self.said == self.wanted)
