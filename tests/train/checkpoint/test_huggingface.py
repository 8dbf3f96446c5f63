import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from ringattn.train.checkpoint import huggingface
from ringattn.train.config import ConfigError, ModelConfig
from ringattn.train.model.gpt import GPT
from tests.train.hub_models import FOLDER, LLAMA3, SIZES, STRETCH, YARN, logits, read_tensors, settings_of, theirs, write_folder

# as Qwen 2.5's cards say it
QWEN_YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 400}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True},
        {"model_type": "mistral", "sliding_window": 7},
        {"rope_parameters": None, "rope_scaling": None, "rope_theta": 3e4},
        {"rope_parameters": LLAMA3},
        {"rope_parameters": None, "rope_scaling": STRETCH, "rope_theta": 50.0},
        {"rope_parameters": YARN},
        {"model_type": "qwen2"},
        {"model_type": "qwen2", "rope_parameters": None, "rope_theta": 50.0, "rope_scaling": QWEN_YARN},
        {"model_type": "qwen3"},
        {"model_type": "qwen3", "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 0},
    ],
    ids=[
        *("Llama", "tied", "Mistral", "older names", "Llama 3.1", "Llama 3.1, older names", "yarn"),
        *("Qwen 2", "Qwen 2 with yarn, older names", "Qwen 3", "Qwen 3 with a window"),
    ],
)
def test_a_folder_is_the_same_model_here(changes, tmp_path):
    folder = write_folder(tmp_path / "hf", **changes)
    settings = settings_of(folder)
    assert huggingface.compare_settings(folder, settings, 257) == ""
    model = GPT(settings, 257)
    for parameter in model.parameters():
        torch.nn.init.ones_(parameter)
    huggingface.load(folder, model)
    assert model.embedding[259:].eq(1).all()  # rows that only fill up
    tokens = torch.randint(257, (40,), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(logits(model, tokens)[:, :259].double(), theirs(folder, tokens), rtol=1e-4, atol=1e-4)


WINDOW = {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 7}
REFUSED = {
    "of another kind": ({"model_type": "gpt2"}, "model_type is gpt2, but only llama or mistral"),
    "no kind": ({"model_type": None}, "supported model: KeyError: 'model_type'"),
    "a window in some layers": (WINDOW | {"max_window_layers": 1}, "layer_types is full_attention and sliding_attention"),
    "a window in some layers, listed": (
        WINDOW | {"max_window_layers": 0, "layer_types": ["full_attention", "sliding_attention"]},
        "layer_types is full_attention and sliding_attention, but only one of them",
    ),
    "biases of Qwen 2": (
        {"model_type": "qwen2"},
        r"is a model of .*model.qkv_bias=True \(now False\).*: use the same settings",
    ),
    "norms of Qwen 3": ({"model_type": "qwen3"}, r"is a model of .*model.qk_norm=True \(now False\).*: use the same settings"),
    "biases": ({"attention_bias": True}, "attention_bias is True, but only False"),
    "biases of the MLP": ({"mlp_bias": True}, "mlp_bias is True, but only False"),
    "another activation": ({"hidden_act": "gelu"}, "hidden_act is gelu, but only silu"),
    "slow angles otherwise": ({"rope_parameters": LLAMA3 | {"low_freq_factor": 2.0}}, "low_freq_factor is 2.0, .*only 1.0"),
    "angles scaled by nothing": (
        {"rope_parameters": LLAMA3 | {"factor": None}},
        "supported model: TypeError",
    ),
    "sizes that are none": ({"vocab_size": "259"}, "supported model: TypeError"),
    "no heads": ({"num_attention_heads": 0, "head_dim": None}, "supported model: ZeroDivisionError"),
    "scaled angles": ({"rope_parameters": {"rope_type": "longrope"}}, "rope_type is longrope, .*default or llama3 or yarn"),
    "yarn otherwise": ({"rope_parameters": YARN | {"beta_fast": 16}}, "beta_fast is 16, but only 32.0"),
    "yarn not rounded": ({"rope_parameters": YARN | {"truncate": False}}, "truncate is False, .*only True"),
    "yarn, sharper": ({"rope_parameters": YARN | {"attention_factor": 1.5}}, "attention_factor is 1.5, .*None or 1.1386"),
    "yarn, scaled twice": ({"rope_parameters": YARN | {"mscale": 1.0}}, "mscale is 1.0, but only None"),
    "some features turned": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5, .*only None or 1.0"),
    "yarn, truncated by nothing": ({"rope_parameters": YARN | {"truncate": None}}, "truncate is None, .*only True"),
    "angles scaled otherwise": ({"rope_parameters": LLAMA3 | {"high_freq_factor": 8.0}}, "high_freq_factor is 8.0, .*only 4.0"),
    "scaled angles without a length": ({"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, "KeyError: 'max_position"),
    "scaled angles, older names": ({"rope_scaling": {"type": "linear"}, "rope_parameters": None}, "rope_type is linear"),
    "no sizes": ({"hidden_size": None}, "supported model: KeyError: 'hidden_size'"),
    "too few tokens": ({"vocab_size": 250}, "has 250 tokens, fewer than the 257 of the tokenizer: set data.tokenizer"),
    "too many tokens": ({"vocab_size": 1000}, "has 1000 tokens, more than the model of this run: set model.vocab_size=1000"),
    "other sizes": ({"intermediate_size": 40}, r"is a model of model.ffn_dim=40 \(now 48\), .*: use the same settings"),
    "other heads": ({"num_key_value_heads": None}, r"is a model of model.kv_heads=4 \(now 2\)"),
}


@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_is_refused(changes, message, tmp_path):
    folder = write_folder(tmp_path / "hf", **changes)
    with pytest.raises(ConfigError, match=message):
        huggingface.compare_settings(folder, ModelConfig(**SIZES, tie_embeddings=False), 257)


def config_only(folder, **changes):
    """A folder of config.json alone; of `changes`, None leaves something out."""
    folder.mkdir()
    config = {name: value for name, value in (FOLDER | changes).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


SHORT_YARN = {"rope_parameters": {name: value for name, value in YARN.items() if "max" not in name}}
LEFT_OUT = {  # as transformers takes them
    "rms_norm_eps": ({"rms_norm_eps": None}, "norm_eps", 1e-6),
    "tie_word_embeddings": ({"tie_word_embeddings": None}, "tie_embeddings", False),
    "rope_theta": ({"rope_parameters": None}, "rope_theta", 10_000),
    "head_dim": ({"head_dim": None}, "resolved_head_dim", 8),
    "kv_heads": ({"num_key_value_heads": None}, "kv_heads", 4),
    "a window of Mistral's": ({"model_type": "mistral"}, "window", 4096),
    "a window of Llama's": ({"sliding_window": 7}, "window", None),
    "a window of Qwen's that is not in use": ({"model_type": "qwen3", "sliding_window": 7}, "window", None),
    "kv_heads of Mistral": ({"model_type": "mistral", "num_key_value_heads": None}, "kv_heads", 8),
    "kv_heads of Qwen 2": ({"model_type": "qwen2", "num_key_value_heads": None}, "kv_heads", 32),
    "head_dim of Qwen 2": ({"model_type": "qwen2", "head_dim": None}, "resolved_head_dim", 8),
    "head_dim of Qwen 3": ({"model_type": "qwen3", "head_dim": None}, "resolved_head_dim", 128),
    "the length of yarn": (SHORT_YARN | {"max_position_embeddings": 99}, "rope_trained_len", 99),
    "the length of yarn, elsewhere": (
        {"rope_parameters": YARN, "original_max_position_embeddings": 77},
        "rope_trained_len",
        77,
    ),
    "two rope_theta": ({"rope_theta": 7.0}, "rope_theta", 500),
}


@pytest.mark.parametrize(("changes", "name", "value"), LEFT_OUT.values(), ids=LEFT_OUT.keys())
def test_what_config_leaves_out(changes, name, value, tmp_path):
    assert huggingface.read_settings(config_only(tmp_path / "hf", **changes))[name] == value


def test_nulls_are_what_transformers_takes_them_for(tmp_path):
    nulls = dict.fromkeys(("attention_bias", "mlp_bias", "tie_word_embeddings", "head_dim"))
    rope = {"rope_type": None, "rope_theta": 500.0}
    (tmp_path / "config.json").write_text(json.dumps(FOLDER | nulls | {"rope_parameters": rope}))
    settings = huggingface.read_settings(tmp_path)
    assert (settings["resolved_head_dim"], settings["tie_embeddings"], settings["rope_factor"]) == (8, False, None)


@pytest.mark.parametrize("rows", [257, 320], ids=["the tokenizer's", "all rows here"])
def test_vocabularies_that_just_fit(rows, tmp_path):
    model = ModelConfig(**SIZES, tie_embeddings=False, rope_theta=500.0, norm_eps=1e-6)
    assert huggingface.compare_settings(config_only(tmp_path / "hf", vocab_size=rows), model, 257) == ""


def test_stretched_angles_may_change_and_are_told(tmp_path):
    model = ModelConfig(**SIZES, tie_embeddings=False, rope_theta=50.0, norm_eps=1e-6)
    changed = huggingface.compare_settings(config_only(tmp_path / "hf", rope_parameters=LLAMA3), model, 257)
    assert changed == "model.rope_factor=4.0 (now None), model.rope_trained_len=40 (now None)"


def test_config_says_what_transformers_asks_for():
    described = huggingface.config_json(ModelConfig(**SIZES, norm_eps=1e-6), 257, 61, 256, torch.bfloat16)
    expected = {"bos_token_id": 256, "eos_token_id": 256, "torch_dtype": "bfloat16", "rms_norm_eps": 1e-6, **huggingface.FIXED}
    assert expected.items() <= described.items()
    stretched = huggingface.config_json(
        ModelConfig(**SIZES, rope_factor=8.0, rope_trained_len=8192), 257, 61, 256, torch.bfloat16
    )["rope_scaling"]
    assert stretched == STRETCH | {"factor": 8.0, "original_max_position_embeddings": 8192}


def test_files_in_folders_of_the_folder_are_not_its(tmp_path):
    folder = write_folder(tmp_path / "hf")
    (folder / "model.safetensors.index.json").unlink()
    (folder / "original").mkdir()
    save_file({"model.norm.weight": torch.ones(31)}, folder / "original" / "model.safetensors")
    model = GPT(settings_of(folder), 257)
    huggingface.load(folder, model)
    assert torch.equal(model.norm, read_tensors(folder)["model.norm.weight"])


def test_quantized_parameters_are_refused(tmp_path):
    """Their scales are tensors of their own, which nothing here would multiply by."""
    folder = write_folder(tmp_path / "hf")
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        save_file({name: x.to(torch.float8_e4m3fn) if "proj" in name else x for name, x in tensors.items()}, file)
    with pytest.raises(ConfigError, match="q_proj.weight is F8_E4M3, so the model is quantized"):
        huggingface.load(folder, GPT(settings_of(folder), 257))


def test_only_files_of_the_index_are_read(tmp_path):
    folder = write_folder(tmp_path / "hf")
    expected = read_tensors(folder)["model.norm.weight"]
    save_file({"model.norm.weight": torch.full((32,), 7.0)}, folder / "other.safetensors")
    model = GPT(settings_of(folder), 257)
    huggingface.load(folder, model)
    assert torch.equal(model.norm, expected)


def test_a_single_file_goes_before_an_index_of_files_before(tmp_path):
    """As transformers reads them; it leaves the index when it saves over it."""
    folder = write_folder(tmp_path / "hf")
    tensors = read_tensors(folder) | {"model.norm.weight": torch.full((32,), 7.0)}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    model = GPT(settings_of(folder), 257)
    huggingface.load(folder, model)
    assert model.norm.eq(7).all()


def test_what_may_change_is_told(tmp_path):
    changed = huggingface.compare_settings(
        write_folder(tmp_path / "hf"), ModelConfig(**SIZES, tie_embeddings=False, window=9), 257
    )
    assert changed == "model.rope_theta=500.0 (now 10000.0), model.norm_eps=1e-06 (now 1e-05), model.window=None (now 9)"


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ({"model.norm.weight": torch.ones(31)}, r"model.norm.weight has shape \(31,\), but \(32,\)"),
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


SURVIVE = [
    *(
        {},
        {"window": 9},
        {"qkv_bias": True},
        {"qk_norm": True},
        {"qkv_bias": True, "window": 9},
        {"qk_norm": True, "window": 9},
    ),
    *({"rope_factor": 8.0, "rope_trained_len": 4096}, {"rope_factor": 8.0, "rope_trained_len": 64, "rope_scaling": "yarn"}),
]


@pytest.mark.parametrize("settings", SURVIVE, ids=str)
def test_settings_survive_a_folder(settings, tmp_path):
    model = ModelConfig(**SIZES, vocab_size=300, **settings)
    described = huggingface.config_json(model, 300, 61, 256, torch.bfloat16)
    (tmp_path / "config.json").write_text(json.dumps(described))
    assert settings_of(tmp_path) == model


def test_a_model_that_transformers_has_not_is_not_exported():
    with pytest.raises(ConfigError, match="no model with both model.qkv_bias and model.qk_norm"):
        huggingface.config_json(ModelConfig(**SIZES, qkv_bias=True, qk_norm=True), 257, 61, 256, torch.bfloat16)
