"""Encode text as tokens. The two tokenizers are the bytes of the text, and the tokenizer of a `tokenizer.json` file."""

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from ringattn.train.config import ConfigError

# Names of the end-of-text token in widely used tokenizers, the most specific first.
END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>", "<|eos|>", "<eos>", "</s>", "[EOS]")


class BytesTokenizer:
    """The tokenizer whose token ids are the UTF-8 bytes of the text. The id of `eos` is 256.

    Attributes:
        vocab_size: the number of token ids, which are 0 to vocab_size - 1.
        eos: the id of the end-of-text token. `encode` never returns it.
        bos: the id of the first token of every document. It equals `eos`, unless the tokenizer has another token for the
            beginning of a text.
        fingerprint: a checksum that identifies the tokenizer.
    """

    vocab_size = 257
    eos = bos = 256
    fingerprint = 0

    def encode(self, text: str) -> np.ndarray:
        """Return the token ids of `text` as int32 (N,), without `eos`."""
        return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int32)

    def decode(self, tokens: list[int]) -> str:
        """Return the text of `tokens`. The tokens may contain `eos` and incomplete characters."""
        return bytes(token for token in tokens if token < 256).decode("utf-8", errors="replace")


class JsonTokenizer:
    """A tokenizer that is defined by a `tokenizer.json`. The optional package `tokenizers` reads the file.

    This class has the same attributes and methods as BytesTokenizer.

    Raises:
        ConfigError: the package is missing, the file cannot be read, or the file has no end-of-text token.
    """

    def __init__(self, path: str | Path):
        self._tokenizer = _read(path)
        # Documents are encoded completely and as plain text. The characters "<|endoftext|>" within a document are therefore not
        # encoded as the end-of-text token.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        names = [name for name in END_OF_TEXT if name in ids]
        if not names:
            raise ConfigError(f"data.tokenizer={path} has no end-of-text token: add one of {', '.join(END_OF_TEXT)}")
        # The file may contain the end-of-text tokens without marking them as special tokens.
        self._tokenizer.add_special_tokens(names)
        self.vocab_size, self.eos, self.fingerprint = max(ids.values()) + 1, ids[names[0]], fingerprint(path)
        bos = self._first_special_token(read_tokenizer_config(Path(path).expanduser().parent))
        self.bos = self.eos if bos is None else bos

    def _first_special_token(self, config: dict[str, Any]) -> int | None:
        """Return the id of the token that the tokenizer prepends to a text, or None if it prepends no token.

        Either the post-processor in `tokenizer.json` prepends the token, or `add_bos_token` in `config` requests the token.
        `config` is the content of `tokenizer_config.json`.
        """
        encoding = self._tokenizer.encode("a", add_special_tokens=True)
        if encoding.special_tokens_mask[:1] == [1]:
            return encoding.ids[0]
        if not config.get("add_bos_token"):
            return None
        token = config.get("bos_token")
        return self._tokenizer.token_to_id(token["content"] if isinstance(token, dict) else str(token))

    def token(self, index: int) -> str:
        """Return the name of a token, such as "<|endoftext|>"."""
        return self._tokenizer.id_to_token(index)

    def encode(self, text: str) -> np.ndarray:
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int32)

    def decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode([int(token) for token in tokens], skip_special_tokens=True)


# Both classes have the same attributes and methods.
Tokenizer = BytesTokenizer | JsonTokenizer


def load_tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer that `data.tokenizer` names.

    Args:
        name: "bytes", or the path of a `tokenizer.json`.

    Raises:
        ConfigError: the package `tokenizers` is missing, the file cannot be read, or the file has no end-of-text token.
    """
    return BytesTokenizer() if name == "bytes" else JsonTokenizer(name)


def read_tokenizer_config(folder: Path) -> dict[str, Any]:
    """Return the content of `tokenizer_config.json` in a folder, or {} if the folder does not contain this file.

    Raises:
        ConfigError: the file cannot be read.
    """
    path = folder / "tokenizer_config.json"
    try:
        config = json.loads(path.read_text()) if path.is_file() else {}
        if not isinstance(config, dict):
            raise ValueError("it must contain a dict")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}; download it again, or remove it") from error
    return config


def fingerprint(path: str | Path) -> int:
    """Return the fingerprint of a `tokenizer.json`."""
    return zlib.crc32(Path(path).expanduser().read_bytes())


def check_tokenizer(name: str, tokenizer: Tokenizer, expected: int | None, why: str) -> None:
    """Check that a tokenizer has the expected fingerprint.

    Args:
        name: the value of `data.tokenizer`.
        tokenizer: the tokenizer.
        expected: the expected fingerprint, or None to accept any tokenizer.
        why: the reason for expecting this fingerprint. The error message contains the reason.

    Raises:
        ConfigError: the tokenizer has a different fingerprint.
    """
    if expected is not None and tokenizer.fingerprint != expected:
        raise ConfigError(f"data.tokenizer={name}, but {why}: the token ids would not match; set data.tokenizer to that file")


def _read(path: str | Path):
    try:
        from tokenizers import Tokenizer as Reader

        return Reader.from_file(str(Path(path).expanduser()))
    except ImportError as error:
        raise ConfigError(f"data.tokenizer={path} requires the package `tokenizers`: pip install tokenizers") from error
    except Exception as error:  # The package `tokenizers` raises only errors of the type Exception.
        reason = str(error).splitlines()[0]
        raise ConfigError(f"data.tokenizer={path}: {reason}; it must be `bytes` or the path of a tokenizer.json") from error
