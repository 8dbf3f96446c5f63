"""Small models in Hugging Face's format, and what transformers computes of them."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from ringattn.train.checkpoint import huggingface
from ringattn.train.config import ModelConfig
from ringattn.train.model.gpt import GPT

SIZES = dict(layers=2, dim=32, heads=4, kv_heads=2, head_dim=16, ffn_dim=48)
FOLDER = {
    "model_type": "llama",
    "vocab_size": 259,
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 500.0, "rope_type": "default"},
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}
# of 16 features, in 40 tokens: some turn more than four times, some less than once, some between
STRETCH = {"rope_type": "llama3", "factor": 4.0, "original_max_position_embeddings": 40}
STRETCH |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 = STRETCH | {"rope_theta": 50.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 400, "rope_theta": 50.0}


def write_folder(folder: Path, **changes) -> Path:
    """A model of random parameters, in two files; of `changes`, None leaves something out."""
    config = {name: value for name, value in (FOLDER | changes).items() if value is not None}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)
    names = {"model.embed_tokens.weight": (259, 32), "model.norm.weight": (32,), "lm_head.weight": (259, 32)}
    if config.get("tie_word_embeddings"):
        del names["lm_head.weight"]
    for layer in range(2):
        shapes = {"input_layernorm": (32,), "post_attention_layernorm": (32,)}
        shapes |= {f"self_attn.{x}_proj": (rows, 32) for x, rows in (("q", 64), ("k", 32), ("v", 32))}
        shapes |= {"self_attn.o_proj": (32, 64), "mlp.gate_proj": (48, 32), "mlp.up_proj": (48, 32), "mlp.down_proj": (32, 48)}
        if config.get("model_type") == "qwen3":
            shapes |= {"self_attn.q_norm": (16,), "self_attn.k_norm": (16,)}
        names |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in shapes.items()}
        if config.get("model_type") == "qwen2":
            names |= {f"model.layers.{layer}.self_attn.{x}_proj.bias": (rows,) for x, rows in (("q", 64), ("k", 32), ("v", 32))}
    tensors = {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in names.items()}
    file_of = {name: f"model-{place % 2}.safetensors" for place, name in enumerate(tensors)}
    for file in set(file_of.values()):
        save_file({name: x for name, x in tensors.items() if file_of[name] == file}, folder / file, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": file_of}))
    return folder


def read_tensors(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def theirs(folder: Path, tokens: Tensor) -> Tensor:
    """Logits (S, V) of tokens (S,) by transformers, in float64; where it is not installed the test is skipped."""
    transformers = pytest.importorskip("transformers")
    model, told = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, output_loading_info=True)
    assert not any(told.values()), told  # every tensor is read, and none is missing
    with torch.no_grad():
        return model(tokens[None]).logits[0]


def logits(model: GPT, tokens: Tensor) -> Tensor:
    """The same of our model, (S, rows of its embedding)."""
    place = torch.arange(len(tokens))
    seen = (place[None] <= place[:, None]) & (place[None] > place[:, None] - (model.config.window or len(tokens)))

    def attend(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True).transpose(1, 2)

    with torch.no_grad():
        return model(tokens[None], place, attend, lambda hidden, head: hidden @ head.T)[0]


def settings_of(folder: Path) -> ModelConfig:
    """The folder's model as a user sets it."""
    read = huggingface.read_settings(folder)
    named = {"resolved_head_dim": "head_dim", "resolved_ffn_dim": "ffn_dim"}
    return ModelConfig(**{named.get(name, name): value for name, value in read.items()})
