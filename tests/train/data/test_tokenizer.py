import sys

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from ringattn.train.config import ConfigError
from ringattn.train.data.tokenizer import BytesTokenizer, load_tokenizer


@pytest.fixture
def tokenizer_json(tmp_path):
    """Write a word tokenizer with the given special token; it would truncate and pad if it were let."""

    def write(special: str) -> str:
        words = {"<unk>": 0, "def": 1, "ring": 2, special: 3}
        tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
        tokenizer.add_special_tokens([special])
        tokenizer.enable_truncation(2)
        tokenizer.enable_padding(length=5)
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        return str(tmp_path / "tokenizer.json")

    return write


@settings(deadline=None)
@given(st.text())
def test_bytes_round_trip(text):
    tokenizer = BytesTokenizer()
    tokens = tokenizer.encode(text)
    assert tokens.dtype == np.int32
    assert tokens.tolist() == list(text.encode())
    assert tokenizer.decode([*tokens.tolist(), tokenizer.eos]) == text


def test_bytes_vocabulary_ends_with_eos():
    tokenizer = load_tokenizer("bytes")
    assert (tokenizer.vocab_size, tokenizer.eos) == (257, 256)


def test_bytes_decode_survives_half_a_character():
    assert BytesTokenizer().decode(list("é".encode())[:1]) == "\N{REPLACEMENT CHARACTER}"


def test_json_encodes_whole_documents(tokenizer_json):
    tokenizer = load_tokenizer(tokenizer_json("<|endoftext|>"))
    assert (tokenizer.vocab_size, tokenizer.eos) == (4, 3)
    assert tokenizer.encode("def ring def ring").tolist() == [1, 2, 1, 2]
    assert tokenizer.decode([1, 2, 3]) == "def ring"


def test_json_eos_written_in_a_text_is_text(tokenizer_json):
    tokenizer = load_tokenizer(tokenizer_json("<|endoftext|>"))
    assert tokenizer.eos not in tokenizer.encode("def <|endoftext|> ring")[[0, -1]]


def test_json_eos_that_is_not_called_special(tmp_path):
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<unk>": 0, "def": 1, "ring": 2}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.add_tokens(["<|endoftext|>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer.json"))
    assert (tokenizer.vocab_size, tokenizer.eos) == (4, 3)
    assert tokenizer.encode("def <|endoftext|> ring").tolist() == [1, 0, 2]


def test_json_without_end_of_text(tokenizer_json):
    with pytest.raises(ConfigError, match="has no end-of-text token"):
        load_tokenizer(tokenizer_json("[PAD]"))


def test_json_missing_file(tmp_path):
    with pytest.raises(ConfigError, match="is not a file"):
        load_tokenizer(str(tmp_path / "none.json"))


def test_json_unreadable_file(tmp_path):
    (tmp_path / "tokenizer.json").write_text("not json")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_tokenizer(str(tmp_path / "tokenizer.json"))


def test_json_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ConfigError, match="pip install tokenizers"):
        load_tokenizer("tokenizer.json")
