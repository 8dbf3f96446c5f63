"""Text to token ids and back: raw bytes, or a `tokenizer.json`."""

import zlib
from pathlib import Path
from typing import Protocol

import numpy as np

from ringattn.train.config import ConfigError

# What the field's tokenizers call the end of a text, most specific first.
END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>", "<|eos|>", "<eos>", "</s>", "[EOS]")


class Tokenizer(Protocol):
    """Ids are 0 .. vocab_size - 1; `eos` leads every document and is never produced by `encode`.

    `fingerprint` is a number that another tokenizer would hardly have.
    """

    vocab_size: int
    eos: int
    fingerprint: int

    def encode(self, text: str) -> np.ndarray:
        """The ids of `text`, int32 of shape (N,), without `eos`."""

    def decode(self, tokens: list[int]) -> str:
        """The text of `tokens`; `eos` and broken characters never raise."""


class BytesTokenizer:
    """The UTF-8 bytes of the text; 256 ends it."""

    vocab_size = 257
    eos = 256
    fingerprint = 0

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int32)

    def decode(self, tokens: list[int]) -> str:
        return bytes(token for token in tokens if token < 256).decode("utf-8", errors="replace")


class JsonTokenizer:
    """A `tokenizer.json` read by the optional `tokenizers` package. Raises ConfigError when it cannot serve."""

    def __init__(self, path: str | Path):
        self._tokenizer = _read(path)
        # A document is encoded whole and as plain text: "<|endoftext|>" written in it is not the end of it.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        names = [name for name in END_OF_TEXT if name in ids]
        if not names:
            raise ConfigError(f"data.tokenizer={path} has no end-of-text token: add one of {', '.join(END_OF_TEXT)}")
        self._tokenizer.add_special_tokens(names)  # also where the file does not call them special
        self.vocab_size, self.eos, self.fingerprint = max(ids.values()) + 1, ids[names[0]], fingerprint(path)

    def encode(self, text: str) -> np.ndarray:
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int32)

    def decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode([int(token) for token in tokens], skip_special_tokens=True)


def load_tokenizer(name: str) -> Tokenizer:
    """`bytes`, or the tokenizer in the file `name`. Raises ConfigError when the file cannot serve as one."""
    return BytesTokenizer() if name == "bytes" else JsonTokenizer(name)


def fingerprint(path: str | Path) -> int:
    """Of a `tokenizer.json`."""
    return zlib.crc32(Path(path).expanduser().read_bytes())


def check_tokenizer(name: str, tokenizer: Tokenizer, expected: int | None, why: str) -> None:
    """Refuse the tokenizer of this `name` where its fingerprint is not as `expected`; None: nothing is known of it.

    Raises:
        ConfigError: saying `why`.
    """
    if expected is not None and tokenizer.fingerprint != expected:
        raise ConfigError(f"data.tokenizer={name}, but {why}: tokens would mean something else; set data.tokenizer to that")


def _read(path: str | Path):
    try:
        from tokenizers import Tokenizer as Reader
    except ImportError as error:
        raise ConfigError(
            f"data.tokenizer={path} needs the `tokenizers` package: pip install tokenizers, or set data.tokenizer=bytes"
        ) from error
    file = Path(path).expanduser()
    if not file.is_file():
        raise ConfigError(f"data.tokenizer={path} is no file: give `bytes` or the path of a tokenizer.json")
    try:
        return Reader.from_file(str(file))
    except Exception as error:  # the package raises bare Exception
        reason = str(error).splitlines()[0]
        raise ConfigError(f"data.tokenizer={path} cannot be read: {reason}; give a tokenizer.json") from error
