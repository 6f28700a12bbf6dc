"""The text of a response, as it continues the prompt's, and stop strings in it as it grows."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from spmdflow.datasets.tokenizer import StopStrings, load_tokenizer, response_texts, token_lengths
from tests.unit.toy_flow import TASK

TEXT = (
    "There was a white cat in the cold, white snow. It said: \u201ccaf\u00e9 \u20ac5\u201d, and "
    "\U0001f63a smiled! Don't go ; stay . \u4e16\u754c and 12,345 more"
)
SPECIAL = ["<pad>", "<bos>", "<eos>"]
KINDS = ("characters", "bytes", "sentences")


def tokenizer_of(kind: str) -> Any:
    """characters: as sentencepiece has them, a space before the text; bytes: as GPT-2."""
    if kind == "bytes":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=300, special_tokens=SPECIAL, initial_alphabet=alphabet
        )
        tokenizer.train_from_iterator([TEXT], trainer)
    else:
        letters = [*SPECIAL, *sorted({*TEXT.replace(" ", "\u2581"), "\u2581"})]
        if kind == "sentences":
            letters = [letter for letter in letters if letter.isascii() or letter == "\u2581"]
            letters += [f"<0x{byte:02X}>" for byte in range(256)] + ["\u2581white", "\u2581the"]
        vocabulary = {letter: i for i, letter in enumerate(letters)}
        merges = _merges(vocabulary) if kind == "sentences" else []
        model = models.BPE(vocabulary, merges, byte_fallback=kind == "sentences", fuse_unk=True)
        tokenizer = Tokenizer(model)
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
        tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    tokenizer.add_special_tokens(SPECIAL)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )


def _merges(vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """What makes the two words out of letters, each step a token of its own."""
    found = []
    for word in ("\u2581white", "\u2581the"):
        for end in range(2, len(word) + 1):
            vocabulary.setdefault(word[:end], len(vocabulary))
            found.append((word[: end - 1], word[end - 1]))
    return found


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return tokenizer_of(request.param)


def ids_of(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False).input_ids


def whole_text(tokenizer: Any, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def cuts_between_characters(tokenizer: Any, ids: list[int]) -> list[int]:
    return [n for n in range(1, len(ids)) if "\ufffd" not in whole_text(tokenizer, ids[:n])]


def test_prompt_and_response_join_to_the_text_at_every_cut(tokenizer: Any) -> None:
    ids = ids_of(tokenizer, TEXT)
    assert whole_text(tokenizer, ids) == TEXT
    cuts = cuts_between_characters(tokenizer, ids)

    texts = response_texts(tokenizer, [ids[:n] for n in cuts], [ids[n:] for n in cuts])

    assert len(cuts) > 40
    assert [whole_text(tokenizer, ids[:n]) + t for n, t in zip(cuts, texts, strict=True)] == (
        [TEXT] * len(cuts)
    )


def test_special_tokens_have_no_text(tokenizer: Any) -> None:
    prompt = ids_of(tokenizer, "There was")
    response = ids_of(tokenizer, "There was a cat")[-3:]
    bos = tokenizer.bos_token_id
    eos = tokenizer.eos_token_id
    plain = response_texts(tokenizer, [prompt], [response])

    marked = response_texts(tokenizer, [[bos, *prompt, bos]], [[*response, eos]])

    assert marked == plain
    assert response_texts(tokenizer, [[bos]], [[eos]]) == [""]


def test_character_that_the_prompt_cuts_belongs_to_the_response() -> None:
    tokenizer = tokenizer_of("bytes")
    ids = ids_of(tokenizer, "It \u20ac5")
    cut = next(n for n in range(len(ids)) if "\ufffd" in whole_text(tokenizer, ids[:n]))

    assert response_texts(tokenizer, [ids[:cut]], [ids[cut:]]) == ["\u20ac5"]
    assert response_texts(tokenizer, [ids[: cut - 1]], [ids[cut - 1 : cut]]) == ["\ufffd"]


@pytest.mark.skipif("SPMDFLOW_DATA" not in os.environ, reason="needs SPMDFLOW_DATA")
def test_real_tokenizer_joins_texts_at_every_cut() -> None:
    folder = Path(os.environ["SPMDFLOW_DATA"]) / "models" / "stories260K-hd64"
    tokenizer = load_tokenizer(str(folder))
    ids = tokenizer(TEXT).input_ids
    cuts = cuts_between_characters(tokenizer, ids)

    texts = response_texts(tokenizer, [ids[:n] for n in cuts], [ids[n:] for n in cuts])

    joined = [whole_text(tokenizer, ids[:n]) + t for n, t in zip(cuts, texts, strict=True)]
    assert set(joined) == {TEXT}


def test_text_of_the_bundled_task_is_what_decoding_alone_gave() -> None:
    tokenizer = load_tokenizer(str(TASK / "model"))
    prompt = tokenizer("12+34=").input_ids
    response = [6, 8, 2]

    assert response_texts(tokenizer, [prompt], [response]) == [
        tokenizer.decode(response, skip_special_tokens=True)
    ]


def first_end(tokenizer: Any, prompt: list[int], response: list[int], stop: list[str]) -> int:
    """Tokens after which the text of the whole response first has a stop string; 0: never."""
    for count in range(1, len(response) + 1):
        (text,) = response_texts(tokenizer, [prompt], [response[:count]])
        if any(string in text for string in stop):
            return count
    return 0


STOPS = [["cat"], [" white"], ["\u20ac5"], ["caf\u00e9"], ["\U0001f63a"], ["zzz", ", and "], ["12"]]


@pytest.mark.parametrize(
    "stop", [*STOPS, ["There"], ["was a white cat in the cold, white"], ["!!"]]
)
def test_response_ends_with_the_token_that_completes_a_stop_string(
    tokenizer: Any, stop: list[str]
) -> None:
    ids = ids_of(tokenizer, TEXT)
    strings = StopStrings(tokenizer, stop)
    for cut in cuts_between_characters(tokenizer, ids)[:12]:
        prompt = ids[:cut]
        response = ids[cut:]

        ends = [n for n in range(1, len(response) + 1) if strings.ends(prompt, response[:n])]

        expected = first_end(tokenizer, prompt, response, stop)
        assert (ends[0] if ends else 0) == expected


def test_stop_string_that_begins_in_the_prompt_does_not_count(tokenizer: Any) -> None:
    ids = ids_of(tokenizer, "a white cat")
    cut = next(n for n in range(len(ids)) if "w" in whole_text(tokenizer, ids[:n]))
    strings = StopStrings(tokenizer, ["white cat"])

    assert not any(strings.ends(ids[:cut], ids[cut:n]) for n in range(cut + 1, len(ids) + 1))


def test_stop_string_is_found_across_special_tokens(tokenizer: Any) -> None:
    ids = ids_of(tokenizer, "a white cat sat")
    mixed = [token for pair in ids for token in (pair, *[tokenizer.pad_token_id] * 3)]
    strings = StopStrings(tokenizer, ["white cat"])

    ends = [n for n in range(1, len(mixed) + 1) if strings.ends([], mixed[:n])]

    assert len(ends) >= 1 and mixed[ends[0] - 1] == ids[(ends[0] - 1) // 4]
    assert ends[0] == first_end(tokenizer, [], mixed, ["white cat"])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("has_specials", [False, True])
def test_every_token_is_given_the_characters_that_it_shows(kind: str, has_specials: bool) -> None:
    tokenizer = tokenizer_of(kind)
    ids = [*tokenizer(TEXT).input_ids, tokenizer.eos_token_id]
    text = tokenizer.decode(ids, skip_special_tokens=not has_specials)

    (lengths,) = token_lengths(tokenizer, [ids], [text])

    assert sum(lengths) == len(text) and min(lengths) >= 0
    assert lengths[-1] == (len("<eos>") if has_specials else 0)
    at = 0
    for token, length in zip(ids, lengths, strict=True):
        own = tokenizer.decode([token]).strip()
        piece = text[at : at + length].strip()
        if own and "\ufffd" not in own and (length or has_specials):
            assert piece.endswith(own), (token, own, piece)  # behind a character of several tokens
        at += length


def test_text_that_its_tokens_do_not_spell_is_given_to_the_last_one() -> None:
    tokenizer = tokenizer_of("characters")
    ids = tokenizer("cat").input_ids

    assert token_lengths(tokenizer, [ids, []], ["something else", ""])[1] == []
    assert sum(token_lengths(tokenizer, [ids], ["something else"])[0]) == 14
