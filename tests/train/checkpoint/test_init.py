"""The initial weights of a new run, from a checkpoint or from a Hugging Face model."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ringattn.train.checkpoint import init, state_dict, storage
from ringattn.train.data.tokenizer import BytesTokenizer
from ringattn.train.model.gpt import GPT
from ringattn.train.settings.config import Config, ConfigError, ModelConfig, with_settings
from tests.train.hub_models import SIZES, read_tensors, settings_of, write_folder

MODEL = ModelConfig(**SIZES, tie_embeddings=False)


def build(model: ModelConfig = MODEL) -> GPT:
    """A model whose weights are all zero."""
    gpt = GPT(model, BytesTokenizer.vocab_size)
    for parameter in gpt.parameters():
        torch.nn.init.zeros_(parameter)
    return gpt


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    """A checkpoint of a model whose weights are all one."""
    tensors = {name: torch.ones_like(tensor) for name, tensor in state_dict.model_state(build()).items()}
    config = asdict(Config(model=MODEL))
    return storage.save(tmp_path / "checkpoints", 1, tensors, {"config": config, "tokenizer": 0}, keep=1)


def test_a_run_without_init_from_has_random_weights():
    assert init.initial_weights_path(Config()) is None


def test_the_path_of_init_from_is_absolute(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    config = Config()
    config = with_settings(config, {"trainer.init_from": "~/model"})
    assert init.initial_weights_path(config) == tmp_path / "model"


def test_weights_of_a_checkpoint_are_loaded(checkpoint):
    model = build()
    assert init.compare_settings(checkpoint, Config(model=MODEL), BytesTokenizer()) == ""
    init.load(checkpoint, model)
    assert all(parameter.eq(1).all() for parameter in model.parameters())


def test_weights_of_a_hugging_face_model_are_loaded(tmp_path):
    folder = write_folder(tmp_path / "hf")
    settings = settings_of(folder)
    model = build(settings)
    assert init.compare_settings(folder, Config(model=settings), BytesTokenizer()) == ""
    init.load(folder, model)
    assert torch.equal(model.norm, read_tensors(folder)["model.norm.weight"])


def test_settings_that_differ_are_described(checkpoint):
    config = Config(model=ModelConfig(**SIZES, tie_embeddings=False, window=9))
    assert init.compare_settings(checkpoint, config, BytesTokenizer()) == "model.window=None (now 9)"


def test_a_path_to_neither_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match=f"trainer.init_from={tmp_path} must be the path of a checkpoint .* or of a folder"):
        init.compare_settings(tmp_path, Config(), BytesTokenizer())


def test_a_checkpoint_of_another_tokenizer_is_an_error(checkpoint):
    meta = json.loads((checkpoint / "meta.json").read_text())
    (checkpoint / "meta.json").write_text(json.dumps(meta | {"tokenizer": 7, "format": 1, "checksum": None}))
    with pytest.raises(ConfigError, match=r"data\.tokenizer=bytes, but .*step_00000001 was trained with the tokenizer bytes"):
        init.compare_settings(checkpoint, Config(model=MODEL), BytesTokenizer())


def test_a_hugging_face_model_with_another_tokenizer_is_an_error(tmp_path):
    folder = write_folder(tmp_path / "hf")
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"data\.tokenizer=bytes, but .*its own tokenizer, .*hf/tokenizer\.json"):
        init.compare_settings(folder, Config(model=settings_of(folder)), BytesTokenizer())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", ["checkpoint", "Hugging Face"])
def test_weights_that_are_not_finite_are_an_error(value, kind, tmp_path):
    """Without this error, the first step would fail, and would advise a lower learning rate."""
    model, name = build(), "norm"
    if kind == "checkpoint":
        model.norm.data[3] = value
        path = storage.save(tmp_path, 1, state_dict.model_state(model), {"config": asdict(Config(model=MODEL))}, keep=1)
    else:
        path, name = write_folder(tmp_path / "hf"), "model.norm.weight"
        tensors = read_tensors(path)
        tensors[name][3] = value
        for file in path.glob("model*"):
            file.unlink()
        save_file(tensors, path / "model.safetensors")
    with pytest.raises(ConfigError, match=f"{path}: {name} contains NaN or infinity"):
        init.load(path, build())
