"""Messages -> text -> token ids by a chat template, for data sets, evaluation and episodes.

Special tokens that the template writes count. So do those in messages of trusted roles, which you
or the model wrote. In all other messages (of users, tools, opponents) and in the schemas of tools,
the text of a special token stays text: a user who writes `<|im_end|>` does not end the turn. The
method is exact:

1. Before rendering, each such text is replaced by a placeholder, so the template only copies it.
2. Text in the result that still matches a special token was written by the template.
3. The complete text is encoded once, by a copy of the tokenizer with other spellings of the special
   tokens. Only the matches of step 2 are written in these spellings.

Without such texts nothing is replaced, and the ids are those of `apply_chat_template`. Added tokens
that the tokenizer does not mark as special, such as `<think>` of Qwen3, count in every message.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from copy import copy
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import Environment, TemplateError, TemplateSyntaxError

from spmdflow.config.schema import AUTO, TRUSTED_ROLES
from spmdflow.datasets.time_limit import OutOfTime, TimeLimit
from spmdflow.datasets.tokenizer import template_ids
from spmdflow.errors import DataError

Message = dict[str, Any]

# Random digits, so that no text contains them; JSON and changes of case leave digits as they are.
_PLACEHOLDER = f"{secrets.randbelow(10**24):024d}"
_SPELLING = f"{secrets.randbelow(10**24):024d}"
_PLACEHOLDERS = re.compile(_PLACEHOLDER + r"(\d{6})")
_DIGITS = re.compile("[0-9]+")
"""A special token that consists of digits would match inside every placeholder."""

_TEMPLATE_FAILURES = (
    TypeError,
    LookupError,
    ValueError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    MemoryError,
)
"""Exceptions that a template can raise when it runs, apart from jinja's own."""


_time_limit = TimeLimit(seconds=30)
"""Limit for rendering one conversation."""
_MOST_RECENT = 4
"""Rendered conversations that a template remembers."""
_MOST_VARIANTS = 8
"""Sets of further arguments that a template remembers."""


class ChatTemplate:
    """A tokenizer's chat template and its arguments. Any: a transformers tokenizer.

    Texts of `render` contain placeholders. Pass them to `ids` or `remove_placeholders`.
    """

    def __init__(
        self,
        tokenizer: Any,
        arguments: Mapping[str, Any] | None = None,
        *,
        date: str = AUTO,
        trusted_roles: Sequence[str] = TRUSTED_ROLES,
    ) -> None:
        """arguments: variables that the template reads, such as enable_thinking.

        date: what the template shows as today's date, such as 2026-11-28; auto: today's.

        trusted_roles: roles in whose messages special tokens count.
        """
        self.tokenizer = tokenizer
        self._arguments = dict(arguments or {})
        if date != AUTO:
            self._arguments["strftime_now"] = datetime.fromisoformat(date).strftime
        self._trusted_roles = frozenset(trusted_roles)
        self._special = _special_texts(tokenizer)
        self._pattern = _pattern_of(self._special)
        self._json_pattern = _pattern_of([json.dumps(text)[1:-1] for text in self._special])
        """Finds special tokens in JSON, which writes some characters in another way."""
        self._request_arguments: dict[str, Any] = {}
        """Those of `with_arguments`. Special tokens in their texts stay text."""
        self._variants: dict[str, ChatTemplate] = {}
        """Further arguments as JSON -> the template with them."""
        self._recent: tuple[tuple[str, str], ...] = ()
        """(messages and tools as JSON, rendered text) of the last conversations: one is often
        rendered again soon."""

    def with_arguments(self, arguments: Mapping[str, Any] | None) -> ChatTemplate:
        """Return the template with further arguments, which replace those of `__init__`.

        arguments: JSON values, as a client of an episode sends them. Special tokens in their texts
        stay text. The result is this object if they change nothing. The last 8 sets of arguments
        are remembered.
        """
        changed = {}
        for name, value in (arguments or {}).items():
            if name not in self._arguments or self._arguments[name] != value:
                changed[name] = value
        if not changed:
            return self
        key = json.dumps(changed, sort_keys=True)
        variant = self._variants.pop(key, None)
        if variant is None:
            variant = copy(self)
            variant._request_arguments = changed
            variant._variants = {}
            variant._recent = ()
        recent = list(self._variants.items())[1 - _MOST_VARIANTS :]
        self._variants = dict([*recent, (key, variant)])
        return variant

    @property
    def request_arguments(self) -> Mapping[str, Any]:
        """The arguments in which this template differs from the run's (`with_arguments`)."""
        return self._request_arguments

    def reads(self, name: str) -> bool:
        """Whether the chat template reads a variable (or an attribute) of this name."""
        return name in _names_in(str(self.tokenizer.chat_template or ""))

    def render(
        self,
        messages: list[Message],
        *,
        answered: bool = False,
        tools: list[Any] | None = None,
    ) -> str:
        """Return the messages as the chat template writes them, which may contain placeholders.

        Ends with the generation prompt unless `answered`. In messages of roles that are not trusted
        and in tools, placeholders replace the texts of special tokens. Raises DataError if the
        template fails, takes too long, or writes other text than without placeholders; the caller
        adds file and line.
        tools: schemas that the template shows to the model.
        """
        try:
            key = json.dumps([messages, tools, answered])
        except (TypeError, ValueError, RecursionError):
            return self._render_hidden(messages, answered, tools)
        for known, text in self._recent:
            if known == key:
                return text
        if self._has_special_texts(key):
            text = self._render_hidden(messages, answered, tools)
        else:
            text = self._render(messages, answered, tools, {})
        # replaced, never modified: other threads may read it
        self._recent = (*self._recent[1 - _MOST_RECENT :], (key, text))
        return text

    def _has_special_texts(self, document: str) -> bool:
        """Whether there may be texts to hide in this JSON document, or in a request's arguments."""
        if self._request_arguments:
            return True
        return self._json_pattern is not None and self._json_pattern.search(document) is not None

    def _render_hidden(
        self, messages: list[Message], answered: bool, tools: list[Any] | None
    ) -> str:
        """See `render`: with placeholders for the texts of special tokens."""
        hidden = []
        for message in messages:
            is_trusted = message.get("role") in self._trusted_roles
            hidden.append(message if is_trusted else self._hide_special_texts(message))
        hidden_tools = self._hide_special_texts(tools)
        arguments = self._request_arguments
        hidden_arguments = self._hide_special_texts(arguments)
        text = self._render(hidden, answered, hidden_tools, hidden_arguments)
        if hidden == messages and hidden_tools == tools and hidden_arguments == arguments:
            return text
        if self.remove_placeholders(text) != self._render(messages, answered, tools, arguments):
            raise DataError(
                f"{self._label} writes other text where a message contains the text of a special "
                f"token, expected it to copy messages; remove that text from the message"
            )
        return text

    def remove_placeholders(self, text: str) -> str:
        """Rendered text with the original texts in place of the placeholders."""
        if _PLACEHOLDER not in text:
            return text
        return _PLACEHOLDERS.sub(lambda match: self._special[int(match[1])], text)

    def leading_special(self, text: str) -> str:
        """Return the special token with which a text begins; "" if there is none."""
        match = self._pattern.match(text) if self._pattern else None
        return match[0] if match else ""

    def remove_special(self, text: str) -> str:
        """Return the text without the texts of special tokens."""
        if self._pattern is None:
            return text
        return self._pattern.sub("", text)

    def strip_special(self, text: str) -> str:
        """Return the text without special tokens and white space at its end."""
        end = len(text.rstrip())
        if self._pattern is None:
            return text[:end]
        special_ends = {match.end(): match.start() for match in self._pattern.finditer(text)}
        while end in special_ends:
            end = len(text[: special_ends[end]].rstrip())
        return text[:end]

    def ids(self, texts: list[str]) -> list[list[int]]:
        """Return the token ids of texts of `render`, or of parts of them, in order.

        The special tokens that the template wrote become their ids; texts behind placeholders are
        encoded as ordinary text.
        """
        ids = template_ids(self.tokenizer, [text for text in texts if _PLACEHOLDER not in text])
        others = []
        for text in texts:
            if _PLACEHOLDER in text:
                others.append(self._respell(text))
        if not others:
            return ids
        respelled_tokenizer = _respelled_tokenizer(self.tokenizer, self._special)
        encodings = respelled_tokenizer.encode_batch(others, add_special_tokens=False)
        ordinary = iter(ids)
        respelled = (encoding.ids for encoding in encodings)
        result = []
        for text in texts:
            result.append(next(respelled if _PLACEHOLDER in text else ordinary))
        return result

    @property
    def _label(self) -> str:
        return f"the chat template of the tokenizer {self.tokenizer.name_or_path!r}"

    def _render(
        self,
        messages: list[Message],
        answered: bool,
        tools: list[Any] | None,
        arguments: Mapping[str, Any],
    ) -> str:
        """Run the template; DataError if it fails or takes more than 30 s of CPU time.

        arguments: further ones, which replace those of the run.
        """

        def run_template() -> str:
            return str(
                self.tokenizer.apply_chat_template(
                    messages,
                    tools=tools,
                    tokenize=False,
                    add_generation_prompt=not answered,
                    **{**self._arguments, **arguments},
                )
            )

        try:
            return _time_limit.call(run_template)
        except OutOfTime as err:
            raise DataError(
                f"{self._label} has not written the messages after {_time_limit.seconds:g} s of "
                f"processor time, expected it to end; correct the template, or the messages"
            ) from err
        except TemplateError as err:
            raise DataError(f"the chat template refuses the messages ({err})") from err
        except _TEMPLATE_FAILURES as err:
            if str(err):
                cause = f"{type(err).__name__}: {err}"
            else:
                cause = type(err).__name__
            raise DataError(
                f"{self._label} fails on the messages ({cause}), expected text; correct the "
                f"template, or the messages"
            ) from err

    def _hide_special_texts(self, value: Any) -> Any:
        """Return a copy of a JSON value with placeholders for the texts of special tokens.

        DataError if it is nested too deeply, or see `_hide_in_value`.
        """
        try:
            return self._hide_in_value(value)
        except RecursionError as err:
            raise DataError(
                "has lists or objects in a message, or in a tool, that are nested too deeply; "
                "remove them"
            ) from err

    def _hide_in_value(self, value: Any) -> Any:
        """Recursive part of `_hide_special_texts`, for dicts (also keys), lists and texts.

        Replaces until no special text is left. DataError if it finds one but the tokenizer has no
        tokenizer.json, or has a special token of digits alone, which would match in placeholders.
        """
        if isinstance(value, dict):
            result = {}
            for name, x in value.items():
                result[self._hide_in_value(name)] = self._hide_in_value(x)
            return result
        if isinstance(value, list):
            return [self._hide_in_value(each) for each in value]
        if not isinstance(value, str) or self._pattern is None:
            return value
        if self._pattern.search(value) is None:
            return value
        if not getattr(self.tokenizer, "is_fast", False):
            raise DataError(
                "has the text of a special token in a message, which this tokenizer cannot keep "
                "as text; use a tokenizer with tokenizer.json, or remove that text"
            )
        if digits := [text for text in self._special if _DIGITS.fullmatch(text)]:
            raise DataError(
                f"has the text of a special token in a message, which cannot be kept as text as "
                f"{digits[0]!r} is a special token; add digits to the tokenizer with "
                f"special_tokens=False, or name the role in data.trusted_roles"
            )
        numbers = {}
        for number, text in enumerate(self._special):
            numbers[text] = number
        # again until none is left: removing one may leave another
        while self._pattern.search(value):
            value = self._pattern.sub(lambda m: f"{_PLACEHOLDER}{numbers[m[0]]:06d}", value)
        return value

    def _respell(self, text: str) -> str:
        """Rendered text with the template's special tokens in the spellings of the copy."""
        assert self._pattern is not None, "no special tokens, so no placeholders"
        return self.remove_placeholders(self._pattern.sub(lambda match: match[0] + _SPELLING, text))


@lru_cache(maxsize=4)
def _names_in(template: str) -> frozenset[str]:
    """Return the names in the code of a jinja template; none if it cannot be read."""
    try:
        tokens = list(Environment().lex(template))
    except TemplateSyntaxError:
        return frozenset()
    return frozenset(value for _, kind, value in tokens if kind == "name")


def _special_texts(tokenizer: Any) -> tuple[str, ...]:
    """Return the texts of the tokenizer's special tokens, longest first."""
    added = tokenizer.added_tokens_decoder.values()
    texts = set()
    for token in added:
        if token.special and token.content:
            texts.add(str(token.content))
    return tuple(sorted(texts, key=lambda text: (-len(text), text)))


def _pattern_of(texts: Sequence[str]) -> re.Pattern[str] | None:
    if texts:
        return re.compile("|".join(map(re.escape, texts)))
    return None


@lru_cache(maxsize=4)
def _respelled_tokenizer(tokenizer: Any, special: tuple[str, ...]) -> Any:
    """Return a copy of the tokenizer whose special tokens end in `_SPELLING`, with the same ids.

    The copy encodes their usual texts as ordinary text. It adds no special tokens and never
    truncates. Any: a tokenizer of transformers; the copy is a `tokenizers.Tokenizer`. The last four
    are cached.
    """
    backend = tokenizer.backend_tokenizer
    document = json.loads(backend.to_str())

    def respell(text: str) -> str:
        if text in special:
            return text + _SPELLING
        return text

    for token in document["added_tokens"]:
        token["content"] = respell(token["content"])
    model = document["model"]
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):
        model["vocab"] = {respell(text): number for text, number in vocabulary.items()}
    elif isinstance(vocabulary, list):  # Unigram
        model["vocab"] = [[respell(text), *more] for text, *more in vocabulary]
    if model.get("unk_token") is not None:
        model["unk_token"] = respell(model["unk_token"])
    if "merges" in model:  # no merge may produce a special token's old spelling, which is gone
        model["merges"] = [
            merge
            for merge in model["merges"]
            if not {_join_merge(merge), *_split_merge(merge)}.intersection(special)
        ]
    document["post_processor"] = None  # it adds special tokens, which the template has written
    document["truncation"] = None
    document["padding"] = None
    return type(backend).from_str(json.dumps(document))


def _split_merge(merge: str | list[str]) -> list[str]:
    if isinstance(merge, str):
        return merge.split(" ")
    return merge


def _join_merge(merge: str | list[str]) -> str:
    return "".join(_split_merge(merge))
