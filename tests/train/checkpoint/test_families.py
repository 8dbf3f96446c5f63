"""A small random model of every family has the logits of transformers, and is exported, trained and sampled like there."""

import json
from pathlib import Path

import pytest
import torch

from ringattn.train.checkpoint import huggingface
from ringattn.train.commands import export
from ringattn.train.model.gpt import GPT
from tests.train.hub_models import (
    exact_logits_of_transformers,
    import_folder,
    in_float64,
    logits,
    read_tensors,
    settings_of,
    write_tokenizer,
)

TOKENS = torch.randint(257, (40,), generator=torch.Generator().manual_seed(1))
# Entries of config.json of all models, except if a family has other ones.
SIZES = {
    "vocab_size": 259,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 400, "rope_theta": 50.0}
QUARTER = {"rope_type": "default", "partial_rotary_factor": 0.25, "rope_theta": 50.0}
# The class of the settings in transformers and further entries of config.json, for each kind of model.
MODELS = {
    "ministral": (
        "MinistralConfig",
        dict(head_dim=16, sliding_window=7, layer_types=["sliding_attention", "full_attention"] * 2),
    ),
    "ministral with windows": ("MinistralConfig", dict(sliding_window=7, head_dim=8)),
    "olmo3": ("Olmo3Config", dict(sliding_window=7, rope_parameters={"full_attention": YARN})),
    "olmo3 without a scaling": ("Olmo3Config", dict(sliding_window=7)),
    "olmo3 with full layers": ("Olmo3Config", dict(num_key_value_heads=4, layer_types=["full_attention"] * 4)),
    "gemma3_text": (
        "Gemma3TextConfig",
        dict(
            num_hidden_layers=7,
            head_dim=16,
            query_pre_attn_scalar=20,
            sliding_window=7,
            rope_parameters={
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 70.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 30.0},
            },
        ),
    ),
    "gemma3_text with windows": (
        "Gemma3TextConfig",
        dict(head_dim=16, query_pre_attn_scalar=16, sliding_window=7, layer_types=["sliding_attention"] * 4),
    ),
    "smollm3": ("SmolLM3Config", dict(tie_word_embeddings=False)),
    "smollm3 with a window": (
        "SmolLM3Config",
        dict(no_rope_layers=[1, 0, 0, 1], use_sliding_window=True, sliding_window=7),
    ),
    "cohere2": ("Cohere2Config", dict(sliding_window=7, logit_scale=0.3)),
    "cohere2 with listed layers": (
        "Cohere2Config",
        dict(sliding_window=7, layer_types=["full_attention", "sliding_attention"] * 2, tie_word_embeddings=False),
    ),
    "glm4": ("Glm4Config", dict(head_dim=16)),
    "glm4 without biases": ("Glm4Config", dict(head_dim=32, attention_bias=False, rope_parameters=QUARTER)),
    "exaone4": ("Exaone4Config", dict(sliding_window=7)),
    "exaone4 without a window": ("Exaone4Config", dict(sliding_window=None, layer_types=["full_attention"] * 4)),
    "granite": (
        "GraniteConfig",
        dict(attention_multiplier=0.3, embedding_multiplier=7.0, residual_multiplier=0.22, logits_scaling=3.0),
    ),
    "seed_oss": ("SeedOssConfig", dict(head_dim=32, attention_bias=True, attention_out_bias=True)),
    "seed_oss without biases": ("SeedOssConfig", dict(head_dim=8, attention_bias=False, attention_out_bias=False)),
}


def write_model(folder: Path, kind: str) -> Path:
    """Write a model of transformers with random weights in bf16, and a tokenizer."""
    transformers = pytest.importorskip("transformers")
    name, entries = MODELS[kind]
    config = getattr(transformers, name)(**SIZES | entries)
    model = transformers.AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3, generator=generator)
    model.bfloat16().save_pretrained(folder)
    write_tokenizer(folder, adds_bos=False)
    return folder


def our_logits(folder: Path) -> torch.Tensor:
    model = GPT(settings_of(folder), 257).double()
    huggingface.load(folder, model)
    with in_float64():
        return logits(model, TOKENS)[:, :259]


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[pytest.mark.slow] * (" " in kind)) for kind in MODELS])
def test_a_model_has_the_logits_of_transformers_and_is_exported(kind, tmp_path):
    folder, copy, rewritten = write_model(tmp_path / "hf", kind), tmp_path / "copy", tmp_path / "rewritten"
    expected = exact_logits_of_transformers(folder, TOKENS)
    torch.testing.assert_close(our_logits(folder), expected, rtol=0, atol=1e-9)
    export.export(import_folder(folder, tmp_path / "a"), copy, torch.bfloat16)
    # Without the folder, the export derives all files from the settings of the run.
    export.export(
        import_folder(folder, tmp_path / "b", trainer__init_from=None, data__tokenizer="bytes"), rewritten, torch.bfloat16
    )
    assert json.loads((copy / "config.json").read_text()) == json.loads((folder / "config.json").read_text())
    for out in (copy, rewritten):
        tensors = read_tensors(out)
        for name, tensor in read_tensors(folder).items():
            assert torch.equal(tensors[name], tensor), name
        torch.testing.assert_close(exact_logits_of_transformers(out, TOKENS), expected, rtol=0, atol=1e-9)
    assert settings_of(rewritten) == settings_of(folder)
