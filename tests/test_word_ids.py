"""Ids that are put together from words are those the library gives for the whole text."""

from __future__ import annotations

import functools
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from clawgym_env.word_ids import GPT_2, LONGEST_TEXT, LONGEST_WORD, PLAIN, WordIds, word_ids

QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA_3 = QWEN.replace(r"\p{N}|", r"\p{N}{1,3}|", 1)
GPT_OSS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TINY = r"\\n|\p{L}+|\d|\n+|(?:(?!\\n)[^\p{L}\d\n])+"
PATTERNS = {
    "gpt-2": None,
    "gpt-2 written out": GPT_2,
    "qwen": QWEN,
    "llama-3": LLAMA_3,
    "gpt-oss": GPT_OSS,
    "tiny": TINY,
}
TRAINED_ON = ["It's the tool's result: I'LL see 1234 x = foo(bar)\n\n  return {'a': [1, 22, 333]}  # don't\t\r\n"] * 3


def split_at(pattern: str | None) -> pre_tokenizers.PreTokenizer:
    if pattern is None:
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


@functools.cache
def trained(pattern: str | None) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = split_at(pattern)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=360, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TRAINED_ON, trainer)
    tokenizer.add_special_tokens([AddedToken("<|im_end|>", special=True, normalized=False)])
    tokenizer.encode_special_tokens = True
    return tokenizer


def whole(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


def words_of(tokenizer: Tokenizer) -> WordIds | None:
    return word_ids(tokenizer, functools.partial(whole, tokenizer))


pieces = st.sampled_from(
    ["the", " tool", "'s", "'LL", "don't", "\n", "\r\n", "  ", "\t", "\x0b", "\x1c", "1234", "x=", "<|im_end|>"]
)

plain_texts = st.lists(
    st.one_of(st.text(st.characters(max_codepoint=127), max_size=6), st.text("’“—…→€≠│✓🙂", max_size=3), pieces),
    max_size=12,
).map("".join)


@pytest.mark.parametrize("name", PATTERNS)
@given(texts=st.lists(plain_texts, min_size=1, max_size=3))
def test_words_give_the_ids_of_the_whole_text(name: str, texts: list[str]) -> None:
    tokenizer = trained(PATTERNS[name])
    words = words_of(tokenizer)
    assert words is not None
    for text in [*texts, *texts]:
        assert words.encode(text) == whole(tokenizer, text)


def test_beyond_ascii_plain_text_is_punctuation_and_symbols_that_no_normal_form_changes() -> None:
    beyond = [chr(point) for point in range(128, 0x110000) if PLAIN.fullmatch(chr(point))]
    assert len(beyond) > 1000
    for character in beyond:
        assert unicodedata.category(character)[0] in "PS", hex(ord(character))
        assert unicodedata.category(character) != "Pc", hex(ord(character))
        assert unicodedata.is_normalized("NFC", character), hex(ord(character))


@pytest.mark.parametrize("text", ["naïve", "½", "a\u00a0b", "x" * (LONGEST_TEXT + 1)])
def test_what_is_not_short_and_plain_is_left_to_the_library(text: str) -> None:
    words = words_of(trained(QWEN))
    assert words is not None
    assert words.encode(text) is None


def test_long_words_are_encoded_and_not_kept() -> None:
    asked: list[str] = []
    tokenizer = trained(QWEN)

    def encode(word: str) -> list[int]:
        asked.append(word)
        return whole(tokenizer, word)

    words = word_ids(tokenizer, encode)
    assert words is not None
    long = "x" * (LONGEST_WORD + 1)
    assert [words.encode(f"word {long}") for _ in range(2)] == [whole(tokenizer, f"word {long}")] * 2
    assert asked == ["word", f" {long}", f" {long}"]


def test_a_text_with_an_added_token_is_left_to_the_library() -> None:
    tokenizer = Tokenizer.from_str(trained(QWEN).to_str())
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    words = words_of(tokenizer)
    assert words is not None
    assert words.encode("I <think> so") is None
    assert words.encode("I think so") == whole(tokenizer, "I think so")


def test_a_pattern_that_leaves_gaps_is_noticed() -> None:
    tokenizer = trained(r"\p{L}+")
    words = words_of(tokenizer)
    assert words is not None
    assert words.encode("one two") is None
    assert words.encode("one") == whole(tokenizer, "one")


@pytest.mark.parametrize(
    "pre_tokenizer",
    [
        pre_tokenizers.ByteLevel(add_prefix_space=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        pre_tokenizers.Metaspace(),
        split_at(r"[\p{P}\p{S}]+|[^\p{P}\p{S}]+"),
        split_at(r"[a-z&&[^b]]+|.+"),
        *(
            split_at(pattern)
            for pattern in (r"\G\S|\s", r"^a|.", r"a$|.", r"(?:ab){1,2}+|.", r"[[:alpha:]]+|.", r"(?m:.)")
        ),
    ],
)
def test_a_tokenizer_that_is_not_understood_has_no_words(pre_tokenizer: pre_tokenizers.PreTokenizer) -> None:
    tokenizer = Tokenizer.from_str(trained(QWEN).to_str())
    tokenizer.pre_tokenizer = pre_tokenizer
    assert words_of(tokenizer) is None


def test_a_tokenizer_that_changes_the_text_first_or_is_no_bpe_has_no_words() -> None:
    tokenizer = Tokenizer.from_str(trained(QWEN).to_str())
    tokenizer.normalizer = normalizers.Lowercase()
    assert words_of(tokenizer) is None
    other = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    other.pre_tokenizer = split_at(QWEN)
    assert words_of(other) is None


def test_the_normal_form_of_plain_text_is_itself() -> None:
    tokenizer = Tokenizer.from_str(trained(QWEN).to_str())
    tokenizer.normalizer = normalizers.NFC()
    words = words_of(tokenizer)
    assert words is not None
    assert words.encode("plain “text”") == whole(tokenizer, "plain “text”")
