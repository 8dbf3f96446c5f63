"""Encode text as tokens, either as UTF-8 bytes or with the tokenizer of a `tokenizer.json` file."""

import json
import logging
import re
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from ringattn.train.data.workers import log_once
from ringattn.train.settings.config import ConfigError, DataConfig

# The names to try in this order if no file specifies the end-of-text token, most specific first
END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>", "<|eos|>", "<eos>", "</s>", "[EOS]")  # noqa: RUF001  # DeepSeek's token has such bars

# The fingerprints of tokenizers for which this process has already shown a warning.
_warned: set[int] = set()


class BytesTokenizer:
    """A tokenizer whose token ids are the UTF-8 bytes of the text.

    Attributes:
        eos: the id of the end-of-text token, which `encode` never returns.
        bos: the id of every document's first token, usually `eos`.
        fingerprint: a checksum of the tokenizer.
    """

    vocab_size = 257
    eos = bos = 256
    fingerprint = 0

    def encode(self, text: str) -> np.ndarray:
        """Return the token ids of `text` as int32 (N,), without `eos`."""
        return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int32)

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        return [self.encode(text) for text in texts]

    def encode_spans(self, text: str, spans: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
        """Encode `text`, and mark the tokens that contain a character of a span.

        Args:
            text: the text.
            spans: pairs (start, end) of character positions, in ascending order and disjoint.

        Returns:
            The token ids, int32 (N,), and whether each token contains a character of a span, bool (N,).
        """
        tokens = self.encode(text)
        is_marked = np.zeros(len(tokens), dtype=bool)
        for start, end in spans:
            first = len(text[:start].encode())
            is_marked[first : first + len(text[start:end].encode())] = True
        return tokens, is_marked

    def decode(self, tokens: list[int]) -> str:
        """Return the text of `tokens`. The tokens may contain `eos` and incomplete characters."""
        return bytes(token for token in tokens if token < 256).decode("utf-8", errors="replace")


class JsonTokenizer:
    """A tokenizer that is defined by a `tokenizer.json`. The class has the attributes and methods of BytesTokenizer.

    Args:
        eos_token: the name of the end-of-text token; None for the name in a file of the same folder or in END_OF_TEXT.
        special_tokens: the value of `data.special_tokens`. `decode` returns special tokens only with "parse".

    Raises:
        ConfigError: the package `tokenizers` is missing, a file cannot be read, or there is no end-of-text token.
    """

    def __init__(self, path: str | Path, eos_token: str | None = None, special_tokens: str = "text"):
        self._tokenizer = _read(path)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._is_parsed = special_tokens == "parse"
        self._tokenizer.encode_special_tokens = not self._is_parsed
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        config = read_tokenizer_config(Path(path).expanduser().parent)
        self.eos = self._find_eos(path, eos_token, config)
        tokens = self._tokenizer.get_added_tokens_decoder().values()
        names = {token.content for token in tokens if token.special and token.content}
        # Mark end-of-text tokens as special. Leave out tokens that are already special, because marking a token twice would
        # change its flags.
        added = {self.token(self.eos)} | ({*END_OF_TEXT} & ids.keys() if not self._is_parsed else set())
        self._tokenizer.add_special_tokens(sorted(added - names))
        self.special_names = re.compile("|".join(map(re.escape, sorted(names | added))))
        self.vocab_size, self.fingerprint = max(ids.values()) + 1, fingerprint(path)
        bos = self._first_special_token(config)
        self.bos = self.eos if bos is None else bos
        # `encode` adds no special tokens, so the post-processor would only remove spaces from the offsets of tokens.
        from tokenizers.processors import ByteLevel

        self._tokenizer.post_processor = ByteLevel(trim_offsets=False)

    def _find_eos(self, path: str | Path, given: str | None, config: dict[str, Any]) -> int:
        name, source = given, "data.eos_token"
        if name is None:
            name, source = name_of(config.get("eos_token")), "tokenizer_config.json or special_tokens_map.json"
        if name is None:
            name, source = read_config(Path(path).expanduser().parent, "config.json").get("eos_token_id"), "config.json"
            name = name[0] if isinstance(name, list) and name else name
            if type(name) is int and 0 <= name < 2**32:
                name = self._tokenizer.id_to_token(name) or name
        if name is None:
            name = next((each for each in END_OF_TEXT if self._find(each) is not None), None)
        if name is None:
            raise ConfigError(f"data.tokenizer={path} has no end-of-text token: set data.eos_token to the name of a token")
        index = self._find(name)
        if index is None:
            raise ConfigError(
                f"data.tokenizer={path} does not contain the end-of-text token {name!r:.60} of {source}: set data.eos_token to "
                "the name of a token"
            )
        return index

    def _first_special_token(self, config: dict[str, Any]) -> int | None:
        """Return the id of the token that the tokenizer prepends to a text, or None.

        The post-processor in `tokenizer.json` may prepend a token, or `add_bos_token` in `tokenizer_config.json` may request
        it.
        """
        encoding = self._tokenizer.encode("a", add_special_tokens=True)
        if encoding.special_tokens_mask[:1] == [1]:
            return encoding.ids[0]
        if not config.get("add_bos_token"):
            return None
        token = config.get("bos_token")
        index = self._find(name_of(token))
        if index is None:
            raise ConfigError(
                f"tokenizer_config.json sets add_bos_token, but its bos_token={token!r:.60} is not a token of tokenizer.json: "
                "correct bos_token, or remove add_bos_token"
            )
        return index

    def _find(self, name: Any) -> int | None:
        try:
            return self._tokenizer.token_to_id(name)
        except (TypeError, UnicodeEncodeError):  # the name is not text, or not UTF-8
            return None

    def token(self, index: int) -> str:
        """Return the name of a token, such as "<|endoftext|>"."""
        return str(self._tokenizer.id_to_token(index))

    def encode(self, text: str) -> np.ndarray:
        return self.encode_batch([text])[0]

    def encode_spans(self, text: str, spans: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
        self._warn_of_special_names(text)
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        begins, ends = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2).T
        starts, stops = np.array([*spans, (len(text), len(text) + 1)]).T
        # Mark a token if the token overlaps a span.
        is_marked = starts[np.searchsorted(stops, begins, side="right")] < ends
        return np.array(encoding.ids, dtype=np.int32), is_marked

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        for text in texts:
            self._warn_of_special_names(text)
        # encode_batch_fast leaves out the offsets of tokens, which are not needed here.
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.int32) for encoding in encodings]

    def _warn_of_special_names(self, text: str) -> None:
        if not self._is_parsed and self.fingerprint not in _warned and (found := self.special_names.search(text)):
            _warned.add(self.fingerprint)
            problem = f"a text contains {found[0]}, the name of a special token, which is encoded as text"
            advice = "set data.special_tokens=parse to encode such names as special tokens"
            log_once(f"{'tokenizer':<12}{problem}; {advice}", logging.WARNING)

    def decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=not self._is_parsed)


Tokenizer = BytesTokenizer | JsonTokenizer


def tokenizer_of(config: DataConfig) -> Tokenizer:
    return load_tokenizer(config.tokenizer, config.eos_token, config.special_tokens)


def load_tokenizer(name: str, eos_token: str | None = None, special_tokens: str = "text") -> Tokenizer:
    """Return the tokenizer that `data.tokenizer`, `data.eos_token` and `data.special_tokens` describe.

    Raises:
        ConfigError: the tokenizer cannot be loaded, or does not support `eos_token` or `special_tokens`.
    """
    if name != "bytes":
        return JsonTokenizer(name, eos_token, special_tokens)
    for setting, value, default in (("eos_token", eos_token, None), ("special_tokens", special_tokens, "text")):
        if value != default:
            raise ConfigError(f"data.{setting}={value} requires a tokenizer.json, but data.tokenizer=bytes: leave it out")
    return BytesTokenizer()


def name_of(token: Any) -> Any:
    """Return the name of a token, which `tokenizer_config.json` stores as a string or as a dict."""
    return token.get("content") if isinstance(token, dict) else token


def read_tokenizer_config(folder: Path) -> dict[str, Any]:
    """Return tokenizer_config.json. As in transformers, older files take their tokens from special_tokens_map.json."""
    config = read_config(folder, "tokenizer_config.json")
    return config if "added_tokens_decoder" in config else config | read_config(folder, "special_tokens_map.json")


def read_config(folder: Path, name: str) -> dict[str, Any]:
    """Return the content of the JSON file `name` in a folder, or {} if there is no such file.

    Raises:
        ConfigError: the file cannot be read.
    """
    path = folder / name
    try:
        config = json.loads(path.read_bytes()) if path.is_file() else {}
        if not isinstance(config, dict):
            raise ValueError("it must contain a dict")
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {error}; download it again, or remove it") from error
    return config


def fingerprint(path: str | Path) -> int:
    return zlib.crc32(Path(path).expanduser().read_bytes())


def check_tokenizer(name: str, tokenizer: Tokenizer, expected: int | None, why: str) -> None:
    """Raise ConfigError unless a tokenizer has the fingerprint `expected`. None accepts any tokenizer.

    `name` is the value of `data.tokenizer`, and `why` tells the user why this fingerprint is expected.
    """
    if expected is not None and tokenizer.fingerprint != expected:
        raise ConfigError(f"data.tokenizer={name}, but {why}: the token ids would not match; set data.tokenizer to that file")


def _read(path: str | Path):
    try:
        from tokenizers import Tokenizer as Reader

        return Reader.from_file(str(Path(path).expanduser()))
    except ImportError as error:
        raise ConfigError(f"data.tokenizer={path} requires the package `tokenizers`: pip install tokenizers") from error
    except Exception as error:  # `tokenizers` raises plain Exceptions.
        reason = str(error).splitlines()[0]
        raise ConfigError(f"data.tokenizer={path}: {reason}; it must be `bytes` or the path of a tokenizer.json") from error
