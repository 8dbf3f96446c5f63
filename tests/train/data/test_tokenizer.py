"""Tokenizers: text to token ids and back, and errors for files that are not tokenizers."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from ringattn.train.data import tokenizer as tokenizer_module
from ringattn.train.data import workers
from ringattn.train.data.tokenizer import BytesTokenizer, check_tokenizer, fingerprint, load_tokenizer
from ringattn.train.settings.config import ConfigError


@pytest.fixture
def tokenizer_json(tmp_path) -> Callable[[str], str]:
    """A function that writes a tokenizer of words, with the given special token, and returns its path.

    The file asks for truncation and padding, which must not take place.
    """

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


@pytest.mark.slow
@settings(max_examples=50)
@given(st.text())
def test_bytes_can_be_decoded_to_the_same_text(text):
    tokenizer = BytesTokenizer()
    tokens = tokenizer.encode(text)
    assert tokens.dtype == np.int32
    assert tokens.tolist() == list(text.encode())
    assert tokenizer.decode([*tokens.tolist(), tokenizer.eos]) == text


def test_the_last_token_of_bytes_is_eos():
    tokenizer = load_tokenizer("bytes")
    assert (tokenizer.vocab_size, tokenizer.eos) == (257, 256)


def test_a_part_of_a_character_can_be_decoded():
    assert BytesTokenizer().decode(list("é".encode())[:1]) == "\N{REPLACEMENT CHARACTER}"


def test_documents_are_neither_truncated_nor_padded(tokenizer_json):
    tokenizer = load_tokenizer(tokenizer_json("<|endoftext|>"))
    assert (tokenizer.vocab_size, tokenizer.eos) == (4, 3)
    assert tokenizer.encode("def ring def ring").tolist() == [1, 2, 1, 2]
    assert tokenizer.decode([1, 2, 3]) == "def ring"


def test_eos_within_a_document_is_encoded_as_text(tokenizer_json):
    tokenizer = load_tokenizer(tokenizer_json("<|endoftext|>"))
    assert tokenizer.eos not in tokenizer.encode("def <|endoftext|> ring")[[0, -1]]


def test_eos_need_not_be_marked_as_special(tmp_path):
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<unk>": 0, "def": 1, "ring": 2}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.add_tokens(["<|endoftext|>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer.json"))
    assert (tokenizer.vocab_size, tokenizer.eos) == (4, 3)
    assert tokenizer.encode("def <|endoftext|> ring").tolist() == [1, 0, 2]


def test_a_tokenizer_must_have_an_end_of_text_token(tokenizer_json):
    with pytest.raises(ConfigError, match=r"has no end-of-text token: set data\.eos_token to the name"):
        load_tokenizer(tokenizer_json("[PAD]"))


def test_the_fingerprint_depends_on_the_contents_of_the_file(tokenizer_json, tmp_path):
    path = tokenizer_json("<|endoftext|>")
    copy = tmp_path / "copy.json"
    copy.write_bytes(Path(path).read_bytes())
    assert load_tokenizer(path).fingerprint == fingerprint(copy)
    assert load_tokenizer(path).fingerprint != load_tokenizer(tokenizer_json("<eos>")).fingerprint


def test_another_fingerprint_than_expected_is_an_error():
    check_tokenizer("bytes", BytesTokenizer(), BytesTokenizer.fingerprint, "unused")
    check_tokenizer("bytes", BytesTokenizer(), None, "unused")
    with pytest.raises(ConfigError, match=r"data\.tokenizer=bytes, but the model needs another: .*set data\.tokenizer"):
        check_tokenizer("bytes", BytesTokenizer(), 7, "the model needs another")


def test_a_missing_file_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.json: No such file or directory"):
        load_tokenizer(str(tmp_path / "none.json"))


def test_a_file_in_another_format_is_an_error(tmp_path):
    (tmp_path / "tokenizer.json").write_text("not json")
    with pytest.raises(ConfigError, match="it must be `bytes`"):
        load_tokenizer(str(tmp_path / "tokenizer.json"))


def test_a_missing_package_is_an_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ConfigError, match="pip install tokenizers"):
        load_tokenizer("tokenizer.json")


def save_words(path: Path, post_processor: tokenizers.processors.PostProcessor | None = None) -> Path:
    """Write a tokenizer of words in the manner of Llama 3, whose tokens 3 and 4 mark the end and the beginning of a text."""
    words = {"<unk>": 0, "def": 1, "ring": 2, "<|end_of_text|>": 3, "<|begin_of_text|>": 4}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<|end_of_text|>", "<|begin_of_text|>"])
    if post_processor is not None:
        tokenizer.post_processor = post_processor
    tokenizer.save(str(path / "tokenizer.json"))
    return path / "tokenizer.json"


def prepend(name: str, index: int) -> tokenizers.processors.PostProcessor:
    return tokenizers.processors.TemplateProcessing(single=f"{name} $A", special_tokens=[(name, index)])


def test_documents_start_with_eos_unless_the_tokenizer_prepends_a_token(tmp_path):
    assert BytesTokenizer().bos == BytesTokenizer().eos
    tokenizer = load_tokenizer(str(save_words(tmp_path)))
    assert (tokenizer.bos, tokenizer.eos) == (3, 3)


def test_documents_start_with_the_token_that_the_post_processor_prepends(tmp_path):
    tokenizer = load_tokenizer(str(save_words(tmp_path, prepend("<|begin_of_text|>", 4))))
    assert (tokenizer.bos, tokenizer.eos) == (4, 3)
    assert tokenizer.encode("def ring").tolist() == [1, 2]
    assert (tokenizer.token(tokenizer.bos), tokenizer.token(tokenizer.eos)) == ("<|begin_of_text|>", "<|end_of_text|>")


@pytest.mark.parametrize("token", ["<|begin_of_text|>", {"content": "<|begin_of_text|>"}], ids=["text", "dict"])
@pytest.mark.parametrize(("added", "bos"), [(True, 4), (False, 3), (None, 3)])
def test_tokenizer_config_may_ask_for_the_first_token(token, added, bos, tmp_path):
    path = save_words(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": added, "bos_token": token}))
    assert load_tokenizer(str(path)).bos == bos


@pytest.mark.parametrize("token", [{}, {"content": 3}, {"content": None}, 3, None, [], "missing", "\ud800"], ids=ascii)
def test_a_first_token_that_does_not_exist_is_an_error(token, tmp_path):
    path = save_words(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": True, "bos_token": token}))
    with pytest.raises(ConfigError, match=r"add_bos_token, but its bos_token=.* is not a token"):
        load_tokenizer(str(path))


@pytest.mark.parametrize("content", ["{", "[]", "[" * 3000])
def test_a_damaged_tokenizer_config_is_an_error(content, tmp_path):
    path = save_words(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json cannot be read"):
        load_tokenizer(str(path))


@pytest.mark.parametrize(
    ("given", "tokenizer_config", "config", "eos"),
    [
        pytest.param(None, {}, {}, "<|endoftext|>", id="a common name"),
        pytest.param(None, {"eos_token": None}, {"eos_token_id": None}, "<|endoftext|>", id="null"),
        pytest.param(None, {"eos_token": "<|im_end|>"}, {"eos_token_id": 3}, "<|im_end|>", id="tokenizer_config.json"),
        pytest.param(None, {"eos_token": {"content": "<|im_end|>", "__type": "AddedToken"}}, {}, "<|im_end|>", id="a dict"),
        pytest.param(None, {"eos_token": {}}, {"eos_token_id": 4}, "<|im_end|>", id="a dict without a name"),
        pytest.param(None, {}, {"eos_token_id": 4}, "<|im_end|>", id="config.json"),
        pytest.param(None, {}, {"eos_token_id": [4, 3]}, "<|im_end|>", id="a list of ids"),
        pytest.param("<|stop|>", {"eos_token": "<|im_end|>"}, {"eos_token_id": 3}, "<|stop|>", id="data.eos_token"),
    ],
)
def test_the_files_of_a_model_name_the_end_of_text_token(given, tokenizer_config, config, eos, tmp_path):
    """As in Qwen 2.5 Instruct, the tokenizer also contains a wrong token with a common name."""
    path = save_chat_tokenizer(tmp_path, tokenizer_config, config)
    tokenizer = load_tokenizer(str(path), given)
    assert tokenizer.token(tokenizer.eos) == tokenizer.token(tokenizer.bos) == eos
    assert tokenizer.eos not in tokenizer.encode(f"def a{eos}").tolist()
    assert tokenizer.decode([1, tokenizer.eos]) == "def"
    if tokenizer_config.get("eos_token") and given is None:
        transformers = pytest.importorskip("transformers")
        assert transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path).eos_token_id == tokenizer.eos


@pytest.mark.parametrize("has_decoder", [False, True])
@pytest.mark.parametrize("token", ["<|stop|>", {"content": "<|stop|>", "lstrip": False}, None])
def test_special_tokens_map_replaces_tokens_as_in_transformers(has_decoder, token, tmp_path):
    entries = {
        "tokenizer_class": "TokenizersBackend",
        "eos_token": "<|im_end|>",
        "bos_token": "<|im_end|>",
        "add_bos_token": True,
    }
    decoder = {"added_tokens_decoder": {"4": {"content": "<|im_end|>", "special": True}}} if has_decoder else {}
    path = save_chat_tokenizer(tmp_path, entries | decoder, {"eos_token_id": 4})
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": token, "bos_token": "<|stop|>"}))
    tokenizer = load_tokenizer(str(path))
    transformers = pytest.importorskip("transformers")
    expected = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.token(tokenizer.eos) == (expected.eos_token or "<|im_end|>")
    assert tokenizer.token(tokenizer.bos) == expected.bos_token


@pytest.mark.parametrize(
    ("given", "tokenizer_config", "config", "message"),
    [
        ("<eos>", {}, {}, "does not contain the end-of-text token '<eos>' of data.eos_token: set data.eos_token"),
        ("", {}, {}, "token '' of data.eos_token"),
        (None, {"eos_token": "<eos>"}, {}, "token '<eos>' of tokenizer_config.json"),
        (None, {"eos_token": 7}, {}, "token 7 of tokenizer_config.json"),
        (None, {"eos_token": "\ud800"}, {}, r"token '\\ud800' of tokenizer_config.json"),
        (None, {}, {"eos_token_id": 99}, "token 99 of config.json"),
        (None, {}, {"eos_token_id": -1}, "token -1 of config.json"),
        (None, {}, {"eos_token_id": 2**40}, f"token {2**40} of config.json"),
        (None, {}, {"eos_token_id": True}, "token True of config.json"),
        (None, {}, {"eos_token_id": []}, r"token \[\] of config.json"),
        (None, {}, [], "config.json cannot be read: it must contain a dict"),
    ],
)
def test_an_end_of_text_token_that_the_tokenizer_lacks_is_an_error(given, tokenizer_config, config, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        load_tokenizer(str(save_chat_tokenizer(tmp_path, tokenizer_config, config)), given)


@pytest.mark.parametrize(("setting", "value"), [("eos_token", "</s>"), ("special_tokens", "parse")])
def test_bytes_have_no_special_tokens(setting, value):
    with pytest.raises(ConfigError, match=f"data.{setting}={value} requires a tokenizer.json, but data.tokenizer=bytes: leave"):
        load_tokenizer("bytes", **{setting: value})


@pytest.fixture
def warned(monkeypatch) -> set[int]:
    monkeypatch.setattr(tokenizer_module, "_warned", set())
    workers.log_once.cache_clear()
    return tokenizer_module._warned


@pytest.mark.parametrize("special_tokens", ["text", "parse"])
@pytest.mark.parametrize(
    ("text", "num_special"),
    [
        ("def a", 0),
        ("", 0),
        ("a<|im_end|>", 1),
        ("a<|im_end|> def <|im_end|>b", 2),
        ("def<|endoftext|>def", 1),
        ("a<|im_end|><|endoftext|>b", 2),
        ("<|im_end | <|im_end", 0),
        ("é<|im_end|>\n\n<|stop|>", 1),
    ],
)
def test_special_tokens_in_a_text_are_encoded_as_transformers_does(text, num_special, special_tokens, tmp_path, warned, caplog):
    transformers = pytest.importorskip("transformers")
    tokenizer = load_tokenizer(str(save_chat_tokenizer(tmp_path, {"eos_token": "<|im_end|>"}, {})), None, special_tokens)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    tokens = tokenizer.encode(text).tolist()
    is_text = special_tokens == "text"
    assert tokens == theirs(text, add_special_tokens=False, split_special_tokens=is_text)["input_ids"]
    assert sum(token in (3, 4) for token in tokens) == (0 if is_text else num_special)
    assert ("<|im_end|>" in tokenizer.decode([1, 4])) != is_text
    tokenizer.encode(text)
    assert len(caplog.messages) == (is_text and num_special > 0), "a warning must be shown once"
    assert all("data.special_tokens=parse" in message for message in caplog.messages)


@pytest.mark.parametrize("flags", [{"rstrip": True}, {"lstrip": True}, {"single_word": True}], ids=str)
def test_the_end_of_text_token_keeps_its_flags(flags, tmp_path):
    transformers = pytest.importorskip("transformers")
    path = str(save_chat_tokenizer(tmp_path, {"eos_token": "<|im_end|>"}, {}, **flags))
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    for text in ("a <|im_end|> b", "a<|im_end|>b<|im_end|>\n\n"):
        assert load_tokenizer(path, None, "parse").encode(text).tolist() == theirs(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("launch", ["torchrun", "process group"])
def test_only_rank_0_warns_of_special_tokens(launch, tmp_path, warned, caplog, monkeypatch):
    """torchrun sets RANK, but programs that start their processes themselves may not."""
    monkeypatch.setattr(dist, "is_initialized", lambda: launch == "process group")
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    if launch == "torchrun":
        monkeypatch.setenv("RANK", "1")
    load_tokenizer(str(save_chat_tokenizer(tmp_path, {}, {}))).encode("<|im_end|>")
    assert warned
    assert not caplog.messages


def save_chat_tokenizer(folder: Path, tokenizer_config: object, config: object, **flags: bool) -> Path:
    words = {"<unk>": 0, "def": 1, "<|stop|>": 2, "<|endoftext|>": 3, "<|im_end|>": 4}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<|endoftext|>", tokenizers.AddedToken("<|im_end|>", **flags)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    (folder / "config.json").write_text(json.dumps(config))
    return folder / "tokenizer.json"
