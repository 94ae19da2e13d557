"""The text tokenizer: text is data, special tokens are placed by id only."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from renderers.base import Tokenizer as TokenizerProtocol

from clawgym_env.errors import EngineError
from clawgym_env.tokenizer import CHATML_SPECIALS, LONG_TEXT, TextTokenizer, byte_tokenizer

TOKENIZER = byte_tokenizer()
LOOKALIKES = st.lists(st.one_of(st.text(max_size=8), st.sampled_from(CHATML_SPECIALS)), max_size=6).map("".join)


def test_the_tokenizer_satisfies_the_protocol_of_the_renderers_library() -> None:
    assert isinstance(TOKENIZER, TokenizerProtocol)


@given(LOOKALIKES)
def test_any_text_survives_the_round_trip_and_never_becomes_a_special_token(text: str) -> None:
    ids = TOKENIZER.encode(text)
    assert TOKENIZER.decode(ids) == text
    assert not TOKENIZER.special_ids & set(ids)


@given(LOOKALIKES, st.integers(1, 3))
def test_a_long_text_has_the_ids_of_its_bytes_however_often_it_is_asked_for(text: str, times: int) -> None:
    long = text + "x" * LONG_TEXT
    ids = [TOKENIZER.encode(long) for _ in range(times)]
    assert all(each == [*TOKENIZER.encode(text), *TOKENIZER.encode("x") * LONG_TEXT] for each in ids)
    ids[0].clear()  # what is handed out is the caller's own
    assert TOKENIZER.encode(long)


def test_half_a_surrogate_pair_becomes_a_replacement_character() -> None:
    assert TOKENIZER.decode(TOKENIZER.encode("a\ud83d b\ud83d\ude00")) == "a\ufffd b\U0001f600"


def test_special_tokens_have_ids_after_the_256_bytes() -> None:
    ids = [TOKENIZER.convert_tokens_to_ids(token) for token in CHATML_SPECIALS]
    assert ids == list(range(256, 256 + len(CHATML_SPECIALS)))
    assert TOKENIZER.vocab_size == 263
    assert TOKENIZER.eos_token_id == TOKENIZER.convert_tokens_to_ids("<|im_end|>")


def test_an_unknown_token_has_no_id() -> None:
    assert TOKENIZER.convert_tokens_to_ids("<|nothing|>") is None


def test_decode_accepts_arrays_and_shows_special_tokens_unless_told_not_to() -> None:
    ids = np.array([*TOKENIZER.encode("hé"), 258], dtype=np.int32)
    assert TOKENIZER.decode(ids) == "hé<|im_end|>"
    assert TOKENIZER.decode(ids, skip_special_tokens=True) == "hé"


def test_only_the_bare_assistant_header_is_read_as_special_because_renderers_search_for_it() -> None:
    header = TOKENIZER.encode("<|im_start|>assistant\n")
    assert header[0] == TOKENIZER.convert_tokens_to_ids("<|im_start|>")
    assert TOKENIZER.convert_tokens_to_ids("<|im_start|>") not in TOKENIZER.encode("x<|im_start|>assistant\n")


def test_a_saved_tokenizer_reads_back_the_same(tmp_path: Path) -> None:
    TOKENIZER.save(tmp_path)
    again = TextTokenizer.from_folder(tmp_path, name_or_path="tiny")
    text = "a <|im_end|> b"
    assert again.encode(text) == TOKENIZER.encode(text)
    assert (again.eos_token_id, again.name_or_path) == (TOKENIZER.eos_token_id, "tiny")


def test_a_folder_without_tokenizer_json_is_an_engine_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"tokenizer\.json"):
        TextTokenizer.from_folder(tmp_path)


def test_extra_special_tokens_get_ids_of_their_own() -> None:
    extended = byte_tokenizer(extra_specials=("<think>", "</think>"))
    assert extended.convert_tokens_to_ids("</think>") == 264


def test_importing_the_tokenizer_pulls_in_neither_torch_nor_renderers() -> None:
    code = (
        "import sys, clawgym_env.tokenizer, clawgym_env.rendering, clawgym_env.trace.prefix_tree\n"
        "heavy = {'torch', 'transformers', 'renderers'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_a_policy_wrote_holds_its_special_tokens_as_ids() -> None:
    tokenizer = byte_tokenizer(extra_specials=["<|im_end|>!"])
    ids = tokenizer.encode_sampled("ä<tool_call>{}</tool_call><|im_end|>!<|im_end|>")
    names = ["<tool_call>", "</tool_call>", "<|im_end|>!", "<|im_end|>"]
    assert [token for token in ids if token in tokenizer.special_ids] == list(
        map(tokenizer.convert_tokens_to_ids, names)
    )
    assert tokenizer.decode(ids) == "ä<tool_call>{}</tool_call><|im_end|>!<|im_end|>"
    assert not tokenizer.special_ids & set(tokenizer.encode("<|im_end|>"))
    assert tokenizer.encode_sampled("") == []
