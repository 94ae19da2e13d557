from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawgym_env.wrappers.hashing import hashed_text


@given(st.text(), st.integers(1, 64))
def test_every_text_has_a_bounded_vector_of_the_given_size(text: str, size: int) -> None:
    features = hashed_text(text, size)
    assert features.shape == (size,)
    assert features.dtype == np.float32
    assert (np.abs(features) <= 1.0).all()


def test_a_text_with_words_has_length_one_and_one_without_is_zero() -> None:
    assert np.linalg.norm(hashed_text("write two lines", 256)) == pytest.approx(1.0)
    assert not hashed_text(" !? ", 256).any()


def test_case_blanks_and_compatible_forms_of_letters_do_not_count_but_order_does() -> None:
    assert np.array_equal(hashed_text("Write  IT", 256), hashed_text("write it.", 256))
    assert np.array_equal(hashed_text("ﬁle", 256), hashed_text("file", 256))
    assert not np.array_equal(hashed_text("write it", 256), hashed_text("it write", 256))


def test_texts_that_share_words_are_nearer_than_texts_that_share_none() -> None:
    one, near, far = (hashed_text(text, 512) for text in ("copy the file", "copy the folder", "sum all numbers"))
    assert one @ near > one @ far + 0.2


def test_text_without_blanks_shares_its_characters() -> None:
    assert hashed_text("复制文件", 512) @ hashed_text("删除文件", 512) > 0.2


def test_another_process_with_another_hash_seed_gets_the_same_vector() -> None:
    code = "from clawgym_env.wrappers.hashing import hashed_text; print(hashed_text('Grüße, ☃ 世界', 32).tolist())"
    root = Path(__file__).parents[2]
    environment = {"PYTHONHASHSEED": "12345", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root, env=environment
    )
    assert done.stdout.strip() == str(hashed_text("Grüße, ☃ 世界", 32).tolist())
