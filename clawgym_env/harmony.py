"""The vocabulary of gpt-oss for `openai-harmony`, out of the policy's own `tokenizer.json`.

The renderer of the gpt-oss family encodes with that package, which wants the vocabulary in a file of its own format
and would fetch it. Here the file is written from the tokenizer for as long as the package needs to read it. It checks
the file's hash, so that a vocabulary which is not exactly that of gpt-oss is refused.
"""

from __future__ import annotations

import os
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from clawgym_env.errors import EngineError
from clawgym_env.tokenizer import TextTokenizer

FOLDER_VARIABLE = "TIKTOKEN_ENCODINGS_BASE"
"""Where `openai-harmony` looks for `FILE` before it asks the network."""
FILE = "o200k_base.tiktoken"


@contextmanager
def harmony_vocabulary(tokenizer: TextTokenizer) -> Iterator[None]:
    """Let `openai-harmony` load its encoding from a tokenizer; from the user's own folder where the variable names one.

    The variable is the process's: build renderers from one thread.

    Raises:
        EngineError: the body could not load the encoding, since this is not the vocabulary of gpt-oss.
    """
    from openai_harmony import HarmonyError

    try:
        if os.environ.get(FOLDER_VARIABLE):
            yield
            return
        with TemporaryDirectory(prefix="clawgym-") as folder:
            (Path(folder) / FILE).write_bytes(tiktoken_file(tokenizer))
            os.environ[FOLDER_VARIABLE] = folder
            try:
                yield
            finally:
                os.environ.pop(FOLDER_VARIABLE, None)
    except HarmonyError as error:
        raise EngineError(
            f"Expected the vocabulary of the family 'gpt-oss', got one that differs: {error}. Name another renderer."
        ) from error


def tiktoken_file(tokenizer: TextTokenizer) -> bytes:
    """Return the ordinary tokens of a byte-level vocabulary, a line each: their bytes in base64, and their rank."""
    return b"".join(b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokenizer.byte_vocabulary()))
