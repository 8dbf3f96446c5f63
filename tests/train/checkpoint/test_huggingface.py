"""Models in Hugging Face's format: the same logits as transformers, the same defaults, and errors for other architectures."""

import json
import logging
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from ringattn.train.checkpoint import huggingface, progress
from ringattn.train.model.gpt import GPT
from ringattn.train.parallel.mesh import build_mesh
from ringattn.train.parallel.shard import shard_model
from ringattn.train.settings.config import ConfigError, ModelConfig
from tests.distributed import run_ranks
from tests.train.hub_models import (
    CONFIG,
    LLAMA3,
    NULL,
    SIZES,
    YARN,
    change_folder,
    logits,
    read_tensors,
    settings_of,
    transformers_logits,
    write_config,
    write_folder,
)

MISTRAL = {"model_type": "mistral", "sliding_window": 7}


EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize(
    ("declared", "missing", "is_tied", "warning"),
    [
        pytest.param(
            True, None, False, "tie_word_embeddings=True, but the weights contain another", id="tied and two matrices"
        ),
        pytest.param(True, HEAD, True, None, id="tied without a head"),
        pytest.param(True, EMBEDDING, True, None, id="tied without an embedding"),
        pytest.param(False, None, False, None, id="untied and two matrices"),
        pytest.param(False, HEAD, True, "tie_word_embeddings=False, but the weights contain no", id="untied without a head"),
    ],
)
def test_the_weights_decide_whether_embeddings_are_tied(model_type, declared, missing, is_tied, warning, tmp_path, caplog):
    folder = write_folder(tmp_path / "hf", model_type=model_type)
    change_folder(folder, {missing: None} if missing else {}, tie_word_embeddings=declared)
    settings = settings_of(folder)
    assert settings.tie_embeddings == is_tied
    assert huggingface.compare_settings(folder, settings, 257) == ""
    model = GPT(settings, 257)
    huggingface.load(folder, model)
    assert warning in caplog.text if warning else not caplog.messages
    tokens = torch.randint(257, (40,), generator=torch.Generator().manual_seed(1))
    found = logits(model, tokens)[:, :259].double()
    # transformers would draw a random head for an untied model without a head. It ties the head if config.json requests this.
    change_folder(folder, {}, tie_word_embeddings=is_tied or declared)
    torch.testing.assert_close(found, transformers_logits(folder, tokens), rtol=1e-4, atol=1e-4)


BLOCK = "model.layers.0."
# Tensors that the files of a model may contain in addition to its weights, and the type of the model.
UNKNOWN = {
    "a bias of queries": ("llama", BLOCK + "self_attn.q_proj.bias"),
    "a bias of queries of Mistral": ("mistral", BLOCK + "self_attn.q_proj.bias"),
    "a bias of queries of Qwen 3": ("qwen3", BLOCK + "self_attn.q_proj.bias"),
    "a bias of the output of attention": ("qwen2", BLOCK + "self_attn.o_proj.bias"),
    "a bias of the MLP": ("llama", BLOCK + "mlp.gate_proj.bias"),
    "a bias of a norm": ("llama", "model.norm.bias"),
    "a bias of the head": ("llama", "lm_head.bias"),
    "a bias of attention": ("llama", BLOCK + "self_attn.bias"),
    "a norm of queries": ("llama", BLOCK + "self_attn.q_norm.weight"),
    "another norm": ("qwen3", BLOCK + "pre_feedforward_layernorm.weight"),
    "another layer": ("llama", "model.layers.2.mlp.up_proj.weight"),
    "a layer of another name": ("llama", "model.layers.x.mlp.up_proj.weight"),
    "a layer of a large number": ("llama", f"model.layers.{9 * (10**9)}.mlp.up_proj.weight"),
    "a head in a layer": ("llama", BLOCK + "lm_head.weight"),
    "an expert": ("llama", BLOCK + "mlp.experts.0.up_proj.weight"),
    "a router": ("mistral", BLOCK + "mlp.gate.weight"),
    "an adapter": ("llama", "base_model." + BLOCK + "self_attn.q_proj.lora_A.weight"),
    "scales of a quantized model": ("llama", BLOCK + "self_attn.q_proj.weight_scale_inv"),
    "a head of a reward model": ("qwen2", "score.weight"),
    "a head of values": ("llama", "v_head.summary.bias"),
    "positions": ("llama", "model.embed_positions.weight"),
    "a scale of attention": ("llama", BLOCK + "self_attn.rotary_emb.scale"),
}


@pytest.mark.parametrize(("model_type", "name"), UNKNOWN.values(), ids=UNKNOWN)
def test_tensors_that_the_model_does_not_have_are_an_error(model_type, name, tmp_path):
    folder = write_folder(tmp_path / "hf", model_type=model_type)
    change_folder(folder, {name: torch.ones(1)})
    with pytest.raises(ConfigError, match=f"hf contains {re.escape(name)}, which its config.json does not .*your-own"):
        huggingface.read_settings(folder)
    change_folder(folder, {name + "1": torch.ones(1), name + "2": torch.ones(1)})
    with pytest.raises(ConfigError, match=f"hf contains {re.escape(name)} and 2 other tensors, which"):
        huggingface.read_settings(folder)


@pytest.mark.parametrize(
    "name",
    [
        BLOCK + "self_attn.rotary_emb.inv_freq",
        "model.rotary_emb.inv_freq",
        "transformer.h.0.attn.bias",
        "transformer.h.0.attn.masked_bias",
    ],
)
def test_constants_and_masks_are_ignored(name, tmp_path):
    folder = write_folder(tmp_path / "hf")
    expected = huggingface.read_settings(folder)
    change_folder(folder, {name: torch.ones(1)})
    assert huggingface.read_settings(folder) == expected


@pytest.mark.parametrize(("change", "is_tied"), [(0.0, True), (1.0, False), (float("nan"), False)])
def test_a_head_that_equals_the_embedding_stays_tied(change, is_tied, tmp_path):
    """The matrices are compared in parts. Only the last value of 2,048 + 1 rows differs."""
    folder = write_folder(tmp_path / "hf", tie_word_embeddings=True)
    embedding = torch.randn(2049, 32)
    head = embedding.double()
    head[-1, -1] += change
    change_folder(folder, {EMBEDDING: embedding, HEAD: head}, vocab_size=2049)
    assert settings_of(folder).tie_embeddings == is_tied


def test_a_head_of_the_index_must_exist(tmp_path):
    """The head is in a file that is damaged or was replaced, so the embedding must not be used in its place."""
    folder = write_folder(tmp_path / "hf")
    (file,) = (file for file in folder.glob("*.safetensors") if HEAD in load_file(file))
    save_file({name: x for name, x in load_file(file).items() if name != HEAD}, file)
    with pytest.raises(ConfigError, match=r"has no lm_head\.weight in its"):
        huggingface.read_settings(folder)


def test_long_load_is_shown(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(progress, "INTERVAL_S", 0.0)
    caplog.set_level(logging.INFO)
    folder = write_folder(tmp_path / "hf")
    huggingface.load(folder, GPT(settings_of(folder), 257))
    assert caplog.messages[-1].startswith(f"loaded      {folder}: ")


def test_every_rank_loads_its_own_rows(tmp_path):
    """The vocabulary of 259 tokens is padded to 320 rows, of which three ranks hold 107, 107 and 106 rows."""
    folder = write_folder(tmp_path / "hf", model_type="qwen2")
    model = GPT(settings_of(folder), 257)
    torch.nn.init.zeros_(model.embedding)
    torch.nn.init.zeros_(model.head)
    huggingface.load(folder, model)
    torch.save(model.state_dict(), tmp_path / "expected.pt")
    run_ranks(load_on_a_rank, 3, tmp_path / "ranks", folder, tmp_path / "expected.pt")


def load_on_a_rank(folder: Path, expected: Path) -> None:
    with torch.device("meta"):
        model = GPT(settings_of(folder), 257)
    shard_model(model, build_mesh("cpu", dist.get_world_size()), torch.device("cpu"), seed=0, bf16=False)
    for parameter in (model.embedding, model.head):
        torch.nn.init.zeros_(parameter)
    huggingface.load(folder, model)
    for name, tensor in torch.load(expected).items():
        assert torch.equal(model.state_dict()[name].full_tensor(), tensor), name


UNSUPPORTED = {
    "another type": ({"model_type": "gpt2"}, "model_type is gpt2, but only llama or mistral"),
    "no type": ({"model_type": None}, "supported model: model_type is None, but only llama or mistral"),
    "another type of layer": (
        MISTRAL | {"layer_types": ["chunked_attention"] * 2},
        "must contain full_attention or sliding_attention for each of 2 layers, but contains 2 values: chunked_attention",
    ),
    "no types of layers": (
        MISTRAL | {"layer_types": []},
        "layer_types must contain .* for each of 2 layers, but contains 0 values",
    ),
    "types of other layers": (
        MISTRAL | {"layer_types": ["full_attention"] * 3},
        "for each of 2 layers, but contains 3 values: full_attention",
    ),
    "too many layers": ({"num_hidden_layers": 10**30}, "num_hidden_layers is 10+, but only 1 to 4096 is supported"),
    "longrope without divisors": ({"rope_parameters": YARN | {"rope_type": "longrope"}}, "'short_factor'"),
    "yarn in Phi-3": ({"model_type": "phi3", "rope_parameters": YARN}, "rope_type is yarn, but only default or longrope"),
    "another scaling in sliding layers": (
        {"model_type": "olmo3", "rope_parameters": {"sliding_attention": YARN}},
        "rope_type is yarn in sliding layers, but only default",
    ),
    "one scaling for all types of layers": (
        {"model_type": "gemma3_text", "hidden_act": None},
        "rope_parameters has rope_theta, rope_type, but only entries per type of layer",
    ),
    "yarn without rounding per type of layer": (
        {"model_type": "olmo3", "rope_parameters": {"full_attention": YARN | {"truncate": False}}},
        "rope_type is yarn-exact, but only default or linear or llama3 or yarn or longrope",
    ),
    "two scalings": ({"rope_scaling": YARN}, "rope_scaling and rope_parameters differ: remove one"),
    "types of layers that Phi-3 ignores": (
        {"model_type": "phi3", "sliding_window": 7, "layer_types": ["full_attention"] * 2},
        "layer_types contradicts sliding_window=7",
    ),
    "windows that are switched off": (
        {"model_type": "smollm3", "sliding_window": 7, "layer_types": ["sliding_attention"] * 2},
        "layer_types contains sliding_attention, but use_sliding_window is not true",
    ),
    "biases of Qwen 2": (
        {"model_type": "qwen2"},
        r"is a model of model.qkv_bias=True \(now False\): leave",
    ),
    "norms of Qwen 3": ({"model_type": "qwen3"}, r"is a model of model.qk_norm=True \(now False\): leave"),
    "quantized weights": ({"quantization_config": {"quant_method": "awq"}}, "quantization_config is given, but only None"),
    "biases": ({"attention_bias": True}, "attention_bias is True, but only False"),
    "biases of the MLP": ({"mlp_bias": True}, "mlp_bias is True, but only False"),
    "another activation": ({"hidden_act": "gelu"}, "hidden_act is gelu, but only silu"),
    "another low_freq_factor": ({"rope_parameters": LLAMA3 | {"low_freq_factor": 2.0}}, "low_freq_factor is 2.0, .*only 1.0"),
    "a factor of null": (
        {"rope_parameters": LLAMA3 | {"factor": None}},
        "supported model: factor is None, but a number is required",
    ),
    "a size that is no integer": (
        {"vocab_size": "259"},
        "model: vocab_size is '259', but an integer is required; .*your-own-loop",
    ),
    "a number that is text": ({"rms_norm_eps": "x"}, "supported model: rms_norm_eps is 'x', but a number is required"),
    "a size that is a fraction": ({"head_dim": 16.5}, "supported model: head_dim is 16.5, but an integer"),
    "a window that is text": ({"model_type": "mistral", "sliding_window": "x"}, "sliding_window is 'x', but an integer"),
    "a length that is text": (
        {"rope_parameters": YARN | {"original_max_position_embeddings": "x"}},
        "embeddings is 'x', but an integer",
    ),
    "no heads": (
        {"num_attention_heads": 0, "head_dim": None},
        "an entry has a value that is not possible .*by zero.*; .*your-own-loop",
    ),
    "another scaling": (
        {"rope_parameters": {"rope_type": "dynamic"}},
        "rope_type is dynamic, .*default or linear or",
    ),
    "yarn with another beta": ({"rope_parameters": YARN | {"beta_fast": 16}}, "beta_fast is 16, but only 32.0"),
    "yarn without a factor or a length": (
        {"rope_parameters": YARN | {"factor": None}},
        "supported model: max_position_embeddings is None, but an integer is required",
    ),
    "yarn with another attention_factor": (
        {"rope_parameters": YARN | {"attention_factor": 1.5}},
        "attention_factor is 1.5, .*None or 1.1386",
    ),
    "yarn with mscale": ({"rope_parameters": YARN | {"mscale": 1.0}}, "mscale is 1.0, but only None"),
    "a partial rotation": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5, .*only None or 1.0"),
    "yarn with truncate of null": ({"rope_parameters": YARN | {"truncate": None}}, "truncate is None, .*only True"),
    "another high_freq_factor": (
        {"rope_parameters": LLAMA3 | {"high_freq_factor": 8.0}},
        "high_freq_factor is 8.0, .*only 4.0",
    ),
    "a scaling without a length": (
        {"rope_parameters": {"rope_type": "llama3", "factor": 2.0}},
        "original_max_position_embeddings is None",
    ),
    "another scaling with older names": ({"rope_scaling": {"type": "ntk"}, "rope_parameters": None}, "rope_type is ntk"),
    "rotary positions per type of layer": (
        {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 500.0}}},
        "rope_parameters is different in layers of different types, but only one for all layers",
    ),
    "an unknown entry": (
        {"scale_of_x": 2.0, "is_y": False, "z": NULL},
        "supported model: it contains the unknown entries is_y, scale_of_x, which may change the results",
    ),
    "softcapping of 0": ({"final_logit_softcapping": 0.0}, "final_logit_softcapping is 0.0, but only None is"),
    "text in place of a boolean": (
        {"model_type": "qwen2", "use_sliding_window": "False"},
        "use_sliding_window is text, but true or false without quotes is required",
    ),
    "softcapping": ({"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0, but only None is"),
    "a missing size": ({"hidden_size": None}, "supported model: hidden_size is None, but an integer"),
    "too few tokens": (
        {"vocab_size": 250},
        "has 250 rows of embeddings, but the tokenizer has 257 tokens, .*: set model.vocab_size=257 .* number 250 on",
    ),
    "too many tokens": ({"vocab_size": 1000}, "has 1000 tokens, more than the model of this run: set model.vocab_size=1000"),
    "other sizes": ({"intermediate_size": 40}, r"is a model of model.ffn_dim=40 \(now 48\): leave"),
    "other heads": ({"num_key_value_heads": None}, r"is a model of model.kv_heads=4 \(now 2\)"),
}


@pytest.mark.parametrize(("changes", "message"), UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_an_error_names_what_is_not_supported_or_differs(changes, message, tmp_path):
    folder = write_folder(tmp_path / "hf", **changes)
    with pytest.raises(ConfigError, match=message):
        huggingface.compare_settings(folder, ModelConfig(**SIZES, tie_embeddings=False), 257)


@pytest.mark.parametrize("model_type", ["gemma3", "gemma2", "qwen2_moe", "gpt2", "deepseek_v3", "mamba"])
def test_another_architecture_is_rejected_with_the_page_that_may_help(model_type, tmp_path):
    transformers = pytest.importorskip("transformers")
    transformers.AutoConfig.for_model(model_type).save_pretrained(tmp_path)
    with pytest.raises(ConfigError) as error:
        huggingface.read_settings(tmp_path)
    message = str(error.value)
    assert f"supported model: model_type is {model_type}, but only llama or mistral or " in message
    assert message.endswith("docs/how-to/your-own-loop.md lists the exact models")
    assert "Error" not in message


@pytest.mark.parametrize("listed", [False, True])
def test_a_window_of_null(listed, tmp_path):
    """Mistral models since version 0.3 have no window. If layers are listed as layers with a window, its size is required."""
    config = write_config(tmp_path / "hf") | {"model_type": "mistral", "sliding_window": None}
    config |= {"layer_types": ["sliding_attention"] * 2} if listed else {}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    if listed:
        with pytest.raises(ConfigError, match="sliding_window is None, but an integer is required"):
            huggingface.read_settings(tmp_path / "hf")
    else:
        assert huggingface.read_settings(tmp_path / "hf")["window"] is None


YARN_WITHOUT_LENGTH = {"rope_parameters": {name: value for name, value in YARN.items() if "max" not in name}}
# Settings of config.json, and the values that transformers derives from them.
DEFAULTS = {
    "rms_norm_eps": ({"rms_norm_eps": None}, "norm_eps", 1e-6),
    "tie_word_embeddings": ({"tie_word_embeddings": None}, "tie_embeddings", False),
    "rope_theta": ({"rope_parameters": None}, "rope_theta", 10_000),
    "head_dim": ({"head_dim": None}, "resolved_head_dim", 8),
    "kv_heads": ({"num_key_value_heads": None}, "kv_heads", 4),
    "window of Mistral": ({"model_type": "mistral"}, "window", 4096),
    "window of Llama, which is not used": ({"sliding_window": 7}, "window", None),
    "window of Qwen, which is not used": ({"model_type": "qwen3", "sliding_window": 7}, "window", None),
    "kv_heads of Mistral": ({"model_type": "mistral", "num_key_value_heads": None}, "kv_heads", 8),
    "kv_heads of Qwen 2": ({"model_type": "qwen2", "num_key_value_heads": None}, "kv_heads", 32),
    "head_dim of Qwen 2": ({"model_type": "qwen2", "head_dim": None}, "resolved_head_dim", 8),
    "head_dim of Qwen 3": ({"model_type": "qwen3", "head_dim": None}, "resolved_head_dim", 128),
    "length of yarn": (YARN_WITHOUT_LENGTH | {"max_position_embeddings": 99}, "rope_trained_len", 99),
    "length of yarn in another place": (
        {"rope_parameters": YARN, "original_max_position_embeddings": 77},
        "rope_trained_len",
        77,
    ),
    "rope_theta in two places": ({"rope_theta": 7.0}, "rope_theta", 500),
}


@pytest.mark.parametrize(("changes", "name", "value"), DEFAULTS.values(), ids=DEFAULTS)
def test_missing_settings_have_the_defaults_of_transformers(changes, name, value, tmp_path):
    write_config(tmp_path / "hf", **changes)
    assert huggingface.read_settings(tmp_path / "hf")[name] == value


def test_nested_lists_are_an_error(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": ' + "[" * 3000 + "]" * 3000 + "}")
    with pytest.raises(ConfigError, match=r"config\.json cannot be read: maximum recursion depth exceeded"):
        huggingface.read_settings(tmp_path)


@pytest.mark.parametrize(
    ("first", "types", "window"),
    [(0, None, 4), (1, ["full", "sliding"], 4), (2, ["full", "full", "sliding"], 4), (3, None, None)],
)
def test_types_of_layers_follow_from_the_first_layer_with_a_window(first, types, window, tmp_path):
    qwen = {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 4, "num_hidden_layers": 3 if first != 1 else 2}
    write_config(tmp_path / "hf", **qwen, max_window_layers=first)
    settings = huggingface.declared_settings(tmp_path / "hf")
    assert (settings["layer_types"], settings["window"]) == (types, window)


@pytest.mark.parametrize(("count", "types"), [(4, ["sliding"] * 3 + ["full-nope"]), (9, ["sliding"] * 3 + ["full-nope"])])
def test_types_of_layers_that_repeat_are_shortened(count, types, tmp_path):
    rest = {"rms_norm_eps": None, "sliding_window": 4}
    write_config(tmp_path / "hf", model_type="cohere2", num_hidden_layers=count, **rest)
    assert huggingface.declared_settings(tmp_path / "hf")["layer_types"] == types


def test_null_is_read_like_a_missing_setting(tmp_path):
    nulls = dict.fromkeys(("attention_bias", "mlp_bias", "tie_word_embeddings", "head_dim"))
    rope = {"rope_type": None, "rope_theta": 500.0}
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | nulls | {"rope_parameters": rope}))
    settings = huggingface.read_settings(tmp_path)
    assert (settings["resolved_head_dim"], settings["tie_embeddings"], settings["rope_factor"]) == (8, False, None)


@pytest.mark.parametrize("rows", [257, 320], ids=["as many as the tokenizer", "as many as the padded vocabulary"])
def test_the_vocabulary_may_have_any_size_that_fits(rows, tmp_path):
    model = ModelConfig(**SIZES, tie_embeddings=False, rope_theta=500.0, norm_eps=1e-6)
    write_config(tmp_path / "hf", vocab_size=rows)
    assert huggingface.compare_settings(tmp_path / "hf", model, 257) == ""


def test_rows_can_be_added_for_new_tokens(tmp_path):
    """The tokenizer of a published model may contain a token for padding without a row of the embedding."""
    folder = write_folder(tmp_path / "hf")
    model = replace(settings_of(folder), vocab_size=260)
    assert huggingface.compare_settings(folder, model, 260) == "model.vocab_size=259 (now 260)"
    with pytest.raises(ConfigError, match="but the tokenizer has 261 tokens"):
        huggingface.compare_settings(folder, model, 261)
    gpt = GPT(model, 260)
    torch.nn.init.ones_(gpt.embedding)
    huggingface.load(folder, gpt)
    assert torch.equal(gpt.embedding[:259], read_tensors(folder)[EMBEDDING])
    assert gpt.embedding[259:].eq(1).all()


def test_the_scaling_may_differ_and_is_described(tmp_path):
    model = ModelConfig(**SIZES, tie_embeddings=False, rope_theta=50.0, norm_eps=1e-6)
    write_config(tmp_path / "hf", rope_parameters=LLAMA3)
    changes = huggingface.compare_settings(tmp_path / "hf", model, 257)
    assert changes == (
        "model.rope_factor=4.0 (now None), model.rope_trained_len=40 (now None), model.rope_scaling=llama3 (now None)"
    )


@pytest.mark.parametrize("scaling", ["llama3", "yarn"])
def test_a_scaling_of_the_run_is_described(scaling, tmp_path):
    write_config(tmp_path / "hf")
    model = settings_of(tmp_path / "hf")
    model = replace(model, rope_factor=4.0, rope_trained_len=256, rope_scaling=scaling)
    assert huggingface.compare_settings(tmp_path / "hf", model, 257) == (
        f"model.rope_factor=None (now 4.0), model.rope_trained_len=None (now 256), model.rope_scaling=None (now {scaling})"
    )


# The changes of config.json, the settings of the model, and the number of positions if sequences of 1,025 tokens are too long.
POSITIONS = {
    "no scaling": ({"max_position_embeddings": 256}, {}, 256),
    "unknown": ({}, {}, None),
    "no number": ({"max_position_embeddings": "x"}, {}, None),
    "long enough": ({"max_position_embeddings": 1025}, {}, None),
    "a scaling of the run that is too small": (
        {"max_position_embeddings": 256},
        {"rope_factor": 4.0, "rope_trained_len": 256},
        1024,
    ),
    "a scaling of the run": ({"max_position_embeddings": 256}, {"rope_factor": 8.0, "rope_trained_len": 256}, None),
    "another base of the run": ({"max_position_embeddings": 256}, {"rope_theta": 1e5}, None),
    "a window of the run": ({"max_position_embeddings": 256}, {"window": 256}, None),
    "a window that is too long": ({"max_position_embeddings": 256}, {"window": 257}, 256),
    "a scaling of the folder": (
        {"max_position_embeddings": 256, "rope_parameters": LLAMA3 | {"original_max_position_embeddings": 257}},
        {},
        None,
    ),
    "a scaling of the folder that is too small": ({"max_position_embeddings": 150, "rope_parameters": LLAMA3}, {}, 160),
}


@pytest.mark.parametrize(("changes", "settings", "positions"), POSITIONS.values(), ids=POSITIONS)
def test_sequences_beyond_the_positions_of_the_model_are_warned_of(changes, settings, positions, tmp_path):
    write_config(tmp_path / "hf", **changes)
    warning = huggingface.warn_of_length(tmp_path / "hf", replace(settings_of(tmp_path / "hf"), **settings), 1025)
    if positions is None:
        assert warning == ""
    else:
        assert f"sequences of 1,025 tokens are longer than the {positions:,} positions" in warning
        assert "set model.rope_factor" in warning


def test_files_in_subfolders_are_not_read(tmp_path):
    folder = write_folder(tmp_path / "hf")
    (folder / "model.safetensors.index.json").unlink()
    (folder / "original").mkdir()
    save_file({"model.norm.weight": torch.ones(31)}, folder / "original" / "model.safetensors")
    model = GPT(settings_of(folder), 257)
    huggingface.load(folder, model)
    assert torch.equal(model.norm, read_tensors(folder)["model.norm.weight"])


def test_quantized_weights_are_an_error(tmp_path):
    """Quantized weights have scales in separate tensors, by which they would have to be multiplied."""
    folder = write_folder(tmp_path / "hf")
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        save_file({name: x.to(torch.float8_e4m3fn) if "proj" in name else x for name, x in tensors.items()}, file)
    with pytest.raises(ConfigError, match=r"q_proj\.weight is F8_E4M3, so the model is quantized"):
        huggingface.load(folder, GPT(settings_of(folder), 257))


def test_only_files_in_the_index_are_read(tmp_path):
    folder = write_folder(tmp_path / "hf")
    expected = read_tensors(folder)["model.norm.weight"]
    save_file({"model.norm.weight": torch.full((32,), 7.0)}, folder / "other.safetensors")
    model = GPT(settings_of(folder), 257)
    huggingface.load(folder, model)
    assert torch.equal(model.norm, expected)


@pytest.mark.parametrize("name", ["../other.safetensors", "{absolute}/other.safetensors", "a/../../other.safetensors", ".."])
def test_files_outside_of_the_folder_are_not_read(name, tmp_path):
    folder = write_folder(tmp_path / "hf")
    save_file(read_tensors(folder), tmp_path / "other.safetensors")
    index = {"weight_map": dict.fromkeys(read_tensors(folder), name.format(absolute=tmp_path))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=r"cannot be read: model\.safetensors\.index\.json lists it, but it is outside"):
        huggingface.read_settings(folder)


def test_files_may_be_links_as_in_the_cache_of_the_hub(tmp_path):
    folder = write_folder(tmp_path / "hf")
    expected = read_tensors(folder)["model.norm.weight"]
    for i, file in enumerate(folder.glob("*.safetensors")):
        file.symlink_to(file.rename(tmp_path / f"blob{i}"))
    model = GPT(settings_of(folder), 257)
    huggingface.load(folder, model)
    assert torch.equal(model.norm, expected)


def test_a_single_file_takes_precedence_over_an_index(tmp_path):
    """When transformers saves a single file over an older model in several files, it leaves the older index."""
    folder = write_folder(tmp_path / "hf")
    tensors = read_tensors(folder) | {"model.norm.weight": torch.full((32,), 7.0)}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    model = GPT(settings_of(folder), 257)
    huggingface.load(folder, model)
    assert model.norm.eq(7).all()


def test_settings_that_may_differ_are_described(tmp_path):
    write_config(tmp_path / "hf")
    changes = huggingface.compare_settings(tmp_path / "hf", ModelConfig(**SIZES, tie_embeddings=False, window=9), 257)
    assert changes == "model.rope_theta=500.0 (now 10000.0), model.norm_eps=1e-06 (now 1e-05), model.window=None (now 9)"


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ({"model.norm.weight": torch.ones(31)}, r"model.norm.weight has shape \(31,\), but \(32,\)"),
        ({}, "has no model.norm.weight in its"),
        (b"junk", "cannot be read: "),
    ],
    ids=["shape", "missing", "broken"],
)
def test_an_error_names_the_file_or_tensor_that_does_not_fit(file, message, tmp_path):
    folder = write_folder(tmp_path / "hf")
    (path,) = (path for path in folder.glob("*.safetensors") if "model.norm.weight" in load_file(path))
    if isinstance(file, bytes):
        path.write_bytes(file)
    else:
        save_file({name: x for name, x in load_file(path).items() if name != "model.norm.weight"} | file, path)
    with pytest.raises(ConfigError, match=message):
        huggingface.load(folder, GPT(settings_of(folder), 257))


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "lm_head.weight"])
@pytest.mark.parametrize("rows", [0, 258, 260])
def test_the_embedding_and_the_head_have_the_declared_rows(name, rows, tmp_path):
    folder = change_folder(write_folder(tmp_path / "hf"), {name: torch.ones(rows, 32)})
    with pytest.raises(ConfigError, match=rf"{name} has shape \({rows}, 32\), but \(259, 32\)"):
        huggingface.load(folder, GPT(settings_of(folder), 257))


def test_a_tensor_in_two_files_is_an_error(tmp_path):
    folder = write_folder(tmp_path / "hf")
    save_file({"model.norm.weight": torch.zeros(32)}, folder / "model-2.safetensors")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["lm_head.weight"] = "model-2.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=r"two safetensors files contain model.norm.weight: remove"):
        huggingface.read_settings(folder)


def test_an_adapter_is_an_error(tmp_path):
    folder = write_folder(tmp_path / "hf")
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"adapter_config.json belongs to an adapter, .* merge it into the weights"):
        huggingface.read_settings(folder)
