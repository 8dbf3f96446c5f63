import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.train.llama import LLAMA3, SIZES, STRETCH, llama, logits, settings_of, write_folder
from train import huggingface
from train.config import ConfigError, ModelConfig
from train.model import GPT


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True},
        {"model_type": "mistral", "sliding_window": 7},
        {"rope_parameters": None, "rope_scaling": None, "rope_theta": 3e4},
        {"rope_parameters": LLAMA3},
        {"rope_parameters": None, "rope_scaling": STRETCH, "rope_theta": 50.0},
    ],
    ids=["Llama", "tied", "Mistral", "older names", "Llama 3.1", "Llama 3.1, older names"],
)
def test_a_folder_is_the_same_model_here(changes, tmp_path):
    folder = write_folder(tmp_path / "hf", **changes)
    settings = settings_of(folder)
    assert huggingface.differences(folder, settings, 257) == ""
    model = GPT(settings, 257)
    for parameter in model.parameters():
        torch.nn.init.ones_(parameter)
    huggingface.load(folder, model)
    assert model.embedding[259:].eq(1).all()  # rows that only fill up
    tokens = torch.randint(257, (40,), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(logits(model, tokens)[:, :259].double(), llama(folder, tokens), rtol=1e-4, atol=1e-4)


REFUSED = {
    "of another kind": ({"model_type": "gpt2"}, "model_type is gpt2, and the model here has only llama or mistral"),
    "biases": ({"attention_bias": True}, "attention_bias is True, and the model here has only False"),
    "scaled angles": ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}}, "rope_type is yarn, .*default or llama3"),
    "angles scaled otherwise": ({"rope_parameters": LLAMA3 | {"high_freq_factor": 8.0}}, "high_freq_factor is 8.0, .*only 4.0"),
    "scaled angles without a length": ({"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, "KeyError: 'original_max"),
    "scaled angles, older names": ({"rope_scaling": {"type": "linear"}, "rope_parameters": None}, "rope_type is linear"),
    "no sizes": ({"hidden_size": None}, "config.json is none of a Llama model: KeyError: 'hidden_size'"),
    "too few tokens": ({"vocab_size": 250}, "has 250 tokens, fewer than the tokenizer's 257: set data.tokenizer"),
    "too many tokens": ({"vocab_size": 1000}, "has 1000 tokens, more than the model here: set model.vocab_size=1000"),
    "other sizes": ({"intermediate_size": 40}, r"is a model of model.ffn_dim=40 \(now 48\), .*: set the same"),
    "other heads": ({"num_key_value_heads": None}, r"is a model of model.kv_heads=4 \(now 2\)"),
}


@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_is_refused(changes, message, tmp_path):
    folder = write_folder(tmp_path / "hf", **changes)
    with pytest.raises(ConfigError, match=message):
        huggingface.differences(folder, ModelConfig(**SIZES, tie_embeddings=False), 257)


def test_what_may_change_is_told(tmp_path):
    changed = huggingface.differences(write_folder(tmp_path / "hf"), ModelConfig(**SIZES, tie_embeddings=False, window=9), 257)
    assert changed == "model.rope_theta=500.0 (now 10000.0), model.norm_eps=1e-06 (now 1e-05), model.window=None (now 9)"


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ({"model.norm.weight": torch.ones(31)}, r"model.norm.weight has shape \(31,\), in this run \(32,\)"),
        ({}, "has no model.norm.weight in its"),
        (b"junk", "cannot be read: "),
    ],
    ids=["shape", "missing", "broken"],
)
def test_files_that_are_not_as_config_says(file, message, tmp_path):
    folder = write_folder(tmp_path / "hf")
    (path,) = (path for path in folder.glob("*.safetensors") if "model.norm.weight" in load_file(path))
    if isinstance(file, bytes):
        path.write_bytes(file)
    else:
        save_file({name: x for name, x in load_file(path).items() if name != "model.norm.weight"} | file, path)
    with pytest.raises(ConfigError, match=message):
        huggingface.load(folder, GPT(settings_of(folder), 257))


@pytest.mark.parametrize("settings", [{}, {"window": 9}, {"rope_factor": 8.0, "rope_trained_len": 4096}], ids=str)
def test_settings_survive_a_folder(settings, tmp_path):
    model = ModelConfig(**SIZES, vocab_size=300, **settings)
    described = huggingface.config_of(model, 300, 61, 256, torch.bfloat16)
    (tmp_path / "config.json").write_text(json.dumps(described))
    assert settings_of(tmp_path) == model
