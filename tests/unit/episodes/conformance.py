"""Chat templates of model families, driven through the recorder as a client would.

The templates come from installed packages. What the model writes is what the template itself writes
for the reply, up to the end of the turn, so a conversation in which nothing else happens has the
ids of one rendering.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from os.path import commonprefix
from typing import Any, NamedTuple

import pytest
import torch
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from spmdflow.datasets.chat import ChatTemplate
from spmdflow.datasets.tokenizer import load_tokenizer
from spmdflow.episodes.fields import parse_request
from spmdflow.episodes.message_form import ThoughtMarks, form_of, to_template_messages
from spmdflow.episodes.recorder import Limits, Recorder
from spmdflow.rollout.resumable import VersionedResponse
from tests.smollm2 import IS_HERE, REASON, SMOLLM2
from tests.unit.datasets.families import byte_level_bpe, template_of

Message = dict[str, Any]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "adds",
            "parameters": {"type": "object", "properties": {"ok": {"type": "string"}}},
        },
    }
]


class Family(NamedTuple):
    """A template, and the tokens that a model of the family ends its replies with."""

    label: str
    source: str
    """Name of a file of TRL; mistral: written by mistral_common; smollm2: its own."""
    ends: tuple[str, ...]
    has_tools: bool = True
    reads: str = ""
    """Name of TRL's response template; "": the calls are read by `scripted`."""
    note: str = ""
    """What differs from a rendering in a loop of tools, where it is more than thoughts."""


_IM = ("<|im_end|>",)
_GLM = ("<|user|>", "<|observation|>", "<|endoftext|>")
_HARMONY = ("<|return|>", "<|call|>")
_DEEPSEEK = ("<\uff5cend\u2581of\u2581sentence\uff5c>",)
_MARKS = "as recorded: the template moves marks"
FAMILIES = (
    Family("Qwen2.5", "qwen2_5", _IM),
    Family("Qwen3", "qwen3", _IM, reads="qwen3_template"),
    Family("Qwen3-Instruct-2507", "qwen3_instruct_2507", _IM),
    Family("Qwen3.5", "qwen3_5_think", _IM, reads="qwen3_5_template"),
    Family("Qwen3.6", "qwen3_6", _IM, reads="qwen3_5_template"),
    Family("Qwen3.8", "qwen3_8", _IM, reads="qwen3_5_template"),
    Family("GLM-4.5", "glm4moe", _GLM, reads="glm4moe_template"),
    Family("DeepSeek-V3", "deepseekv3", _DEEPSEEK, note=_MARKS),
    Family("DeepSeek-R1-Distill", "deepseek_r1_distill", _DEEPSEEK, note=_MARKS),
    Family("gpt-oss", "gptoss", _HARMONY, reads="gptoss_template"),
    Family("Nemotron-3 Nano", "nemotron_3_nano", _IM, reads="nemotron_3_template"),
    Family("Nemotron-3 Super", "nemotron_3_super", _IM, reads="nemotron_3_template"),
    Family("Mistral v3", "mistral", ("</s>",)),
    Family("Llama 3", "llama3", ("<|eot_id|>",), has_tools=False),
    Family("Llama 3.1", "llama3_1", ("<|eot_id|>",), reads="llama3_template"),
    Family("Llama 3.2", "llama3_2", ("<|eot_id|>",), reads="llama3_template"),
    Family("Gemma", "gemma", ("<end_of_turn>",), has_tools=False),
    Family("Gemma 3", "gemma3", ("<end_of_turn>",), has_tools=False),
    Family("Gemma 4", "gemma4_v5", ("<turn|>", "<|tool_response>"), reads="gemma4_template"),
    Family("SmolLM2", "smollm2", _IM, has_tools=False),
    Family("LFM2", "lfm2", _IM, has_tools=False),
    Family("LFM2.5", "lfm2_2_5", _IM, reads="lfm2_2_5_template"),
    Family("Phi-3", "phi3", ("<|endoftext|>", "<|end|>"), has_tools=False),
    Family("Cohere", "cohere", ("<|END_OF_TURN_TOKEN|>",), has_tools=False),
    Family("Muse Glimmer", "muse_glimmer", ("<|eot|>",)),
)


_SPECIAL = re.compile(
    r"<\|[^<>|\s]+\|?>|<[^<>|\s]+\|>|<\uff5c[^<>\uff5c\s]+\uff5c>|\[/?[A-Z_]{3,}\]"
    r"|</?s>|<bos>|<start_of_turn>|<end_of_turn>|\[gMASK\]|<sop>"
)
_ADDED = ("<think>", "</think>", "<tool_call>", "</tool_call>")


def tokenizer_of(family: Family) -> Any:
    """A byte-level tokenizer with the special tokens that the template mentions; or SmolLM2's."""
    if family.source == "smollm2":
        if not IS_HERE:
            pytest.skip(REASON)
        return load_tokenizer(str(SMOLLM2))
    template = template_of(family.source)
    special = sorted({*_SPECIAL.findall(template), *family.ends})
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(byte_level_bpe()),
        bos_token="<bos>" if "<bos>" in special else "<s>",
        eos_token=family.ends[0],
    )
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    tokenizer.add_tokens([token for token in _ADDED if token in template])
    tokenizer.chat_template = template
    if family.reads:
        tokenizer.response_template = response_template(family.reads)
    return tokenizer


def response_template(name: str) -> Any:
    """TRL's template for reading the replies of a family."""
    return getattr(importlib.import_module("trl.chat_template_utils"), name)


def scripted(text: str, tools: list[Any]) -> tuple[str, list[dict[str, Any]]]:
    """Reads the only call that the tests make, in any family's format, as a parser of vLLM does."""
    value = re.search(r"value\d+", text)
    if value is None or "add" not in text:
        return text, []
    number = re.search(r"call\d{5}", text)
    call = {"name": "add", "arguments": {"ok": value[0]}, "id": number and number[0]}
    return "", [call]


class Conversation:
    """A client and a model that talk through the recorder."""

    def __init__(self, family: Family, *, tools: bool = False) -> None:
        self.tokenizer = tokenizer_of(family)
        self.chat = ChatTemplate(self.tokenizer)
        self.form = form_of(self.chat)
        self.ends = family.ends
        self.tools = TOOLS if tools else None
        self.recorder = Recorder(
            self.chat,
            tuple(self.tokenizer.convert_tokens_to_ids(list(family.ends))),
            Limits(99, 10**6, 10**6, may_fork=True, vocab_size=len(self.tokenizer)),
            None if family.reads else scripted,
        )
        self.sent: list[Message] = []
        """What the client sends."""
        self.said: list[Message] = []
        """The same with the model's thoughts, for the template."""

    def tell(self, **message: Any) -> None:
        """The client adds a message."""
        self.sent.append(message)
        self.said.append(message)

    def reply(
        self,
        content: str = "",
        *,
        thought: str = "",
        value: str = "",
        send: Callable[[Message], Message] = lambda message: message,
    ) -> Message:
        """The model replies, with a call if `value` is given; the client keeps send(message)."""
        ask = parse_request(
            {"messages": self.sent, "tools": self.tools}, chat=True, warned_fields=set()
        )
        turn = self.recorder.begin(ask)
        said: Message = {"role": "assistant", "content": content}
        if thought and self.form.thought_field:
            said[self.form.thought_field] = thought
        if value:
            function = {"name": "add", "arguments": {"ok": value}}
            said["tool_calls"] = [{"id": "call00000", "type": "function", "function": function}]
        text, end = self.words(said, thought)
        ids = self.chat.ids([text])[0] + [self.tokenizer.convert_tokens_to_ids(end)]
        message, _, _ = self.recorder.finish(ask, turn, drawn_of(ids))
        for made, read in zip(
            said.get("tool_calls", ()), message.get("tool_calls", ()), strict=True
        ):
            made["id"] = read["id"]
        self.said.append(said)
        self.sent.append(send(message))
        return message

    def words(self, said: Message, thought: str) -> tuple[str, str]:
        """(text, end token) of a reply as the template writes it after what was said.

        Earlier thoughts are left out, as some templates drop them once the reply is there.
        """
        before = [{**each, str(self.form.thought_field): None} for each in self.said]
        prompt = self.rendered(before)
        whole = self.rendered([*before, said], answered=True)
        marks = self.form.marks
        nothing = marks.start + marks.end if marks else ""
        if marks and prompt.rstrip().endswith(marks.start) and not whole.startswith(prompt):
            opening = prompt.rindex(marks.start)  # the template itself leaves out the thought
            text = f"{thought}\n{marks.end}\n\n{whole[opening:].removeprefix(nothing)}"
        else:
            text = whole[len(commonprefix([prompt, whole])) :]
            if marks and thought and thought not in text:
                answer = text.removeprefix(nothing)
                text = f"{marks.start}\n{thought}\n{marks.end}\n\n{answer}"
        found = [(text.index(end), end) for end in self.ends if end in text]
        if found:
            place, end = min(found)
            return text[:place], end
        end = self.ends[1 if said.get("tool_calls") and len(self.ends) > 1 else 0]
        return text.removesuffix(self.form.end_of_turn), end

    def rendered(self, messages: list[Message], *, answered: bool = False) -> str:
        plain = to_template_messages(messages, self.form)
        return self.chat.render(plain, answered=answered, tools=self.tools)

    def next_ids(self) -> list[int]:
        """The ids of the next prompt."""
        ask = parse_request(
            {"messages": self.sent, "tools": self.tools}, chat=True, warned_fields=set()
        )
        return self.recorder.begin(ask).ids

    def rendered_ids(self) -> list[int]:
        """The ids of one rendering of all that was said."""
        return self.chat.ids([self.rendered(self.said)])[0]


class Outcome(NamedTuple):
    """What a template does with the conversations of `outcome`; each is one segment."""

    turns: str
    """Three turns of a user."""
    loop: str
    """Twenty calls of a tool, one after another."""
    after: str
    """An answer and a turn of the user behind them."""
    thoughts: str
    """Three turns with thoughts, which the client sends in a field, in the text, or not at all."""


EQUAL = "equal"
STAY = "thoughts stay"
NONE = "-"


def outcome(family: Family) -> Outcome:
    """Lets a client and a model talk, and compares the recorded ids with one rendering."""
    loop = after = thoughts = NONE
    if family.has_tools:
        talk = loop_of_tools(family, 20)
        loop = difference(talk, family.note)
        talk.reply("done", thought="hm")
        talk.tell(role="user", content="more")
        after = difference(talk, family.note)
    ways = (lambda message: message, thought_in_text, without_thought)
    talks = [turns_of_user(family, thought="hm", send=send) for send in ways]
    if talks[0].form.marks is not None:
        thoughts = difference(talks[0])
        assert [talk.next_ids() for talk in talks[1:]] == [talks[0].next_ids()] * 2
    return Outcome(difference(turns_of_user(family)), loop, after, thoughts)


def turns_of_user(
    family: Family,
    *,
    thought: str = "",
    send: Callable[[Message], Message] = lambda message: message,
) -> Conversation:
    """Two replies, and the third turn of the user."""
    talk = Conversation(family)
    for number in range(2):
        talk.tell(role="user", content=f"question {number}")
        message = talk.reply(f"answer {number}", thought=thought, send=send)
        assert message["content"] == f"answer {number}"
        is_read = thought if talk.form.marks else ""
        assert message.get("reasoning_content", "") == is_read
    talk.tell(role="user", content="question 2")
    return talk


def loop_of_tools(family: Family, count: int, *, result: str = "result") -> Conversation:
    """Calls of a tool with thoughts, and their results."""
    talk = Conversation(family, tools=True)
    talk.tell(role="user", content="go")
    for number in range(count):
        message = talk.reply(value=f"value{number}", thought="hm")
        (call,) = message["tool_calls"]
        assert call["function"] == {"name": "add", "arguments": f'{{"ok": "value{number}"}}'}
        talk.tell(role="tool", name="add", content=result, tool_call_id=call["id"])
    return talk


def thought_in_text(message: Message) -> Message:
    """As pydantic-ai sends a reply back."""
    thought = message.get("reasoning_content")
    if thought is None:
        return message
    text = f"<think>\n{thought}\n</think>\n\n{message['content']}"
    return without_thought(message) | {"content": text}


def without_thought(message: Message) -> Message:
    """As clients send a reply back that know no thoughts."""
    return {name: value for name, value in message.items() if name != "reasoning_content"}


def difference(talk: Conversation, note: str = "") -> str:
    """How the ids of the next prompt differ from those of one rendering. One segment, or fails."""
    recorded = talk.next_ids()
    rendered = talk.rendered_ids()
    assert len(talk.recorder.segments) == 1
    if recorded == rendered:
        return EQUAL
    ours, theirs = (bare_text(talk, ids) for ids in (recorded, rendered))
    if ours == theirs:
        return STAY
    if ours.replace("<|return|>", "<|end|>") == theirs:
        return f"{STAY}, and `<\\|return\\|>`"
    assert note, (ours, theirs)
    return note


def bare_text(talk: Conversation, ids: list[int]) -> str:
    """The text of ids without thoughts and white space."""
    text = talk.tokenizer.decode(ids)
    marks = talk.form.marks
    if marks is not None:
        end, opening = end_of_thought(marks)
        pattern = f"{re.escape(marks.start)}.*?{re.escape(end)}(?:{re.escape(opening)})?"
        text = re.sub(pattern, "", text, flags=re.DOTALL)
        text = text.removesuffix(marks.start).rstrip().removesuffix(marks.start)
    return re.sub(r"\s", "", text)


def end_of_thought(marks: ThoughtMarks) -> tuple[str, str]:
    """(the token that ends a thought, what opens the next part of the reply)."""
    token = re.match(r"<[^<>]+>", marks.end)
    assert token is not None
    return token[0], marks.end.removeprefix(token[0]).removesuffix(marks.answer_start)


def drawn_of(ids: list[int]) -> VersionedResponse:
    return VersionedResponse(
        0, torch.tensor(ids), torch.full((len(ids),), -0.5), versions=torch.zeros(len(ids)).int()
    )
