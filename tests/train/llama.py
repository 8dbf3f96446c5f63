"""Llama models in Hugging Face's format, and their forward written out under those names.

transformers itself gives the same logits.
"""

import json
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from train import huggingface
from train.config import ModelConfig
from train.model import GPT

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


def write_folder(folder: Path, **changes) -> Path:
    """A model of random parameters, in two files; of `changes`, None leaves something out."""
    config = {name: value for name, value in (FOLDER | changes).items() if value is not None}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)
    theirs = {"model.embed_tokens.weight": (259, 32), "model.norm.weight": (32,), "lm_head.weight": (259, 32)}
    if config.get("tie_word_embeddings"):
        del theirs["lm_head.weight"]
    for layer in range(2):
        shapes = {"input_layernorm": (32,), "post_attention_layernorm": (32,)}
        shapes |= {f"self_attn.{x}_proj": (rows, 32) for x, rows in (("q", 64), ("k", 32), ("v", 32))}
        shapes |= {"self_attn.o_proj": (32, 64), "mlp.gate_proj": (48, 32), "mlp.up_proj": (48, 32), "mlp.down_proj": (32, 48)}
        theirs |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in shapes.items()}
    tensors = {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in theirs.items()}
    names = list(tensors)
    for part, chosen in enumerate((names[::2], names[1::2])):
        save_file({name: tensors[name] for name in chosen}, folder / f"model-{part}.safetensors")
    return folder


def read_tensors(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def llama3(wavelength: float, rope: dict[str, float]) -> float:
    """As in Llama 3.1's own code."""
    length, low, high = rope["original_max_position_embeddings"], rope["low_freq_factor"], rope["high_freq_factor"]
    if wavelength < length / high:
        return wavelength
    if wavelength > length / low:
        return wavelength * rope["factor"]
    smooth = (length / wavelength - low) / (high - low)
    return 1 / ((1 - smooth) / (wavelength * rope["factor"]) + smooth / wavelength)


def llama(folder: Path, tokens: Tensor) -> Tensor:
    """Logits (S, V) of tokens (S,), in float64."""
    config = json.loads((folder / "config.json").read_text())
    weights = {name: tensor.double() for name, tensor in read_tensors(folder).items()}
    eps, dim, window = config["rms_norm_eps"], config["head_dim"], config.get("sliding_window") or len(tokens)
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    place = torch.arange(len(tokens), dtype=torch.float64)
    wavelengths = 2 * math.pi * config.get("rope_theta", rope.get("rope_theta")) ** (torch.arange(0, dim, 2).double() / dim)
    if rope.get("rope_type") == "llama3":
        wavelengths = torch.tensor([llama3(wavelength, rope) for wavelength in wavelengths.tolist()])
    angles = 2 * math.pi * place[:, None] / wavelengths
    cos, sin = (torch.cat((x, x), -1) for x in (angles.cos(), angles.sin()))
    seen = (place[None] <= place[:, None]) & (place[None] > place[:, None] - window)

    def norm(x, name):
        return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weights[name]

    def heads(x, name, turned):
        x = (x @ weights[name].T).view(len(tokens), -1, dim).transpose(0, 1)
        return x * cos + torch.cat((-x[..., dim // 2 :], x[..., : dim // 2]), -1) * sin if turned else x

    x = weights["model.embed_tokens.weight"][tokens]
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        h = norm(x, at + "input_layernorm.weight")
        q, k, v = (heads(h, f"{at}self_attn.{name}_proj.weight", name != "v") for name in "qkv")
        k, v = (y.repeat_interleave(len(q) // len(k), 0) for y in (k, v))
        probabilities = (q @ k.mT / dim**0.5).masked_fill(~seen, float("-inf")).softmax(-1)
        x = x + (probabilities @ v).transpose(0, 1).flatten(1) @ weights[at + "self_attn.o_proj.weight"].T
        h = norm(x, at + "post_attention_layernorm.weight")
        gate, up = (h @ weights[f"{at}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (F.silu(gate) * up) @ weights[at + "mlp.down_proj.weight"].T
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    return norm(x, "model.norm.weight") @ head.T


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
    named = {"head_features": "head_dim", "ffn_features": "ffn_dim"}
    return ModelConfig(**{named.get(name, name): value for name, value in read.items()})
