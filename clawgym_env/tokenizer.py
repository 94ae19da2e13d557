"""The text tokenizer of a policy: `tokenizers.Tokenizer` behind the small surface that renderers ask for.

Used by renderers and embedded engines; needs neither torch nor transformers. Invariant: text is data. A string that
merely looks like a special token (`<|im_end|>` inside a file the agent reads) is encoded as ordinary text, so that
nothing in a workspace can forge a turn; special ids are placed by renderers, by id. Tokens that a model's own
`tokenizer.json` adds without calling them special stay readable when they are mere tags (Qwen's `<think>`), which its
renderer writes as text, and not when they look like turn tokens (DeepSeek's `<｜User｜>`).
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from clawgym_env.errors import EngineError
from clawgym_env.word_ids import word_ids

CHATML_SPECIALS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)
"""Special tokens of the embedded policy, in id order after the ordinary vocabulary."""

_SCAFFOLDS = frozenset(
    {
        "<|im_start|>assistant\n",
        "<｜Assistant｜>",
        "<｜hy_Assistant:opensource｜>",
        "<|im_assistant|>assistant<|im_middle|>",
        "<assistant>",
        "]~b]ai\n",
    }
)
"""Assistant headers that the `renderers` library encodes as one string to look for them in a prompt. They are the
only texts in which special tokens are recognised, and only when they are the whole text."""

LONG_TEXT, LONGEST_TEXT = 8 << 10, 256 << 10
"""Characters. The ids of such texts are remembered: every rollout of a batch begins with the same system prompt and
tools, and often reads the same files."""
REMEMBERED_TEXTS = 64

_TURN_TOKEN = re.compile(r"<[|｜].+[|｜]>")


class TextTokenizer:
    """Satisfies `renderers.base.Tokenizer`."""

    def __init__(self, tokenizer: Tokenizer, *, name_or_path: str = "", eos_token: str | None = None) -> None:
        """Wrap a private copy of `tokenizer`.

        Args:
            name_or_path: what renderers recognise the model family by; empty for our own policies.
            eos_token: must be in the vocabulary.

        Raises:
            EngineError: `eos_token` is unknown.
        """
        self._tokenizer = Tokenizer.from_str(tokenizer.to_str())
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._scaffolds = {
            text: self._tokenizer.encode(text, add_special_tokens=False).ids for text in sorted(_SCAFFOLDS)
        }
        self._tokenizer.encode_special_tokens = True
        added = self._tokenizer.get_added_tokens_decoder()
        uncalled = {i for i, token in added.items() if not token.special and _TURN_TOKEN.fullmatch(token.content)}
        self._special_ids = frozenset(index for index, token in added.items() if token.special) | uncalled
        forged = "|".join(re.escape(added[i].content) for i in sorted(uncalled))
        self._uncalled = re.compile(forged) if forged else None
        """Finds turn tokens that the vocabulary does not call special, which the library would read in any text."""
        # The longest first: one special token may begin with another.
        specials = sorted((added[i].content for i in self._special_ids), key=len, reverse=True)
        self._specials = re.compile(f"({'|'.join(map(re.escape, specials))})") if specials else None
        self._words = word_ids(self._tokenizer, self._plain_ids)
        self._remembered_ids = functools.lru_cache(maxsize=REMEMBERED_TEXTS)(self._long_ids)
        self.name_or_path = name_or_path
        self.unk_token_id: int | None = None
        self.eos_token_id: int | None = None
        if eos_token is not None:
            self.eos_token_id = self._tokenizer.token_to_id(eos_token)
            if self.eos_token_id is None:
                raise EngineError(f"Expected the end token {eos_token!r} in the vocabulary of {name_or_path!r}.")

    @classmethod
    def from_folder(cls, folder: str | Path, *, name_or_path: str | None = None) -> TextTokenizer:
        """Read `tokenizer.json` (and the end token of `tokenizer_config.json`) of a Hugging Face folder.

        Raises:
            EngineError: there is no `tokenizer.json`.
        """
        path = Path(folder)
        file = path / "tokenizer.json"
        if not file.is_file():
            raise EngineError(f"Expected a tokenizer.json in {str(path)!r}. Save the model with a fast tokenizer.")
        name = str(path) if name_or_path is None else name_or_path
        return cls(Tokenizer.from_file(str(file)), name_or_path=name, eos_token=_eos_token(path))

    @property
    def vocab_size(self) -> int:
        """Number of ids, special ones included."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that no text is ever encoded to."""
        return self._special_ids

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Return the ids of plain text. Nothing is ever added, whatever `add_special_tokens` says."""
        scaffold = self._scaffolds.get(text)
        return self.encode_literal(text) if scaffold is None else list(scaffold)

    def encode_literal(self, text: str) -> list[int]:
        """Return the ids of plain text, whatever it spells: what our own renderer writes messages with."""
        if not text.isascii():
            # JSON may carry half a surrogate pair, which is no text; each becomes U+FFFD.
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        if not self._tokenizer.encode_special_tokens:
            return self._tokenizer.encode(text, add_special_tokens=False).ids
        if LONG_TEXT <= len(text) <= LONGEST_TEXT:
            remembered: list[int] = self._remembered_ids(text).tolist()
            return remembered
        return self._literal_ids(text)

    def encode_sampled(self, text: str) -> list[int]:
        """Return the ids of what a policy wrote: a special token in it is that token, for a policy may sample any."""
        pieces = [text] if self._specials is None else self._specials.split(text)
        ids: list[int] = []
        for position, piece in enumerate(pieces):
            special = self._tokenizer.token_to_id(piece) if position % 2 else None
            ids += self.encode_literal(piece) if special is None else [special]
        return ids

    def _long_ids(self, text: str) -> npt.NDArray[np.int32]:
        return np.array(self._literal_ids(text), dtype=np.int32)

    def _literal_ids(self, text: str) -> list[int]:
        ids = None if self._words is None else self._words.encode(text)
        if ids is not None:
            return ids
        if self._uncalled is None:
            return self._plain_ids(text)
        cuts = [0, *(found.start() + 1 for found in self._uncalled.finditer(text)), len(text)]
        return [i for start, end in pairwise(cuts) for i in self._plain_ids(text[start:end])]

    def _plain_ids(self, text: str) -> list[int]:
        # Of a batch of one, because only batches come without character offsets, a third of the time.
        ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def decode(
        self,
        token_ids: Sequence[int] | npt.NDArray[np.int32] | int,
        *,
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool = False,
    ) -> str:
        """Return the text of ids; bytes that are no valid UTF-8 become U+FFFD."""
        ids = [int(token_ids)] if isinstance(token_ids, int | np.integer) else [int(i) for i in token_ids]
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def convert_tokens_to_ids(self, tokens: str) -> int | None:
        """Return the id of a token, or None when it is unknown."""
        return self._tokenizer.token_to_id(tokens)

    def byte_vocabulary(self) -> list[bytes]:
        """Return the ordinary tokens of a byte-level vocabulary in id order, as the bytes they stand for.

        Raises:
            EngineError: the vocabulary is no byte-level one.
        """
        byte_of = {symbol: byte for byte, symbol in enumerate(_byte_symbols())}
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=False)
        try:
            return [
                bytes(byte_of[symbol] for symbol in token) for token in sorted(vocabulary, key=vocabulary.__getitem__)
            ]
        except KeyError as error:
            raise EngineError(f"Expected a byte-level vocabulary, got one with the symbol {error}.") from error

    @contextmanager
    def special_texts(self) -> Iterator[None]:
        """Recognise special tokens in texts for a while.

        Only for building a renderer: some look their own special tokens up by encoding them.
        """
        self._tokenizer.encode_special_tokens = False
        try:
            yield
        finally:
            self._tokenizer.encode_special_tokens = True

    def save(self, folder: str | Path) -> None:
        """Write `tokenizer.json` and `tokenizer_config.json` into an existing folder."""
        path = Path(folder)
        self._tokenizer.save(str(path / "tokenizer.json"))
        eos = None if self.eos_token_id is None else self._tokenizer.id_to_token(self.eos_token_id)
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos}
        (path / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def byte_tokenizer(*, extra_specials: Sequence[str] = ()) -> TextTokenizer:
    """Make a tokenizer of the 256 bytes, `CHATML_SPECIALS` and `extra_specials`: no file, no training.

    Id b is byte b's place in the byte-level alphabet; special ids follow from 256.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in (*CHATML_SPECIALS, *extra_specials)]
    )
    return TextTokenizer(tokenizer, eos_token="<|im_end|>")


def _byte_symbols() -> list[str]:
    """Return the character that stands for each byte in a byte-level vocabulary: itself where it can be seen."""
    seen = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    unseen = [byte for byte in range(256) if byte not in seen]
    return [chr(byte if byte in seen else 256 + unseen.index(byte)) for byte in range(256)]


def _eos_token(folder: Path) -> str | None:
    file = folder / "tokenizer_config.json"
    if not file.is_file():
        return None
    value = json.loads(file.read_text(encoding="utf-8")).get("eos_token")
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None
