"""Prepared folders: the same sequences as from the source, readable with NumPy alone, and checked against the settings."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from ringattn.train.data import prepared
from ringattn.train.data.packing import load, load_held_out
from ringattn.train.data.prepared import copy_tokenizer, settings_of
from ringattn.train.data.tokenisation import tokenise
from ringattn.train.data.tokenizer import BytesTokenizer, tokenizer_of
from ringattn.train.settings.config import ConfigError, DataConfig
from tests.train.chats import write_chat_tokenizer, write_chats
from tests.train.hub_models import write_tokenizer

ROOT = Path(__file__).parents[3]


def write_lines(folder: Path) -> DataConfig:
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": f"line {i}" * (1 + i % 5)}) + "\n" for i in range(40)))
    return DataConfig(source="jsonl", path=str(folder / "a.jsonl"), seq_len=16, eval_fraction=0.2)


def prepare(config: DataConfig, folder: Path) -> DataConfig:
    """Prepare a corpus, and return the settings that train on it."""
    tokenise(config, tokenizer_of(config), folder=folder)
    copy_tokenizer(config.tokenizer, folder)
    defaults = {"source": "prepared", "path": str(folder), "column": "text", "messages_column": "messages"}
    return replace(config, **defaults, tokenizer=prepared.tokenizer_path(folder))


def corpora(tmp_path: Path) -> dict[str, DataConfig]:
    """A text of bytes, a text of a tokenizer, and conversations."""
    chat = DataConfig(
        source="jsonl",
        path=write_chats(tmp_path / "chats.jsonl", 60),
        tokenizer=write_chat_tokenizer(tmp_path / "chat"),
        format="chat",
        seq_len=64,
        eval_fraction=0.2,
    )
    (tmp_path / "tokenizer").mkdir()
    text = write_lines(tmp_path)
    return {
        "bytes": text,
        "tokenizer": replace(text, tokenizer=str(write_tokenizer(tmp_path / "tokenizer", adds_bos=True))),
        "chat": chat,
    }


@pytest.mark.parametrize("name", ["bytes", "tokenizer", "chat"])
def test_a_prepared_folder_has_the_sequences_of_its_source(name, tmp_path):
    source = corpora(tmp_path)[name]
    configs = source, prepare(source, tmp_path / "shards")
    tokenizers = [tokenizer_of(config) for config in configs]
    training = [load(config, tokenizer) for config, tokenizer in zip(configs, tokenizers, strict=True)]
    held_out = [load_held_out(*each) for each in zip(configs, tokenizers, training, strict=True)]
    for first, second in (training, held_out):
        assert first.fingerprint == second.fingerprint
        numbers = range(2 * first.sequences_per_epoch)
        batches = first.batch(numbers), second.batch(numbers)
        assert torch.equal(batches[0].tokens, batches[1].tokens)
        assert torch.equal(batches[0].labels, batches[1].labels)
        assert batches[0].documents == batches[1].documents


def test_the_page_reads_a_document_with_numpy(tmp_path, monkeypatch):
    """The code of docs/prepared-data.md runs and reads the first document."""
    prepare(write_lines(tmp_path), tmp_path / "shards")
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "prepared-data.md").read_text(), re.DOTALL)
    assert "ringattn" not in code
    values: dict[str, object] = {}
    exec(code, values)
    assert values["document"].tolist() == [256, *b"line 0"]


def test_a_loss_mask_is_read_as_the_page_says(tmp_path):
    config = corpora(tmp_path)["chat"]
    folder = Path(prepare(config, tmp_path / "shards").path)
    name = json.loads((folder / "index.json").read_text())["shards"][0]["name"]
    offsets = np.fromfile(folder / f"{name}.offsets", "<i8")
    tokens, loss = np.fromfile(folder / f"{name}.tokens", "<u2"), np.fromfile(folder / f"{name}.loss", "u1")
    rows = slice(offsets[0], offsets[1])
    text = tokenizer_of(replace(config, special_tokens="parse")).decode(tokens[rows][loss[rows] == 1].tolist())
    assert text == "rrr<|im_end|>"


def test_a_split_selects_documents(tmp_path):
    config = prepare(write_lines(tmp_path), tmp_path / "shards")
    config = replace(config, split="train[:75%]", eval_split="train[75%:]", eval_fraction=0.0)
    training = load(config, BytesTokenizer())
    held_out = load_held_out(config, BytesTokenizer(), training)
    assert (len(training.lengths), len(held_out.lengths)) == (30, 10)
    with pytest.raises(ConfigError, match="contains some of the held-out text"):
        load_held_out(replace(config, eval_split="train[70%:]"), BytesTokenizer(), training)
    with pytest.raises(ConfigError, match="cannot be read"):
        load(replace(config, split="test"), BytesTokenizer())


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tokenizer": "chat"}, r"was not prepared with data\.tokenizer=.*fingerprint 0 .*set data\.tokenizer=bytes"),
        ({"format": "prompt_completion"}, "was prepared with data.format=text, but data.format=prompt_completion"),
        ({"path": None}, r"requires data\.path: a folder that ringattn-prepare has written"),
        ({"path": "/missing"}, "/missing/index.json does not exist"),
    ],
)
def test_settings_that_contradict_the_folder_are_an_error(values, message, tmp_path):
    config = prepare(write_lines(tmp_path), tmp_path / "shards")
    if "tokenizer" in values:
        values = {"tokenizer": write_chat_tokenizer(tmp_path / "chat")}
    config = replace(config, **values)
    with pytest.raises(ConfigError, match=message):
        load(config, tokenizer_of(config))


def test_the_folder_knows_its_settings(tmp_path):
    config = prepare(corpora(tmp_path)["chat"], tmp_path / "shards")
    assert settings_of(config) == {
        "data.format": "chat",
        "data.special_tokens": "text",
        "data.eos_token": None,
        "data.tokenizer": f"{tmp_path}/shards/tokenizer/tokenizer.json",
    }
